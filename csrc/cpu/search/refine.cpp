// Scores candidates by the vectors that are stored beside their codes. Compiled once per instruction set; see simd.h.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "cpu/buffer.h"
#include "cpu/simd.h"
#include "search.h"

namespace drq {
namespace DRQ_ISA {
namespace {

constexpr int64_t kBlocks = 4;                // vectors of Floats whose sums are kept apart
constexpr int64_t kChunk = kBlocks * kWidth;  // dimensions
constexpr int64_t kAhead = 6;                 // candidates between the one that is scored and the one that is fetched

using Candidate = std::pair<float, int64_t>;  // (cost, position): less is better

// Four sums of 16 lanes and the order in which they are added up.
struct Sums {
  Floats totals[kBlocks] = {Floats::all(0), Floats::all(0), Floats::all(0), Floats::all(0)};
  void add(int64_t block, Floats terms) { totals[block] = totals[block] + terms; }
  float total() const { return sum((totals[0] + totals[1]) + (totals[2] + totals[3])); }
};

// Calls use(block, q, x) for the dimensions of a query, which is padded with zeros, and of a stored row.
template <class Number, class Use>
void each_block(const float* query, const Number* row, float step, int64_t D, const Use& use) {
  const Floats factor = Floats::all(step);
  const auto blocks = [&](const float* q, const Number* x) {
    for (int64_t b = 0; b < kBlocks; ++b) {
      const Floats values = Floats::load(x + b * kWidth);
      use(b, Floats::load(q + b * kWidth), std::is_same_v<Number, int8_t> ? factor * values : values);
    }
  };
  int64_t d = 0;
  for (; d + kChunk <= D; d += kChunk) blocks(query + d, row + d);
  if (d < D) {
    Number rest[kChunk] = {};
    std::copy(row + d, row + D, rest);
    blocks(query + d, rest);
  }
}

template <class Number>
float cost_of(const Refine& job, const float* query, float length, int64_t position) {
  const Number* row = static_cast<const Number*>(job.vectors) + position * job.D;
  const float step = job.steps == nullptr ? 1 : job.steps[position];
  Sums sums, squares;
  if (job.metric == kL2) {
    each_block(query, row, step, job.D, [&](int64_t b, Floats q, Floats x) { sums.add(b, (q - x) * (q - x)); });
    return sums.total();
  }
  if (job.metric == kIp) {
    each_block(query, row, step, job.D, [&](int64_t b, Floats q, Floats x) { sums.add(b, q * x); });
    return 0.0f - sums.total();
  }
  each_block(query, row, step, job.D, [&](int64_t b, Floats q, Floats x) {
    sums.add(b, q * x);
    squares.add(b, x * x);
  });
  const float lengths = length * std::sqrt(squares.total());
  return 0.0f - (lengths > 0 ? sums.total() / lengths : 0);
}

template <class Number>
void fetch(const Refine& job, int64_t position) {
  if (position < 0) return;
  const auto* row = reinterpret_cast<const char*>(static_cast<const Number*>(job.vectors) + position * job.D);
  for (size_t line = 0; line < job.D * sizeof(Number); line += 64) __builtin_prefetch(row + line);
}

template <class Number>
void refine_queries(const Refine& job, int64_t begin, int64_t end) {
  constexpr float kWorst = std::numeric_limits<float>::infinity();
  Buffer<float> query((job.D + kChunk - 1) / kChunk * kChunk);
  Buffer<Candidate> found(job.n);
  for (int64_t q = begin; q < end; ++q) {
    std::copy(job.queries + q * job.D, job.queries + (q + 1) * job.D, query.data);
    Sums squares;
    if (job.metric == kCosine)
      each_block(query.data, query.data, 1, job.D, [&](int64_t b, Floats x, Floats) { squares.add(b, x * x); });
    const float length = std::sqrt(squares.total());
    const int64_t* candidates = job.candidates + q * job.n;
    int64_t count = 0;
    for (int64_t i = 0; i < job.n; ++i) {
      if (i + kAhead < job.n) fetch<Number>(job, candidates[i + kAhead]);
      if (candidates[i] < 0) continue;
      const float cost = cost_of<Number>(job, query.data, length, candidates[i]);
      found.data[count++] = {cost == cost ? cost : kWorst, candidates[i]};
    }
    const int64_t kept = std::min(job.k, count);
    std::partial_sort(found.data, found.data + kept, found.data + count);
    for (int64_t i = 0; i < job.k; ++i) {
      job.scores[q * job.k + i] = turned(job.metric, i < kept ? found.data[i].first : kWorst);
      job.positions[q * job.k + i] = i < kept ? found.data[i].second : -1;
    }
  }
}

}  // namespace

void refine(const Refine& job, int64_t begin, int64_t end) {
  if (job.stored == kFloat32) refine_queries<float>(job, begin, end);
  if (job.stored == kFloat16) refine_queries<uint16_t>(job, begin, end);
  if (job.stored == kInt8) refine_queries<int8_t>(job, begin, end);
}

}  // namespace DRQ_ISA
}  // namespace drq
