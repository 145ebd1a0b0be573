// The only file that knows Python. Pointers arrive as integers from drq_fast/_native.py, which has checked them.
#include <pybind11/pybind11.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstdint>
#include <stdexcept>
#include <string>

#include "adc.h"
#include "isa.h"
#include "levels.h"

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

// A job comes as keyword arguments named like the members of its struct: pointers and sizes as integers.
struct Arguments {
  const py::kwargs& given;
  template <class T>
  T* pointer(const char* name) const {
    return reinterpret_cast<T*>(given[name].cast<std::uintptr_t>());
  }
  template <class T>
  T* pointer_or_null(const char* name) const {
    return given.contains(name) ? pointer<T>(name) : nullptr;
  }
  float number(const char* name) const { return given[name].cast<float>(); }
  int64_t size(const char* name) const { return given[name].cast<int64_t>(); }
};

drq::Tile tile_of(const Arguments& job) {
  return {job.pointer<float>("scores"),
          job.pointer<float>("x"),
          job.pointer<float>("codebook"),
          job.pointer<float>("gram"),
          job.pointer<float>("diagonal"),
          job.pointer<float>("bias"),
          job.pointer<float>("scale"),
          job.size("N"),
          job.size("K"),
          job.size("P"),
          job.size("D"),
          job.size("M")};
}

drq::Encode encode_of(const Arguments& job) {
  return {
      tile_of(job),     job.pointer<float>("omega"), job.pointer<float>("still_to_come"), job.pointer<void>("codes"),
      job.size("beam"), job.size("wide") != 0};
}

drq::Training training_of(const Arguments& job) {
  drq::Training out{};
  out.tile = tile_of(job);
  out.gamma = job.number("gamma");
  out.codes = job.pointer<int64_t>("codes");
  out.squared_norms = job.pointer<float>("squared_norms");
  out.residuals = job.pointer<float>("residuals");
  out.soft = job.pointer<float>("soft");
  out.product = job.pointer_or_null<float>("product");
  out.delta = job.pointer_or_null<float>("delta");
  out.hard_errors = job.pointer_or_null<float>("hard_errors");
  out.soft_errors = job.pointer_or_null<float>("soft_errors");
  out.joint_errors = job.pointer_or_null<float>("joint_errors");
  out.omega = job.pointer_or_null<float>("omega");
  if (out.omega != nullptr) {
    out.of_hard = job.number("of_hard");
    out.of_soft = job.number("of_soft");
    out.of_joint = job.number("of_joint");
    out.gap = job.size("gap") != 0;
  }
  out.value = job.pointer_or_null<double>("value");
  out.dhard = job.pointer_or_null<float>("dhard");
  out.dsoft = job.pointer_or_null<float>("dsoft");
  out.djoint = job.pointer_or_null<float>("djoint");
  out.ddelta = job.pointer_or_null<float>("ddelta");
  out.dscores = job.pointer_or_null<float>("dscores");
  out.dsquared_norms = job.pointer_or_null<float>("dsquared_norms");
  out.dgram = job.pointer_or_null<float>("dgram");
  out.ddiagonal = job.pointer_or_null<float>("ddiagonal");
  out.dscale = job.pointer_or_null<double>("dscale");
  return out;
}

drq::Search search_of(const Arguments& job) {
  return {job.pointer<float>("table"),
          job.pointer<float>("scale"),
          job.pointer<void>("codes"),
          job.pointer<float>("norms"),
          job.pointer<float>("constants"),
          job.pointer<float>("lengths"),
          job.pointer<uint8_t>("keep"),
          job.pointer<float>("scores"),
          job.pointer<int64_t>("positions"),
          job.size("Q"),
          job.size("N"),
          job.size("K"),
          job.size("M"),
          job.size("k"),
          job.size("stride"),
          static_cast<int>(job.size("metric")),
          job.size("wide") != 0};
}

drq::Norms norms_of(const Arguments& job) {
  return {job.pointer<float>("gram"),
          job.pointer<float>("scale"),
          job.pointer<float>("inner"),
          job.number("constant"),
          job.pointer<void>("codes"),
          job.pointer<float>("norms"),
          job.size("N"),
          job.size("K"),
          job.size("M"),
          job.size("stride"),
          job.size("wide") != 0};
}

int index_of(const std::string& isa) {
  for (int i = 0; i < drq::kIsaCount; ++i)
    if (isa == drq::kIsaNames[i] && drq::isa_supported(i)) return i;
  throw std::runtime_error("this machine has no instruction set " + isa);
}

// Asks for large pages where whole ones fit: memory that is new then costs a fault per 2 MiB, not per 4 KiB.
void large_pages([[maybe_unused]] std::uintptr_t memory, [[maybe_unused]] int64_t bytes) {
#ifdef __linux__
  constexpr std::uintptr_t kPage = 1 << 21;
  const std::uintptr_t begin = (memory + kPage - 1) / kPage * kPage, end = (memory + bytes) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // only advice: may fail
#endif
}

template <class Job>
void def_kernel(py::module_& module, const char* name, Job (*job_of)(const Arguments&),
                void (*kernel)(const Job&, int)) {
  module.def(
      name,
      [=](const std::string& isa, const py::kwargs& arguments) {
        const Job job = job_of(Arguments{arguments});
        const int chosen = index_of(isa);
        py::gil_scoped_release release;
        kernel(job, chosen);
      },
      py::arg("isa"));
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

  module.def(
      "search_cpu",
      [](const std::string& isa, int threads, const py::kwargs& arguments) {
        const drq::Search job = search_of(Arguments{arguments});
        const int chosen = index_of(isa);
        py::gil_scoped_release release;
        drq::search_cpu(job, chosen, threads);
      },
      py::arg("isa"), py::arg("threads"));

  module.def(
      "norms_cpu",
      [](int threads, const py::kwargs& arguments) {
        const drq::Norms job = norms_of(Arguments{arguments});
        py::gil_scoped_release release;
        drq::norms_cpu(job, threads);
      },
      py::arg("threads"));

  module.def("large_pages", &large_pages, py::arg("memory"), py::arg("bytes"));
  module.def("supported_isas", [] {
    py::list names;
    for (int isa = 0; isa < drq::kIsaCount; ++isa)
      if (drq::isa_supported(isa)) names.append(drq::kIsaNames[isa]);
    return names;
  });
  def_kernel(module, "encode_cpu", encode_of, drq::encode_cpu);
  def_kernel(module, "assign_cpu", training_of, drq::assign_cpu);
  def_kernel(module, "evaluate_cpu", training_of, drq::evaluate_cpu);
  def_kernel(module, "mix_cpu", training_of, drq::mix_cpu);
  def_kernel(module, "backward_cpu", training_of, drq::backward_cpu);

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
  module.def("search_cuda_workspace",
             [](const py::kwargs& arguments) { return drq::search_cuda_workspace(search_of(Arguments{arguments})); });
  module.def("search_cuda", [](const py::kwargs& arguments) {
    const Arguments job{arguments};
    const char* error = drq::search_cuda(search_of(job), job.pointer<void>("workspace"), job.pointer<void>("stream"));
    if (error != nullptr) throw std::runtime_error(error);
  });
#else
  module.attr("cuda") = false;
#endif
}
