// One query by the first few levels, in floats: after them most codes are out. For codes that neither scan_one.h nor
// scan_bits.h can take, and for processors without AVX2.
#pragma once

#include "cpu/buffer.h"
#include "cpu/scan.h"

namespace drq {
namespace DRQ_ISA {
namespace {

constexpr int64_t kFewest = 4096;  // codes for which it pays to find out how many levels will do

// With A, B and the limit as in Filter, a code can only be among the k best if
//   sum of A_m[b_m] over its first levels + B(norm) < limit - sum of the minima of A_m over the others.
template <class Code>
struct Few {
  static constexpr int kMost = 4;

  explicit Few(const Search& job) : job(job), terms(kMost * job.K) {}

  // For another query.
  void start(int64_t query, Reservoir& reservoir) { q = query, best = &reservoir, built = false; }

  // Scans as many of the codes begin..end as it can, after the seeds, and returns where it stopped: at one of both.
  int64_t run(int64_t begin, int64_t end) {
    if (end - begin < kFewest || job.M <= 2 || job.metric == kCosine) return begin;
    best->shrink();
    if (!best->full || !build()) return begin;
    const int levels = choose(begin, end);
    if (levels == 2) job.norms == nullptr ? scan<2, false>(begin, end) : scan<2, true>(begin, end);
    if (levels == 3) job.norms == nullptr ? scan<3, false>(begin, end) : scan<3, true>(begin, end);
    if (levels == 4) job.norms == nullptr ? scan<4, false>(begin, end) : scan<4, true>(begin, end);
    return levels > 0 ? end : begin;
  }

 private:
  bool build() {
    if (built) return finite;
    const float *const entries = job.table + q * job.K, sign = job.metric == kL2 ? -2 : -1;
    float low = entries[0], high = low;
    finite = built = true;
    for (int64_t k = 0; k < job.K; ++k) {
      low = entries[k] < low ? entries[k] : low, high = entries[k] > high ? entries[k] : high;
      finite &= std::isfinite(entries[k]);
    }
    magnitude = std::fabs(job.constants[q]);
    for (int64_t m = 0; m < job.M; ++m) {
      minima[m] = Filter::lowest(sign, job.scale[m], low, high);
      magnitude += 2 * std::fabs(sign * job.scale[m]) * std::fmax(std::fabs(low), std::fabs(high));
      if (m >= kMost) continue;
      for (int64_t k = 0; k < job.K; ++k) terms.data[m * job.K + k] = sign * (job.scale[m] * entries[k]);
    }
    return finite = finite && magnitude < kLargest;
  }

  // What the sum over so many levels must be below, for the k-th best cost so far.
  float limit(int levels) const {
    double limit = Filter::limit_of(job, q, best->tau);
    limit += (magnitude + std::fabs(limit)) * (8 * (job.M + 4)) / (1 << 24);
    for (int64_t m = levels; m < job.M; ++m) limit -= minima[m];
    return static_cast<float>(limit) * (1 + (limit > 0 ? 1e-6f : -1e-6f));
  }

  // By value, so that the compiler knows that nothing of it changes during a scan.
  template <bool kNorms>
  auto summing() const {
    return [table = terms.data, norms = job.norms, K = job.K](const Code* code, int64_t n, int levels) {
      float sum = table[code[0]];
      for (int m = 1; m < levels; ++m) sum += table[m * K + code[m]];
      return kNorms ? sum + norms[n] : sum;
    };
  }

  // So many levels that hardly any code is left, 0 if there is no such number: by some of the codes.
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

  // Scores those codes that are left; returns the limit from then on.
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
  float minima[kMaxLevels] = {};
  double magnitude = 0;
  bool built = false, finite = false;
};

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
