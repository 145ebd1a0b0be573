// Searches the nearest lists of some queries. Compiled once per instruction set; see simd.h.
#include <memory>
#include <vector>

#include "cpu/search/bits.h"
#include "cpu/search/floats.h"
#include "cpu/search/one.h"
#include "cpu/search/tables.h"

namespace drq {
namespace DRQ_ISA {
namespace {

// How a query drops codes in one list after the other: start() for a query, then run() for each list, when the job has
// the constant of the query in it. run() scans as many of begin..end as it can and returns where it stopped; the codes
// from `next` on will be needed soon.
struct NoBound {
  explicit NoBound(const Search&) {}
  void start(int64_t, Reservoir&) {}
  int64_t run(int64_t begin, int64_t, int64_t) { return begin; }
};

#if defined(DRQ_DWORDS)

template <class One>
struct OneInLists {
  explicit OneInLists(const Search& job) : one(job), readable(readable_rows(job)) {}
  void start(int64_t q, Reservoir& reservoir) { usable = one.start(q, reservoir); }

  // Blocks of 64 codes begin at multiples of 64 rows, so that loads are aligned. The first and the last one may hold
  // codes of other lists.
  int64_t run(int64_t begin, int64_t end, int64_t next) {
    if (!usable || readable < 64 || !one.aim()) return begin;
    const int64_t last = std::min(end, readable);
    const int64_t at = std::min(last, (begin + 63) / 64 * 64), whole = at + (last - at) / 64 * 64;
    DRQ_COUNT(one, last - begin);
    if (begin < at) run_some(begin, at);
    one.run(at, whole, next == begin ? 0 : next / 64 * 64 - at);
    if (whole < last) run_some(whole, last);
    return last;
  }

 private:
  void run_some(int64_t begin, int64_t end) {
    const int64_t first = std::min(begin / 64 * 64, readable - 64);
    one.run_some(first, ((uint64_t{1} << (end - begin)) - 1) << (begin - first));
  }

  One one;
  const int64_t readable;
  bool usable = false;
};

template <class Code, class Use>
void with_bound(const Search& job, const Use& use) {
  if (!takes_one(job)) return use(Type<NoBound>{});
  with_one(job, [&](auto type) { use(Type<OneInLists<typename decltype(type)::type>>{}); });
}

#else

#if defined(DRQ_BITS)

struct BitsInLists {
  explicit BitsInLists(const Search& job) : bits(job) {}
  void start(int64_t q, Reservoir& reservoir) { wait = 1, waiting = 0, bits.start(q, reservoir); }

  // Where nothing could be dropped, it is tried again after one call, then after two, four and so on.
  int64_t run(int64_t begin, int64_t end, int64_t) {
    if (waiting > 0) return --waiting, begin;
    const int64_t stopped = bits.run(begin, end);
    if (stopped > begin)
      wait = 1;
    else
      waiting = wait, wait = std::min<int64_t>(2 * wait, 32);
    return stopped;
  }

  Bits bits;
  int64_t wait = 1, waiting = 0;  // calls
};

#endif

template <class Code, class Use>
void with_bound(const Search& job, const Use& use) {
#if defined(DRQ_BITS)
  if (Bits::takes(job)) return use(Type<BitsInLists>{});
#endif
  static_cast<void>(job);
  use(Type<NoBound>{});
}

#endif

// The nearest lists of one query at a time.
struct Nearest {
  explicit Nearest(const Lists& lists) : lists(lists), padded((lists.L + kWidth - 1) / kWidth * kWidth), costs(padded) {
    keys.reserve(enough());
  }

  // The `probes` nearest lists as keys of (distance, list), nearest first.
  const Key* choose(int metric, const float* products, float constant) {
    for (int64_t l = 0; l < lists.L; ++l)
      costs.data[l] = metric == kL2 ? (lists.norms[l] - 2 * products[l]) + constant : 0.0f - products[l];
    for (int64_t l = lists.L; l < padded; ++l) costs.data[l] = std::numeric_limits<float>::quiet_NaN();
    collect(lists.probes < lists.L ? limit() : std::numeric_limits<float>::quiet_NaN());
    std::sort(keys.begin(), keys.end());
    return keys.data();
  }

 private:
  // Few more than `probes`: to find so many takes less time than to find exactly as many.
  int64_t enough() const { return lists.probes + lists.probes / 8 + 4; }

  int64_t count_within(float limit) const {
    const Floats most = Floats::all(limit);
    int64_t count = 0;
    for (int64_t l = 0; l < padded; l += kWidth)
      count += __builtin_popcount(less_equal(Floats::load(costs.data + l), most));
    return count;
  }

