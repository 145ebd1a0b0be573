// One query by floats: every code is scored by the definition. For small collections, for k that is a large part of
// them, and for the first codes of a search. Included by files that are compiled once per instruction set; see simd.h.
#pragma once

#include "cpu/search/count.h"
#include "cpu/search/metric.h"
#include "cpu/search/reservoir.h"

namespace drq {
namespace DRQ_ISA {
namespace {

// sums[i] of `count` codes from row n on; terms [M, K] = fl(scale[m] * entries[k]); kM is M, or 0 for any.
template <class Code, int kM>
void sum_terms(const Search& job, int64_t n, int64_t count, const float* terms, float* sums) {
  const int64_t M = kM ? kM : job.M, K = job.K, stride = job.stride;
  const Code* code = row_of<Code>(job, n);
  for (int64_t i = 0; i < count; ++i, code += stride) {
    float sum = terms[code[0]];
    for (int64_t m = 1; m < M; ++m) sum += terms[m * K + code[m]];
    sums[i] = sum;
  }
}

// A block of codes at a time: table look-ups first, then sums to costs, then the few that are wanted.
template <class Code, class Metric, int kM>
void scan_floats(const Search& job, int64_t q, int64_t begin, int64_t end, const float* terms, Reservoir& best) {
  constexpr int64_t kBlock = 64;
  float sums[kBlock] = {}, norms[kBlock] = {}, costs[kBlock];
  const Floats constant = Floats::all(job.constants[q]), length = Floats::all(length_of(job, q));
  for (int64_t n = begin; n < end; n += kBlock) {
    const int64_t count = std::min(kBlock, end - n);
    sum_terms<Code, kM>(job, n, count, terms, sums);
    if (Metric::kNorms) std::memcpy(norms, job.norms + n, count * sizeof(float));
    const Floats tau = Floats::all(best.full ? best.tau : std::numeric_limits<float>::infinity());
    uint64_t wanted = 0;
    for (int64_t i = 0; i < kBlock; i += kWidth) {
      const Floats cost = Metric::cost(Floats::load(sums + i), Floats::load(norms + i), constant, length);
      cost.store(costs + i);
      wanted |= static_cast<uint64_t>(not_above(cost, tau)) << i;
    }
    if (job.keep == nullptr && best.add_all(costs, n, count)) continue;
    if (count < kBlock) wanted &= (uint64_t{1} << count) - 1;
    for (; wanted; wanted &= wanted - 1) {
      const int64_t i = __builtin_ctzll(wanted);
      if ((job.keep == nullptr || job.keep[n + i]) && best.wants(costs[i])) best.add(costs[i], n + i);
    }
  }
}

// Scans begin..end; terms [M, K] is scratch memory.
template <class Code>
void scan_floats(const Search& job, int64_t q, int64_t begin, int64_t end, float* terms, Reservoir& best) {
  if (begin == end) return;
  DRQ_COUNT(floats, end - begin);
  for (int64_t m = 0; m < job.M; ++m) {
    const float* entries = job.entries(q, m);
    for (int64_t k = 0; k < job.K; ++k) terms[m * job.K + k] = job.scale[m] * entries[k];
  }
  with_metric(job.metric, [&](auto metric) {
    using Metric = decltype(metric);
    if (job.M == 4) return scan_floats<Code, Metric, 4>(job, q, begin, end, terms, best);
    if (job.M == 8) return scan_floats<Code, Metric, 8>(job, q, begin, end, terms, best);
    scan_floats<Code, Metric, 0>(job, q, begin, end, terms, best);
  });
}

// How many codes are scored by floats before a bound is of use, and how the stretches between new tables grow.
inline int64_t seeds_for(int64_t k) { return std::max<int64_t>(512, 16 * k); }
constexpr int64_t kGrowth = 8;

// Where the seeds end: far enough from `begin` for that many codes that the filter keeps.
inline int64_t seeds_end(const Search& job, int64_t begin, int64_t end) {
  if (job.keep == nullptr) return std::min(end, begin + seeds_for(job.k));
  int64_t at = begin;  // fewer, because those that the filter drops are scored, too
  for (int64_t kept = 0; at < end && kept < std::max<int64_t>(128, 4 * job.k); ++at) kept += job.keep[at] != 0;
  return at;
}

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
