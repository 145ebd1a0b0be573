// A batch of queries by bytes, one query per lane: a look-up is one line of bytes that serves them all. Included by
// files that are compiled once per instruction set; see simd.h.
#pragma once

#include "cpu/search/bound.h"
#include "cpu/search/bytes.h"
#include "cpu/search/ceilings.h"
#include "cpu/search/count.h"
#include "cpu/search/floats.h"
#include "cpu/search/part.h"
#include "cpu/search/reservoir.h"

namespace drq {
namespace DRQ_ISA {
namespace {

template <class Code>
bool same_code(const Search& job, int64_t a, int64_t b) {
  const Code *left = row_of<Code>(job, a), *right = row_of<Code>(job, b);
  bool same = job.norms == nullptr || job.norms[a] == job.norms[b];
  for (int64_t m = 0; m < job.M; ++m) same &= left[m] == right[m];
  return same;
}

// Codes that were scored recently, and the lanes that rejected them. These lanes reject every copy, too, because
// thresholds only fall.
template <class Code>
struct Rejected {
  struct Entry {
    uint32_t position;
    uint64_t lanes;
  };
  Entry& entry_of(const Search& job, int64_t n) {
    const Code* code = row_of<Code>(job, n);
    uint64_t hash = 0;
    for (int64_t m = 0; m < job.M; ++m) hash = hash * 31 + code[m];
    Entry& entry = entries[(hash * 0x9e3779b97f4a7c15u) >> 56];
    if (entry.lanes == 0 || !same_code<Code>(job, entry.position, n)) entry = {static_cast<uint32_t>(n), 0};
    return entry;
  }
  Entry entries[256] = {};
};

template <class Code, int kLanes>
class Batch {
 public:
  // For searches of up to kLanes queries that differ from `all` in the queries only, in `count` codes.
  Batch(const Search& all, const Bins* bins, int64_t count)
      : job(all),
        bins(bins),
        sampled(Ceilings<Code, kLanes>::sampled(all.k, count)),
        ceilings(all.k, count),
        transposed(job.T * kLanes),
        lines((job.M * spacing() + (bins != nullptr ? 256 : 0)) * kLanes),
        terms(job.M * job.K) {
    for (int bin = 0; bin < 256 && bins != nullptr; ++bin) {
      norms_low[bin] = norm_term(job.metric, bins->low[bin]);
      norms_high[bin] = norm_term(job.metric, bins->high[bin]);
    }
  }

  // guesses, if not null: a likely upper bound of the k-th best cost of each query. A query whose guess was too low is
  // searched again.
  void run(const Search& some, int64_t begin, int64_t end, Reservoir* reservoirs, const float* guesses) {
    job = some, queries = job.Q, best = reservoirs;
    start();
    active = ~uint64_t{0} >> (64 - queries);
    if (guesses != nullptr) {
      forget();
      for (int64_t lane = 0; lane < queries; ++lane) best[lane].clear(std::fmin(guesses[lane], ceiling_of(job, lane)));
      sweep(begin, end);
      for (int64_t lane = 0; lane < queries; ++lane) {
        const bool done = best[lane].complete() || ceiling_of(job, lane) <= guesses[lane];
        active &= ~(uint64_t{done} << lane);
      }
      if (active == 0) return;
    }
    forget();
    for (int64_t at = first_thresholds(begin, end); at < end;) {
      const int64_t next = std::min(end, begin + std::max({at - begin, sampled, int64_t{64}}) * kGrowth);
      sweep(at, next);
      at = next;
    }
  }

 private:
  using Line = Bytes<kLanes>;

  bool is_active(int64_t lane) const { return active >> lane & 1; }

  int64_t spacing() const { return kSpacing ? kSpacing : job.K; }

  void forget() {
    rejected = {};
    settled = turned_down = 0, nobodys = nullptr;
  }

  // Gives every query a threshold; returns how far the codes have been scanned for that. With a filter that keeps few
  // codes, or costs that are not finite, the first codes are scored by floats.
  int64_t first_thresholds(int64_t begin, int64_t end) {
    float ceiling[kLanes];
    ceilings.fill(job, transposed.data, begin, end, ceiling);
    for (int64_t lane = 0; lane < queries; ++lane) ceiling[lane] = std::fmin(ceiling[lane], ceiling_of(job, lane));
    bool known = true;
    for (int64_t lane = 0; lane < queries; ++lane)
      known &= !is_active(lane) || ceiling[lane] < std::numeric_limits<float>::infinity();
    const int64_t at = known ? begin : seeds_end(job, begin, end);
    for (int64_t lane = 0; lane < queries; ++lane) {
      if (!is_active(lane)) continue;
      best[lane].clear(known ? ceiling[lane] : ceiling_of(job, lane));
      scan_floats<Code>(job, lane, begin, at, terms.data, best[lane]);
    }
    return at;
  }

