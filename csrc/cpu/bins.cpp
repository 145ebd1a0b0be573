// The norms of codes by 256 bins. Compiled once per instruction set; see simd.h.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/part.h"
#include "cpu/simd.h"
#include "cpu/topk.h"

namespace drq {
namespace DRQ_ISA {

void fill_bins(const Search& job, Bins& out) {
  const float* norms = job.norms;
  const int64_t count = job.N, whole = count / kWidth * kWidth;
  Floats least = Floats::all(norms[0]), most = least;
  unsigned ordered = 0xffff;  // not NaN, whose cosine is 0, whatever its sum
  const auto extend = [&](Floats some) {
    least = min(some, least), most = max(some, most);
    ordered &= equal(some, some);
  };
  for (int64_t n = 0; n < whole; n += kWidth) extend(Floats::load(norms + n));
  for (int64_t n = whole; n < count; ++n) extend(Floats::all(norms[n]));
  const float lowest = ordered != 0xffff ? std::numeric_limits<float>::quiet_NaN() : smallest(least);
  const float highest = -smallest(Floats::all(0) - most);
  // Equal bins for all but the outermost, and some for those on either side, so that one outlier does not take the
  // resolution from all others.
  constexpr int64_t kSample = 1024, kOutermost = 4;
  Key sample[kSample];
  const int64_t sampled = std::min(count, kSample);
  for (int64_t i = 0; i < sampled; ++i) sample[i] = Key{key_of(norms[i * count / sampled], 0)};
  std::sort(sample, sample + sampled);
  const float edges[] = {lowest, drq::cost_of(sample[std::min(kOutermost, sampled - 1)].bits),
                         drq::cost_of(sample[std::max<int64_t>(sampled - 1 - kOutermost, 0)].bits), highest};
  const int shares[] = {32, 192, 32};
  float per_unit[3];  // bins
  double starts[4] = {};
  bool divisible = true;
  for (int i = 0; i < 3; ++i) {
    const float width = edges[i + 1] - edges[i];
    per_unit[i] = width > 0 ? shares[i] / width : 0;
    starts[i + 1] = starts[i] + (per_unit[i] > 0 ? shares[i] : 0);
    divisible &= width == 0 || (per_unit[i] > 0 && std::isfinite(per_unit[i]));
  }
  if (!divisible) {  // beyond what float32 can hold: one bin
    std::fill(out.bins, out.bins + count, 0);
    std::fill(out.low, out.low + 256, lowest);
    std::fill(out.high, out.high + 256, highest);
    return;
  }
  const auto places = [&](Floats norm) {
    Floats place = Floats::all(0);
    for (int i = 0; i < 3; ++i) {
      const Floats from = Floats::all(edges[i]), to = Floats::all(edges[i + 1]);
      place = place + (min(max(norm, from), to) - from) * Floats::all(per_unit[i]);
    }
    return place;
  };
  for (int64_t n = 0; n < whole; n += kWidth) places(Floats::load(norms + n)).store_bytes(out.bins + n);
  for (int64_t n = whole; n < count; ++n) {
    uint8_t copies[kWidth];
    places(Floats::all(norms[n])).store_bytes(copies);
    out.bins[n] = copies[0];
  }
  // The norm at a place. Places are off by less than a thousandth, and by what float32 cannot tell apart.
  const auto norm_at = [&](double place, double rounding) {
    int i = 0;
    while (i < 2 && (place >= starts[i + 1] || per_unit[i] == 0)) ++i;
    const double norm = per_unit[i] > 0 ? edges[i] + (place - starts[i]) / per_unit[i] : edges[i + (rounding > 0)];
    const double there = norm + rounding * (std::fabs(edges[i]) + std::fabs(edges[i + 1]));
    return static_cast<float>(std::fmin(std::fmax(there, lowest), highest));
  };
  for (int i = 0; i < 256; ++i) {
    out.low[i] = i == 0 ? lowest : norm_at(i - 1e-3, -1e-6);
    out.high[i] = i == 255 ? highest : norm_at(i + 1 + 1e-3, 1e-6);
  }
}

}  // namespace DRQ_ISA
}  // namespace drq
