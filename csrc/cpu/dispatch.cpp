// Chooses between the copies of a kernel that setup.py compiles, one per instruction set.
#include "cpu/parallel.h"
#include "encode.h"

namespace drq {

#define DRQ_DECLARE(isa)                                      \
  namespace isa {                                             \
  void encode(const Encode& job, int64_t begin, int64_t end); \
  }
DRQ_DECLARE(portable)
#ifdef DRQ_X86
DRQ_DECLARE(avx2)
DRQ_DECLARE(avx512)
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

void encode_cpu(const Encode& job, int isa, int threads) {
  void (*kernel)(const Encode&, int64_t, int64_t) = portable::encode;
#ifdef DRQ_X86
  if (isa == 1) kernel = avx2::encode;
  if (isa == 2) kernel = avx512::encode;
#endif
  parallel_for(job.N, threads, [&](int64_t begin, int64_t end) { kernel(job, begin, end); });
}

}  // namespace drq