  // A cost that few more than `probes` lists do not exceed, by bisection; NaN if there is none.
  float limit() const {
    Floats least = Floats::load(costs.data), most = least;
    for (int64_t l = kWidth; l < padded; l += kWidth) {
      least = min(Floats::load(costs.data + l), least);
      most = max(Floats::load(costs.data + l), most);
    }
    float low = smallest(least), high = -smallest(Floats::all(0) - most);
    if (!(high - low < std::numeric_limits<float>::infinity()) || count_within(high) < lists.probes)
      return std::numeric_limits<float>::quiet_NaN();
    for (;;) {
      const float middle = low + (high - low) / 2;
      if (!(low < middle && middle < high)) return high;
      const int64_t count = count_within(middle);
      if (count < lists.probes)
        low = middle;
      else if (count <= enough())
        return middle;
      else
        high = middle;
    }
  }

  // Fills keys with the lists within the limit, or with all if it is NaN.
  void collect(float limit) {
    keys.clear();
    for (int64_t first = 0; first < lists.L; first += kWidth) {
      unsigned wanted = not_above(Floats::load(costs.data + first), Floats::all(limit));
      for (; wanted; wanted &= wanted - 1) {
        const int64_t list = first + __builtin_ctz(wanted);
        if (list < lists.L) keys.push_back(Key{key_of(costs.data[list], list)});
      }
    }
  }

  const Lists& lists;
  const int64_t padded;
  Buffer<float> costs;  // [padded]  NaN beyond L
  std::vector<Key> keys;
};

// Queries of one thread, some at a time. The codes of a list are read once for all queries that look at it, except that
// each query first looks at its nearest list, which gives it a threshold.
template <class Code, class Scan>
class ByLists {
 public:
  ByLists(const Part& part, const Lists& lists)
      : part(part),
        lists(lists),
        together(most_together(part, lists)),
        tables(part, together),
        job(part.job),
        constants(new float[together]),
        capacity(Reservoir::capacity_for(part.job.k, part.job.N)),
        kept(new Key[(together + 1) * capacity]),
        found(new Reservoir[together]),
        probed(new Pair[together * lists.probes]),
        order(together > 1 ? new Pair[together * lists.probes] : nullptr),
        nexts(together > 1 ? new int64_t[lists.L + 1] : nullptr) {
    job.constants = constants.get();
    scans.reserve(together);
    for (int64_t i = 0; i < together; ++i) {
      found[i] = {part.job.k, capacity, kept.get() + i * capacity, kept.get() + together * capacity};
      found[i].any_order = true;
      found[i].sorted = part.job.k <= kMostSorted;
      scans.emplace_back(job);
    }
  }

  void run() {
    for (int64_t q = part.first_query; q < part.last_query; q += together) {
      const int64_t count = std::min(together, part.last_query - q);
      start(q, count);
      if (count == 1) {
        scan_all(probed.get(), lists.probes);
      } else {
        scan_ranks(count, 0, std::min<int64_t>(1, lists.probes));
        scan_ranks(count, 1, lists.probes);
      }
      for (int64_t i = 0; i < count; ++i) part.counts[q + i] = found[i].finish(part.keys + (q + i) * job.k);
    }
  }

 private:
  static constexpr int64_t kTogether = 256, kMostPairs = 1 << 20, kMostKept = 1 << 22, kMostSorted = 48;
  static constexpr int64_t kFirst = 64, kScored = 2048;  // codes that are scored before a bound is tried, and again

  struct Pair {
    uint32_t query, list;
    float constant;
  };

  static int64_t most_together(const Part& part, const Lists& lists) {
    const int64_t queries = part.last_query - part.first_query;
    const int64_t least =
        std::min({queries, kTogether, kMostPairs / std::max<int64_t>(1, lists.probes), kMostKept / part.job.k});
    return std::max<int64_t>(1, least);
  }

  // The tables of queries q..q + count and the lists that they look at.
  void start(int64_t q, int64_t count) {
    const Search some = tables.of(q, count);
    job.Q = count, job.table = some.table, job.lengths = some.lengths;
    constexpr int64_t kRows = 8;  // whose products are computed at a time
    Nearest nearest(lists);
    Buffer<float> computed(part.queries == nullptr ? 0 : std::min(kRows, count) * lists.L);
    for (int64_t i = 0; i < count; ++i) {
      if (part.queries != nullptr && i % kRows == 0)
        fill_products(job, *part.queries, lists, q + i, q + std::min(i + kRows, count), computed.data);
      const float* const products =
          part.queries != nullptr ? computed.data + i % kRows * lists.L : lists.products + (q + i) * lists.L;
      choose(i, products, some.constants[i], nearest);
      constants[i] = some.constants[i];
      found[i].clear(ceiling_of(some, i));
      scans[i].start(i, found[i]);
    }
  }

