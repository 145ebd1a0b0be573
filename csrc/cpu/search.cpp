// Shares queries or codes out among threads, scans with the instruction set at hand and merges what they found.
#include "search.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "cpu/key.h"
#include "cpu/parallel.h"
#include "cpu/part.h"
#include "isa.h"

namespace drq {

DRQ_DECLARE_COPIES(void, scan, const Part& part)
DRQ_DECLARE_COPIES(void, fill_bins, const Search& job, Bins& bins)
DRQ_DECLARE_COPIES(bool, in_batches, const Search& job)
DRQ_DECLARE_COPIES(int64_t, queries_at_a_time, )
DRQ_DECLARE_COPIES(int64_t, fill_tables, const Search& job, const Queries& queries, int64_t begin, int64_t end,
                   float* table, float* constants, float* lengths)

namespace {

// Codes, and look-ups, that are worth a thread, which takes some 50 us to wake up.
constexpr int64_t kLeastRange = 1 << 15, kLeastWork[kIsaCount] = {1 << 18, 1 << 19, 1 << 23};

// Writes the results of one query, best first, from up to k keys in order.
void write(const Search& job, int64_t q, const uint64_t* keys, int64_t count) {
  float* scores = job.scores + q * job.k;
  int64_t* positions = job.positions + q * job.k;
  for (int64_t i = 0; i < count; ++i) {
    scores[i] = job.metric == kL2 ? cost_of(keys[i]) : 0.0f - cost_of(keys[i]);
    positions[i] = position_of(keys[i]);
  }
  const float worst = std::numeric_limits<float>::infinity();
  std::fill(scores + count, scores + job.k, job.metric == kL2 ? worst : -worst);
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
  // Many queries are shared out in whole batches, of few queries the codes are.
  const int64_t batch = DRQ_CHOOSE_COPY(queries_at_a_time, isa)(), batches = (job.Q + batch - 1) / batch;
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(threads, job.N * job.Q * job.M / kLeastWork[isa]));
  const int64_t groups = batches >= parts ? parts : 1;
  const int64_t ranges = groups > 1 ? 1 : std::max<int64_t>(1, std::min(parts, job.N / kLeastRange));

  const std::unique_ptr<uint64_t[]> keys(new uint64_t[ranges * job.Q * job.k]);
  const std::unique_ptr<int64_t[]> counts(new int64_t[ranges * job.Q]);
  std::unique_ptr<uint8_t[]> binned;
  Bins bins;
  const bool in_batches = DRQ_CHOOSE_COPY(in_batches, isa)(job), binning = in_batches && job.norms != nullptr;
  if (binning) {
    binned.reset(new uint8_t[job.N]);
    bins.bins = binned.get();
    DRQ_CHOOSE_COPY(fill_bins, isa)(job, bins);
  }
  // One query at a time, threads take codes in turn: a thread that starts late takes fewer.
  const bool in_turn = ranges > 1 && !in_batches;
  const std::unique_ptr<std::atomic<int64_t>[]> taken(in_turn ? new std::atomic<int64_t>[job.Q]() : nullptr);
  // Threads that share out the codes share the tables, too. Else each computes those of its queries as it needs them.
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> odd{kNone};
  bool to_compute = queries.rows != nullptr;
  std::unique_ptr<float[]> tables;
  if (to_compute && ranges > 1) {
    tables.reset(new float[job.Q * (job.K + 2)]);
    float *const table = tables.get(), *const constants = table + job.Q * job.K, *const lengths = constants + job.Q;
    const int64_t found = DRQ_CHOOSE_COPY(fill_tables, isa)(job, queries, 0, job.Q, table, constants, lengths);
    if (found >= 0) odd = found;
    job.table = table, job.constants = constants, job.lengths = lengths, to_compute = false;
  }
  const auto scan = DRQ_CHOOSE_COPY(scan, isa);
  parallel_for(groups * ranges, static_cast<int>(groups * ranges), [&](int64_t unit, int64_t, int64_t) {
    const int64_t group = unit / ranges, range = unit % ranges;
    const int64_t first = std::min(job.Q, batches * group / groups * batch);
    const int64_t last = std::min(job.Q, batches * (group + 1) / groups * batch);
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

}  // namespace drq
