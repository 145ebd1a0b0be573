// The scan of the codes that all search kernels share. An `Action` decides what is done with the costs.
#pragma once

#include <cstdint>

#include "search.h"

namespace drq {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRows = 4;          // codes that a lane scores at a time
constexpr int kMaxDenseRow = 32;  // rows of up to so many bytes are loaded whole, even if only a prefix is searched
constexpr int kBlocksPerSm = 4;   // so at most 64 registers a thread

// Cost and position in one number: smaller is better, and every key is unique.
using Key = unsigned long long;
constexpr Key kNone = ~Key{0};

__device__ inline Key key_of(float cost, uint32_t position) {
  cost += 0.0f;  // -0 becomes 0, the two tie
  const uint32_t bits = __float_as_uint(cost);
  const uint32_t order = cost != cost ? ~0u : bits ^ (bits >> 31 ? ~0u : 0x80000000u);  // NaN last
  return static_cast<Key>(order) << 32 | position;
}

// The cost within a key; NaN for kNone.
__device__ inline float cost_of(Key key) {
  const uint32_t order = static_cast<uint32_t>(key >> 32);
  return __uint_as_float(order ^ (order >> 31 ? 0x80000000u : ~0u));
}

// The costs of kRows codes, computed by one lane.
struct Scored {
  float cost[kRows];
  bool valid[kRows];
  uint32_t position, step;  // of the first code, and the difference from one code to the next

  __device__ Key key(int i) const { return key_of(cost[i], position + i * step); }
};

// A search of some queries, as the kernels see it. A group is 32 queries in a batch, else one.
struct Plan {
  Search job;
  Probed probed;        // only without a batch
  float* tables;        // [groups, K, 32], where there is a batch
  Key* keys;            // [groups, slices, queries of a group, capacity], or [Q, capacity] where k > kMaxFused
  struct Radix* radix;  // [Q] where k > kMaxFused
  int64_t groups, slices, slice_rows, capacity;
  int tile_rows, tile_words;
  int table_words;  // in shared memory
  int spread;       // log2 of the floats per codeword in the table: copies of one entry, or 32 queries
  int shift;        // position of the current digit of the radix select; below 0: collect keys
};

struct Lane {
  int64_t group, slice, query;
  bool active;  // the query exists
};

template <bool kBatch>
__device__ Lane lane_of(const Plan& plan) {
  Lane lane;
  lane.group = blockIdx.x % plan.groups;  // neighbours read the same codes
  lane.slice = blockIdx.x / plan.groups;
  lane.query = kBatch ? lane.group * kWarp + threadIdx.x % kWarp : lane.group;
  lane.active = lane.query < plan.job.Q;
  return lane;
}

// Codes in shared memory: words with one word of padding after every 32, so that rows of 4, 8, 16 or 32 bytes can be
// read by 32 lanes, and words be written 16 bytes apart, without a bank conflict.
struct Tile {
  uint32_t* words;

  static __host__ __device__ int padded(int word) { return word + (word >> 5); }

  // With room for 15 bytes before the first code, and for the word after the last; a multiple of 16 bytes.
  static int words_for(int64_t bytes) { return (padded(static_cast<int>(bytes + 15) / 4 + 1) + 4) / 4 * 4; }

  // The four bytes from byte `at` on.
  template <bool kAligned>
  __device__ uint32_t load(int at) const {
    const int word = at >> 2, shift = kAligned ? 0 : (at & 3) * 8;
    const uint32_t low = words[padded(word)];
    return shift == 0 ? low : __funnelshift_r(low, words[padded(word + 1)], shift);
  }

