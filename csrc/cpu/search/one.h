// One query against 64 codes at a time, with AVX-512 (VBMI) or NEON: a table of 256 bytes, in registers, serves all
// levels that share their codewords, and one instruction (six in plain NEON) weights the four levels of a dword and
// adds them up. See bits.h and few.h for other processors.
#pragma once

#include "cpu/search/bound.h"
#include "cpu/search/count.h"
#include "cpu/search/dwords.h"
#include "cpu/search/reservoir.h"

namespace drq {
namespace DRQ_ISA {
namespace {

#if defined(DRQ_DWORDS)

// How one query drops codes by bytes (docs/math.md, section 5). With B and the limit of bound.h, A_m = sign times the
// entries of level m, and R the largest of all max A_m - min A_m, a code can only be among the k best if
//   sum_m floor(127 scale[m] / max |scale|) floor(255 (A_m[b_m] - min A_m) / R) + unit B
//   <= unit (limit - base),   base = sum_m scale[m] min A_m,
// where `rounding` is added for weights below 0, which rounding down makes larger, and for the errors of float32. The
// tables stay as they are while the limit falls. With kShared, all levels have the same one.
template <int kStride, int kGroups, bool kShared = true>
struct One {
  static constexpr int kVectors = 64 / Dwords::kLanes;
  static constexpr int kTogether = kStride == 0 && kGroups % 4 == 0 ? 4 : 1;  // dwords that are loaded at a time

  explicit One(const Search& job) : job(job), stride(static_cast<int>(job.stride)) {}

  // Builds the table of a query; false if no code may be dropped.
  bool start(int64_t query, Reservoir& reservoir) {
    q = query, best = &reservoir, base = rounding = 0, less = 0, rejected = -1;
    return bound.start(job, q) && build();
  }

  // Sets the limit for the k-th best cost, which must be known, and the constant of the query; false if no code may be
  // dropped.
  bool aim() {
    rejected = -1;
    if (!bound.set_constant() || !((bound.magnitude + std::fabs(bound.limit(best->tau))) * unit < 1e37)) return false;
    tighten();
    return true;
  }

  // Scans begin..end, a multiple of 64 codes. Fetches the codes that are `ahead` rows further, which are next, unless
  // it is 0.
  void run(int64_t begin, int64_t end, int64_t ahead = 0) {
    with_metric(job.metric, [&](auto metric) {
      ahead ? scan<decltype(metric), true>(begin, end, ahead) : scan<decltype(metric), false>(begin, end, 0);
    });
  }

  // Scans the codes of 64 rows, from `first` on, whose bits are set in `wanted`.
  void run_some(int64_t first, uint64_t wanted) {
    with_metric(job.metric, [&](auto metric) {
      const Quarter a = tables[0][0], b = tables[0][1], c = tables[0][2], d = tables[0][3];
      Dwords sums[kVectors];
      if (sum_up<decltype(metric)>(first, a, b, c, d, most, sums)) look_closely(first, sums, wanted);
    });
  }

 private:
  // The levels of a dword that have one table: their weights, and 0 for the others.
  struct Levels {
    int64_t table;
    int32_t weights;
  };

  // The least of A_m; the sign is below 0.
  float low(int64_t m) const { return sign_of(job.metric) * bound.highs[m]; }

  bool build() {
    float largest = 0, range = 0;
    for (int64_t m = 0; m < job.M; ++m) {
      largest = std::fmax(largest, std::fabs(job.scale[m]));
      range = std::fmax(range, bound.highs[m] - bound.lows[m]);
    }
    range *= std::fabs(sign_of(job.metric));
    const float per_step = range > 0 ? 255 / range : 1, whole = largest > 0 ? 127 / largest : 1;
    unit = per_step * whole;
    if (!std::isfinite(whole) || !std::isfinite(unit) || !(unit > 0)) return false;
    int8_t weights[4 * kGroups] = {};
    for (int64_t m = 0; m < job.M; ++m) {
      weights[m] = static_cast<int8_t>(std::floor(job.scale[m] * whole));
      base += static_cast<double>(job.scale[m]) * low(m);
      if (weights[m] < 0 && job.norms != nullptr) return false;  // a norm beyond the range of int32 could wrap around
      rounding += 1e-3 * std::abs(weights[m]) + (weights[m] < 0 ? -weights[m] : 0);
      less += kLess * weights[m];
    }
    std::memcpy(weight, weights, sizeof weight);
    std::memset(counts, 0, sizeof counts);
    for (int64_t m = 0, last = -1; m < (kShared ? 1 : job.M); ++m) {
      if (m == 0 || job.bases[m] != job.bases[m - 1]) fill_table(m, per_step, tables[++last]);
      Levels* const levels = of_dwords[m / 4];
      int& count = counts[m / 4];
      if (count == 0 || levels[count - 1].table != last) levels[count++] = {last, 0};
      std::memcpy(reinterpret_cast<char*>(&levels[count - 1].weights) + m % 4, weights + m, 1);
    }
    return true;
  }

