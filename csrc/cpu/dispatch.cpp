// Chooses between the copies of the kernels, see isa.h.
#include "isa.h"
#include "levels.h"

namespace drq {

DRQ_DECLARE_COPIES(void, encode, const Encode& job)
DRQ_DECLARE_COPIES(void, assign, const Training& job)
DRQ_DECLARE_COPIES(void, evaluate, const Training& job)
DRQ_DECLARE_COPIES(void, mix, const Training& job)
DRQ_DECLARE_COPIES(void, backward, const Training& job)

bool isa_supported(int isa) {
#ifdef DRQ_SIMDE
  if (isa == 2) return true;  // emulated
#endif
#ifdef DRQ_X86
  if (isa == 1) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == 2)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
#endif
  return isa == 0;
}

void encode_cpu(const Encode& job, int isa) { DRQ_CHOOSE_COPY(encode, isa)(job); }
void assign_cpu(const Training& job, int isa) { DRQ_CHOOSE_COPY(assign, isa)(job); }
void evaluate_cpu(const Training& job, int isa) { DRQ_CHOOSE_COPY(evaluate, isa)(job); }
void mix_cpu(const Training& job, int isa) { DRQ_CHOOSE_COPY(mix, isa)(job); }
void backward_cpu(const Training& job, int isa) { DRQ_CHOOSE_COPY(backward, isa)(job); }

}  // namespace drq
