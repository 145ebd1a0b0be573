// One query: sums the first few levels in floats, after which most codes can be dropped. For codes that neither one.h
// nor bits.h can take. Included by files that are compiled once per instruction set;
// see simd.h.
#pragma once

#include "cpu/search/bound.h"
#include "cpu/search/count.h"
#include "cpu/search/reservoir.h"

namespace drq {
namespace DRQ_ISA {
namespace {

constexpr int64_t kFewest = 4096;  // codes from which choosing the number of levels pays

// With A, B and the limit of bound.h, a code can only be among the k best if
//   sum of A_m[b_m] over its first levels + B(norm) < limit - sum of the minima of A_m over the other levels.
template <class Code>
struct Few {
  static constexpr int kMost = 4;

  explicit Few(const Search& job) : job(job), terms(kMost * job.K) {}

  // For another query.
  void start(int64_t query, Reservoir& reservoir) { q = query, best = &reservoir, built = false; }

  // Returns `end` if it scanned begin..end, else `begin`. The k-th best cost must be known.
  int64_t run(int64_t begin, int64_t end) {
    if (end - begin < kFewest || job.M <= 2 || !is_norm_only(job.metric)) return begin;
    best->shrink();
    if (!best->full || !build()) return begin;
    const int levels = choose(begin, end);
    if (levels == 2) job.norms == nullptr ? scan<2, false>(begin, end) : scan<2, true>(begin, end);
    if (levels == 3) job.norms == nullptr ? scan<3, false>(begin, end) : scan<3, true>(begin, end);
    if (levels == 4) job.norms == nullptr ? scan<4, false>(begin, end) : scan<4, true>(begin, end);
    if (levels == 0) return begin;
    DRQ_COUNT(few, end - begin);
    return end;
  }

 private:
  bool build() {
    if (built) return usable;
    built = true, usable = bound.start(job, q);
    const float sign = sign_of(job.metric);
    for (int64_t m = 0; m < std::min<int64_t>(kMost, job.M); ++m) {
      const float* entries = job.entries(q, m);
      for (int64_t k = 0; k < job.K; ++k) terms.data[m * job.K + k] = sign * (job.scale[m] * entries[k]);
    }
    return usable;
  }

  // What the sum over so many levels must be below, for the k-th best cost so far; rounded up.
  float limit(int levels) const {
    double limit = bound.limit(best->tau);
    for (int64_t m = levels; m < job.M; ++m) limit -= bound.minima[m];
    return static_cast<float>(limit) * (1 + (limit > 0 ? 1e-6f : -1e-6f));
  }

  // Captures by value, so that the compiler knows that nothing changes during a scan.
  template <bool kNorms>
  auto summing() const {
    return [table = terms.data, norms = job.norms, K = job.K](const Code* code, int64_t n, int levels) {
      float sum = table[code[0]];
      for (int m = 1; m < levels; ++m) sum += table[m * K + code[m]];
      return kNorms ? sum + norms[n] : sum;
    };
  }

  // The least number of levels after which hardly any code is left, by a sample of the codes; 0 if there is none.
  int choose(int64_t begin, int64_t end) const {
    constexpr int64_t kTried = 512;
    for (int levels = 2; levels <= kMost && levels < job.M; ++levels) {
      const float below = limit(levels);
      int64_t left = 0;
      for (int64_t i = 0; i < kTried; ++i) {
        const int64_t n = begin + (end - begin) * i / kTried;
        const Code* code = row_of<Code>(job, n);
        left += (job.norms == nullptr ? summing<false>()(code, n, levels) : summing<true>()(code, n, levels)) < below;
      }
      if (left <= kTried / 100) return levels;
    }
    return 0;
  }

  template <int kLevels, bool kNorms>
  void scan(int64_t begin, int64_t end) {
    constexpr int64_t kGroup = 4;
    const auto sum_of = summing<kNorms>();
    const int64_t stride = job.stride;
    const Code* code = row_of<Code>(job, begin);
    float below = limit(kLevels);
    int64_t n = begin;
    for (; n + kGroup <= end; n += kGroup) {
      float least = std::numeric_limits<float>::infinity();
      for (int64_t i = 0; i < kGroup; ++i, code += stride) {
        const float sum = sum_of(code, n + i, kLevels);
        least = sum < least ? sum : least;
      }
      if (__builtin_expect(least < below, 0)) below = look_closely<kLevels, kNorms>(n, n + kGroup, below);
    }
    look_closely<kLevels, kNorms>(n, end, below);
  }

  // Scores the codes that are left; returns the new limit.
  template <int kLevels, bool kNorms>
  __attribute__((noinline)) float look_closely(int64_t first, int64_t last, float below) {
    const auto sum_of = summing<kNorms>();
    const float before = best->tau;
    for (int64_t n = first; n < last; ++n) {
      if (!(sum_of(row_of<Code>(job, n), n, kLevels) < below) || (job.keep != nullptr && !job.keep[n])) continue;
      const float cost = cost_of<Code>(job, q, n);
      if (best->wants(cost)) best->add(cost, n);
    }
    return best->tau == before ? below : limit(kLevels);
  }

  const Search& job;
  int64_t q = 0;
  Reservoir* best = nullptr;
  Buffer<float> terms;  // [kMost, K]  A
  Bound bound;
  bool built = false, usable = false;
};

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