  // floor((A_m - min A_m) per_step) of all codewords, as bytes.
  void fill_table(int64_t m, float per_step, Quarter (&table)[4]) const {
    const float *const entries = job.entries(q, m), sign = sign_of(job.metric), least = low(m);
    alignas(64) float steps[256] = {};
    alignas(64) uint8_t bytes[256];
    for (int64_t k = 0; k < job.K; ++k) steps[k] = (sign * entries[k] - least) * per_step;
    for (int64_t k = 0; k < 256; k += kWidth) Floats::load(steps + k).store_bytes(bytes + k);
    for (auto& entry : bytes) entry = static_cast<uint8_t>(entry - kLess);
    for (int i = 0; i < 4; ++i) table[i] = load_quarter(bytes + 64 * i);
  }

  // Sets the limit for the k-th best cost so far. With norms it is shifted to about 0, so that integers overflow only
  // for norms that are far below or above it.
  void tighten() {
    const double steps = (bound.limit(best->tau) - base) * unit;
    shift = job.norms == nullptr ? 0 : static_cast<float>(steps);
    most = static_cast<int32_t>(std::fmin(std::fmax(std::floor(steps - shift + rounding + 1), -2e9), 2e9)) - less;
    // The root has a relative error of up to 2^-14, for which the factor allows.
    const double c = bound.factor(best->tau) * unit;
    factor = static_cast<float>(has_root(job.metric) ? c * (c >= 0 ? 1 - 1.0 / 4096 : 1 + 1.0 / 4096) : c);
    if (!std::isfinite(factor)) factor = shift = 0, most = std::numeric_limits<int32_t>::max();  // keep all
  }

  // B of some codes in units, less `shift`; what is far above all limits is clamped. A norm that is NaN, or has no
  // root, gives so little that the code is kept.
  template <class Metric>
  Dwords start(int64_t n) const {
    return Metric::kNorms ? steps_of<Metric::kRoot>(job.norms + n, factor, shift) : Dwords::all(0);
  }

  const uint8_t* row(int64_t n) const {
    return static_cast<const uint8_t*>(job.codes) + n * (kStride ? kStride : stride);
  }

  // Sums of the 64 codes from n on; whether any of them is within the limit.
  template <class Metric>
  __attribute__((always_inline)) bool sum_up(int64_t n, const Quarter& a, const Quarter& b, const Quarter& c,
                                             const Quarter& d, int32_t limit, Dwords (&sums)[kVectors]) const {
    Dwords least = Dwords::all(std::numeric_limits<int32_t>::max());
    for (int i = 0; i < kVectors; ++i) {
      const int64_t first = n + i * Dwords::kLanes;
      Dwords sum = start<Metric>(first);
      for (int g = 0; g < kGroups && kShared; g += kTogether) {
        Dwords codes[kTogether];
        load<kTogether>(first, g, codes);
        for (int j = 0; j < kTogether; ++j) sum = add_products(sum, look_up(a, b, c, d, codes[j]), weight[g + j]);
      }
      sums[i] = sum;
    }
    for (int g = 0; g < kGroups && !kShared; g += kTogether) add_dwords(n, g, sums);
    for (const Dwords& sum : sums) least = min(least, sum);
    return any_at_most(least, limit);
  }

  // Dwords g, g + 1, .. of some rows from n on.
  template <int kCount>
  __attribute__((always_inline)) void load(int64_t n, int g, Dwords (&codes)[kCount]) const {
    if constexpr (kCount == 1)
      codes[0] = dwords_of<kStride>(row(n), g, stride);
    else
      four_dwords_of(row(n) + 4 * g, stride, codes);
  }

