// What search.cpp hands to the scan of one instruction set.
#pragma once

#include <algorithm>
#include <atomic>

#include "search.h"

namespace drq {

// Codes that a thread takes at a time where all threads work on one query.
constexpr int64_t kTaken = 1 << 16;

struct NormRange {
  float low, high;  // low is NaN if any norm is
};

// The norms of all codes by 256 bins, so that a norm can be looked up like one more level.
struct Bins {
  uint8_t* bins;                // [N]
  float low[256], high[256];    // bounds of the norms in each bin
  float edges[4], per_unit[3];  // three stretches of norms, with so many bins per unit
  bool divisible;               // else all norms are in bin 0
};

// Some queries and some codes, for one thread.
struct Part {
  const Search& job;
  const Queries* queries;     // whose tables are to be computed; null where the job has them
  std::atomic<int64_t>* odd;  // lowered to the first query that has NaN or infinity, if `queries` is given
  const Bins* bins;           // for batches with a metric that has norms, else null
  int64_t first_query, last_query;
  int64_t begin, end;           // codes
  uint64_t* keys;               // [Q, k]  the best of these codes for these queries, see key.h, in order
  int64_t* counts;              // [Q]     how many those are
  std::atomic<int64_t>* taken;  // [Q]     how many codes of each query threads have taken; null if they share none
};

}  // namespace drq
