// Search for k > kMaxFused: a radix select finds the k-th best key, then all keys up to it are collected and sorted.
#pragma once

#include "queue.cuh"

namespace drq {
namespace {

constexpr int64_t kDigits = 256;

// The state of a query's radix select, which finds the k-th best key digit by digit, the most significant one first.
struct Radix {
  Key bound;                 // its first digits; once `done`, the largest key that is collected
  unsigned long long below;  // how many keys are less than every key with these digits
  unsigned done;
  unsigned collected;
  unsigned histogram[kDigits];
};

// Counts the digit at `shift` of the keys that begin with the digits found so far; the counts are [digit][32], so that
// each lane has its own bank. If shift < 0, writes all keys up to the bound instead, in any order; the k best are among
// them.
template <bool kBatch>
struct Select {
  unsigned* counts;  // shared
  Key* keys;
  Radix* radix;
  Key bound;
  int shift;
  bool done;

  __device__ void take(const Scored& scored) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Key key = scored.key(i);
      if (shift < 0) {
        if (scored.valid[i] && key <= bound) keys[atomicAdd(&radix->collected, 1u)] = key;
      } else if (scored.valid[i] && !done && (shift == 56 || (key ^ bound) >> (shift + 8) == 0)) {
        atomicAdd(counts + (key >> shift) % kDigits * kWarp + threadIdx.x % kWarp, 1u);
      }
    }
  }

  __device__ void add_up_counts(bool active) {
    __syncthreads();  // all keys are counted
#pragma unroll 1
    for (int digit = threadIdx.x / kWarp; digit < kDigits; digit += kWarps) {
      unsigned total = counts[digit * kWarp + threadIdx.x % kWarp];
      if (!kBatch)
        for (int i = kWarp / 2; i > 0; i /= 2) total += __shfl_xor_sync(~0u, total, i);
      if (active && total > 0 && (kBatch || threadIdx.x % kWarp == 0)) atomicAdd(radix->histogram + digit, total);
    }
  }
};

// Math:     k > kMaxFused: one digit of a radix select over the keys (cost, position), or the keys up to its bound
// Tiling:   as queue_kernel; a block returns at once if all its queries are done
// Memory:   table and codes as queue_kernel, the keys computed anew for each digit and never stored, so the workspace
//           grows with k alone; counts [256][32] in shared memory, lane i in bank i
// Numerics: integer counts; the set of keys does not depend on the order of the blocks
template <class Code, bool kBatch, bool kShared, bool kLists>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) select_kernel(Plan plan) {
  extern __shared__ float4 dynamic[];
  unsigned* counts = reinterpret_cast<unsigned*>(dynamic);
  float* shared = reinterpret_cast<float*>(counts + kDigits * kWarp);
  const Lane lane = lane_of<kBatch>(plan);
  Radix* radix = plan.radix + (lane.active ? lane.query : 0);
  Key* keys = plan.keys + lane.query * plan.capacity;
  Select<kBatch> select{counts, keys, radix, radix->bound, plan.shift, radix->done != 0};
  const bool counting = plan.shift >= 0;
  if (__syncthreads_and(counting && (select.done || !lane.active))) return;
  for (int i = threadIdx.x; i < kDigits * kWarp && counting; i += kThreads) counts[i] = 0;
  scan<Code, kBatch, kShared, kLists>(plan, lane, shared, select);
  if (counting) select.add_up_counts(lane.active);
}

// Math:     the digit of the k-th best key from the counts of all digits; done once all keys up to it fit in `capacity`
// Tiling:   one block owns one query, one thread one digit
// Memory:   256 counts are read, and cleared for the next digit
// Numerics: integers
__global__ void __launch_bounds__(kDigits) digit_kernel(Plan plan) {
  __shared__ unsigned long long sums[kDigits];
  Radix& radix = plan.radix[blockIdx.x];
  const int digit = threadIdx.x;
  const unsigned count = radix.histogram[digit];
  radix.histogram[digit] = 0;
  if (radix.done) return;
  const unsigned long long wanted = plan.job.k - radix.below, room = plan.capacity - radix.below;
  unsigned long long sum = count;
  for (int step = 1; step < kDigits; step *= 2) {
    sums[digit] = sum;
    __syncthreads();  // the sums are there
    if (digit >= step) sum += sums[digit - step];
    __syncthreads();  // the sums have been read
  }
  sums[digit] = sum;
  __syncthreads();                              // the total is there
  const Key rest = kNone >> (56 - plan.shift);  // this digit and all after it
  if (sums[kDigits - 1] <= room) {
    if (digit == 0) {
      radix.bound |= rest;
      radix.done = 1;
    }
  } else if (sum - count < wanted && wanted <= sum) {
    radix.bound |= static_cast<Key>(digit) << plan.shift;
    radix.below += sum - count;
    if (sum <= room) {
      radix.bound |= rest >> 8;
      radix.done = 1;
    }
  }
}

// Math:     stages of a bitonic network that stay within kSortKeys keys, of [Q, capacity]
// Tiling:   one block owns kSortKeys keys
// Memory:   keys are read and written once, coalesced, and sorted in shared memory
// Numerics: integers
__global__ void __launch_bounds__(kThreads) sort_kernel(Key* keys, int64_t capacity, int64_t from, int64_t to) {
  __shared__ Key sorted[kSortKeys];
  const int n = static_cast<int>(min(capacity, kSortKeys));
  keys += static_cast<int64_t>(blockIdx.x) * n;
  for (int i = threadIdx.x; i < n; i += kThreads) sorted[i] = keys[i];
  sort_keys<Sorters<false>>(sorted, n, static_cast<int64_t>(blockIdx.x) * n % capacity, from, to);
  for (int i = threadIdx.x; i < n; i += kThreads) keys[i] = sorted[i];
}

// Math:     one step of a stage of the bitonic network whose partners are at least kSortKeys apart
// Tiling:   one thread owns one pair
// Memory:   keys are read and written once, coalesced
// Numerics: integers
__global__ void __launch_bounds__(kThreads) exchange_kernel(Key* keys, int64_t capacity, int64_t size, int64_t stride) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t low = 2 * i - (i & (stride - 1));
  order(keys[low], keys[low + stride], (low % capacity & size) == 0);
}

// Math:     results from sorted keys [Q, capacity]
// Tiling:   one thread owns one result
// Memory:   one key and one code are read, one result is written
// Numerics: score_at
__global__ void __launch_bounds__(kThreads) emit_kernel(Plan plan) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t q = i / plan.job.k, rank = i % plan.job.k;
  if (q < plan.job.Q) emit(plan, q, rank, plan.keys[q * plan.capacity + rank]);
}

}  // namespace
}  // namespace drq
