// Chooses between the copies of the kernels that setup.py compiles, one per instruction set.
#include "levels.h"

namespace drq {

#define DRQ_DECLARE(isa)          \
  namespace isa {                 \
  void encode(const Encode& job); \
  void assign(const Loss& job);   \
  void evaluate(const Loss& job); \
  void backward(const Loss& job); \
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
void run(void (*const (&copies)[kIsaCount])(const Job&), const Job& job, int isa) {
  copies[isa](job);
}

void encode_cpu(const Encode& job, int isa) { run<Encode>(DRQ_COPIES(encode), job, isa); }
void assign_cpu(const Loss& job, int isa) { run<Loss>(DRQ_COPIES(assign), job, isa); }
void evaluate_cpu(const Loss& job, int isa) { run<Loss>(DRQ_COPIES(evaluate), job, isa); }
void backward_cpu(const Loss& job, int isa) { run<Loss>(DRQ_COPIES(backward), job, isa); }

}  // namespace drq