  // Scans at..end by tables made for the k-th best costs so far.
  void sweep(int64_t at, int64_t end) {
    const uint64_t undecided = build();
    scan(at, end);
    for (int64_t lane = 0; lane < queries; ++lane) settle(lane);
    for (int64_t lane = 0; lane < queries; ++lane)
      if (undecided >> lane & 1) scan_floats<Code>(job, lane, at, end, terms.data, best[lane]);
  }

  void start() {
    for (int64_t lane = 0; lane < queries; ++lane) {
      const float* table = job.table + lane * job.T;
      for (int64_t k = 0; k < job.T; ++k) transposed.data[k * kLanes + lane] = table[k];
      usable[lane] = bound[lane].start(job, lane);
      if (bins != nullptr)
        usable[lane] &= with_metric(job.metric, [this](auto metric) { return metric.bounded(bins->low[0]); });
    }
  }

  // Builds tables and thresholds for the k-th best costs so far. Returns the lanes for which nothing may be dropped.
  uint64_t build() {
    uint64_t undecided = 0;
    std::memset(threshold, 0, sizeof threshold);
    std::memset(inverse, 0, sizeof inverse);
    for (int64_t lane = 0; lane < queries; ++lane) {
      if (!is_active(lane)) continue;
      best[lane].shrink();
      factor[lane] = static_cast<float>(bound[lane].factor(best[lane].tau));
      norm_low[lane] = bins == nullptr ? 0 : std::fmin(factor[lane] * norms_low[0], factor[lane] * norms_high[255]);
      const double base = bound[lane].base + norm_low[lane], limit = bound[lane].limit(best[lane].tau);
      if (!best[lane].full || !usable[lane] || !std::isfinite(limit - base)) {
        undecided |= uint64_t{1} << lane;
      } else if (steps[lane].set(base, limit, 254)) {
        inverse[lane] = steps[lane].inverse;
        tighten(lane);
      } else {
        threshold[lane] = limit > base ? 255 : 0;  // all steps are 0: keeps all codes, or none
      }
    }
    for (int64_t m = 0; m < job.M; ++m) build_level(m);
    if (bins != nullptr) build_norms();
    return undecided;
  }

  void build_level(int64_t m) {
    float low[kLanes] = {};
    for (int64_t lane = 0; lane < queries; ++lane) low[lane] = bound[lane].minima[m];
    const Floats scale = Floats::all(job.scale[m]), signs = Floats::all(sign_of(job.metric));
    const float* entries = transposed.data + job.bases[m] * kLanes;
    for (int64_t k = 0; k < job.K; ++k)
      for (int64_t lane = 0; lane < kLanes; lane += kWidth) {
        const Floats term = signs * (scale * Floats::load(entries + k * kLanes + lane));
        const Floats count = (term - Floats::load(low + lane)) * Floats::load(inverse + lane);
        count.store_bytes(lines.data + (m * spacing() + k) * kLanes + lane);
      }
  }

  // The lower bound of B in a bin is at one of its edges. In float32 it is off by a few 2^-24 of itself, which is a
  // small part of the slack where |B| is at most L + S (see bound.h), and of a step where B is less.
  void build_norms() {
    uint8_t* line = lines.data + job.M * spacing() * kLanes;
    for (int bin = 0; bin < 256; ++bin, line += kLanes)
      for (int64_t lane = 0; lane < kLanes; lane += kWidth) {
        const Floats by = Floats::load(factor + lane);
        const Floats least = min(by * Floats::all(norms_low[bin]), by * Floats::all(norms_high[bin]));
        const Floats count = (least - Floats::load(norm_low + lane)) * Floats::load(inverse + lane);
        max(count, Floats::all(0)).store_bytes(line + lane);  // NaN becomes 0
      }
  }

  // Codes whose steps add up to the threshold or more are dropped; 255, to which sums saturate, always is.
  void tighten(int64_t lane) {
    const double most = steps[lane].at(bound[lane].limit(best[lane].tau));
    threshold[lane] = most < 0 ? 0 : static_cast<uint8_t>(std::fmin(most, 254) + 1);
  }

