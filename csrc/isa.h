// The copies of the kernels that setup.py compiles, one per instruction set, and which of them this processor can run.
#pragma once

namespace drq {

// avx512 means what Ice Lake and Zen 4 brought: F, BW, VL, DQ, VBMI and VNNI. dotprod is NEON with the products of four
// bytes of ARMv8.2.
#ifdef DRQ_ARM
#define DRQ_SECOND_ISA neon
#define DRQ_THIRD_ISA dotprod
constexpr const char* kIsaNames[] = {"portable", "neon", "dotprod"};
#else
#define DRQ_SECOND_ISA avx2
#define DRQ_THIRD_ISA avx512
constexpr const char* kIsaNames[] = {"portable", "avx2", "avx512"};
#endif
constexpr int kIsaCount = 3;

// isa is an index into kIsaNames: compiled in, and this processor has it.
bool isa_supported(int isa);

// Made by AMD.
bool is_amd();

}  // namespace drq

#if defined(DRQ_X86) || defined(DRQ_ARM)
#define DRQ_DECLARE_COPIES(type, kernel, ...) \
  namespace portable {                        \
  type kernel(__VA_ARGS__);                   \
  }                                           \
  namespace DRQ_SECOND_ISA {                  \
  type kernel(__VA_ARGS__);                   \
  }                                           \
  namespace DRQ_THIRD_ISA {                   \
  type kernel(__VA_ARGS__);                   \
  }
#define DRQ_CHOOSE_COPY(kernel, isa) \
  ((isa) == 2 ? DRQ_THIRD_ISA::kernel : (isa) == 1 ? DRQ_SECOND_ISA::kernel : portable::kernel)
#else
#define DRQ_DECLARE_COPIES(type, kernel, ...) \
  namespace portable {                        \
  type kernel(__VA_ARGS__);                   \
  }
#define DRQ_CHOOSE_COPY(kernel, isa) (static_cast<void>(isa), portable::kernel)
#endif
