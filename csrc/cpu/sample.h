// A few of the codes, from which a batch guesses how good its results will be. Included by files that are compiled once
// per instruction set; see simd.h.
#pragma once

#include <cmath>
#include <cstring>

#include "cpu/scan.h"

namespace drq {
namespace DRQ_ISA {
namespace {

// Every kApart-th of the codes begin..end that the filter keeps, one after the other. A prime, so that data that
// repeats itself is sampled evenly.
template <class Code>
struct Sample {
  static constexpr int64_t kApart = 17;

  // Whether a guess saves more than it costs: of many codes, many are among the k best so far for a while.
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
    job.N = count, job.stride = all.M, job.k = rank(all.k);
  }

  // The search of some queries in the sample.
  Search of(const Search& queries) const {
    Search some = job;
    some.table = queries.table, some.constants = queries.constants, some.lengths = queries.lengths;
    some.Q = queries.Q;
    return some;
  }

  // Which of the best of the sample is, for all but one in some ten thousand samples, not among the k best of all.
  static int64_t rank(int64_t k) {
    const double expected = static_cast<double>(k) / kApart;
    return std::min(k, static_cast<int64_t>(expected + 4.4 * std::sqrt(expected) + 2));
  }

  Search job;
  Bins bins;

 private:
  Buffer<Code> codes;
  Buffer<float> norms;
  Buffer<uint8_t> bin_of;
};

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