  template <class Code>
  __device__ void store(int at, Code code) const {
    reinterpret_cast<Code*>(words + padded(at >> 2))[(at & 3) / sizeof(Code)] = code;
  }
};

// Where row 0 of a staged tile begins, and how far rows are apart, in bytes.
struct Staged {
  int lead, pitch;
};

// Bytes that are outside of [begin, end) are 0.
__device__ inline uint4 load_inside(uintptr_t at, uintptr_t begin, uintptr_t end) {
  if (at >= begin && at + 16 <= end) return __ldg(reinterpret_cast<const uint4*>(at));
  uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (at + i >= begin && at + i < end)
      words[i / 4] |= static_cast<uint32_t>(*reinterpret_cast<const uint8_t*>(at + i)) << i % 4 * 8;
  return {words[0], words[1], words[2], words[3]};
}

// Copies rows first..first + rows - 1 to shared memory: unchanged, 16 bytes per thread, or only the M codes of each row
// where a row has more than kMaxDenseRow bytes.
template <class Code>
__device__ Staged stage(const Search& job, int64_t first, int rows, Tile tile) {
  const Code* codes = static_cast<const Code*>(job.codes) + first * job.stride;
  if (job.stride * sizeof(Code) > kMaxDenseRow) {
    const int M = static_cast<int>(job.M);
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * M; i += kThreads)
      tile.store<Code>(i * sizeof(Code), codes[i / M * job.stride + i % M]);
    return {0, static_cast<int>(M * sizeof(Code))};
  }
  const uintptr_t begin = reinterpret_cast<uintptr_t>(codes);
  const uintptr_t end = begin + ((rows - 1) * job.stride + job.M) * sizeof(Code);
  const uintptr_t aligned = begin & ~uintptr_t{15};
  for (int chunk = threadIdx.x; aligned + chunk * 16 < end; chunk += kThreads) {
    const uint4 loaded = load_inside(aligned + chunk * 16, begin, end);
    const int word = Tile::padded(chunk * 4);
    tile.words[word] = loaded.x;
    tile.words[word + 1] = loaded.y;
    tile.words[word + 2] = loaded.z;
    tile.words[word + 3] = loaded.w;
  }
  return {static_cast<int>(begin - aligned), static_cast<int>(job.stride * sizeof(Code))};
}

// Copies the block's table to shared memory: [T][32 queries], [T][32 copies] or, with spread 0, [T].
template <bool kBatch>
__device__ void stage_table(const Plan& plan, const Lane& lane, float* staged) {
  const int entries = static_cast<int>(plan.job.T) << plan.spread;
  if (kBatch) {
    const float4* from = reinterpret_cast<const float4*>(plan.tables + lane.group * entries);
#pragma unroll 1
    for (int i = threadIdx.x; i < entries / 4; i += kThreads) reinterpret_cast<float4*>(staged)[i] = from[i];
  } else {
    const float* from = plan.job.table + lane.query * plan.job.T;
#pragma unroll 1
    for (int i = threadIdx.x; plan.spread && i < entries / 4; i += kThreads) {
      const float entry = from[i >> (plan.spread - 2)];
      reinterpret_cast<float4*>(staged)[i] = {entry, entry, entry, entry};
    }
#pragma unroll 1
    for (int i = threadIdx.x; !plan.spread && i < entries; i += kThreads) staged[i] = from[i];
  }
}

// sum[i] = sum over m of fl(scale[m] * table[bases[m] + code m of row i]), in order of m and without fused
// multiply-add, for the first `live` rows.
template <class Code, bool kAligned>
__device__ void add_up(Tile tile, const int (&at)[kRows], int live, const float* scale, const int* bases, int M,
                       const float* table, uint32_t column, int spread, float (&sum)[kRows]) {
  constexpr int kPerWord = 4 / sizeof(Code);
  for (int i = 0; i < kRows; ++i) sum[i] = -0.0f;  // -0 + x is x for every x, also for -0
#pragma unroll 1
  for (int m = 0; m < M; m += kPerWord) {
    uint32_t word[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (i < live) word[i] = tile.load<kAligned>(at[i] + m * static_cast<int>(sizeof(Code)));
#pragma unroll
    for (int j = 0; j < kPerWord; ++j) {
      if (m + j >= M) break;
      const float s = scale[m + j];
      const char* entries = reinterpret_cast<const char*>(table + (static_cast<int64_t>(bases[m + j]) << spread));
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (i >= live) break;
        const uint32_t code = static_cast<Code>(word[i] >> j * 8 * sizeof(Code));
        const uint32_t offset = code << (spread + 2) | column;  // in bytes; the column is less than a row
        const float entry = *reinterpret_cast<const float*>(entries + offset);
        sum[i] = __fadd_rn(sum[i], __fmul_rn(s, entry));
      }
    }
  }
}

