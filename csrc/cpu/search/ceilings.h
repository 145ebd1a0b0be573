// Upper bounds of the k-th best costs of a batch of queries, from some of the codes. Included by files that are
// compiled once per instruction set; see simd.h.
#pragma once

#include <cmath>

#include "cpu/search/metric.h"
#include "cpu/search/reservoir.h"

namespace drq {
namespace DRQ_ISA {
namespace {

// Scores codes that lie evenly over the range, in groups: the k-th smallest of the groups' least costs is not below the
// k-th best cost of all, whatever the codes are.
template <class Code, int kLanes>
struct Ceilings {
  static constexpr int64_t kParts = kLanes / kWidth;

  // The codes that are scored, out of `count`: more of them give lower ceilings, but take time.
  static int64_t sampled(int64_t k, int64_t count) { return std::min(256 * k, count / 8); }

  Ceilings(int64_t k, int64_t count)
      : groups(4 * k), size(std::max<int64_t>(1, sampled(k, count) / groups)), least(groups * kLanes), one(groups) {}

  // ceilings[lane] is above the k-th best cost, infinite if nothing is known; transposed is [K, kLanes].
  void fill(const Search& job, const float* transposed, int64_t begin, int64_t end, float* ceilings) {
    if (end - begin < groups * size) {  // a code must not count twice
      std::fill(ceilings, ceilings + kLanes, std::numeric_limits<float>::infinity());
      return;
    }
    with_metric(job.metric, [&](auto metric) { score<decltype(metric)>(job, transposed, begin, end); });
    if (job.k <= kFew)
      select_few(job.k, ceilings);
    else
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        for (int64_t g = 0; g < groups; ++g) one.data[g] = Key{key_of(least.data[g * kLanes + lane], 0)};
        std::nth_element(one.data, one.data + job.k - 1, one.data + groups);
        ceilings[lane] = drq::cost_of(one.data[job.k - 1].bits);
      }
    for (int64_t lane = 0; lane < kLanes; ++lane)
      ceilings[lane] = std::nextafter(ceilings[lane], std::numeric_limits<float>::infinity());
  }

 private:
  static constexpr int64_t kFew = 16;

  template <class Metric>
  void score(const Search& job, const float* transposed, int64_t begin, int64_t end) {
    const Floats infinity = Floats::all(std::numeric_limits<float>::infinity());
    float constants[kLanes] = {}, lengths[kLanes] = {};
    for (int64_t lane = 0; lane < job.Q; ++lane)
      constants[lane] = job.constants[lane], lengths[lane] = length_of(job, lane);
    for (int64_t g = 0; g < groups; ++g) {
      Floats minima[kParts];
      for (auto& each : minima) each = infinity;
      for (int64_t i = 0; i < size; ++i) {
        const int64_t n = begin + (end - begin) * (g * size + i) / (groups * size);
        if (job.keep != nullptr && !job.keep[n]) continue;
        const Code* code = row_of<Code>(job, n);
        const Floats norm = Floats::all(Metric::kNorms ? job.norms[n] : 0);
        Floats sums[kParts];
        for (int64_t p = 0; p < kParts; ++p)
          sums[p] = Floats::all(job.scale[0]) * Floats::load(transposed + code[0] * kLanes + p * kWidth);
        for (int64_t m = 1; m < job.M; ++m) {
          const float* entries = transposed + (job.bases[m] + code[m]) * kLanes;
          for (int64_t p = 0; p < kParts; ++p)
            sums[p] = sums[p] + Floats::all(job.scale[m]) * Floats::load(entries + p * kWidth);
        }
        for (int64_t p = 0; p < kParts; ++p)  // NaN is ignored
          minima[p] =
              min(Metric::cost(sums[p], norm, Floats::load(constants + p * kWidth), Floats::load(lengths + p * kWidth)),
                  minima[p]);
      }
      for (int64_t p = 0; p < kParts; ++p) minima[p].store(least.data + g * kLanes + p * kWidth);
    }
  }

  // The k smallest in order, for sixteen lanes at a time, by insertion.
  void select_few(int64_t k, float* ceilings) const {
    for (int64_t p = 0; p < kParts; ++p) {
      Floats sorted[kFew];
      for (auto& each : sorted) each = Floats::all(std::numeric_limits<float>::infinity());
      for (int64_t g = 0; g < groups; ++g) {
        Floats rest = Floats::load(least.data + g * kLanes + p * kWidth);
        for (int64_t i = 0; i < k; ++i) {
          const Floats smaller = min(sorted[i], rest);
          rest = max(sorted[i], rest);
          sorted[i] = smaller;
        }
      }
      sorted[k - 1].store(ceilings + p * kWidth);
    }
  }

  int64_t groups, size;  // codes of each group
  Buffer<float> least;   // [groups, kLanes]
  Buffer<Key> one;       // [groups]
};

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
