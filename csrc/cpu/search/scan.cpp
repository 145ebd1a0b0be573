// Chooses between the scans for some queries and codes. Compiled once per instruction set; see simd.h.
#include <memory>

#include "cpu/search/batch.h"
#include "cpu/search/bits.h"
#include "cpu/search/few.h"
#include "cpu/search/floats.h"
#include "cpu/search/one.h"
#include "cpu/search/sample.h"
#include "cpu/search/tables.h"

namespace drq {
namespace DRQ_ISA {
namespace {

// Whether bounds can pay for the time their tables take.
bool by_bytes(const Search& job, int64_t count) {
  return count > 4 * seeds_for(job.k) && count > 2 * job.K && job.M <= kMaxLevels;
}

// The number of queries from which a batch is faster than one after the other. That of NEON is the ratio of
// instructions.
#if defined(DRQ_NEON)
constexpr int64_t kWorthABatch = 10;
#else
constexpr int64_t kWorthABatch = 20;
#endif
int64_t worth_a_batch(const Search& job) { return is_quick(job) ? kWorthABatch : 3; }

// One query after the other. With several, each scans a block of codes before the next block is read, which is in cache
// then.
template <class Code>
class OneByOne {
 public:
  OneByOne(const Part& part, bool bytes)
      : part(part),
        bytes(bytes),
        together(bytes && part.taken == nullptr && takes_one(part.job) ? kTogether : 1),
        found(part.job.k, part.end - part.begin, together),
        tables(part, together),
        terms(part.job.M * part.job.K),
        job(part.job),
        bits(job),
        few(job) {}

  void run() {
    for (int64_t q = part.first_query; q < part.last_query; q += together) {
      const int64_t count = std::min(together, part.last_query - q);
      job = tables.of(q, count);
      for (int64_t i = 0; i < count; ++i) found.best[i].clear();
      start(0);
      if (part.taken != nullptr) {
        for (int64_t at; (at = part.taken[q].fetch_add(kTaken)) < part.end;)
          scan(0, at, std::min(at + kTaken, part.end));
      } else {
        const int64_t step = count > 1 ? kTaken : part.end - part.begin;
        for (int64_t at = part.begin; at < part.end; at += step)
          for (int64_t i = 0; i < count; ++i) {
            if (count > 1) start(i);
            scan(i, at, std::min(at + step, part.end));
          }
      }
      for (int64_t i = 0; i < count; ++i) part.counts[q + i] = found.best[i].finish(part.keys + (q + i) * job.k);
    }
  }

 private:
  static constexpr int64_t kTogether = 16;

  void start(int64_t q) {
    scanned = 0;
    bits.start(q, found.best[q]);
    few.start(q, found.best[q]);
  }

  void scan(int64_t q, int64_t at, int64_t end) {
    Reservoir& best = found.best[q];
    if (bytes) {
      if (!best.full) {
        const int64_t begin = at;
        at = seeds_end(job, begin, end);
        scan_floats<Code>(job, q, begin, at, terms.data, best);
        scanned += at - begin;
      }
      at = scan_one(job, q, at, end, best);
      while (at < end) {
        const int64_t next = std::min(end, at + std::max(kFewest, (kGrowth - 1) * scanned));
        scanned += next - at;
        at = bits.run(at, next);
        at = few.run(at, next);
        scan_floats<Code>(job, q, at, next, terms.data, best);
        at = next;
      }
    }
    scan_floats<Code>(job, q, at, end, terms.data, best);
  }

  const Part& part;
  const bool bytes;
  const int64_t together;
  Reservoirs found;
  Tables tables;
  Buffer<float> terms;
  Search job;  // of the queries at hand
  Bits bits;
  Few<Code> few;
  int64_t scanned = 0;  // codes of the query at hand
};

// kLanes queries at a time, for queries from q on of which at least `least` are left; returns where it stopped.
template <class Code, int kLanes>
int64_t scan_batches(const Part& part, const Sample<Code>* sample, int64_t q, int64_t least) {
  if (part.last_query - q < least) return q;
  const int64_t lanes = std::min<int64_t>(kLanes, part.last_query - q), count = part.end - part.begin;
  Reservoirs found(part.job.k, count, lanes);
  Tables tables(part, lanes);
  const auto batch = std::make_unique<Batch<Code, kLanes>>(part.job, part.bins, count);
  std::unique_ptr<Guess<Code, kLanes>> guess;
  if (sample != nullptr) guess.reset(new Guess<Code, kLanes>(*sample, part.bins != nullptr));
  for (; part.last_query - q >= least; q += std::min(lanes, part.last_query - q)) {
    const Search job = tables.of(q, std::min(lanes, part.last_query - q));
    batch->run(job, part.begin, part.end, found.best, guess ? guess->thresholds(job) : nullptr);
    for (int64_t lane = 0; lane < job.Q; ++lane)
      part.counts[q + lane] = found.best[lane].finish(part.keys + (q + lane) * job.k);
  }
  return q;
}

template <class Code>
void scan_part(const Part& part) {
  const int64_t count = part.end - part.begin, least = worth_a_batch(part.job);
  const bool bytes = by_bytes(part.job, count);
  int64_t q = part.first_query;
  if (bytes && part.last_query - q >= least) {
    std::unique_ptr<Sample<Code>> sample;
    if (Sample<Code>::pays(part.job, count)) sample.reset(new Sample<Code>(part.job, part.bins, part.begin, part.end));
#if defined(DRQ_AVX512) || defined(DRQ_NEON)
    q = scan_batches<Code, 64>(part, sample.get(), q, 33);
#endif
    q = scan_batches<Code, 32>(part, sample.get(), q, least);
  }
  if (q == part.last_query) return;
  Part rest = part;
  rest.first_query = q;
  OneByOne<Code>(rest, bytes).run();
}

}  // namespace

bool in_batches(const Search& job) { return job.Q >= worth_a_batch(job) && by_bytes(job, job.N); }

void scan(const Part& part) { part.job.wide ? scan_part<uint16_t>(part) : scan_part<uint8_t>(part); }

}  // namespace DRQ_ISA
}  // namespace drq
