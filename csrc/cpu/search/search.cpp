// Divides queries or codes among threads, scans with the chosen instruction set and merges the results.
#include "search.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/search/count.h"
#include "cpu/search/key.h"
#include "cpu/search/part.h"
#include "isa.h"

namespace drq {

#ifdef DRQ_COUNT_SCANS
Counts counts;
#endif

DRQ_DECLARE_COPIES(void, scan, const Part& part)
DRQ_DECLARE_COPIES(void, scan_lists, const Part& part, const Lists& lists)
DRQ_DECLARE_COPIES(bool, in_batches, const Search& job)
DRQ_DECLARE_COPIES(NormRange, norm_range, const Search& job, int64_t begin, int64_t end)
DRQ_DECLARE_COPIES(void, place_bins, const Search& job, NormRange range, Bins& bins)
DRQ_DECLARE_COPIES(void, fill_bins, const Search& job, int64_t begin, int64_t end, const Bins& bins)
DRQ_DECLARE_COPIES(int64_t, fill_tables, const Search& job, const Queries& queries, int64_t begin, int64_t end,
                   float* table, float* constants, float* lengths)

namespace {

// Rough times in seconds: to make a thread worth waking, of a look-up, and of a code in lists. Those of NEON are
// guessed from counts of instructions.
constexpr double kThread = 60e-6;
#ifdef DRQ_ARM
constexpr double kLookUp[kIsaCount] = {230e-12, 60e-12, 50e-12}, kCode[kIsaCount] = {4e-9, 1e-9, 1e-9};
#else
constexpr double kLookUp[kIsaCount] = {230e-12, 110e-12, 15e-12}, kCode[kIsaCount] = {4e-9, 1e-9, 0.2e-9};
#endif

// How the work is divided: `groups` of queries, each over `ranges` of codes.
struct Division {
  Division(const Search& job, int isa, int threads, bool in_batches) {
    constexpr double kQuery = 3e-6;  // seconds that a query takes besides
    // With small k, half a batch of queries takes about as long as a whole one, but half of the codes take half as
    // long. With large k, ranges of codes would each have to find k.
    constexpr int64_t kLeastRange = 1 << 15;
    const int64_t least_batch = job.k < 64 ? 32 : 16;
    const double time = job.Q * (kQuery + kLookUp[isa] * static_cast<double>(job.N * job.M));
    const int64_t parts = std::max<int64_t>(1, static_cast<int64_t>(std::min<double>(threads, time / kThread)));
    const bool even = job.Q % parts == 0 || job.Q >= 4 * parts || job.N < parts * kLeastRange;
    groups = std::min(parts, std::max<int64_t>(1, in_batches ? job.Q / least_batch : even ? job.Q : 1));
    ranges = std::max<int64_t>(1, std::min(parts / groups, job.N / kLeastRange));
  }
  int64_t groups, ranges;
};

// Assigns all norms to bins, by as many threads as are worth starting.
std::unique_ptr<uint8_t[]> bin_norms(const Search& job, int isa, int threads, Bins& bins) {
  constexpr int64_t kLeast = 1 << 18;  // norms that are worth a thread
  std::unique_ptr<uint8_t[]> memory(new uint8_t[job.N]);
  bins.bins = memory.get();
  const int parts = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, job.N / kLeast)));
  std::vector<NormRange> found(parts);
  parallel_for(job.N, parts, [&](int64_t begin, int64_t end, int64_t part) {
    found[part] = DRQ_CHOOSE_COPY(norm_range, isa)(job, begin, end);
  });
  NormRange range = found[0];
  for (const NormRange& each : found) {
    if (!(each.low >= range.low)) range.low = each.low;  // NaN wins
    if (range.low != range.low) break;
    range.high = std::max(range.high, each.high);
  }
  DRQ_CHOOSE_COPY(place_bins, isa)(job, range, bins);
  parallel_for(job.N, parts,
               [&](int64_t begin, int64_t end, int64_t) { DRQ_CHOOSE_COPY(fill_bins, isa)(job, begin, end, bins); });
  return memory;
}

// Writes the results of one query, best first, from up to k keys in order.
void write(const Search& job, int64_t q, const uint64_t* keys, int64_t count) {
  float* scores = job.scores + q * job.k;
  int64_t* positions = job.positions + q * job.k;
  for (int64_t i = 0; i < count; ++i) {
    scores[i] = turned(job.metric, cost_of(keys[i]));
    positions[i] = position_of(keys[i]);
  }
  std::fill(scores + count, scores + job.k, turned(job.metric, std::numeric_limits<float>::infinity()));
  std::fill(positions + count, positions + job.k, -1);
}

