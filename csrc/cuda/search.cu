#include <cuda_runtime.h>

#include "select.cuh"

namespace drq {
namespace {

constexpr int64_t kBatchFrom = 16;        // queries from which 32 of them share a block
constexpr int64_t kBlocks = 1024;         // of a round; a constant, so that any GPU needs the same workspace
constexpr int64_t kMinSliceRows = 2048;   // of a slice; fewer are not worth a block
constexpr int64_t kFewBlocks = 256;       // two for each multiprocessor; from there on slices have twice as many rows
constexpr int64_t kRoundBytes = 1 << 28;  // of workspace; queries that need more are searched in several rounds
constexpr int64_t kMaxShared = 96 * 1024;
constexpr int64_t kStaticShared = 1024;    // upper bound of the static shared memory of the scans
constexpr int64_t kMaxCodes = 0xfffffffe;  // a position has 32 bits, and one of them means "none"

// Math:     tables[g, k, i] = table[32 g + i, k], 0 for queries beyond Q
// Tiling:   one block owns 32 queries and 32 codewords
// Memory:   read and written once, coalesced, transposed in shared memory
// Numerics: copies
__global__ void __launch_bounds__(kThreads) transpose_kernel(Plan plan) {
  __shared__ float square[kWarp][kWarp + 1];
  const int64_t K = plan.job.T, across = (K + kWarp - 1) / kWarp;
  const int64_t group = blockIdx.x / across, first = blockIdx.x % across * kWarp;
  const int lane = threadIdx.x % kWarp;
  for (int i = threadIdx.x / kWarp; i < kWarp; i += kWarps) {
    const int64_t q = group * kWarp + i;
    square[i][lane] = q < plan.job.Q && first + lane < K ? plan.job.table[q * K + first + lane] : 0;
  }
  __syncthreads();  // the square is there
  for (int i = threadIdx.x / kWarp; i < kWarp; i += kWarps)
    if (first + i < K) plan.tables[(group * K + first + i) * kWarp + lane] = square[lane][i];
}

using Kernel = void (*)(Plan);

template <class Code, bool kShared>
Kernel kernel_of(bool fused, bool batch, bool lists) {
  if (batch) return fused ? queue_kernel<Code, true, kShared, false> : select_kernel<Code, true, kShared, false>;
  if (lists) return fused ? queue_kernel<Code, false, kShared, true> : select_kernel<Code, false, kShared, true>;
  return fused ? queue_kernel<Code, false, kShared, false> : select_kernel<Code, false, kShared, false>;
}

template <class Code>
Kernel kernel_of(bool fused, bool batch, bool lists, bool shared) {
  return shared ? kernel_of<Code, true>(fused, batch, lists) : kernel_of<Code, false>(fused, batch, lists);
}

int64_t up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

int64_t power_of_two(int64_t least) {
  int64_t power = 1;
  while (power < least) power *= 2;
  return power;
}

// Codes that a block loads at a time: as many as its lanes score in one step, or a multiple.
int tile_rows(int64_t row_bytes, bool batch) {
  const int64_t unit = kRows * kWarps, fit = (batch ? 4096 : 16384) / row_bytes;
  if (!batch && fit > kRows * kThreads) return kRows * kThreads;
  return static_cast<int>(fit / unit * unit);
}

// How a search is laid out: rounds of queries, groups, slices, and the parts of the workspace.
struct Layout {
  bool batch, fused;
  int64_t width, round, groups, slices, slice_rows, capacity;
  size_t tables, radix, keys;  // bytes of each part