// Turns sums into costs: scores, negated where larger ones are better.
template <int kMetric>
__device__ void costs_of(float (&sum)[kRows], const float (&norm)[kRows], float constant, float length) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float score = score_of(kMetric, sum[i], norm[i], constant, length);
    sum[i] = kMetric == kL2 ? score : -score;
  }
}

// How many of the ascending numbers are at most `value`.
__device__ inline int64_t count_up_to(const int64_t* numbers, int64_t count, int64_t value) {
  int64_t least = 0;
  while (least < count) {
    const int64_t middle = (least + count) / 2;
    if (numbers[middle] <= value)
      least = middle + 1;
    else
      count = middle;
  }
  return least;
}

// Goes through a block's slice where the query looks at lists: a range of the rows that it looks at, counted through
// its lists. Each part lies in one list and fits in a tile. It is in shared memory, because registers are for the scan:
// one thread advances, the others read.
struct Walk {
  const int64_t *lists, *ends;  // of the query
  const float* constants;       // of the query
  int64_t counted, stop;        // what is left of the slice
  int64_t probe;                // the list that the next row is in, or one before it
  uint32_t first;               // row of the current part
  int rows;                     // in it, 0 at the end
  float constant;               // of the query in its list

  __device__ void start(const Plan& plan, const Lane& lane) {
    const int64_t probes = plan.probed.probes;
    lists = plan.probed.lists + lane.query * probes;
    ends = plan.probed.ends + lane.query * probes;
    constants = plan.job.constants + lane.query * plan.probed.L;
    const int64_t slice_rows = (ends[probes - 1] + plan.slices - 1) / plan.slices;
    counted = lane.slice * slice_rows;
    stop = min(counted + slice_rows, ends[probes - 1]);
    probe = count_up_to(ends, probes, counted);
    advance(plan);
  }

  __device__ void advance(const Plan& plan) {
    rows = 0;
    if (counted >= stop) return;
    while (ends[probe] <= counted) ++probe;
    const int64_t list = lists[probe], end = ends[probe];
    first = static_cast<uint32_t>(counted + (plan.probed.starts[list + 1] - end));
    rows = static_cast<int>(min(static_cast<int64_t>(plan.tile_rows), min(end, stop) - counted));
    constant = constants[list];
    counted += rows;
  }
};

