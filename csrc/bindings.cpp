// The only file that knows Python. Pointers arrive as integers, 0 for null, and Python keeps the tensors alive;
// drq_fast/_C.pyi is the contract.
#include <pybind11/pybind11.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "checksum.h"
#include "isa.h"
#include "levels.h"
#include "search.h"

namespace py = pybind11;
using py::arg;

namespace {

#ifdef __clang__
constexpr const char* kCompiler = __VERSION__;
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

using Address = std::uintptr_t;

// An address as a pointer of whatever type the member has that it is assigned to.
struct At {
  Address address;
  template <class T>
  operator T*() const {
    return reinterpret_cast<T*>(address);
  }
};

// A codec as the search takes it: what is the same for all queries.
struct Columns {
  Address columns, scale, bases, offset;
  int64_t K, T, D;
};

// Codes to be searched by queries whose products with the codewords are part of the search.
struct Database {
  drq::Search job;
  drq::Queries queries;
};

// A member as an attribute: a pointer as an integer, anything else as it is.
template <auto kMember, class Class>
void attribute(py::class_<Class>& type, const char* name) {
  using Member = std::remove_reference_t<decltype(std::declval<Class>().*kMember)>;
  if constexpr (std::is_pointer_v<Member>)
    type.def_property(
        name, [](const Class& job) { return reinterpret_cast<Address>(job.*kMember); },
        [](Class& job, Address address) { job.*kMember = At{address}; });
  else
    type.def_readwrite(name, kMember);
}

void def_jobs(py::module_& module) {
  py::class_<drq::Lookup>(module, "Lookup")
      .def(py::init([](Address table, Address scale, Address codes, Address sums, int64_t Q, int64_t N, int64_t K,
                       int64_t M,
                       bool wide) { return drq::Lookup{At{table}, At{scale}, At{codes}, At{sums}, Q, N, K, M, wide}; }),
           py::kw_only(), arg("table"), arg("scale"), arg("codes"), arg("sums"), arg("Q"), arg("N"), arg("K"), arg("M"),
           arg("wide"));
  py::class_<Columns>(module, "Columns")
      .def(py::init([](Address columns, Address scale, Address bases, Address offset, int64_t K, int64_t T, int64_t D) {
             return Columns{columns, scale, bases, offset, K, T, D};
           }),
           py::kw_only(), arg("columns"), arg("scale"), arg("bases"), arg("offset"), arg("K"), arg("T"), arg("D"));
  py::class_<Database>(module, "Database")
      .def(py::init([](const Columns& codec, Address codes, Address norms, Address keep, int64_t N, int64_t M,
                       int64_t stride, int metric, bool wide) {
             Database database{};
             drq::Search& job = database.job;
             job.scale = At{codec.scale}, job.bases = At{codec.bases};
             job.codes = At{codes}, job.norms = At{norms}, job.keep = At{keep};
             job.N = N, job.K = codec.K, job.T = codec.T, job.M = M, job.stride = stride, job.metric = metric,
             job.wide = wide;
             database.queries = {nullptr, At{codec.columns}, At{codec.offset}, codec.D};
             return database;
           }),
           py::kw_only(), arg("codec"), arg("codes"), arg("norms"), arg("keep"), arg("N"), arg("M"), arg("stride"),
           arg("metric"), arg("wide"));
  py::class_<drq::Search>(module, "Search")
      .def(py::init([](Address table, Address constants, Address lengths, Address scale, Address bases, int64_t K,
                       int64_t T, Address codes, Address norms, Address keep, Address scores, Address positions,
                       int64_t Q, int64_t N, int64_t M, int64_t k, int64_t stride, int metric, bool wide) {
             return drq::Search{At{table},   At{scale},
                                At{bases},   At{codes},
                                At{norms},   At{constants},
                                At{lengths}, At{keep},
                                At{scores},  At{positions},
                                Q,           N,
                                K,           T,
                                M,           k,
                                stride,      metric,
                                wide};
           }),
           py::kw_only(), arg("table"), arg("constants"), arg("lengths"), arg("scale"), arg("bases"), arg("K"),
           arg("T"), arg("codes"), arg("norms"), arg("keep"), arg("scores"), arg("positions"), arg("Q"), arg("N"),
           arg("M"), arg("k"), arg("stride"), arg("metric"), arg("wide"));
  py::class_<drq::Refine>(module, "Refine")
      .def(py::init([](Address queries, Address candidates, Address vectors, Address steps, Address scores,
                       Address positions, int64_t Q, int64_t n, int64_t k, int64_t D, int metric, int stored) {
             return drq::Refine{At{queries}, At{candidates}, At{vectors}, At{steps}, At{scores}, At{positions}, Q, n, k,
                                D,           metric,         stored};
           }),
           py::kw_only(), arg("queries"), arg("candidates"), arg("vectors"), arg("steps"), arg("scores"),
           arg("positions"), arg("Q"), arg("n"), arg("k"), arg("D"), arg("metric"), arg("stored"));
  py::class_<drq::Norms>(module, "Norms")
      .def(py::init([](Address gram, Address scale, Address bases, Address inner, Address constants, Address starts,
                       Address codes, Address norms, int64_t N, int64_t T, int64_t M, int64_t stride, bool wide) {
             return drq::Norms{At{gram},  At{scale}, At{bases}, At{inner}, At{constants}, At{starts}, At{codes},
                               At{norms}, N,         T,         M,         stride,        wide};
           }),
           py::kw_only(), arg("gram"), arg("scale"), arg("bases"), arg("inner"), arg("constants"), arg("starts"),
           arg("codes"), arg("norms"), arg("N"), arg("T"), arg("M"), arg("stride"), arg("wide"));
  py::class_<drq::Lists>(module, "Lists")
      .def(py::init([](Address starts, Address columns, Address norms, Address products, int64_t L, int64_t probes) {
             return drq::Lists{At{starts}, At{columns}, At{norms}, At{products}, L, probes};
           }),
           py::kw_only(), arg("starts"), arg("columns"), arg("norms"), arg("products"), arg("L"), arg("probes"));
  py::class_<drq::Probed>(module, "Probed")
      .def(py::init([](Address starts, Address lists, Address ends, int64_t L, int64_t probes) {
             return drq::Probed{At{starts}, At{lists}, At{ends}, L, probes};
           }),
           py::kw_only(), arg("starts"), arg("lists"), arg("ends"), arg("L"), arg("probes"));
  py::class_<drq::Levels>(module, "Levels")
      .def(py::init([](Address codebook, Address gram, Address diagonal, Address bias, Address scale, Address bases,
                       int64_t K, int64_t P, int64_t T, int64_t D, int64_t M, int64_t pitch) {
             return drq::Levels{At{codebook}, At{gram}, At{diagonal}, At{bias}, At{scale}, At{bases}, K, P, T, D, M,
                                pitch};
           }),
           py::kw_only(), arg("codebook"), arg("gram"), arg("diagonal"), arg("bias"), arg("scale"), arg("bases"),
           arg("K"), arg("P"), arg("T"), arg("D"), arg("M"), arg("pitch"));
  py::class_<drq::Tile>(module, "Tile")
      .def(py::init([](const drq::Levels& levels, Address x, Address scores, int64_t N) {
             return drq::Tile{levels, At{x}, At{scores}, N};
           }),
           py::kw_only(), arg("levels"), arg("x"), arg("scores"), arg("N"));
  py::class_<drq::Encode>(module, "Encode")
      .def(py::init([](const drq::Tile& tile, Address omega, Address still_to_come, Address codes, int64_t beam,
                       bool wide) { return drq::Encode{tile, At{omega}, At{still_to_come}, At{codes}, beam, wide}; }),
           py::kw_only(), arg("tile"), arg("omega"), arg("still_to_come"), arg("codes"), arg("beam"), arg("wide"));
  py::class_<drq::Beam>(module, "Beam")
      .def(
          py::init([](const drq::Encode& encode, int64_t first, int64_t last, Address counts, Address shared,
                      Address squares, Address residuals, Address errors, Address costs, Address codes, int64_t pitch) {
            return drq::Beam{encode,        first,      last,      At{counts}, At{shared}, At{squares},
                             At{residuals}, At{errors}, At{costs}, At{codes},  pitch};
          }),
          py::kw_only(), arg("encode"), arg("first"), arg("last"), arg("counts"), arg("shared"), arg("squares"),
          arg("residuals"), arg("errors"), arg("costs"), arg("codes"), arg("pitch"));
}

void def_training(py::module_& module) {
  using drq::Training;
  py::class_<Training> type(module, "Training");
  type.def(py::init([](const drq::Tile& tile, float gamma, Address codes, Address squared_norms, Address residuals,
                       Address soft) {
             Training job{};
             job.tile = tile, job.gamma = gamma, job.codes = At{codes}, job.squared_norms = At{squared_norms};
             job.residuals = At{residuals}, job.soft = At{soft};
             return job;
           }),
           py::kw_only(), arg("tile"), arg("gamma"), arg("codes"), arg("squared_norms"), arg("residuals"), arg("soft"));
  attribute<&Training::product>(type, "product");
  attribute<&Training::kappa>(type, "kappa");
  attribute<&Training::delta>(type, "delta");
  attribute<&Training::hard_errors>(type, "hard_errors");
  attribute<&Training::soft_errors>(type, "soft_errors");
  attribute<&Training::joint_errors>(type, "joint_errors");
  attribute<&Training::omega>(type, "omega");
  attribute<&Training::of_hard>(type, "of_hard");
  attribute<&Training::of_soft>(type, "of_soft");
  attribute<&Training::of_joint>(type, "of_joint");
  attribute<&Training::gap>(type, "gap");
  attribute<&Training::value>(type, "value");
  attribute<&Training::dhard>(type, "dhard");
  attribute<&Training::dsoft>(type, "dsoft");
  attribute<&Training::djoint>(type, "djoint");
  attribute<&Training::ddelta>(type, "ddelta");
  attribute<&Training::dscores>(type, "dscores");
  attribute<&Training::dsquared_norms>(type, "dsquared_norms");
  attribute<&Training::dgram>(type, "dgram");
  attribute<&Training::ddiagonal>(type, "ddiagonal");
  attribute<&Training::dscale>(type, "dscale");
}

void def_squared(py::module_& module) {
  using drq::Squared;
  py::class_<Squared> type(module, "Squared");
  type.def(py::init([](Address x, Address codebook, Address scale, Address offset, Address codes, int64_t N, int64_t D,
                       int64_t K, int64_t M) {
             Squared job{};
             job.x = At{x}, job.codebook = At{codebook}, job.scale = At{scale}, job.offset = At{offset};
             job.codes = At{codes}, job.N = N, job.D = D, job.K = K, job.M = M;
             return job;
           }),
           py::kw_only(), arg("x"), arg("codebook"), arg("scale"), arg("offset"), arg("codes"), arg("N"), arg("D"),
           arg("K"), arg("M"));
  attribute<&Squared::decoded>(type, "decoded");
  attribute<&Squared::errors>(type, "errors");
  attribute<&Squared::derrors>(type, "derrors");
  attribute<&Squared::weights>(type, "weights");
  attribute<&Squared::pulls>(type, "pulls");
  attribute<&Squared::dscale>(type, "dscale");
  attribute<&Squared::dcodebook>(type, "dcodebook");
}

int index_of(const std::string& isa) {
  for (int i = 0; i < drq::kIsaCount; ++i)
    if (isa == drq::kIsaNames[i] && drq::isa_supported(i)) return i;
  throw std::runtime_error("this machine has no instruction set " + isa);
}

// Asks for large pages where whole ones fit: memory that is new then costs a fault per 2 MiB, not per 4 KiB.
void large_pages([[maybe_unused]] Address memory, [[maybe_unused]] int64_t bytes) {
#ifdef __linux__
  constexpr Address kPage = 1 << 21;
  const Address begin = (memory + kPage - 1) / kPage * kPage, end = (memory + bytes) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // only advice: may fail
#endif
}

template <class Job>
void def_kernel(py::module_& module, const char* name, void (*kernel)(const Job&, int)) {
  module.def(
      name,
      [kernel](const Job& job, const std::string& isa) {
        const int chosen = index_of(isa);
        py::gil_scoped_release release;
        kernel(job, chosen);
      },
      arg("job"), arg("isa"));
}

#ifdef DRQ_FAST_CUDA
void raise(const char* error) {
  if (error != nullptr) throw std::runtime_error(error);
}

void def_cuda(py::module_& module) {
  module.def("cuda_runtime_version", &drq::cuda_runtime_version);
  module.def("cuda_driver_version", &drq::cuda_driver_version);
  module.def(
      "lookup_cuda", [](const drq::Lookup& job, Address stream) { raise(drq::lookup_cuda(job, At{stream})); },
      arg("job"), arg("stream"));
  module.def(
      "search_cuda_workspace",
      [](const drq::Search& job, const drq::Probed* probed) {
        return drq::search_cuda_workspace(job, probed ? *probed : drq::Probed{});
      },
      arg("job"), arg("probed"));
  module.def(
      "search_cuda",
      [](const drq::Search& job, const drq::Probed* probed, Address workspace, Address stream) {
        raise(drq::search_cuda(job, probed ? *probed : drq::Probed{}, At{workspace}, At{stream}));
      },
      arg("job"), arg("probed"), arg("workspace"), arg("stream"));
}
#endif

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.attr("compiler") = kCompiler;
  module.attr("amd") = drq::is_amd();
  module.attr("max_levels") = drq::kMaxLevels;
  def_jobs(module);
  def_training(module);
  def_squared(module);

