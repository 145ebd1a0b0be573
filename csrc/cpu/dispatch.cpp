// Chooses between the copies of the kernels that setup.py compiles, one per instruction set.
#include "cpu/parallel.h"
#include "levels.h"

namespace drq {

#define DRQ_DECLARE(isa)                                                    \
  namespace isa {                                                           \
  void encode(const Encode& job, int64_t begin, int64_t end, int64_t part); \
  void assign(const Loss& job, int64_t begin, int64_t end, int64_t part);   \
  void errors(const Loss& job, int64_t begin, int64_t end, int64_t part);   \
  void backward(const Loss& job, int64_t begin, int64_t end, int64_t part); \
  }

DRQ_DECLARE(portable)
#ifdef DRQ_X86
DRQ_DECLARE(avx2)
DRQ_DECLARE(avx512)
#define DRQ_COPIES(kernel) {portable::kernel, avx2::kernel, avx512::kernel}
#else
#define DRQ_COPIES(kernel) {portable::kernel, portable::kernel, portable::kernel}
#endif

bool isa_supported(int isa) {
#ifdef DRQ_X86
  if (isa == 1) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == 2)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
  return isa == 0;
}

template <class Job>
using Kernel = void (*)(const Job&, int64_t begin, int64_t end, int64_t part);

template <class Job>
void run(const Kernel<Job> (&copies)[kIsaCount], const Job& job, int isa, int threads) {
  const Kernel<Job> kernel = copies[isa];
  parallel_for(job.tile.N, threads, [&](int64_t begin, int64_t end, int64_t part) { kernel(job, begin, end, part); });
}

void encode_cpu(const Encode& job, int isa, int threads) { run<Encode>(DRQ_COPIES(encode), job, isa, threads); }
void assign_cpu(const Loss& job, int isa, int threads) { run<Loss>(DRQ_COPIES(assign), job, isa, threads); }
void errors_cpu(const Loss& job, int isa, int threads) { run<Loss>(DRQ_COPIES(errors), job, isa, threads); }
void backward_cpu(const Loss& job, int isa, int threads) { run<Loss>(DRQ_COPIES(backward), job, isa, threads); }

}  // namespace drq
