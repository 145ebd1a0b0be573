// The metrics on the CPU: everything that a scan needs to know about one. A new metric is added here, and to Metric,
// score_of() and turned() in search.h. Included by files that are compiled once per instruction set; see simd.h.
//
// A scan minimises costs: the score, negated where larger scores are better. With
//   A_m[k] = kSign * fl(scale[m] * T[k]),   B(norm) = factor(tau) * norm, or factor(tau) * sqrt(norm) with kRoot,
// a code costs less than tau if and only if sum_m A_m[b_m] + B(norm) < limit(tau), but for rounding; see bound.h. That
// needs norms that are bounded(): their least is a number for which B is.
//
// Every metric has these constants and functions:
//   kNorms     norms enter the cost; kRoot: by their square root
//   kNormOnly  B(norm) is the norm itself, or 0 without norms: the factor depends neither on tau nor on the query
//   kCentred   the table is that of x = q - offset; otherwise x = q
//   kLength    ||q|| enters the cost, as a factor of a denominator
//   constant   the constant of a query, from x and the offset, which may be null
#pragma once

#include <cmath>

#include "cpu/simd.h"
#include "search.h"

namespace drq {
namespace DRQ_ISA {
namespace {

// <x, offset>, or 0 without an offset.
inline float dot_or_zero(const float* x, const float* offset, int64_t D) {
  return offset != nullptr ? dot(x, offset, D) : 0;
}

struct L2 {
  static constexpr float kSign = -2;
  static constexpr bool kNorms = true, kRoot = false, kNormOnly = true, kCentred = true, kLength = false;
  static float constant(const float* x, const float*, int64_t D) { return dot(x, x, D); }
  static Floats cost(Floats sum, Floats norm, Floats constant, Floats) {
    return (norm - Floats::all(2) * sum) + constant;
  }
  static double limit(float tau, float constant) { return static_cast<double>(tau) - constant; }
  static double factor(float, float) { return 1; }
  static bool bounded(float least_norm) { return least_norm == least_norm; }
};

struct Ip {
  static constexpr float kSign = -1;
  static constexpr bool kNorms = false, kRoot = false, kNormOnly = true, kCentred = false, kLength = false;
  static float constant(const float* x, const float* offset, int64_t D) { return dot_or_zero(x, offset, D); }
  static Floats cost(Floats sum, Floats, Floats constant, Floats) { return Floats::all(0) - (sum + constant); }
  static double limit(float tau, float constant) { return static_cast<double>(tau) + constant; }
  static double factor(float, float) { return 0; }
  static bool bounded(float) { return true; }
};

struct Cosine {
  static constexpr float kSign = -1;
  static constexpr bool kNorms = true, kRoot = true, kNormOnly = false, kCentred = false, kLength = true;
  static float constant(const float* x, const float* offset, int64_t D) { return dot_or_zero(x, offset, D); }
  static Floats cost(Floats sum, Floats norm, Floats constant, Floats length) {
    return Floats::all(0) - ratio_or_zero(sum + constant, length * root(norm));
  }
  static double limit(float, float constant) { return constant; }
  static double factor(float tau, float length) { return -static_cast<double>(tau) * length; }
  static bool bounded(float least_norm) { return least_norm > 0; }  // else the score is 0, whatever the sum
};

// A type as a value, for functions that are called with one of several types.
template <class T>
struct Type {
  using type = T;
};

// use(L2{}), use(Ip{}) or use(Cosine{}).
template <class Use>
inline auto with_metric(int metric, const Use& use) {
  if (metric == kL2) return use(L2{});
  if (metric == kIp) return use(Ip{});
  return use(Cosine{});
}

inline float sign_of(int metric) {
  return with_metric(metric, [](auto m) { return m.kSign; });
}

inline bool has_root(int metric) {
  return with_metric(metric, [](auto m) { return m.kRoot; });
}

inline bool is_norm_only(int metric) {
  return with_metric(metric, [](auto m) { return m.kNormOnly; });
}

inline bool is_centred(int metric) {
  return with_metric(metric, [](auto m) { return m.kCentred; });
}

inline bool has_length(int metric) {
  return with_metric(metric, [](auto m) { return m.kLength; });
}

inline float constant_of(int metric, const float* x, const float* offset, int64_t D) {
  return with_metric(metric, [=](auto m) { return m.constant(x, offset, D); });
}

// The length of a query where the metric has one.
inline float length_of(const Search& job, int64_t q) { return has_length(job.metric) ? job.lengths[q] : 0; }

// B(norm) / factor.
inline float norm_term(int metric, float norm) { return has_root(metric) ? std::sqrt(norm) : norm; }

template <class Code>
const Code* row_of(const Search& job, int64_t n) {
  return static_cast<const Code*>(job.codes) + n * job.stride;
}

// The cost of one code by the definition.
template <class Code>
float cost_of(const Search& job, int64_t q, int64_t n) {
  const Code* code = row_of<Code>(job, n);
  float sum = job.scale[0] * job.entries(q, 0)[code[0]];
  for (int64_t m = 1; m < job.M; ++m) sum += job.scale[m] * job.entries(q, m)[code[m]];
  const float norm = job.norms == nullptr ? 0 : job.norms[n];
  return turned(job.metric, score_of(job.metric, sum, norm, job.constants[q], length_of(job, q)));
}

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
