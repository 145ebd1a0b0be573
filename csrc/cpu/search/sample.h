// A sample of the codes, from which a batch guesses its thresholds. Included by files that are compiled once per
// instruction set; see simd.h.
#pragma once

#include <cmath>

#include "cpu/search/batch.h"

namespace drq {
namespace DRQ_ISA {
namespace {

// A copy of every kApart-th of the codes begin..end, without those that the filter drops. A prime, so that periodic
// data is sampled evenly.
template <class Code>
struct Sample {
  static constexpr int64_t kApart = 17;

  // Whether a guess saves more than it costs: for large k, many codes are among the k best so far for a while.
  static bool pays(const Search& job, int64_t count) { return job.k >= 24 && count >= 512 * job.k; }

  Sample(const Search& all, const Bins* all_bins, int64_t begin, int64_t end)
      : job(all),
        codes((end - begin) / kApart * all.M + all.M),
        norms(all.norms == nullptr ? 1 : (end - begin) / kApart + 1),
        bin_of(all_bins == nullptr ? 1 : (end - begin) / kApart + 1) {
    int64_t count = 0;
    for (int64_t n = begin; n < end; n += kApart) {
      if (all.keep != nullptr && !all.keep[n]) continue;
      const Code* row = row_of<Code>(all, n);
      for (int64_t m = 0; m < all.M; ++m) codes.data[count * all.M + m] = row[m];
      if (all.norms != nullptr) norms.data[count] = all.norms[n];
      if (all_bins != nullptr) bin_of.data[count] = all_bins->bins[n];
      ++count;
    }
    if (all_bins != nullptr) bins = *all_bins, bins.bins = bin_of.data;
    job.codes = codes.data, job.norms = all.norms == nullptr ? nullptr : norms.data, job.keep = nullptr;
    job.N = count, job.stride = all.M, job.k = rank(all.k), job.ceilings = nullptr;
  }

  // The search for some queries in the sample.
  Search of(const Search& queries) const {
    Search some = job;
    some.table = queries.table, some.constants = queries.constants, some.lengths = queries.lengths;
    some.Q = queries.Q;
    return some;
  }

  // The r for which the r-th best of the sample is not among the k best of all, except in one of some ten thousand
  // samples.
  static int64_t rank(int64_t k) {
    const double expected = static_cast<double>(k) / kApart;
    return std::min(k, static_cast<int64_t>(expected + 4.4 * std::sqrt(expected) + 2));
  }

  Search job;  // its k is the rank
  Bins bins;

 private:
  Buffer<Code> codes;
  Buffer<float> norms;
  Buffer<uint8_t> bin_of;
};

// Guesses what the k-th best costs of a batch of queries will stay below.
template <class Code, int kLanes>
struct Guess {
  Guess(const Sample<Code>& sample, bool binned)
      : sample(sample),
        found(sample.job.k, sample.job.N, kLanes),
        batch(sample.job, binned ? &sample.bins : nullptr, sample.job.N) {}

  const float* thresholds(const Search& queries) {
    batch.run(sample.of(queries), 0, sample.job.N, found.best, nullptr);
    const float none = std::numeric_limits<float>::infinity();
    for (int64_t lane = 0; lane < queries.Q; ++lane) {
      Reservoir& best = found.best[lane];
      threshold[lane] = best.complete() && best.full ? std::nextafter(best.tau, none) : none;
    }
    return threshold;
  }

  const Sample<Code>& sample;
  Reservoirs found;
  Batch<Code, kLanes> batch;
  float threshold[kLanes];
};

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
