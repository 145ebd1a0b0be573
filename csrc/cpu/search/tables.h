// The tables of the queries that a scan works on: given, or computed a few queries at a time.
#pragma once

#include <atomic>

#include "cpu/buffer.h"
#include "cpu/search/part.h"

namespace drq {
namespace DRQ_ISA {

// Fills table [end - begin, K], constants and, for cosine, lengths, [end - begin] each; returns the first row that has
// NaN or infinity, or -1.
int64_t fill_tables(const Search& job, const Queries& queries, int64_t begin, int64_t end, float* table,
                    float* constants, float* lengths);

// Fills products [end - begin, L] = <q', c_l> of some queries and the centroids of lists.
void fill_products(const Search& job, const Queries& queries, const Lists& lists, int64_t begin, int64_t end,
                   float* products);

namespace {

// The tables of up to `most` queries at a time, for one thread.
struct Tables {
  Tables(const Part& part, int64_t most) : part(part), memory(part.queries == nullptr ? 0 : most * (part.job.T + 2)) {}

  // The search of the queries first..first + count alone.
  Search of(int64_t first, int64_t count) {
    Search job = part.job;
    job.Q = count;
    if (job.ceilings != nullptr) job.ceilings += first;
    if (part.queries == nullptr) {
      job.table += first * job.T, job.constants += first;
      if (job.lengths != nullptr) job.lengths += first;
    } else {
      float *const table = memory.data, *const constants = table + count * job.T, *const lengths = constants + count;
      const int64_t odd = fill_tables(job, *part.queries, first, first + count, table, constants, lengths);
      if (odd >= 0) lower(*part.odd, odd);
      job.table = table, job.constants = constants, job.lengths = lengths;
    }
    return job;
  }

 private:
  static void lower(std::atomic<int64_t>& least, int64_t value) {
    for (int64_t now = least; value < now && !least.compare_exchange_weak(now, value);) continue;
  }

  const Part& part;
  Buffer<float> memory;
};

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
