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

// table[i, k] for kRows vectors and the codewords of kPanels panels from `panel` on; `count` of the rows are wanted.
template <int kRows, int kPanels>
void fill(const float* const (&rows)[kRows], int64_t count, const Search& job, const Queries& queries, int64_t panel,
          float* table) {
  Floats totals[kRows][kPanels];
  multiply(rows, queries.columns + panel * kPanel * queries.D, queries.D, totals);
  for (int64_t r = 0; r < count; ++r)
    for (int p = 0; p < kPanels; ++p) {
      const int64_t k = (panel + p) * kPanel;
      float words[kPanel];
      totals[r][p].store(words);
      std::memcpy(table + r * job.K + k, words, std::min(kPanel, job.K - k) * sizeof(float));
    }
}

}  // namespace

int64_t fill_tables(const Search& job, const Queries& queries, int64_t begin, int64_t end, float* table,
                    float* constants, float* lengths) {
#if defined(DRQ_AVX512)
  constexpr int kRows = 8, kPanels = 4;
#else
  constexpr int kRows = 4, kPanels = 2;
#endif
  const int64_t D = queries.D, panels = (job.K + kPanel - 1) / kPanel;
  const bool moved = is_centred(job.metric) && queries.offset != nullptr;
  Buffer<float> centred(moved ? kRows * D : 0);
  int64_t odd = -1;
  for (int64_t first = begin; first < end; first += kRows) {
    const int64_t count = std::min<int64_t>(kRows, end - first);
    const float* rows[kRows];
    for (int64_t r = 0; r < kRows; ++r) {
      if (r >= count) {  // unused: repeats the first row
        rows[r] = rows[0];
        continue;
      }
      const float* q = rows[r] = queries.rows + (first + r) * D;
      const int64_t i = first + r - begin;
      if (odd < 0 && !all_finite(q, D)) odd = first + r;
      if (moved) {
        float* x = centred.data + r * D;
        for (int64_t d = 0; d < D; ++d) x[d] = q[d] - queries.offset[d];
        rows[r] = x;
      }
      constants[i] = constant_of(job.metric, rows[r], queries.offset, D);
      if (has_length(job.metric)) lengths[i] = std::sqrt(dot(q, q, D));
    }
    float* out = table + (first - begin) * job.K;
    int64_t panel = 0;
    if (count == 1) {
      const float* const row[1] = {rows[0]};
      for (; panel + kPanels <= panels; panel += kPanels) fill<1, kPanels>(row, 1, job, queries, panel, out);
      for (; panel < panels; ++panel) fill<1, 1>(row, 1, job, queries, panel, out);
    }
    for (; panel < panels; ++panel) fill<kRows, 1>(rows, count, job, queries, panel, out);
  }
  return odd;
}

}  // namespace DRQ_ISA
}  // namespace drq
