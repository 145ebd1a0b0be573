// The interface of search: raw pointers, sizes and a stream. No torch, no Python, no allocation of device memory, no
// state. Outputs are written by the callee and owned by the caller.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define DRQ_INLINE __host__ __device__ inline
#else
#define DRQ_INLINE inline
#endif

namespace drq {

// Table look-up of asymmetric distance computation (docs/math.md, section 5):
//   sums[q, n] = sum over m = 0..M-1, in this order and without fused multiply-add, of
//   fl(scale[m] * table[q, codes[n, m]])
// All arrays are dense and row-major; every code must be in 0..K-1 (callers check).
struct Lookup {
  const float* table;  // [Q, K]
  const float* scale;  // [M]
  const void* codes;   // [N, M], uint8 or int32
  float* sums;         // [Q, N]
  int64_t Q, N, K, M;
  bool wide;  // codes are int32
};

void lookup_cpu(const Lookup& job, int threads);

// The most levels of codes that are scanned by bytes (CPU) or at all (CUDA).
constexpr int kMaxLevels = 64;

enum Metric : int { kL2 = 0, kIp = 1, kCosine = 2 };

// The k best codes for each query, in the order (score, position): ascending for l2, descending for ip and cosine.
// Where fewer than k are left, position -1 and the worst score. Scores are those of score_of() below, to the bit.
struct Search {
  const float* table;      // [Q, T]  q C^T, of q - offset for l2
  const float* scale;      // [M]
  const int64_t* bases;    // [M]     where the K entries of level m begin in a row of the table; ascending
  const void* codes;       // row n begins `stride` codes after row n - 1 and has M of them, uint8 or uint16, in 0..K-1
  const float* norms;      // [N]     ||xhat||^2 (l2), ||offset + xhat||^2 (cosine), null for ip
  const float* constants;  // [Q]     ||q - offset||^2 (l2), <q, offset> (ip, cosine)
  const float* lengths;    // [Q]     ||q|| (cosine), else null
  const uint8_t* keep;     // [N]     0 for codes to pass over, null to look at all
  float* scores;           // [Q, k]
  int64_t* positions;      // [Q, k]
  int64_t Q, N, K, T, M, k;
  int64_t stride;
  int metric;
  bool wide;  // codes are uint16
  // [Q]  codes whose cost (see turned()) is not below it are left out; null: none are. CUDA does not read it.
  const float* ceilings = nullptr;

