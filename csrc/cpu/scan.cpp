// The scan of codes by floats and, for batches of queries, by bytes. Compiled once per instruction set; see simd.h.
#include "cpu/scan.h"

#include <memory>

#include "cpu/sample.h"
#include "cpu/scan_bits.h"
#include "cpu/scan_few.h"
#include "cpu/scan_one.h"
#include "cpu/search/tables.h"

namespace drq {
namespace DRQ_ISA {
namespace {

// A block of codes at a time: table look-ups first, then sums to costs, then the few that are wanted.
constexpr int64_t kBlock = 64;

// sums[i] of `count` codes from row n on; terms [M, K] = fl(scale[m] * T[q, k]); kM is M, or 0 for any.
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

// The scores of docs/math.md, section 5, turned so that less is better; the same bits as score_of().
template <int kMetric>
Floats costs_of(const float* sums, const float* norms, float constant, float length) {
  const Floats sum = Floats::load(sums), add = Floats::all(constant);
  if (kMetric == kL2) return (Floats::load(norms) - Floats::all(2) * sum) + add;
  const Floats inner = sum + add;
  if (kMetric == kIp) return Floats::all(0) - inner;
  return Floats::all(0) - ratio_or_zero(inner, Floats::all(length) * root(Floats::load(norms)));
}

template <class Code, int kMetric, int kM>
void scan_floats(const Search& job, int64_t q, int64_t begin, int64_t end, const float* terms, Reservoir& best) {
  float sums[kBlock] = {}, norms[kBlock] = {}, costs[kBlock];
  const float length = kMetric == kCosine ? job.lengths[q] : 0;
  for (int64_t n = begin; n < end; n += kBlock) {
    const int64_t count = std::min(kBlock, end - n);
    sum_terms<Code, kM>(job, n, count, terms, sums);
    if (kMetric != kIp) std::memcpy(norms, job.norms + n, count * sizeof(float));
    const Floats tau = Floats::all(best.full ? best.tau : std::numeric_limits<float>::infinity());
    uint64_t wanted = 0;
    for (int64_t i = 0; i < kBlock; i += kWidth) {
      const Floats cost = costs_of<kMetric>(sums + i, norms + i, job.constants[q], length);
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

template <class Code, int kMetric>
void scan_floats(const Search& job, int64_t q, int64_t begin, int64_t end, const float* terms, Reservoir& best) {
  if (job.M == 4) return scan_floats<Code, kMetric, 4>(job, q, begin, end, terms, best);
  if (job.M == 8) return scan_floats<Code, kMetric, 8>(job, q, begin, end, terms, best);
  scan_floats<Code, kMetric, 0>(job, q, begin, end, terms, best);
}

template <class Code>
void scan_floats(const Search& job, int64_t q, int64_t begin, int64_t end, float* terms, Reservoir& best) {
  if (begin == end) return;
  const float* table = job.table + q * job.K;
  for (int64_t m = 0; m < job.M; ++m)
    for (int64_t k = 0; k < job.K; ++k) terms[m * job.K + k] = job.scale[m] * table[k];
  if (job.metric == kL2) return scan_floats<Code, kL2>(job, q, begin, end, terms, best);
  if (job.metric == kIp) return scan_floats<Code, kIp>(job, q, begin, end, terms, best);
  scan_floats<Code, kCosine>(job, q, begin, end, terms, best);
}

// Codes that were looked at closely lately, and the queries that will never want them again: thresholds only fall.
template <class Code>
struct Rejected {
  static constexpr int64_t kEntries = 256;
  struct Entry {
    Code code[kMaxLevels];
    float norm;
    uint64_t lanes;
  };
  Entry& entry_of(const Search& job, int64_t n) {
    const Code* code = row_of<Code>(job, n);
    uint64_t hash = 0;
    for (int64_t m = 0; m < job.M; ++m) hash = hash * 31 + code[m];
    Entry& entry = entries[(hash * 0x9e3779b97f4a7c15u) >> 56];
    const float norm = job.norms == nullptr ? 0 : job.norms[n];
    bool same = entry.norm == norm;
    for (int64_t m = 0; m < job.M; ++m) same &= entry.code[m] == code[m];
    if (!same) {
      for (int64_t m = 0; m < job.M; ++m) entry.code[m] = code[m];
      entry.norm = norm, entry.lanes = 0;
    }
    return entry;
  }
  Entry entries[kEntries] = {};
};

// A batch of up to kLanes queries, one per lane: a look-up is one line of bytes that serves them all.
template <class Code>
struct Batch {
  Batch(const Search& all, const Bins* bins)
      : job(all),
        bins(bins),
        transposed(job.K * kLanes),
        lines((job.M * job.K + (bins != nullptr ? 256 : 0)) * kLanes),
        terms(job.M * job.K) {}

  // ceilings, if not null: what the k-th best cost of each query is thought to stay below.
  void run(const Search& some, int64_t begin, int64_t end, Reservoir* best, const float* ceilings) {
    job = some, queries = job.Q, this->best = best;
    transpose();
    active = ~uint64_t{0} >> (64 - queries);
    if (ceilings != nullptr) {
      forget();
      for (int64_t lane = 0; lane < queries; ++lane) best[lane].clear(ceilings[lane]);
      sweep(begin, end);
      for (int64_t lane = 0; lane < queries; ++lane) active &= ~(uint64_t{best[lane].complete()} << lane);
      if (active == 0) return;
    }
    forget();
    int64_t at = seeds_end(job, begin, end);
    for (int64_t lane = 0; lane < queries; ++lane) {
      if (!is_active(lane)) continue;
      best[lane].clear();
      scan_floats<Code>(job, lane, begin, at, terms.data, best[lane]);
    }
    while (at < end) {
      const int64_t next = std::min(end, begin + (at - begin) * kGrowth);
      sweep(at, next);
      at = next;
    }
  }

 private:
  bool is_active(int64_t lane) const { return active >> lane & 1; }

  void forget() {
    rejected = {};
    settled = turned_down = 0, nobodys = nullptr;
  }

  // Scans at..end by tables made for the best so far.
  void sweep(int64_t at, int64_t end) {
    const uint64_t undecided = build();
    scan(at, end);
    for (int64_t lane = 0; lane < queries; ++lane) settle(lane);
    for (int64_t lane = 0; lane < queries; ++lane)
      if (undecided >> lane & 1) scan_floats<Code>(job, lane, at, end, terms.data, best[lane]);
  }

  void transpose() {
    for (int64_t lane = 0; lane < queries; ++lane) {
      const float* table = job.table + (lane)*job.K;
      table_low[lane] = table_high[lane] = table[0];
      for (int64_t k = 0; k < job.K; ++k) {
        transposed.data[k * kLanes + lane] = table[k];
        table_low[lane] = table[k] < table_low[lane] ? table[k] : table_low[lane];
        table_high[lane] = table[k] > table_high[lane] ? table[k] : table_high[lane];
      }
    }
  }

  // Tables and bounds for the best so far. Returns the lanes for which nothing may be dropped.
  uint64_t build() {
    uint64_t undecided = 0;
    std::memset(bound, 0, sizeof bound);
    std::memset(inverse, 0, sizeof inverse);
    for (int64_t lane = 0; lane < queries; ++lane) {
      if (!is_active(lane)) continue;
      best[lane].shrink();
      const float lowest = bins == nullptr ? 0 : bins->low[0], highest = bins == nullptr ? 0 : bins->high[255];
      Filter& filter = filters[lane];
      if (!best[lane].full ||
          !filter.set(job, lane, best[lane].tau, table_low[lane], table_high[lane], lowest, highest)) {
        undecided |= uint64_t{1} << lane;
        continue;
      }
      inverse[lane] = filter.inverse;
      bound[lane] = filter.bound(job, lane, best[lane].tau);
    }
    const float sign = job.metric == kL2 ? -2 : -1;
    float low[kLanes] = {};
    for (int64_t m = 0; m < job.M; ++m) {
      const float s = job.scale[m];
      for (int64_t lane = 0; lane < queries; ++lane)
        low[lane] = Filter::lowest(sign, s, table_low[lane], table_high[lane]);
      const Floats scale = Floats::all(s), signs = Floats::all(sign);
      for (int64_t k = 0; k < job.K; ++k)
        for (int64_t lane = 0; lane < kLanes; lane += kWidth) {
          const Floats term = signs * (scale * Floats::load(transposed.data + k * kLanes + lane));
          const Floats steps = (term - Floats::load(low + lane)) * Floats::load(inverse + lane);
          steps.store_bytes(lines.data + (m * job.K + k) * kLanes + lane);
        }
    }
    if (bins != nullptr) build_norms();
    return undecided;
  }

  void build_norms() {
    uint8_t* line = lines.data + job.M * job.K * kLanes;
    for (int bin = 0; bin < 256; ++bin, line += kLanes)
      for (int64_t lane = 0; lane < queries; ++lane) {
        const double c = filters[lane].factor, edge = c >= 0 ? bins->low[bin] : bins->high[bin];
        const double b = job.metric == kL2 ? edge : c * std::sqrt(edge);
        const double steps = (b - filters[lane].norm_low) * inverse[lane];
        line[lane] = steps > 0 ? static_cast<uint8_t>(steps < 255 ? steps : 255) : 0;
      }
  }

  // The sum of the first levels and, with kNorms, the norm of code n for all queries. By value, so that the compiler
  // knows that nothing of it changes during a scan.
  template <bool kNorms>
  auto summing() const {
    const uint8_t *const table = lines.data, *const norms = table + job.M * job.K * kLanes;
    const uint8_t* const bin = kNorms ? bins->bins : nullptr;
    return [table, norms, bin, level = job.K * kLanes](const Code* code, int64_t n, int64_t levels) {
      Bytes sum = Bytes::load(table + code[0] * kLanes);
      if (kNorms) sum = add_saturated(sum, Bytes::load(norms + bin[n] * kLanes));
      for (int64_t m = 1; m < levels; ++m) sum = add_saturated(sum, Bytes::load(table + m * level + code[m] * kLanes));
      return sum;
    };
  }

  void scan(int64_t at, int64_t end) { bins ? scan<true>(at, end) : scan<false>(at, end); }

  // A first round by few levels is short but leaves more for the second: tries some codes of at..end.
  template <bool kNorms>
  void scan(int64_t at, int64_t end) {
    const auto sum_of = summing<kNorms>();
    const Bytes limit = Bytes::load(bound);
    double least = job.M;  // table lines per code: of the first round, and of the second for groups with any code left
    int64_t best = job.M;
    for (const int64_t levels : {2, 3, 4, 6}) {
      constexpr int64_t kTried = 256;
      int64_t left = 0;
      for (int64_t i = 0; i < kTried && levels < job.M; ++i) {
        const int64_t n = at + (end - at) * i / kTried;
        left += less(sum_of(row_of<Code>(job, n), n, levels), limit) != 0;
      }
      const double groups = 1 - std::pow(1 - static_cast<double>(left) / kTried, kGroup);
      const double lines = levels + 14 * groups;
      if (lines < least) least = lines, best = levels;
    }
    if (best == 2) return scan<2, kNorms>(at, end);
    if (best == 3) return scan<3, kNorms>(at, end);
    if (best == 4) return scan<4, kNorms>(at, end);
    if (best == 6) return scan<6, kNorms>(at, end);
    scan<0, kNorms>(at, end);
  }

  // Blocks of codes in three rounds, none of which has a branch that is hard to guess: which groups of kGroup codes
  // have any that a query may want by its first levels (kLevels, or all if 0), which codes these are by all levels, and
  // then those.
  template <int kLevels, bool kNorms>
  void scan(int64_t at, int64_t end) {
    const int64_t M = job.M, few = kLevels ? kLevels : M, stride = job.stride;
    const auto sum_of = summing<kNorms>();
    for (int64_t first = at; first < end; first += kGroup * kGroups) {
      const Bytes limit = Bytes::load(bound);
      const Code* const codes = row_of<Code>(job, first);
      const int64_t count = std::min(kGroup * kGroups, end - first), whole = count / kGroup * kGroup;
      int32_t groups[kGroups + 1], places[kGroup * kGroups];
      uint64_t lanes[kGroup * kGroups];
      int64_t noted = 0, found = 0;
      for (int64_t n = 0; n < whole; n += kGroup) {
        Bytes sums[kGroup];
        for (int64_t i = 0; i < kGroup; ++i) sums[i] = sum_of(codes + (n + i) * stride, first + n + i, few);
        groups[noted] = static_cast<int32_t>(n);
        noted += less(min(min(sums[0], sums[1]), min(sums[2], sums[3])), limit) != 0;
      }
      if (whole < count) groups[noted++] = static_cast<int32_t>(whole);
      for (int64_t g = 0; g < noted; ++g)
        for (int64_t n = groups[g]; n < std::min(groups[g] + kGroup, count); ++n) {
          if (unwanted(codes + n * stride, first + n)) continue;
          places[found] = static_cast<int32_t>(n);
          lanes[found] = less(sum_of(codes + n * stride, first + n, M), limit);
          found += lanes[found] != 0;
        }
      for (int64_t i = 0; i < found; ++i) look_closely(first + places[i], lanes[i]);
    }
  }

  // Whether this is the code that all queries turned down last.
  bool unwanted(const Code* code, int64_t n) const {
    if (nobodys == nullptr || code[0] != nobodys->code[0]) return false;
    bool same = job.norms == nullptr || job.norms[n] == nobodys->norm;
    for (int64_t m = 1; m < job.M; ++m) same &= code[m] == nobodys->code[m];
    return same && nobodys->lanes == active;
  }

  // Notes a code for the queries that could not drop it, but for those that have turned it down before.
  void look_closely(int64_t n, uint64_t candidates) {
    if (job.keep != nullptr && !job.keep[n]) return;
    if (4 * turned_down > settled) candidates &= ~rejected.entry_of(job, n).lanes;
    for (uint64_t lanes = candidates; lanes; lanes &= lanes - 1) {
      const int64_t lane = __builtin_ctzll(lanes);
      pending[lane][waiting[lane]++] = static_cast<uint32_t>(n);
      if (waiting[lane] == kPending) settle(lane);
    }
  }

  // Scores the codes that a query noted: many at once keep the processor busy while it waits for tables.
  __attribute__((noinline)) void settle(int64_t lane) {
    const int64_t q = lane, count = waiting[lane];
    Reservoir& mine = best[lane];
    float costs[kPending];
    for (int64_t i = 0; i < count; ++i) costs[i] = cost_of<Code>(job, q, pending[lane][i]);
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
    if (mine.full && inverse[lane] > 0) bound[lane] = filters[lane].bound(job, q, mine.tau);
  }

  static constexpr int64_t kPending = 32, kGroup = 4, kGroups = 64;
  Search job;  // of the queries at hand
  const Bins* bins;
  int64_t queries = 0;
  uint64_t active = 0;  // queries that are looked at
  Reservoir* best = nullptr;
  Buffer<float> transposed;  // [K, kLanes]
  Buffer<uint8_t> lines;     // [M, K, kLanes], then [256, kLanes] for norms
  Buffer<float> terms;       // [M, K]
  Rejected<Code> rejected;
  Filter filters[kLanes];
  float table_low[kLanes] = {}, table_high[kLanes] = {}, inverse[kLanes] = {};
  uint8_t bound[kLanes] = {};
  uint32_t pending[kLanes][kPending];
  int64_t waiting[kLanes] = {};
  const typename Rejected<Code>::Entry* nobodys = nullptr;
  int64_t settled = 0, turned_down = 0;  // where many are turned down, it pays to remember which
};

// Whether bytes can pay for the time their tables take.
bool by_bytes(const Search& job, int64_t count) {
  return count > 4 * seeds_for(job.k) && count > 2 * job.K && job.M <= kMaxLevels;
}

template <class Code>
void scan_one_by_one(const Part& part, bool bytes) {
  Search job = part.job;  // of the query at hand
  const int64_t capacity = Reservoir::capacity_for(job.k, part.end - part.begin);
  Tables tables(part, 1);
  Buffer<float> terms(job.M * job.K);
  Buffer<Key> kept(2 * capacity);
  Reservoir best{job.k, capacity, kept.data, kept.data + capacity};
  Bits bits(job);
  Few<Code> few(job);
  for (int64_t q = part.first_query; q < part.last_query; ++q) {
    job = tables.of(q, 1);
    best.clear();
    bits.start(0, best);
    few.start(0, best);
    int64_t at = part.begin, end = part.end, scanned = 0;
    while (part.taken == nullptr || (at = part.taken[q].fetch_add(kTaken)) < part.end) {
      if (part.taken != nullptr) end = std::min(at + kTaken, part.end);
      if (bytes) {
        if (!best.full) {
          const int64_t begin = at;
          at = seeds_end(job, begin, end);
          scan_floats<Code>(job, 0, begin, at, terms.data, best);
          scanned += at - begin;
        }
        at = scan_one(job, 0, at, end, best);
        while (at < end) {
          const int64_t next = std::min(end, at + std::max(kFewest, (kGrowth - 1) * scanned));
          scanned += next - at;
          at = bits.run(at, next);
          at = few.run(at, next);
          scan_floats<Code>(job, 0, at, next, terms.data, best);
          at = next;
        }
      }
      scan_floats<Code>(job, 0, at, end, terms.data, best);
      if (part.taken == nullptr) break;
    }
    part.counts[q] = best.finish(part.keys + q * job.k);
  }
}

// Room for the best of a batch of queries.
struct Reservoirs {
  Reservoirs(int64_t k, int64_t codes, int64_t lanes)
      : capacity(Reservoir::capacity_for(k, codes)), kept((lanes + 1) * capacity) {
    for (int64_t lane = 0; lane < lanes; ++lane)
      best[lane] = {k, capacity, kept.data + lane * capacity, kept.data + lanes * capacity};
  }
  int64_t capacity;
  Buffer<Key> kept;
  Reservoir best[kLanes];
};

// What the k-th best costs of batches of queries will stay below, by a sample.
template <class Code>
struct Guess {
  Guess(const Part& part, int64_t lanes)
      : sample(part.job, part.bins, part.begin, part.end),
        found(sample.job.k, sample.job.N, lanes),
        batch(sample.job, part.bins == nullptr ? nullptr : &sample.bins) {}

  const float* ceilings(const Search& job) {
    const int64_t queries = job.Q;
    batch.run(sample.of(job), 0, sample.job.N, found.best, nullptr);
    const float none = std::numeric_limits<float>::infinity();
    for (int64_t lane = 0; lane < queries; ++lane) {
      Reservoir& best = found.best[lane];
      ceiling[lane] = best.complete() && best.full ? std::nextafter(best.tau, none) : none;
    }
    return ceiling;
  }

  Sample<Code> sample;
  Reservoirs found;
  Batch<Code> batch;
  float ceiling[kLanes];
};

template <class Code>
void scan_in_batches(const Part& part) {
  const int64_t lanes = std::min(kLanes, part.last_query - part.first_query), count = part.end - part.begin;
  Reservoirs found(part.job.k, count, lanes);
  Tables tables(part, lanes);
  const std::unique_ptr<Batch<Code>> batch(new Batch<Code>(part.job, part.bins));
  const std::unique_ptr<Guess<Code>> guess(Sample<Code>::pays(part.job, count) ? new Guess<Code>(part, lanes)
                                                                               : nullptr);
  for (int64_t q = part.first_query; q < part.last_query; q += lanes) {
    const int64_t queries = std::min(lanes, part.last_query - q);
    const Search job = tables.of(q, queries);
    const float* ceilings = guess ? guess->ceilings(job) : nullptr;
    batch->run(job, part.begin, part.end, found.best, ceilings);
    for (int64_t lane = 0; lane < queries; ++lane)
      part.counts[q + lane] = found.best[lane].finish(part.keys + (q + lane) * part.job.k);
  }
}

template <class Code>
void scan_part(const Part& part) {
  const bool bytes = by_bytes(part.job, part.end - part.begin);
  if (bytes && part.last_query - part.first_query >= kWorthABatch)
    scan_in_batches<Code>(part);
  else
    scan_one_by_one<Code>(part, bytes);
}

}  // namespace

int64_t queries_at_a_time() { return kLanes; }

bool in_batches(const Search& job) { return job.Q >= kWorthABatch && by_bytes(job, job.N); }

void scan(const Part& part) { part.job.wide ? scan_part<uint16_t>(part) : scan_part<uint8_t>(part); }

}  // namespace DRQ_ISA
}  // namespace drq
