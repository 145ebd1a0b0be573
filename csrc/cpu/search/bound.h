// The certificate by which every scan drops codes (docs/math.md, section 5). Included by files that are compiled once
// per instruction set; see simd.h.
#pragma once

#include <cmath>

#include "cpu/search/metric.h"

namespace drq {
namespace DRQ_ISA {
namespace {

// Of one query. A code may be dropped if a lower bound of sum_m A_m[b_m] + B(norm) is not below limit(tau), tau being
// the k-th best cost so far; A, B and the exact limit are those of metric.h.
//
// Proof. A_m[k] is exact: the score adds the same float fl(scale[m] T[k]), and a sign of -1 or -2 rounds nothing. So a
// computed cost differs from the exact one by the rounding of at most M + 3 operations (M - 1 additions of levels, the
// norm, the constant; for cosine a root, a product and a quotient), each of them by at most 2^-24 of its result. Let
// S = |constant| + sum_m max |A_m| and L = |exact limit|. A code that costs less than tau has B < L + S, up to
// rounding. If B > -(L + S), too, then no result of an operation exceeds 2 (L + S), and the computed inequality holds
// with a slack of 2 (M + 3) 2^-24 (L + S). If B is less, the exact inequality holds with room for any rounding, because
// the sum of the other terms is at most S. A scan may itself add up to M + 1 floats of these magnitudes, which doubles
// the slack; the one used here is twice that. Quotients that underflow are off by up to 2^-149 * ||q|| sqrt(norm),
// where the root is below 2e19.
//
// Below kLargest no sum becomes infinite. A cosine whose denominator is 0, infinite or not a number is 0, whatever its
// sum: start() refuses lengths for which a positive norm could give 0 or infinity, and scans keep codes whose norm is
// not positive.
struct Bound {
  // Sets everything that does not depend on tau; false if no code may be dropped.
  bool start(const Search& search, int64_t query) {
    job = &search, q = query, base = 0, of_table = 0;
    const float sign = sign_of(search.metric);
    for (int64_t m = 0; m < search.M; ++m) {
      float &low = lows[m], &high = highs[m];
      if (m > 0 && search.bases[m] == search.bases[m - 1])
        low = lows[m - 1], high = highs[m - 1];
      else if (!extremes(search.entries(q, m), search.K, low, high))
        return false;
      const float scale = search.scale[m], largest = std::fmax(std::fabs(low), std::fabs(high));
      minima[m] = sign * (scale * (sign * scale >= 0 ? low : high));  // rounding keeps the order of numbers
      base += minima[m];
      of_table += std::fabs(2.0 * scale) * largest;
    }
    const float length = length_of(search, q);
    return set_constant() && (!has_length(search.metric) || (length > 1e-15f && length < 1e15f));
  }

  // For another constant of the query, which the job has now; false if no code may be dropped.
  bool set_constant() {
    magnitude = of_table + std::fabs(job->constants[q]);
    return magnitude < kLargest;
  }

  double limit(float tau) const {
    const auto exact = with_metric(job->metric, [&](auto m) { return m.limit(tau, job->constants[q]); });
    const double slack = (magnitude + std::fabs(exact)) * (8.0 * static_cast<double>(job->M + 4) / (1 << 24));
    return exact + slack + 6e-26 * length_of(*job, q);
  }

  // Of B.
  double factor(float tau) const {
    return with_metric(job->metric, [&](auto m) { return m.factor(tau, length_of(*job, q)); });
  }

  const Search* job = nullptr;
  int64_t q = 0;
  float lows[kMaxLevels], highs[kMaxLevels];  // of the entries of level m
  float minima[kMaxLevels];                   // of A_m
  double base = 0;                            // the sum of the minima
  double of_table = 0;                        // S without the constant
  double magnitude = 0;                       // S

 private:
  static constexpr double kLargest = 8e37;
};

// Terms less their minimum, rounded down to whole steps: if the steps of some terms add up to more than at(limit), the
// terms add up to more than the limit. A float computes the steps of a term with a relative error of a few 2^-24, which
// is less than kError for up to 255 steps.
struct Steps {
  static constexpr double kError = 0.01;

  // Makes the limit a little less than `count` steps, so that `count` are too many; false if that is impossible.
  bool set(double new_base, double limit, int count) {
    base = new_base;
    inverse = static_cast<float>((count - 2 * kError) / (limit - base));
    return std::isfinite(limit - base) && limit > base && std::isfinite(256 * inverse);
  }
  double at(double limit) const { return (limit - base) * inverse + kError; }

  double base = 0;    // the sum of the minima
  float inverse = 0;  // 1 / step
};

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