// Scores all codes of the block's slice and passes their costs to `action`, kRows codes per lane. With kBatch every
// lane has its own query, and a warp scores the same codes for 32 queries. Otherwise all lanes have the same query, and
// each scores its own codes. With kLists, which excludes kBatch, these are codes of the lists that the query looks at.
template <class Code, bool kBatch, bool kShared, bool kLists, class Action>
__device__ void scan(const Plan& plan, const Lane& lane, float* shared, Action& action) {
  float* scale = shared;
  int* bases = reinterpret_cast<int*>(shared + kMaxLevels);
  float* staged_table = shared + 2 * kMaxLevels;  // at an address known to the compiler
  const Tile tile{reinterpret_cast<uint32_t*>(staged_table + plan.table_words)};
  const Search& job = plan.job;
  const int thread = threadIdx.x, M = static_cast<int>(job.M);
#pragma unroll 1
  for (int i = thread; i < plan.tile_words; i += kThreads) tile.words[i] = 0;
#pragma unroll 1
  for (int m = thread; m < M; m += kThreads) scale[m] = job.scale[m], bases[m] = static_cast<int>(job.bases[m]);
  if (kShared) stage_table<kBatch>(plan, lane, staged_table);
  const float* table = kShared  ? staged_table
                       : kBatch ? plan.tables + lane.group * job.T * kWarp
                                : job.table + lane.query * job.T;
  const uint32_t column = plan.spread ? thread % kWarp * sizeof(float) : 0;
  const float length = lane.active && job.lengths ? job.lengths[lane.query] : 0;

  constexpr int kRowStep = kBatch ? 1 : kThreads;  // between two rows of a lane
  const int first_row = kBatch ? thread / kWarp * kRows : thread;
  __shared__ Walk walk;
  const auto scan_tile = [&](int64_t first, int rows, float constant) {
    const Staged staged = stage<Code>(job, first, rows, tile);
    __syncthreads();  // the tile is there
    if (kLists && thread == 0) walk.advance(plan);
    for (int base = 0; base < rows; base += kRows * (kBatch ? kWarps : kThreads)) {
      int at[kRows];
      float norm[kRows];
      Scored scored;
      scored.position = static_cast<uint32_t>(first) + base + first_row;
      scored.step = kRowStep;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = base + first_row + i * kRowStep;
        scored.valid[i] = row < rows && lane.active;
        at[i] = staged.lead + (row < rows ? row : 0) * staged.pitch;
        norm[i] = job.norms && row < rows ? job.norms[first + row] : 0;
        if (job.keep && row < rows) scored.valid[i] &= job.keep[first + row] != 0;
      }
      const int live = kBatch ? kRows : (rows - base + kThreads - 1) / kThreads;  // may exceed kRows
      if ((staged.lead | staged.pitch) % 4 == 0)
        add_up<Code, true>(tile, at, live, scale, bases, M, table, column, kBatch ? 5 : plan.spread, scored.cost);
      else
        add_up<Code, false>(tile, at, live, scale, bases, M, table, column, kBatch ? 5 : plan.spread, scored.cost);
      if (job.metric == kL2)
        costs_of<kL2>(scored.cost, norm, constant, length);
      else if (job.metric == kIp)
        costs_of<kIp>(scored.cost, norm, constant, length);
      else
        costs_of<kCosine>(scored.cost, norm, constant, length);
      action.take(scored);
    }
  };
  if constexpr (kLists) {
    if (thread == 0) walk.start(plan, lane);
    for (;;) {
      __syncthreads();  // the part is known, and the tile before is done with
      const int rows = walk.rows;
      if (rows == 0) break;
      scan_tile(walk.first, rows, walk.constant);
    }
  } else {
    const float constant = lane.active ? job.constants[lane.query] : 0;
    const int64_t begin = lane.slice * plan.slice_rows;
    const int64_t end = min(begin + plan.slice_rows, job.N);
    for (int64_t first = begin; first < end; first += plan.tile_rows) {
      __syncthreads();  // the tile before is done with
      scan_tile(first, static_cast<int>(min(static_cast<int64_t>(plan.tile_rows), end - first)), constant);
    }
  }
}

// The score of one code, by the same operations in the same order.
__device__ inline float score_at(const Plan& plan, int64_t q, int64_t n) {
  const Search& job = plan.job;
  const Probed& probed = plan.probed;
  float sum = -0.0f;
  for (int64_t m = 0; m < job.M; ++m) {
    const int64_t at = n * job.stride + m;
    const int code =
        job.wide ? static_cast<const uint16_t*>(job.codes)[at] : static_cast<const uint8_t*>(job.codes)[at];
    sum = __fadd_rn(sum, __fmul_rn(job.scale[m], job.entries(q, m)[code]));
  }
  const int64_t at = probed.probes > 0 ? q * probed.L + count_up_to(probed.starts, probed.L, n) - 1 : q;
  return score_of(job.metric, sum, job.norms ? job.norms[n] : 0, job.constants[at], job.lengths ? job.lengths[q] : 0);
}

// A key does not keep every bit of a score (-0, NaN), so the scores of the results are computed again.
__device__ inline void emit(const Plan& plan, int64_t q, int64_t rank, Key key) {
  const Search& job = plan.job;
  const bool none = key == kNone;
  const int64_t n = none ? -1 : static_cast<int64_t>(key & 0xffffffffu);
  job.positions[q * job.k + rank] = n;
  const float worst = job.metric == kL2 ? HUGE_VALF : -HUGE_VALF;
  job.scores[q * job.k + rank] = none ? worst : score_at(plan, q, n);
}

}  // namespace
}  // namespace drq