  module.def("lookup_cpu", &drq::lookup_cpu, arg("job"), arg("threads"), py::call_guard<py::gil_scoped_release>());
  module.def("packed_size", &drq::packed_size, arg("K"), arg("D"));
  module.def(
      "pack_codebook",
      [](Address codebook, Address columns, int64_t K, int64_t D) {
        drq::pack_codebook(At{codebook}, At{columns}, K, D);
      },
      arg("codebook"), arg("columns"), arg("K"), arg("D"));
  module.def(
      "search_cpu",
      [](const Database& database, Address query, Address scores, Address positions, int64_t Q, int64_t k,
         const std::string& isa, int threads, Address ceilings) {
        const int chosen = index_of(isa);
        drq::Search job = database.job;
        drq::Queries queries = database.queries;
        job.scores = At{scores}, job.positions = At{positions}, job.Q = Q, job.k = k, queries.rows = At{query};
        job.ceilings = At{ceilings};
        py::gil_scoped_release release;
        return drq::search_cpu(job, queries, chosen, threads);
      },
      arg("database"), arg("query"), arg("scores"), arg("positions"), arg("Q"), arg("k"), arg("isa"), arg("threads"),
      arg("ceilings") = 0);
  module.def(
      "search_given_cpu",
      [](const drq::Search& job, const std::string& isa, int threads) {
        const int chosen = index_of(isa);
        py::gil_scoped_release release;
        drq::search_cpu(job, {}, chosen, threads);
      },
      arg("job"), arg("isa"), arg("threads"));
  module.def(
      "refine_cpu",
      [](const drq::Refine& job, const std::string& isa, int threads) {
        const int chosen = index_of(isa);
        py::gil_scoped_release release;
        drq::refine_cpu(job, chosen, threads);
      },
      arg("job"), arg("isa"), arg("threads"));
  module.def(
      "search_lists_cpu",
      [](const Database& database, const drq::Lists& lists, Address query, Address scores, Address positions, int64_t Q,
         int64_t k, const std::string& isa, int threads, Address ceilings) {
        const int chosen = index_of(isa);
        drq::Search job = database.job;
        drq::Queries queries = database.queries;
        job.scores = At{scores}, job.positions = At{positions}, job.Q = Q, job.k = k, queries.rows = At{query};
        job.ceilings = At{ceilings};
        py::gil_scoped_release release;
        return drq::search_lists_cpu(job, queries, lists, chosen, threads);
      },
      arg("database"), arg("lists"), arg("query"), arg("scores"), arg("positions"), arg("Q"), arg("k"), arg("isa"),
      arg("threads"), arg("ceilings") = 0);
  module.def(
      "search_given_lists_cpu",
      [](const drq::Search& job, const drq::Lists& lists, const std::string& isa, int threads) {
        const int chosen = index_of(isa);
        py::gil_scoped_release release;
        drq::search_lists_cpu(job, {}, lists, chosen, threads);
      },
      arg("job"), arg("lists"), arg("isa"), arg("threads"));
  module.def("norms_cpu", &drq::norms_cpu, arg("job"), arg("threads"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "block_sums",
      [](Address data, int64_t bytes, Address keys, Address sums, int threads) {
        py::gil_scoped_release release;
        drq::block_sums(At{data}, bytes, At{keys}, At{sums}, threads);
      },
      arg("data"), arg("bytes"), arg("keys"), arg("sums"), arg("threads"));
  module.def("large_pages", &large_pages, arg("memory"), arg("bytes"));
  // os.environ sets the process's environment, too, and takes half a microsecond to look something up.
  module.def("environment", [](const char* name) { return std::getenv(name); }, arg("name"));
  module.def("supported_isas", [] {
    py::list names;
    for (int isa = 0; isa < drq::kIsaCount; ++isa)
      if (drq::isa_supported(isa)) names.append(drq::kIsaNames[isa]);
    return names;
  });
  def_kernel(module, "encode_cpu", drq::encode_cpu);
  def_kernel(module, "beam_cpu", drq::beam_cpu);
  def_kernel(module, "assign_cpu", drq::assign_cpu);
  def_kernel(module, "evaluate_cpu", drq::evaluate_cpu);
  def_kernel(module, "mix_cpu", drq::mix_cpu);
  def_kernel(module, "backward_cpu", drq::backward_cpu);
  def_kernel(module, "decode_cpu", drq::decode_cpu);
  def_kernel(module, "squared_errors_cpu", drq::squared_errors_cpu);
  def_kernel(module, "pulls_cpu", drq::pulls_cpu);
  def_kernel(module, "own_pulls_cpu", drq::own_pulls_cpu);
  module.def(
      "add_pulls_cpu",
      [](const drq::Squared& job, Address starts, Address places, int64_t begin, int64_t end, const std::string& isa) {
        const int chosen = index_of(isa);
        py::gil_scoped_release release;
        drq::add_pulls_cpu(job, At{starts}, At{places}, begin, end, chosen);
      },
      arg("job"), arg("starts"), arg("places"), arg("begin"), arg("end"), arg("isa"));
  module.def(
      "group_codes",
      [](const drq::Squared& job, Address starts, Address places) {
        py::gil_scoped_release release;
        drq::group_codes(job, At{starts}, At{places});
      },
      arg("job"), arg("starts"), arg("places"));
#ifdef DRQ_FAST_CUDA
  module.attr("cuda") = true;
  def_cuda(module);
#else
  module.attr("cuda") = false;
#endif
}