  // The sum of the first levels and, with kNorms, the norm of code n for all queries. Captures by value, so that
  // the compiler knows that nothing changes during a scan.
  template <bool kNorms>
  auto summing() const {
    const uint8_t *const table = lines.data, *const norms = table + job.M * spacing() * kLanes;
    const uint8_t* const bin = kNorms ? bins->bins : nullptr;
    return [table, norms, bin, spacing = spacing()](const Code* code, int64_t n, int64_t levels) {
      const int64_t level = (kSpacing ? kSpacing : spacing) * kLanes;
      const auto at = [](size_t entry) { return entry * kLanes; };
      Line sum = Line::load(table + at(code[0]));
      if (kNorms) sum = add_saturated(sum, Line::load(norms + at(bin[n])));
      for (int64_t m = 1; m < levels; ++m) sum = add_saturated(sum, Line::load(table + m * level + at(code[m])));
      return sum;
    };
  }

  // The sum of all levels of a code, given that of the first `few`.
  Line completed(Line sum, const Code* code, int64_t few) const {
    for (int64_t m = few; m < job.M; ++m)
      sum = add_saturated(sum, Line::load(lines.data + (m * spacing() + code[m]) * kLanes));
    return sum;
  }

  void scan(int64_t at, int64_t end) {
    DRQ_COUNT(batch, end - at);
    bins ? scan<true>(at, end) : scan<false>(at, end);
  }

  // Chooses the levels of the first round by trying some codes of at..end: with fewer levels the round is shorter, but
  // leaves more codes for the second.
  template <bool kNorms>
  void scan(int64_t at, int64_t end) {
    const auto sum_of = summing<kNorms>();
    const Line limit = Line::load(threshold);
    const auto M = static_cast<double>(job.M);
    double least = M;  // table lines per code, and what costs as much time
    int64_t chosen = job.M;
    for (const int levels : {2, 3, 4, 6, 8, 12, 16, 24}) {
      if (levels >= job.M) break;
      constexpr int64_t kTried = 256;
      int64_t tried_left = 0;
      for (int64_t i = 0; i < kTried; ++i) {
        const int64_t n = at + (end - at) * i / kTried;
        tried_left += any_less(sum_of(row_of<Code>(job, n), n, levels), limit);
      }
      const double left = static_cast<double>(tried_left) / kTried;
      const double second = levels <= kFew ? (M + 10) * (1 - std::pow(1 - left, kGroup)) : (M - levels + 2) * left;
      const double cost = levels + second;
      if (cost < least) least = cost, chosen = levels;
    }
    scan_by<kNorms, 2, 3, 4, 6, 8, 12, 16, 24, 32>(chosen, at, end);
  }

  // scan<kLevels> for the number of levels that is in the list, else scan<0>.
  template <bool kNorms, int kFirst, int... kOthers>
  void scan_by(int64_t levels, int64_t at, int64_t end) {
    if (levels == kFirst) return scan<kFirst, kNorms>(at, end);
    if constexpr (sizeof...(kOthers) > 0)
      scan_by<kNorms, kOthers...>(levels, at, end);
    else
      scan<0, kNorms>(at, end);
  }

  // Scans blocks of codes in three rounds, without branches that are hard to predict. The first finds the codes that
  // some query cannot drop by their first levels (kLevels, or all if 0), the second those of them that are left by all
  // levels, and the third notes these codes. With few levels, testing every code would take longer than summing its
  // levels, so the first round tests kGroup codes at once, and the second sums their levels again.
  template <int kLevels, bool kNorms>
  void scan(int64_t at, int64_t end) {
    constexpr bool kGrouped = 0 < kLevels && kLevels <= kFew;
    const int64_t few = kLevels ? kLevels : job.M, stride = job.stride;
    const auto sum_of = summing<kNorms>();
    for (int64_t first = at; first < end; first += kBlock) {
      const Line limit = Line::load(threshold);
      const Code* const codes = row_of<Code>(job, first);
      const int64_t count = std::min(kBlock, end - first);
      int32_t places[kBlock + kGroup];
      Line sums[kGrouped ? 1 : kBlock + 1];
      uint64_t lanes[kBlock + 1];
      int64_t n = 0, left = 0, found = 0;
      if constexpr (kGrouped) {
        for (; n + kGroup <= count; n += kGroup) {
          Line group[kGroup];
          for (int64_t i = 0; i < kGroup; ++i) {
            group[i] = sum_of(codes + (n + i) * stride, first + n + i, few);
            places[left + i] = static_cast<int32_t>(n + i);
          }
          left += any_less(min(min(group[0], group[1]), min(group[2], group[3])), limit) ? kGroup : 0;
        }
        for (; n < count; ++n) places[left++] = static_cast<int32_t>(n);
      } else {
        for (; n < count; ++n) {
          sums[left] = sum_of(codes + n * stride, first + n, few);
          places[left] = static_cast<int32_t>(n);
          left += any_less(sums[left], limit);
        }
      }
      for (int64_t i = 0; i < left; ++i) {
        const Code* code = codes + places[i] * stride;
        if (unwanted(code, first + places[i])) continue;
        const Line sum = kGrouped ? sum_of(code, first + places[i], job.M) : completed(sums[i], code, few);
        lanes[found] = less(sum, limit);
        places[found] = places[i];
        found += lanes[found] != 0;
      }
      for (int64_t i = 0; i < found; ++i) look_closely(first + places[i], lanes[i]);
    }
  }

