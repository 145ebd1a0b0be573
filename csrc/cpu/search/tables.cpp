// The tables q C^T of some queries, with their constants and lengths. Compiled once per instruction set; see simd.h.
#include "cpu/search/tables.h"

#include <algorithm>
#include <cmath>

#include "cpu/buffer.h"
#include "cpu/search/metric.h"

namespace drq {
namespace DRQ_ISA {
namespace {

constexpr int64_t kChunk = 64;  // dimensions whose products are added before they go into the total

// Products of kRows vectors with kPanels panels of 16 codewords: as many sums as hide the latency of an addition.
template <int kRows, int kPanels>
void multiply(const float* const (&rows)[kRows], const float* panels, int64_t D, Floats (&totals)[kRows][kPanels]) {
  for (auto& row : totals)
    for (auto& total : row) total = Floats::all(0);
  for (int64_t first = 0; first < D; first += kChunk) {
    const int64_t last = std::min(first + kChunk, D);
    Floats sums[kRows][kPanels];
    for (auto& row : sums)
      for (auto& sum : row) sum = Floats::all(0);
    for (int64_t d = first; d < last; ++d)
      for (int p = 0; p < kPanels; ++p) {
        const Floats words = Floats::load(panels + (p * D + d) * kPanel);
        for (int r = 0; r < kRows; ++r) sums[r][p] = sums[r][p] + Floats::all(rows[r][d]) * words;
      }
    for (int r = 0; r < kRows; ++r)
      for (int p = 0; p < kPanels; ++p) totals[r][p] = totals[r][p] + sums[r][p];
  }
}

#if defined(DRQ_AVX512)
constexpr int kRows = 8, kPanels = 4;
#else
constexpr int kRows = 4, kPanels = 2;
#endif

// out[i, k] for kSome vectors and the codewords of kBeside panels from `panel` on; `count` of the vectors are wanted.
template <int kSome, int kBeside>
void fill(const float* const (&rows)[kSome], int64_t count, const float* columns, int64_t K, int64_t D, int64_t panel,
          float* out) {
  Floats totals[kSome][kBeside];
  multiply(rows, columns + panel * kPanel * D, D, totals);
  for (int64_t r = 0; r < count; ++r)
    for (int p = 0; p < kBeside; ++p) {
      const int64_t k = (panel + p) * kPanel;
      float words[kPanel];
      totals[r][p].store(words);
      std::memcpy(out + r * K + k, words, std::min(kPanel, K - k) * sizeof(float));
    }
}

// Fills out [count, K] with the products of up to kRows vectors and all K columns.
void fill_all(const float* const (&rows)[kRows], int64_t count, const float* columns, int64_t K, int64_t D,
              float* out) {
  const int64_t panels = (K + kPanel - 1) / kPanel;
  int64_t panel = 0;
  if (count == 1) {
    const float* const row[1] = {rows[0]};
    for (; panel + kPanels <= panels; panel += kPanels) fill<1, kPanels>(row, 1, columns, K, D, panel, out);
    for (; panel < panels; ++panel) fill<1, 1>(row, 1, columns, K, D, panel, out);
  }
  for (; panel < panels; ++panel) fill<kRows, 1>(rows, count, columns, K, D, panel, out);
}

// kRows queries at a time, less the offset for metrics that want that.
struct Rows {
  // For `count` queries in all.
  Rows(const Search& job, const Queries& queries, int64_t count)
      : queries(queries),
        moved(is_centred(job.metric) && queries.offset != nullptr),
        centred(moved ? std::min<int64_t>(kRows, count) * queries.D : 0) {}

  // Sets rows to the queries first..first + count; those beyond repeat the first.
  void load(int64_t first, int64_t count) {
    const int64_t D = queries.D;
    for (int64_t r = 0; r < kRows; ++r) {
      rows[r] = r < count ? queries.rows + (first + r) * D : rows[0];
      if (!moved || r >= count) continue;
      float* x = centred.data + r * D;
      for (int64_t d = 0; d < D; ++d) x[d] = rows[r][d] - queries.offset[d];
      rows[r] = x;
    }
  }

  const Queries& queries;
  const bool moved;
  const float* rows[kRows];

 private:
  Buffer<float> centred;
};

}  // namespace

int64_t fill_tables(const Search& job, const Queries& queries, int64_t begin, int64_t end, float* table,
                    float* constants, float* lengths) {
  const int64_t D = queries.D;
  Rows some(job, queries, end - begin);
  int64_t odd = -1;
  for (int64_t first = begin; first < end; first += kRows) {
    const int64_t count = std::min<int64_t>(kRows, end - first);
    some.load(first, count);
    for (int64_t r = 0; r < count; ++r) {
      const float* q = queries.rows + (first + r) * D;
      const int64_t i = first + r - begin;
      if (odd < 0 && !all_finite(q, D)) odd = first + r;
      constants[i] = constant_of(job.metric, some.rows[r], queries.offset, D);
      if (has_length(job.metric)) lengths[i] = std::sqrt(dot(q, q, D));
    }
    fill_all(some.rows, count, queries.columns, job.T, D, table + (first - begin) * job.T);
  }
  return odd;
}

void fill_products(const Search& job, const Queries& queries, const Lists& lists, int64_t begin, int64_t end,
                   float* products) {
  Rows some(job, queries, end - begin);
  for (int64_t first = begin; first < end; first += kRows) {
    const int64_t count = std::min<int64_t>(kRows, end - first);
    some.load(first, count);
    fill_all(some.rows, count, lists.columns, lists.L, queries.D, products + (first - begin) * lists.L);
  }
}

}  // namespace DRQ_ISA
}  // namespace drq
