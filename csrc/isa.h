// The copies of the kernels that setup.py compiles, one per instruction set, and which of them this processor can run.
#pragma once

namespace drq {

// avx512 means what Ice Lake and Zen 4 brought: F, BW, VL, DQ, VBMI and VNNI.
constexpr const char* kIsaNames[] = {"portable", "avx2", "avx512"};
constexpr int kIsaCount = 3;

// isa is an index into kIsaNames: compiled in, and this processor has it.
bool isa_supported(int isa);

// Made by AMD.
bool is_amd();

}  // namespace drq

#ifdef DRQ_X86
#define DRQ_DECLARE_COPIES(type, kernel, ...) \
  namespace portable {                        \
  type kernel(__VA_ARGS__);                   \
  }                                           \
  namespace avx2 {                            \
  type kernel(__VA_ARGS__);                   \
  }                                           \
  namespace avx512 {                          \
  type kernel(__VA_ARGS__);                   \
  }
#define DRQ_CHOOSE_COPY(kernel, isa) ((isa) == 2 ? avx512::kernel : (isa) == 1 ? avx2::kernel : portable::kernel)
#else
#define DRQ_DECLARE_COPIES(type, kernel, ...) \
  namespace portable {                        \
  type kernel(__VA_ARGS__);                   \
  }
#define DRQ_CHOOSE_COPY(kernel, isa) (static_cast<void>(isa), portable::kernel)
#endif