  // Adds the levels of dwords g, g + 1, .. of the 64 codes from n on, by the tables that they have.
  __attribute__((always_inline)) void add_dwords(int64_t n, int g, Dwords (&sums)[kVectors]) const {
    Dwords codes[kVectors][kTogether];
    for (int i = 0; i < kVectors; ++i) load<kTogether>(n + i * Dwords::kLanes, g, codes[i]);
    for (int j = 0; j < kTogether; ++j)
      for (int part = 0; part < counts[g + j]; ++part) {
        const Levels& own = of_dwords[g + j][part];
        const Quarter(&table)[4] = tables[own.table];
        const Quarter a = table[0], b = table[1], c = table[2], d = table[3];
        for (int i = 0; i < kVectors; ++i)
          sums[i] = add_products(sums[i], look_up(a, b, c, d, codes[i][j]), own.weights);
      }
  }

  // Always inline: GCC 12 takes a function of prefetches for one without effect.
  template <class Metric>
  __attribute__((always_inline)) void fetch(int64_t n) const {
    for (int64_t byte = 0; byte < 64 * (kStride ? kStride : stride); byte += 64) __builtin_prefetch(row(n) + byte);
    for (int i = 0; i < 4 && Metric::kNorms; ++i) __builtin_prefetch(job.norms + n + 16 * i);
  }

  template <class Metric, bool kAhead>
  void scan(int64_t begin, int64_t end, int64_t ahead) {
    for (int64_t n = begin; n < end;) {
      const Quarter a = tables[0][0], b = tables[0][1], c = tables[0][2], d = tables[0][3];
      const int32_t limit = most;
      Dwords sums[kVectors];
      bool any = false;
      for (; n < end && !any; n += 64) {
        if (kAhead) fetch<Metric>(n + ahead);
        any = sum_up<Metric>(n, a, b, c, d, limit, sums);
      }
      if (any) look_closely(n - 64, sums, ~uint64_t{0});
      while (n < end && rejected >= 0 && ~copies_of_rejected(n) == 0) n += 64;
    }
  }

  // Scores the codes of 64 that are wanted and left, except copies of the one that was rejected last.
  __attribute__((noinline)) void look_closely(int64_t first, const Dwords (&sums)[kVectors], uint64_t wanted) {
    uint64_t candidates = at_most(sums, most) & wanted;
    if (job.keep != nullptr) candidates &= nonzero(job.keep + first);
    if (candidates && rejected >= 0) candidates &= ~copies_of_rejected(first);
    const float before = best->tau;
    for (; candidates; candidates &= candidates - 1) {
      const int64_t n = first + __builtin_ctzll(candidates);
      const float cost = cost_of<uint8_t>(job, q, n);
      if (best->wants(cost))
        best->add(cost, n);
      else
        rejected = n;
    }
    if (best->tau != before) tighten();
  }

  uint64_t copies_of_rejected(int64_t first) const {
    Dwords different[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      different[i] = Dwords::all(0);
      for (int g = 0; g < kGroups; ++g) {
        int32_t four = 0;
        std::memcpy(&four, row(rejected) + 4 * g, kStride ? std::min(kStride, 4) : 4);
        different[i] = differences(different[i], dwords_of<kStride>(row(first + i * Dwords::kLanes), g, stride), four);
      }
    }
    uint64_t copies = zero(different);
    for (int64_t i = 0; i < 64 && job.norms != nullptr; i += kWidth) {
      const unsigned same = equal(Floats::load(job.norms + first + i), Floats::all(job.norms[rejected]));
      copies &= ~(uint64_t{~same & 0xffff} << i);
    }
    return copies;
  }

