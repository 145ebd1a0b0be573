// Chooses between the copies of the kernels, see isa.h.
#include "cpu/parallel.h"
#include "isa.h"
#include "levels.h"
#include "search.h"

#if defined(DRQ_ARM) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(DRQ_ARM) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace drq {

DRQ_DECLARE_COPIES(void, encode, const Encode& job)
DRQ_DECLARE_COPIES(void, beam, const Beam& job)
DRQ_DECLARE_COPIES(void, assign, const Training& job)
DRQ_DECLARE_COPIES(void, evaluate, const Training& job)
DRQ_DECLARE_COPIES(void, mix, const Training& job)
DRQ_DECLARE_COPIES(void, backward, const Training& job)
DRQ_DECLARE_COPIES(void, decode, const Squared& job)
DRQ_DECLARE_COPIES(void, squared_errors, const Squared& job)
DRQ_DECLARE_COPIES(void, pulls, const Squared& job)
DRQ_DECLARE_COPIES(void, own_pulls, const Squared& job)
DRQ_DECLARE_COPIES(void, add_pulls, const Squared& job, const int64_t* starts, const int64_t* places, int64_t begin,
                   int64_t end)

DRQ_DECLARE_COPIES(void, refine, const Refine& job, int64_t begin, int64_t end)

#ifdef DRQ_ARM
namespace {

// Whether the processor multiplies and adds four bytes at a time (FEAT_DotProd).
bool has_dotprod() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has != 0;
#else
  return false;
#endif
}

}  // namespace
#endif

bool isa_supported(int isa) {
#ifdef DRQ_SIMDE
  if (isa >= 2) return true;  // emulated
#endif
#ifdef DRQ_X86
  if (isa == 1)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (isa >= 2) {
    const bool avx512 = __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq");
    return avx512 && (isa == 2 || (__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni")));
  }
#endif
#ifdef DRQ_ARM
  if (isa == 1) return true;  // every processor of 64 bits has NEON
  if (isa == 2) {
    static const bool has = has_dotprod();
    return has;
  }
#endif
  return isa == 0;
}

bool is_amd() {
#ifdef DRQ_X86
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

void encode_cpu(const Encode& job, int isa) { DRQ_CHOOSE_COPY(encode, isa)(job); }
void beam_cpu(const Beam& job, int isa) { DRQ_CHOOSE_COPY(beam, isa)(job); }
void assign_cpu(const Training& job, int isa) { DRQ_CHOOSE_COPY(assign, isa)(job); }
void evaluate_cpu(const Training& job, int isa) { DRQ_CHOOSE_COPY(evaluate, isa)(job); }
void mix_cpu(const Training& job, int isa) { DRQ_CHOOSE_COPY(mix, isa)(job); }
void backward_cpu(const Training& job, int isa) { DRQ_CHOOSE_COPY(backward, isa)(job); }
void decode_cpu(const Squared& job, int isa) { DRQ_CHOOSE_COPY(decode, isa)(job); }
void squared_errors_cpu(const Squared& job, int isa) { DRQ_CHOOSE_COPY(squared_errors, isa)(job); }
void pulls_cpu(const Squared& job, int isa) { DRQ_CHOOSE_COPY(pulls, isa)(job); }
void own_pulls_cpu(const Squared& job, int isa) { DRQ_CHOOSE_COPY(own_pulls, isa)(job); }
void add_pulls_cpu(const Squared& job, const int64_t* starts, const int64_t* places, int64_t begin, int64_t end,
                   int isa) {
  DRQ_CHOOSE_COPY(add_pulls, isa)(job, starts, places, begin, end);
}

void refine_cpu(const Refine& job, int isa, int threads) {
  const auto kernel = DRQ_CHOOSE_COPY(refine, isa);
  parallel_for(job.Q, threads, [&](int64_t begin, int64_t end, int64_t) { kernel(job, begin, end); });
}

void group_codes(const Squared& job, int64_t* starts, int64_t* places) {
  const int64_t count = job.N * job.M;
  for (int64_t k = 0; k <= job.K; ++k) starts[k] = 0;
  for (int64_t i = 0; i < count; ++i) ++starts[job.codes[i] + 1];
  for (int64_t k = 0; k < job.K; ++k) starts[k + 1] += starts[k];
  for (int64_t i = 0; i < count; ++i) places[starts[job.codes[i]]++] = i;
  for (int64_t k = job.K; k > 0; --k) starts[k] = starts[k - 1];  // each start has moved to the next one
  starts[0] = 0;
}

}  // namespace drq