  Layout(const Search& job, const Probed& probed)
      : batch(job.Q >= kBatchFrom && probed.probes == 0), fused(job.k <= kMaxFused), width(batch ? kWarp : 1) {
    const int64_t rows = probed.probes == 0 ? job.N : job.N / probed.L * probed.probes;  // of a query, on average
    capacity = fused ? power_of_two(job.k > 32 ? 2 * job.k : 64) : power_of_two(job.k + job.k / 4);
    const int64_t of_group = width * (4 * job.T + (fused ? 0 : capacity * 8));
    const int64_t most = kRoundBytes / of_group < 1 ? 1 : kRoundBytes / of_group;
    groups = (job.Q + width - 1) / width;
    if (groups > most) groups = most;
    if (groups > kBlocks) groups = kBlocks;
    round = groups * width;
    slices = (rows + kMinSliceRows - 1) / kMinSliceRows;
    if (slices > kFewBlocks) slices = slices / 2 < kFewBlocks ? kFewBlocks : slices / 2;
    if (slices > kBlocks / groups) slices = kBlocks / groups;
    if (slices < 1) slices = 1;
    slice_rows = up((rows + slices - 1) / slices, 16);
    tables = batch ? groups * job.T * kWarp * sizeof(float) : 0;
    radix = fused ? 0 : up(round * sizeof(Radix), 16);
    keys = (fused ? slices : 1) * round * capacity * sizeof(Key);
  }
};

// CUDA's words for an error, null if there is none. Clears it, so that the next call does not report it again.
const char* text_of(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();
  return cudaGetErrorString(error);
}

const char* last_error() { return text_of(cudaGetLastError()); }

// Bytes of dynamic shared memory that a block may have.
const char* shared_limit(int64_t& limit) {
  int device = 0, most = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  limit = (most < kMaxShared ? most : kMaxShared) - kStaticShared;
  return text_of(error);
}

// One round of queries, enqueued on a stream.
struct Round {
  const Layout& layout;
  Plan plan;
  Kernel kernel;
  size_t shared;
  cudaStream_t stream;