  const Search& job;
  const int stride;
  int64_t q = 0;
  Reservoir* best = nullptr;
  Quarter tables[kShared ? 1 : 4 * kGroups][4];  // of the levels that share their codewords
  int32_t weight[kGroups];                       // four bytes in each
  Levels of_dwords[kGroups][4];
  int counts[kGroups];  // of these
  Bound bound;
  double base = 0, rounding = 0;
  float unit = 0, factor = 0, shift = 0;
  int32_t less = 0;  // by which sums are too small, because entries are
  int32_t most = 0;  // the greatest sum that is kept
  int64_t rejected = -1;
};

// Whether rows are of a length that takes few instructions to load.
inline bool is_quick(const Search& job) {
  const int64_t s = job.stride;
  const bool one_or_two = job.shared() && (s == 1 || s == 2);
  return !job.wide && s >= job.M && (one_or_two || s == 4 || s == 8 || s == 16);
}

// Whether scan_one() supports the codes.
inline bool takes_one(const Search& job) {
  return is_quick(job) || (!job.wide && job.M <= kMaxLevels && job.stride >= job.M && job.stride < 1 << 20);
}

// How many bytes of a row are read, in dwords, if it is of another length than those of is_quick().
inline int64_t groups_of(const Search& job) {
  const int64_t groups = (job.M + 3) / 4;
  if (!job.shared()) return groups <= 2 ? groups : groups <= 4 ? 4 : groups <= 8 ? 8 : 16;
  return groups <= 4 ? groups : groups <= 6 ? 6 : groups <= 8 ? 8 : groups <= 12 ? 12 : 16;
}

// use(One<stride, groups>) as a type that fits the rows; they must be taken by takes_one().
template <class Use>
void with_one(const Search& job, const Use& use) {
  const int64_t groups = (job.M + 3) / 4;
  if (!job.shared()) {
    if (is_quick(job) && job.stride == 4) return use(Type<One<4, 1, false>>{});
    if (is_quick(job) && job.stride == 8) return use(Type<One<8, 2, false>>{});
    if (is_quick(job) && job.stride == 16) return use(Type<One<16, 4, false>>{});
    if (groups == 1) return use(Type<One<0, 1, false>>{});
    if (groups == 2) return use(Type<One<0, 2, false>>{});
    if (groups <= 4) return use(Type<One<0, 4, false>>{});
    if (groups <= 8) return use(Type<One<0, 8, false>>{});
    return use(Type<One<0, 16, false>>{});
  }
  if (!is_quick(job)) {
    switch (groups_of(job)) {
      case 1:
        return use(Type<One<0, 1>>{});
      case 2:
        return use(Type<One<0, 2>>{});
      case 3:
        return use(Type<One<0, 3>>{});
      case 4:
        return use(Type<One<0, 4>>{});
      case 6:
        return use(Type<One<0, 6>>{});
      case 8:
        return use(Type<One<0, 8>>{});
      case 12:
        return use(Type<One<0, 12>>{});
      default:
        return use(Type<One<0, 16>>{});
    }
  }
  if (job.stride == 1) return use(Type<One<1, 1>>{});
  if (job.stride == 2) return use(Type<One<2, 1>>{});
  if (job.stride == 4) return use(Type<One<4, 1>>{});
  if (job.stride == 8 && groups == 1) return use(Type<One<8, 1>>{});
  if (job.stride == 8) return use(Type<One<8, 2>>{});
  if (groups <= 2) return use(Type<One<16, 2>>{});
  use(Type<One<16, 4>>{});
}

// Rows are read whole or in dwords, but the last one of all may end after M codes: where reading must stop.
inline int64_t readable_rows(const Search& job) {
  return job.M < (is_quick(job) ? job.stride : 4 * groups_of(job)) ? job.N - 1 : job.N;
}

// Scans as many codes as it can from `begin` and returns where it stopped.
inline int64_t scan_one(const Search& job, int64_t q, int64_t begin, int64_t end, Reservoir& best) {
  if (!takes_one(job)) return begin;
  const int64_t last = begin + (std::min(end, readable_rows(job)) - begin) / 64 * 64;
  best.shrink();
  if (!best.full || begin >= last) return begin;
  bool done = false;
  with_one(job, [&](auto type) {
    typename decltype(type)::type one(job);
    done = one.start(q, best) && one.aim();
    if (done) one.run(begin, last, job.stride >= 16 ? 16384 / job.stride : 0);
  });
  if (!done) return begin;
  DRQ_COUNT(one, last - begin);
  return last;
}

#else

inline bool is_quick(const Search&) { return false; }
inline bool takes_one(const Search&) { return false; }
inline int64_t scan_one(const Search&, int64_t, int64_t begin, int64_t, Reservoir&) { return begin; }

#endif

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