  // Whether this is a copy of the code that all queries rejected last.
  bool unwanted(const Code* code, int64_t n) const {
    if (nobodys == nullptr || code[0] != *row_of<Code>(job, nobodys->position)) return false;
    return nobodys->lanes == active && same_code<Code>(job, nobodys->position, n);
  }

  // Notes a code for the queries that could not drop it and have not rejected it before.
  void look_closely(int64_t n, uint64_t candidates) {
    if (job.keep != nullptr && !job.keep[n]) return;
    if (4 * turned_down > settled) candidates &= ~rejected.entry_of(job, n).lanes;
    for (uint64_t lanes = candidates; lanes; lanes &= lanes - 1) {
      const int64_t lane = __builtin_ctzll(lanes);
      pending[lane][waiting[lane]++] = static_cast<uint32_t>(n);
      if (waiting[lane] == kPending) settle(lane);
    }
  }

  // Scores the codes that a query noted: many at once, so that cache misses overlap.
  __attribute__((noinline)) void settle(int64_t lane) {
    const int64_t count = waiting[lane];
    Reservoir& mine = best[lane];
    float costs[kPending];
    for (int64_t i = 0; i < count; ++i) costs[i] = cost_of<Code>(job, lane, pending[lane][i]);
    for (int64_t i = 0; i < count; ++i) {
      if (mine.wants(costs[i])) {
        mine.add(costs[i], pending[lane][i]);
      } else {
        typename Rejected<Code>::Entry& entry = rejected.entry_of(job, pending[lane][i]);
        entry.lanes |= uint64_t{1} << lane;
        if (entry.lanes == active) nobodys = &entry;
        ++turned_down;
      }
    }
    settled += count, waiting[lane] = 0;
    if (mine.full && inverse[lane] > 0) tighten(lane);
  }

  static constexpr int64_t kPending = 32, kBlock = 256, kGroup = 4, kFew = 4;
  // Entries from one level to the next in `lines`, known to the compiler for codes of one byte, and not a multiple of
  // the 64 lines after which addresses compete for the same place in the first cache. 0: K entries.
  static constexpr int64_t kSpacing = sizeof(Code) == 1 ? 272 : 0;
  Search job;  // of the queries at hand
  const Bins* bins;
  int64_t queries = 0, sampled;
  uint64_t active = 0;  // lanes that are looked at
  Reservoir* best = nullptr;
  Ceilings<Code, kLanes> ceilings;
  Buffer<float> transposed;  // [K, kLanes]
  Buffer<uint8_t> lines;     // [M, spacing, kLanes], then [256, kLanes] for norms
  Buffer<float> terms;       // [M, K]
  Rejected<Code> rejected;
  Bound bound[kLanes];
  Steps steps[kLanes];
  bool usable[kLanes] = {};                          // whether the bound may drop codes
  float factor[kLanes] = {}, norm_low[kLanes] = {};  // of B, and its minimum
  float norms_low[256], norms_high[256];             // the edges of the bins, or their roots if B has them
  float inverse[kLanes] = {};                        // of the steps; 0 where all steps are 0
  uint8_t threshold[kLanes] = {};
  uint32_t pending[kLanes][kPending];
  int64_t waiting[kLanes] = {};
  const typename Rejected<Code>::Entry* nobodys = nullptr;
  int64_t settled = 0, turned_down = 0;  // if many are turned down, it pays to remember which
};

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
