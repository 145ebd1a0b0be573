// Assigns the norms of codes to 256 bins. Compiled once per instruction set; see simd.h.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/search/part.h"
#include "cpu/search/reservoir.h"
#include "cpu/simd.h"

namespace drq {
namespace DRQ_ISA {

NormRange norm_range(const Search& job, int64_t begin, int64_t end) {
  Floats least = Floats::all(job.norms[begin]), most = least;
  unsigned ordered = 0xffff;
  const auto extend = [&](Floats some) {
    least = min(some, least), most = max(some, most);
    ordered &= equal(some, some);
  };
  int64_t n = begin;
  for (; n + kWidth <= end; n += kWidth) extend(Floats::load(job.norms + n));
  for (; n < end; ++n) extend(Floats::all(job.norms[n]));
  const float low = ordered != 0xffff ? std::numeric_limits<float>::quiet_NaN() : smallest(least);
  return {low, -smallest(Floats::all(0) - most)};
}

void place_bins(const Search& job, NormRange range, Bins& out) {
  // 192 equal bins for all but the outermost norms, and 32 for those on either side, so that an outlier does not take
  // the resolution from all others.
  constexpr int64_t kSample = 1024, kOutermost = 4;
  Key sample[kSample];
  const int64_t sampled = std::min(job.N, kSample);
  for (int64_t i = 0; i < sampled; ++i) sample[i] = Key{key_of(job.norms[i * job.N / sampled], 0)};
  std::sort(sample, sample + sampled);
  const float edges[] = {range.low, drq::cost_of(sample[std::min(kOutermost, sampled - 1)].bits),
                         drq::cost_of(sample[std::max<int64_t>(sampled - 1 - kOutermost, 0)].bits), range.high};
  std::copy(edges, edges + 4, out.edges);
  const int shares[] = {32, 192, 32};
  double starts[4] = {};
  out.divisible = true;
  for (int i = 0; i < 3; ++i) {
    const float width = edges[i + 1] - edges[i];
    out.per_unit[i] = width > 0 ? shares[i] / width : 0;
    starts[i + 1] = starts[i] + (out.per_unit[i] > 0 ? shares[i] : 0);
    out.divisible &= width == 0 || (out.per_unit[i] > 0 && std::isfinite(out.per_unit[i]));
  }
  if (!out.divisible) {  // float32 cannot hold the widths: one bin
    std::fill(out.low, out.low + 256, range.low);
    std::fill(out.high, out.high + 256, range.high);
    return;
  }
  // The norm at a fractional bin number. fill_bins() computes these numbers with an error of less than 1/1000, plus the
  // rounding of float32.
  const auto norm_at = [&](double place, double rounding) {
    int i = 0;
    while (i < 2 && (place >= starts[i + 1] || out.per_unit[i] == 0)) ++i;
    const double norm =
        out.per_unit[i] > 0 ? edges[i] + (place - starts[i]) / out.per_unit[i] : edges[i + (rounding > 0)];
    const double there = norm + rounding * (std::fabs(edges[i]) + std::fabs(edges[i + 1]));
    return static_cast<float>(std::fmin(std::fmax(there, range.low), range.high));
  };
  for (int i = 0; i < 256; ++i) {
    out.low[i] = i == 0 ? range.low : norm_at(i - 1e-3, -1e-6);
    out.high[i] = i == 255 ? range.high : norm_at(i + 1 + 1e-3, 1e-6);
  }
}

void fill_bins(const Search& job, int64_t begin, int64_t end, const Bins& out) {
  if (!out.divisible) {
    std::fill(out.bins + begin, out.bins + end, 0);
    return;
  }
  Floats from[3], to[3], per_unit[3];
  for (int i = 0; i < 3; ++i) {
    from[i] = Floats::all(out.edges[i]), to[i] = Floats::all(out.edges[i + 1]);
    per_unit[i] = Floats::all(out.per_unit[i]);
  }
  const auto places = [&](Floats norm) {
    Floats place = Floats::all(0);
    for (int i = 0; i < 3; ++i) place = place + (min(max(norm, from[i]), to[i]) - from[i]) * per_unit[i];
    return place;
  };
  int64_t n = begin;
  for (; n + kWidth <= end; n += kWidth) places(Floats::load(job.norms + n)).store_bytes(out.bins + n);
  for (; n < end; ++n) {
    uint8_t copies[kWidth];
    places(Floats::all(job.norms[n])).store_bytes(copies);
    out.bins[n] = copies[0];
  }
}

}  // namespace DRQ_ISA
}  // namespace drq
