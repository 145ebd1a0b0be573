// The copies of the kernels that setup.py compiles, one per instruction set, and which of them this processor can run.
#pragma once

#include <initializer_list>

// use(name, ...) for each copy, the widest last. avx512 means what Skylake's servers brought: F, BW, VL and DQ; vbmi
// what Ice Lake and Zen 4 added: VBMI and VNNI. dotprod is NEON with the products of four bytes of ARMv8.2.
#if defined(DRQ_X86)
#define DRQ_EACH_ISA(use, ...) \
  use(portable, __VA_ARGS__) use(avx2, __VA_ARGS__) use(avx512, __VA_ARGS__) use(vbmi, __VA_ARGS__)
#elif defined(DRQ_ARM)
#define DRQ_EACH_ISA(use, ...) use(portable, __VA_ARGS__) use(neon, __VA_ARGS__) use(dotprod, __VA_ARGS__)
#else
#define DRQ_EACH_ISA(use, ...) use(portable, __VA_ARGS__)
#endif

namespace drq {

#define DRQ_NAME_ISA(name, ...) #name,
constexpr const char* kIsaNames[] = {DRQ_EACH_ISA(DRQ_NAME_ISA)};
constexpr int kIsaCount = sizeof kIsaNames / sizeof *kIsaNames;

// isa is an index into kIsaNames: compiled in, and this processor has it.
bool isa_supported(int isa);

// Made by AMD.
bool is_amd();

template <class Kernel>
Kernel* copy_for(std::initializer_list<Kernel*> copies, int isa) {
  return copies.begin()[isa];
}

}  // namespace drq

#define DRQ_DECLARE_COPY(name, type, kernel, ...) \
  namespace name {                                \
  type kernel(__VA_ARGS__);                       \
  }
#define DRQ_DECLARE_COPIES(...) DRQ_EACH_ISA(DRQ_DECLARE_COPY, __VA_ARGS__)
#define DRQ_NAME_COPY(name, kernel) name::kernel,
#define DRQ_CHOOSE_COPY(kernel, isa) \
  ::drq::copy_for<decltype(portable::kernel)>({DRQ_EACH_ISA(DRQ_NAME_COPY, kernel)}, isa)
