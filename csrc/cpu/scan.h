// What the scans of csrc/cpu share, for one instruction set; see simd.h.
#pragma once

#include <cmath>

#include "cpu/bytes.h"
#include "cpu/part.h"
#include "cpu/topk.h"
#include "search.h"

namespace drq {
namespace DRQ_ISA {
namespace {

template <class Code>
const Code* row_of(const Search& job, int64_t n) {
  return static_cast<const Code*>(job.codes) + n * job.stride;
}

// The score turned so that less is better.
template <int kMetric>
float cost_of(const Search& job, int64_t q, int64_t n, float sum) {
  const float norm = kMetric == kIp ? 0 : job.norms[n], length = kMetric == kCosine ? job.lengths[q] : 0;
  const float score = score_of(kMetric, sum, norm, job.constants[q], length);
  return kMetric == kL2 ? score : -score;
}

template <class Code>
float cost_of(const Search& job, int64_t q, int64_t n) {
  const Code* code = row_of<Code>(job, n);
  const float* table = job.table + q * job.K;
  float sum = job.scale[0] * table[code[0]];
  for (int64_t m = 1; m < job.M; ++m) sum += job.scale[m] * table[code[m]];
  if (job.metric == kL2) return cost_of<kL2>(job, q, n, sum);
  return job.metric == kIp ? cost_of<kIp>(job, q, n, sum) : cost_of<kCosine>(job, q, n, sum);
}

constexpr double kLargest = 8e37;  // beyond it a sum of float32 may become infinite on its way

// How one query drops codes by small integers (docs/math.md, section 5). A code can only be among the k best if
//   sum_m A_m[b_m] + B(norm) < limit,    A_m = -2 scale[m] T (l2), -scale[m] T (ip, cosine),
//   B = norm (l2), 0 (ip), c sqrt(norm) (cosine, c = the k-th best score so far * ||q||).
// Each term, less its minimum, is rounded down to whole steps, so that the sum of steps below `bound` is a certificate.
struct Filter {
  double base = 0;      // sum of the minima
  double slack = 0;     // what float32 may add to or take from a score
  float inverse = 0;    // 1 / step; 0 where nothing can be said
  double factor = 0;    // c
  double norm_low = 0;  // the minimum of B

  // Sets everything for the k-th best cost tau, given the extremes of T and of the norms; false where an input is not
  // finite, so that nothing may be dropped.
  bool set(const Search& job, int64_t q, float tau, float table_low, float table_high, float norms_low,
           float norms_high) {
    const float sign = job.metric == kL2 ? -2 : -1;
    double magnitudes = std::fabs(job.constants[q]);
    base = 0;
    for (int64_t m = 0; m < job.M; ++m) {
      base += lowest(sign, job.scale[m], table_low, table_high);
      magnitudes += std::fabs(2.0 * job.scale[m]) * std::fmax(std::fabs(table_low), std::fabs(table_high));
    }
    factor = job.metric == kCosine ? -static_cast<double>(tau) * job.lengths[q] : 1;
    if (job.metric != kIp) {
      norm_low =
          job.metric == kL2 ? norms_low : factor * std::sqrt(static_cast<double>(factor >= 0 ? norms_low : norms_high));
      base += norm_low;
      magnitudes += std::fabs(job.metric == kL2 ? norms_high : factor * std::sqrt(static_cast<double>(norms_high)));
    }
    // Where the product of lengths is 0 or infinite, the score is 0, whatever the sum.
    const double shortest = job.metric != kCosine ? 1 : job.lengths[q] * std::sqrt(static_cast<double>(norms_low));
    const double longest = job.metric != kCosine ? 0 : job.lengths[q] * std::sqrt(static_cast<double>(norms_high));
    if (!(shortest > 1e-37 && longest < 1e38)) return false;
    const double limit = limit_of(job, q, tau);
    magnitudes += std::fabs(limit);
    slack = magnitudes * (4 * (job.M + 4)) / (1 << 24) + 3e-45 * longest;
    const double span = limit + slack - base;
    if (!std::isfinite(span) || !(magnitudes < kLargest)) return false;
    inverse = span > 0 ? static_cast<float>(253 / span) : 0;
    if (!std::isfinite(inverse)) inverse = 0;
    return true;
  }

  // Sums of steps from here on are dropped; 255, to which sums saturate, always is. Steps carry a relative error of a
  // few units of float32, hence the 0.01.
  uint8_t bound(const Search& job, int64_t q, float tau) const {
    const double steps = (limit_of(job, q, tau) + slack - base) * inverse + 0.01;
    if (inverse == 0) return base < limit_of(job, q, tau) + slack ? 255 : 0;
    return steps < 0 ? 0 : static_cast<uint8_t>(std::fmin(steps, 254) + 1);
  }

  static double limit_of(const Search& job, int64_t q, float tau) {
    if (job.metric == kCosine) return job.constants[q];
    return static_cast<double>(tau) + (job.metric == kL2 ? -job.constants[q] : job.constants[q]);
  }

  // The least sign * fl(scale T): rounding keeps the order of numbers.
  static float lowest(float sign, float scale, float table_low, float table_high) {
    return sign * (scale * (sign * scale >= 0 ? table_low : table_high));
  }
};

// Codes that are scored by floats before integers are of use, and how the stretches between new tables grow.
inline int64_t seeds_for(int64_t k) { return std::max<int64_t>(512, 16 * k); }
constexpr int64_t kGrowth = 8;

// Where the seeds end: far enough from `begin` for that many codes that the filter keeps.
inline int64_t seeds_end(const Search& job, int64_t begin, int64_t end) {
  if (job.keep == nullptr) return std::min(end, begin + seeds_for(job.k));
  int64_t at = begin;  // fewer, since those that it does not keep are scored, too
  for (int64_t kept = 0; at < end && kept < std::max<int64_t>(128, 4 * job.k); ++at) kept += job.keep[at] != 0;
  return at;
}

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