  // Places the table: [K][32] in shared memory, else [K] if that fits, else it stays in global memory (L2 cache).
  const char* place_table(int64_t limit) {
    const Search& job = plan.job;
    const int64_t counts = layout.fused ? kSortKeys * sizeof(Key) : kDigits * kWarp * sizeof(unsigned);
    const int64_t own = counts + (2 * kMaxLevels + plan.tile_words) * sizeof(float);
    const int64_t spread_out = job.T * kWarp * sizeof(float), flat = job.T * sizeof(float);
    const bool fits = own + spread_out <= limit, flat_fits = !layout.batch && own + flat <= limit;
    plan.spread = layout.batch || fits ? 5 : 0;
    plan.table_words = static_cast<int>(up(fits ? spread_out : flat_fits ? flat : 0, 16) / sizeof(float));
    shared = own + plan.table_words * sizeof(float);
    const bool lists = plan.probed.probes > 0, in_shared = fits || flat_fits;
    kernel = job.wide ? kernel_of<uint16_t>(layout.fused, layout.batch, lists, in_shared)
                      : kernel_of<uint8_t>(layout.fused, layout.batch, lists, in_shared);
    return text_of(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  }

  const char* scan() {
    kernel<<<static_cast<unsigned>(plan.groups * plan.slices), kThreads, shared, stream>>>(plan);
    return last_error();
  }

  const char* transpose() {
    if (!layout.batch) return nullptr;
    const int64_t across = (plan.job.T + kWarp - 1) / kWarp;
    transpose_kernel<<<static_cast<unsigned>(plan.groups * across), kThreads, 0, stream>>>(plan);
    return last_error();
  }

  const char* merge() {
    merge_kernel<<<static_cast<unsigned>(plan.job.Q), kThreads, 0, stream>>>(plan, static_cast<int>(layout.width));
    return last_error();
  }

  // Radix select over all digits of the cost and the digits of the position that N needs.
  const char* select() {
    if (const char* error = text_of(cudaMemsetAsync(plan.radix, 0, layout.radix, stream))) return error;
    if (const char* error = text_of(cudaMemsetAsync(plan.keys, 0xff, layout.keys, stream))) return error;
    for (plan.shift = 56; plan.shift >= 0; plan.shift -= 8) {
      if (plan.shift < 32 && plan.shift > 0 && plan.job.N <= int64_t{1} << plan.shift) continue;
      if (const char* error = scan()) return error;
      digit_kernel<<<static_cast<unsigned>(plan.job.Q), kDigits, 0, stream>>>(plan);
      if (const char* error = last_error()) return error;
    }
    return scan();
  }

  const char* sort() {
    const int64_t keys = plan.job.Q * plan.capacity, tile = plan.capacity < kSortKeys ? plan.capacity : kSortKeys;
    const unsigned tiles = static_cast<unsigned>(keys / tile), pairs = static_cast<unsigned>(keys / 2 / kThreads);
    sort_kernel<<<tiles, kThreads, 0, stream>>>(plan.keys, plan.capacity, 2, tile);
    if (const char* error = last_error()) return error;
    for (int64_t size = 2 * tile; size <= plan.capacity; size *= 2) {
      for (int64_t stride = size / 2; stride >= tile; stride /= 2) {
        exchange_kernel<<<pairs, kThreads, 0, stream>>>(plan.keys, plan.capacity, size, stride);
        if (const char* error = last_error()) return error;
      }
      sort_kernel<<<tiles, kThreads, 0, stream>>>(plan.keys, plan.capacity, size, size);
      if (const char* error = last_error()) return error;
    }
    emit_kernel<<<static_cast<unsigned>((plan.job.Q * plan.job.k + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
        plan);
    return last_error();
  }

  const char* run(int64_t limit) {
    if (const char* error = place_table(limit)) return error;
    if (const char* error = transpose()) return error;
    if (!layout.fused) {
      if (const char* error = select()) return error;
      return sort();
    }
    if (const char* error = scan()) return error;
    return merge();
  }
};

}  // namespace

size_t search_cuda_workspace(const Search& job, const Probed& probed) {
  if (job.Q == 0 || job.k == 0) return 0;
  const Layout layout(job, probed);
  return layout.tables + layout.radix + layout.keys;
}

const char* search_cuda(const Search& job, const Probed& probed, void* workspace, void* stream) {
  if (job.Q == 0 || job.k == 0) return nullptr;
  if (job.N > kMaxCodes) return "more than 2^32 - 2 codes: search them in parts";
  if (job.M > kMaxLevels) return "more than 64 levels";
  const Layout layout(job, probed);
  int64_t limit = 0;
  if (const char* error = shared_limit(limit)) return error;
  const int64_t bytes = job.wide ? 2 : 1;
  const int64_t row = (job.stride * bytes > kMaxDenseRow ? job.M : job.stride) * bytes;
  char* memory = static_cast<char*>(workspace);
  for (int64_t first = 0; first < job.Q; first += layout.round) {
    Plan plan{job, probed};
    plan.job.Q = job.Q - first < layout.round ? job.Q - first : layout.round;
    plan.job.table += first * job.T;
    plan.job.constants += first * (probed.probes > 0 ? probed.L : 1);
    plan.probed.lists += first * probed.probes;
    plan.probed.ends += first * probed.probes;
    if (job.lengths) plan.job.lengths += first;
    plan.job.scores += first * job.k;
    plan.job.positions += first * job.k;
    plan.tables = reinterpret_cast<float*>(memory);
    plan.radix = reinterpret_cast<Radix*>(memory + layout.tables);
    plan.keys = reinterpret_cast<Key*>(memory + layout.tables + layout.radix);
    plan.groups = (plan.job.Q + layout.width - 1) / layout.width;
    plan.slices = layout.slices;
    plan.slice_rows = layout.slice_rows;
    plan.capacity = layout.capacity;
    plan.tile_rows = tile_rows(row, layout.batch);
    plan.tile_words = Tile::words_for(plan.tile_rows * row);
    Round round{layout, plan, nullptr, 0, static_cast<cudaStream_t>(stream)};
    if (const char* error = round.run(limit)) return error;
  }
  return nullptr;
}

}  // namespace drq