  void choose(int64_t i, const float* products, float constant, Nearest& nearest) {
    const Key* const keys = nearest.choose(job.metric, products, constant);
    for (int64_t rank = 0; rank < lists.probes; ++rank) {
      const int64_t list = position_of(keys[rank].bits);
      const float own = job.metric == kL2 ? constant - 2 * products[list] : constant + products[list];
      probed[i * lists.probes + rank] = {static_cast<uint32_t>(i), static_cast<uint32_t>(list), own};
    }
  }

  // Scans what `count` queries have at the ranks begin..end, in the order of the lists.
  void scan_ranks(int64_t count, int64_t begin, int64_t end) {
    std::fill(nexts.get(), nexts.get() + lists.L + 1, 0);
    const auto each_pair = [&](auto use) {
      for (int64_t i = 0; i < count; ++i)
        for (int64_t rank = begin; rank < end; ++rank) use(probed[i * lists.probes + rank]);
    };
    each_pair([&](const Pair& pair) { ++nexts[pair.list + 1]; });
    for (int64_t l = 0; l < lists.L; ++l) nexts[l + 1] += nexts[l];
    each_pair([&](const Pair& pair) { order[nexts[pair.list]++] = pair; });
    scan_all(order.get(), count * (end - begin));
  }

  void scan_all(const Pair* pairs, int64_t count) {
    for (int64_t i = 0; i < count; ++i) scan(pairs[i], lists.starts[pairs[i + 1 < count ? i + 1 : i].list]);
  }

  // One query in one list; `next` is the first row of the list that comes next.
  void scan(const Pair& pair, int64_t next) {
    const int64_t q = pair.query, begin = lists.starts[pair.list], end = lists.starts[pair.list + 1];
    constants[q] = pair.constant;
    Reservoir& best = found[q];
    int64_t at = begin;
    if (!best.full) {
      at = first_end(begin, end);
      score(q, begin, at);
    }
    while (at < end) {
      if (!best.full || best.count - best.k > best.k / 4) best.shrink();
      if (best.full) at = scans[q].run(at, end, next == begin ? at : next);
      const int64_t stop = std::min(end, at + kScored);
      score(q, at, stop);
      at = stop;
    }
  }

  // How far codes are scored until a bound is of use: for so many codes that the filter keeps.
  int64_t first_end(int64_t begin, int64_t end) const {
    const int64_t wanted = std::max(kFirst, 4 * job.k);
    if (job.keep == nullptr) return std::min(end, begin + wanted);
    int64_t at = begin;
    for (int64_t kept = 0; at < end && kept < wanted; ++at) kept += job.keep[at] != 0;
    return at;
  }

  // Scores begin..end by the definition. Terms pay if they are used more often than they are computed.
  void score(int64_t q, int64_t begin, int64_t end) {
    Reservoir& best = found[q];
    if (job.keep == nullptr && end - begin >= job.K) {
      if (!terms) terms.reset(new Buffer<float>(job.M * job.K));
      return scan_floats<Code>(job, q, begin, end, terms->data, best);
    }
    DRQ_COUNT(floats, end - begin);
    for (int64_t n = begin; n < end; ++n) {
      if (job.keep != nullptr && !job.keep[n]) continue;
      const float cost = cost_of<Code>(job, q, n);
      if (best.wants(cost)) best.add(cost, n);
    }
  }

  const Part& part;
  const Lists& lists;
  const int64_t together;
  Tables tables;
  Search job;                                // of the queries at hand
  const std::unique_ptr<float[]> constants;  // [together]  of each query in the list that it looks at
  std::unique_ptr<Buffer<float>> terms;      // [M, K]  made when it is needed
  const int64_t capacity;
  const std::unique_ptr<Key[]> kept;  // [together + 1, capacity]
  const std::unique_ptr<Reservoir[]> found;
  std::vector<Scan> scans;
  const std::unique_ptr<Pair[]> probed;    // [together, probes]  nearest first
  const std::unique_ptr<Pair[]> order;     // the same by lists
  const std::unique_ptr<int64_t[]> nexts;  // [L + 1]
};

template <class Code>
void scan_lists_of(const Part& part, const Lists& lists) {
  with_bound<Code>(part.job, [&](auto type) { ByLists<Code, typename decltype(type)::type>(part, lists).run(); });
}

}  // namespace

void scan_lists(const Part& part, const Lists& lists) {
  part.job.wide ? scan_lists_of<uint16_t>(part, lists) : scan_lists_of<uint8_t>(part, lists);
}

}  // namespace DRQ_ISA
}  // namespace drq