// The k best of what all ranges of codes found for one query, into the keys of the first.
void merge(const Search& job, int64_t q, uint64_t* keys, int64_t* counts, int64_t ranges) {
  std::vector<uint64_t> all;
  for (int64_t r = 0; r < ranges; ++r) {
    const uint64_t* found = keys + (r * job.Q + q) * job.k;
    all.insert(all.end(), found, found + counts[r * job.Q + q]);
    std::inplace_merge(all.begin(), all.end() - counts[r * job.Q + q], all.end());
  }
  counts[q] = std::min<int64_t>(job.k, all.size());
  std::copy(all.begin(), all.begin() + counts[q], keys + q * job.k);
}

}  // namespace

void pack_codebook(const float* codebook, float* columns, int64_t K, int64_t D) {
  for (int64_t panel = 0; panel < K; panel += kPanel)
    for (int64_t d = 0; d < D; ++d)
      for (int64_t k = panel; k < panel + kPanel; ++k) *columns++ = k < K ? codebook[k * D + d] : 0;
}

int64_t search_cpu(const Search& given, const Queries& queries, int isa, int threads) {
  Search job = given;
  const bool in_batches = DRQ_CHOOSE_COPY(in_batches, isa)(job), binning = in_batches && job.norms != nullptr;
  const Division division(job, isa, threads, in_batches);
  const int64_t groups = division.groups, ranges = division.ranges;

  const std::unique_ptr<uint64_t[]> keys(new uint64_t[ranges * job.Q * job.k]);
  const std::unique_ptr<int64_t[]> counts(new int64_t[ranges * job.Q]);
  Bins bins;
  std::unique_ptr<uint8_t[]> binned;
  if (binning) binned = bin_norms(job, isa, static_cast<int>(groups * ranges), bins);
  // If all threads work on one query, each takes the next block of codes when it is ready: a late one takes fewer.
  const bool in_turn = ranges > 1 && !in_batches;
  const std::unique_ptr<std::atomic<int64_t>[]> taken(in_turn ? new std::atomic<int64_t>[job.Q]() : nullptr);
  // Threads that divide the codes share the tables. Otherwise each computes those of its queries as it needs them.
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> odd{kNone};
  bool to_compute = queries.rows != nullptr;
  std::unique_ptr<float[]> tables;
  if (to_compute && ranges > 1) {
    tables.reset(new float[job.Q * (job.T + 2)]);
    float *const table = tables.get(), *const constants = table + job.Q * job.T, *const lengths = constants + job.Q;
    const int64_t found = DRQ_CHOOSE_COPY(fill_tables, isa)(job, queries, 0, job.Q, table, constants, lengths);
    if (found >= 0) odd = found;
    job.table = table, job.constants = constants, job.lengths = lengths, to_compute = false;
  }
  const auto scan = DRQ_CHOOSE_COPY(scan, isa);
  parallel_for(groups * ranges, static_cast<int>(groups * ranges), [&](int64_t unit, int64_t, int64_t) {
    const int64_t group = unit / ranges, range = unit % ranges;
    const int64_t first = job.Q * group / groups, last = job.Q * (group + 1) / groups;
    const int64_t begin = in_turn ? 0 : job.N * range / ranges, end = in_turn ? job.N : job.N * (range + 1) / ranges;
    scan(Part{job, to_compute ? &queries : nullptr, &odd, binning ? &bins : nullptr, first, last, begin, end,
              keys.get() + range * job.Q * job.k, counts.get() + range * job.Q, taken.get()});
    for (int64_t q = first; q < last && ranges == 1; ++q) write(job, q, keys.get() + q * job.k, counts[q]);
  });
  for (int64_t q = 0; q < job.Q && ranges > 1; ++q) {
    merge(job, q, keys.get(), counts.get(), ranges);
    write(job, q, keys.get() + q * job.k, counts[q]);
  }
  return odd == kNone ? -1 : odd.load();
}

int64_t search_lists_cpu(const Search& job, const Queries& queries, const Lists& lists, int isa, int threads) {
  constexpr double kQuery = 5e-6;  // seconds that a query takes besides
  const double codes = static_cast<double>(job.N) * lists.probes / lists.L;
  const double parts = std::min<double>(threads, job.Q * (kQuery + codes * kCode[isa]) / kThread);
  const int64_t groups = std::max<int64_t>(1, std::min(job.Q, static_cast<int64_t>(parts)));
  const std::unique_ptr<uint64_t[]> keys(new uint64_t[job.Q * job.k]);
  const std::unique_ptr<int64_t[]> counts(new int64_t[job.Q]);
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> odd{kNone};
  const auto scan_lists = DRQ_CHOOSE_COPY(scan_lists, isa);
  parallel_for(job.Q, static_cast<int>(groups), [&](int64_t first, int64_t last, int64_t) {
    const bool to_compute = queries.rows != nullptr;
    scan_lists(Part{job, to_compute ? &queries : nullptr, &odd, nullptr, first, last, 0, job.N, keys.get(),
                    counts.get(), nullptr},
               lists);
    for (int64_t q = first; q < last; ++q) write(job, q, keys.get() + q * job.k, counts[q]);
  });
  return odd == kNone ? -1 : odd.load();
}

}  // namespace drq
