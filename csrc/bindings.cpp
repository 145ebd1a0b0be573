// The only file that knows Python. Pointers arrive as integers from drq_fast/_native.py, which has checked them.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "adc.h"
#include "encode.h"

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

  module.def("supported_isas", [] {
    py::list names;
    for (int isa = 0; isa < drq::kIsaCount; ++isa)
      if (drq::isa_supported(isa)) names.append(drq::kIsaNames[isa]);
    return names;
  });
  module.def(
      "encode_cpu",
      [](std::uintptr_t scores, std::uintptr_t squared_norms, std::uintptr_t x, std::uintptr_t codebook,
         std::uintptr_t gram, std::uintptr_t bias, std::uintptr_t scale, std::uintptr_t omega,
         std::uintptr_t still_to_come, std::uintptr_t codes, bool wide, int64_t N, int64_t K, int64_t P, int64_t D,
         int64_t M, int64_t beam, const std::string& isa, int threads) {
        const auto floats = [](std::uintptr_t pointer) { return reinterpret_cast<const float*>(pointer); };
        const drq::Encode job{floats(scores),
                              floats(squared_norms),
                              floats(x),
                              floats(codebook),
                              floats(gram),
                              floats(bias),
                              floats(scale),
                              floats(omega),
                              floats(still_to_come),
                              reinterpret_cast<void*>(codes),
                              N,
                              K,
                              P,
                              D,
                              M,
                              beam,
                              wide};
        int chosen = 0;
        for (int i = 0; i < drq::kIsaCount; ++i)
          if (isa == drq::kIsaNames[i]) chosen = i;
        if (!drq::isa_supported(chosen)) throw std::runtime_error(isa + " is not supported by this processor");
        py::gil_scoped_release release;
        drq::encode_cpu(job, chosen, threads);
      },
      py::arg("scores"), py::arg("squared_norms"), py::arg("x"), py::arg("codebook"), py::arg("gram"), py::arg("bias"),
      py::arg("scale"), py::arg("omega"), py::arg("still_to_come"), py::arg("codes"), py::arg("wide"), py::arg("N"),
      py::arg("K"), py::arg("P"), py::arg("D"), py::arg("M"), py::arg("beam"), py::arg("isa"), py::arg("threads"));

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