  // The entries [K] of level m for query q.
  DRQ_INLINE const float* entries(int64_t q, int64_t m) const { return table + q * T + bases[m]; }
  // Whether all levels have the same entries.
  DRQ_INLINE bool shared() const { return bases[M - 1] == 0; }
};

inline float ceiling_of(const Search& job, int64_t q) { return job.ceilings == nullptr ? INFINITY : job.ceilings[q]; }

// The score of a code for a query, given the sum of its table entries; no fused multiply-add anywhere.
DRQ_INLINE float score_of(int metric, float sum, float norm, float constant, float length) {
  if (metric == kL2) return (norm - 2 * sum) + constant;
  const float inner = sum + constant;
  if (metric == kIp) return inner;
  const float lengths = length * (norm > 0 ? std::sqrt(norm) : 0.0f);
  return lengths > 0 ? inner / lengths : 0;
}

// Costs are scores turned so that less is better; turning twice gives the score back.
DRQ_INLINE float turned(int metric, float score) { return metric == kL2 ? score : 0.0f - score; }

// The queries themselves, from which the CPU search forms the table, constants and lengths of `Search` for a few
// queries at a time. With q' = q - offset (l2) or q:
//   table[k]  = <q', C_k>: dimensions in order in chunks of 64, the chunks' sums in order, no fused multiply-add
//   constants = <q', q'> (l2), <q, offset> (ip, cosine; 0 without an offset), lengths = sqrt(<q, q>)
// The bits depend on q, C and D only: not on Q, threads or the instruction set.
struct Queries {
  const float* rows;     // [Q, D]  null if `Search` has a table
  const float* columns;  // the codebook as pack_codebook() lays it out
  const float* offset;   // [D]     null without an offset
  int64_t D;
};

// Returns the first row of the queries that has NaN or infinity, -1 if there is none or if the table was given. The
// results of such a row are what the definition gives.
int64_t search_cpu(const Search& job, const Queries& queries, int isa, int threads);

// Inverted lists: the rows of list l lie together, and their vectors are relative to its centroid c_l as well (relative
// to the offset). The norms of `Search` are those of c_l + xhat (l2) or offset + c_l + xhat (cosine). A code's score is
// that of score_of() with the constant of the query in its list:
//   l2: constant - 2 <q', c_l>    ip, cosine: constant + <q, c_l>
// Each query looks at its `probes` nearest lists, in the order ((||c_l||^2 - 2 <q', c_l>) + constant, l) for l2 and
// (-<q, c_l>, l) otherwise, with NaN last. <q, c_l> is added up as the entries of the table are.
struct Lists {
  const int64_t* starts;  // [L + 1]  list l has rows starts[l] .. starts[l + 1] - 1
  const float* columns;   // the centroids as pack_codebook() lays them out
  const float* norms;     // [L]      ||c_l||^2 (l2), else not read
  const float* products;  // [Q, L]   <q', c_l>, null where they are to be computed
  int64_t L, probes;      // probes: 1..L
};

// As search_cpu(), among the codes of the nearest lists.
int64_t search_lists_cpu(const Search& job, const Queries& queries, const Lists& lists, int isa, int threads);

// The lists that each query looks at, chosen beforehand, as CUDA takes them. `constants` of `Search` are [Q, L] then:
// of each query in each list. probes == 0: there are no lists, and every query looks at all codes.
struct Probed {
  const int64_t* starts;  // [L + 1]      as in `Lists`
  const int64_t* lists;   // [Q, probes]  in any order, each at most once
  const int64_t* ends;    // [Q, probes]  how many rows the first 1, 2, .. of these lists have together
  int64_t L, probes;
};

// columns[p, d, i] = codebook[16 p + i, d], 0 beyond K: panels of 16 codewords.
constexpr int64_t kPanel = 16;
inline int64_t packed_size(int64_t K, int64_t D) { return (K + kPanel - 1) / kPanel * kPanel * D; }
void pack_codebook(const float* codebook, float* columns, int64_t K, int64_t D);

// norms[n] = ||t + xhat_n||^2 as docs/math.md, section 5, adds it up, where t is the offset, or what rows of a list are
// moved by.
struct Norms {
  const float* gram;       // [T, T]  G = C C^T
  const float* scale;      // [M]
  const int64_t* bases;    // [M]     as in Search
  const float* inner;      // [L, T]  2 <C_k, t>, null if t is 0
  const float* constants;  // [L]     ||t||^2
  const int64_t* starts;   // [L + 1] the rows of each list; null if t is the same for all rows
  const void* codes;       // as in Search
  float* norms;            // [N]
  int64_t N, T, M, stride;
  bool wide;
};

void norms_cpu(const Norms& job, int threads);

// How stored vectors are represented; float16 as its bits, int8 with a factor per row.
enum Stored : int { kFloat32 = 0, kFloat16 = 1, kInt8 = 2 };

// The k best of the candidates of each query by the vectors themselves, in the order (score, position); what is missing
// as in Search. Sums over dimensions: sixteen lanes, four blocks of them side by side, added in halves at the end.
struct Refine {
  const float* queries;       // [Q, D]
  const int64_t* candidates;  // [Q, n]  rows of the vectors, -1 for none
  const void* vectors;        // [N, D]  float, uint16_t or int8_t, see Stored
  const float* steps;         // [N]     factors of int8 rows, else null
  float* scores;              // [Q, k]
  int64_t* positions;         // [Q, k]
  int64_t Q, n, k, D;
  int metric, stored;
};

void refine_cpu(const Refine& job, int isa, int threads);

#ifdef DRQ_FAST_CUDA
// Enqueues on `stream` (a cudaStream_t) and returns at once. Null on success, else CUDA's own words.
const char* lookup_cuda(const Lookup& job, void* stream);
// As above, with search_cuda_workspace() bytes of device memory, aligned to 16, that nobody else uses until it is done.
const char* search_cuda(const Search& job, const Probed& probed, void* workspace, void* stream);
size_t search_cuda_workspace(const Search& job, const Probed& probed);
int cuda_runtime_version();
int cuda_driver_version();  // 0 where there is no driver
#endif

}  // namespace drq
