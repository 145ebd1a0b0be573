// The only file that knows Python. Pointers arrive as integers from drq_fast/_native.py, which has checked them.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>

#include "adc.h"

namespace py = pybind11;

namespace {

#ifdef __clang__
constexpr const char* kCompiler = __VERSION__;
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

drq::Lookup lookup(std::uintptr_t table, std::uintptr_t scale, std::uintptr_t codes, bool wide, std::uintptr_t sums,
                   int64_t Q, int64_t N, int64_t K, int64_t M) {
  return {reinterpret_cast<const float*>(table),
          reinterpret_cast<const float*>(scale),
          reinterpret_cast<const void*>(codes),
          reinterpret_cast<float*>(sums),
          Q,
          N,
          K,
          M,
          wide};
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.attr("compiler") = kCompiler;

  module.def(
      "lookup_cpu",
      [](std::uintptr_t table, std::uintptr_t scale, std::uintptr_t codes, bool wide, std::uintptr_t sums, int64_t Q,
         int64_t N, int64_t K, int64_t M, int threads) {
        py::gil_scoped_release release;
        drq::lookup_cpu(lookup(table, scale, codes, wide, sums, Q, N, K, M), threads);
      },
      py::arg("table"), py::arg("scale"), py::arg("codes"), py::arg("wide"), py::arg("sums"), py::arg("Q"),
      py::arg("N"), py::arg("K"), py::arg("M"), py::arg("threads"));

#ifdef DRQ_FAST_CUDA
  module.attr("cuda") = true;
  module.def("cuda_runtime_version", &drq::cuda_runtime_version);
  module.def("cuda_driver_version", &drq::cuda_driver_version);
  module.def(
      "lookup_cuda",
      [](std::uintptr_t table, std::uintptr_t scale, std::uintptr_t codes, bool wide, std::uintptr_t sums, int64_t Q,
         int64_t N, int64_t K, int64_t M, std::uintptr_t stream) {
        const char* error =
            drq::lookup_cuda(lookup(table, scale, codes, wide, sums, Q, N, K, M), reinterpret_cast<void*>(stream));
        if (error != nullptr) throw std::runtime_error(error);
      },
      py::arg("table"), py::arg("scale"), py::arg("codes"), py::arg("wide"), py::arg("sums"), py::arg("Q"),
      py::arg("N"), py::arg("K"), py::arg("M"), py::arg("stream"));
#else
  module.attr("cuda") = false;
#endif
}
