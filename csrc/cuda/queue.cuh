// Search for k <= kMaxFused: each block keeps the k best keys of its slice, and a second kernel merges the slices.
#pragma once

#include "scan.cuh"

namespace drq {
namespace {

constexpr int64_t kMaxFused = 256;   // k up to which each block keeps its k best
constexpr int64_t kSortKeys = 1024;  // sorted at a time in shared memory
constexpr int kRankKeys = 128;       // up to which each key is compared with all others

// Threads that sort together: a warp, or the block.
template <bool kWarpAlone>
struct Sorters {
  static __device__ int thread() { return kWarpAlone ? threadIdx.x % kWarp : threadIdx.x; }
  static __device__ int count() { return kWarpAlone ? kWarp : kThreads; }
  static __device__ void sync() {
    if (kWarpAlone)
      __syncwarp();
    else
      __syncthreads();
  }
};

__device__ inline void order(Key& a, Key& b, bool ascending) {
  if ((a > b) == ascending) {
    const Key first = b;
    b = a;
    a = first;
  }
}

// The bitonic network's stages from..to for keys `base`..`base` + n - 1 of a longer list; n is a power of two.
template <class Group>
__device__ void sort_keys(Key* keys, int n, int64_t base, int64_t from, int64_t to) {
  for (int64_t size = from; size <= to; size *= 2) {
    for (int stride = static_cast<int>(min(size, static_cast<int64_t>(n)) / 2); stride > 0; stride /= 2) {
      Group::sync();  // the step before is done
#pragma unroll 1
      for (int i = Group::thread(); i < n / 2; i += Group::count()) {
        const int low = 2 * i - (i & (stride - 1));
        order(keys[low], keys[low + stride], ((base + low) & size) == 0);
      }
    }
  }
  Group::sync();  // all keys are in order
}

// How many of `count` distinct keys are smaller: the place of a key among them. For few keys this takes fewer
// instructions than a network, and no barriers.
__device__ inline int rank_of(Key key, const Key* keys, int count) {
  int place = 0;
#pragma unroll 4
  for (int i = 0; i < count; ++i) place += keys[i] < key;
  return place;
}

// The best keys so far of each of the block's queries, `capacity` of them at most, in no order.
template <bool kBatch>
struct Queues {
  Key* keys;     // [queries, capacity]
  Key* scratch;  // shared, kSortKeys of them
  int* count;    // shared [queries]; exceeds the capacity while keys that did not fit wait
  Key* bound;    // shared [queries]: the k-th best, kNone as long as there are fewer
  int capacity, k;
  int mine;     // this lane's query
  Key limit;    // its bound
  float worst;  // the cost in it; NaN as long as there is no limit, and no cost compares above NaN

  __device__ void clear() {
    if (threadIdx.x < (kBatch ? kWarp : 1)) {
      count[threadIdx.x] = 0;
      bound[threadIdx.x] = kNone;
    }
    limit = kNone;
    worst = cost_of(kNone);
    __syncthreads();  // the queues are empty
  }

  // Most codes are worse than the k-th best, which one comparison of costs shows.
  __device__ void take(const Scored& scored) {
    Key key[kRows];
    bool waiting[kRows], any = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) any |= waiting[i] = scored.valid[i] && !(scored.cost[i] > worst);
    if (any)
      for (int i = 0; i < kRows; ++i) key[i] = scored.key(i);
    offer(key, waiting, any);
  }

  // A thread that finds its queue full waits until the queue has been cut to its k best keys, and tries again.
  __device__ void offer(const Key (&key)[kRows], bool (&waiting)[kRows], bool any) {
    bool full;
    do {
      full = false;
      if (any) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (!waiting[i] || key[i] >= limit) continue;
          const int slot = atomicAdd(count + mine, 1);
          waiting[i] = slot >= capacity;
          if (!waiting[i]) keys[static_cast<int64_t>(mine) * capacity + slot] = key[i];
          full |= waiting[i];
        }
      }
      any = full;
      full = __syncthreads_or(full);
      if (full) cut((k + capacity) / 2);
    } while (full);
  }

  // Leaves the k best, sorted, in every queue that has more than `enough` keys.
  __device__ void cut(int enough) {
    using Group = Sorters<kBatch>;
    const int sorter = kBatch ? threadIdx.x / kWarp : 0;
    const int sorters = kBatch ? min(kWarps, static_cast<int>(kSortKeys) / capacity) : 1;
    Key* sorted = scratch + sorter * capacity;
    for (int q = sorter; q < (kBatch ? kWarp : 1) && sorter < sorters; q += sorters) {
      const int there = min(count[q], capacity);
      if (there <= enough) continue;
      Key* queue = keys + static_cast<int64_t>(q) * capacity;
#pragma unroll 1  // registers are for the scan
      for (int i = Group::thread(); i < capacity; i += Group::count()) sorted[i] = i < there ? queue[i] : kNone;
      const bool few = capacity <= kRankKeys;
      if (few) {
        Group::sync();  // the keys are copied
      } else {
        sort_keys<Group>(sorted, capacity, 0, 2, capacity);
      }
#pragma unroll 1
      for (int i = Group::thread(); i < there; i += Group::count()) {
        const int place = few ? rank_of(sorted[i], sorted, there) : i;
        if (place < k) queue[place] = sorted[i];
        if (place == k - 1) bound[q] = sorted[i];
      }
#pragma unroll 1
      for (int i = there + Group::thread(); i < k; i += Group::count()) queue[i] = kNone;
      if (Group::thread() == 0) count[q] = min(there, k);
      Group::sync();  // the keys have been compared
    }
    __syncthreads();  // all queues are cut
    limit = bound[mine];
    worst = cost_of(limit);
  }
};

// Math:     the k best keys (cost, position) of each slice of codes, k <= kMaxFused; docs/math.md section 5
// Tiling:   one block owns a slice of codes and a group of queries: 32, one a lane, that share each code, or one
// Memory:   the table in shared memory as [K][32] where it fits, so that lane i reads bank i alone; codes once per
//           group, by 16-byte loads; queues in the workspace, written to rarely once a bound is known
// Numerics: float32 sums in order of the levels, no fused multiply-add; keys are unique, so no ties
template <class Code, bool kBatch, bool kShared, bool kLists>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm - (kLists && !kShared)) queue_kernel(Plan plan) {
  extern __shared__ float4 dynamic[];
  __shared__ int count[kWarp];
  __shared__ Key bound[kWarp];
  const Lane lane = lane_of<kBatch>(plan);
  constexpr int kWidth = kBatch ? kWarp : 1;
  Key* keys = plan.keys + (lane.group * plan.slices + lane.slice) * kWidth * plan.capacity;
  Key* scratch = reinterpret_cast<Key*>(dynamic);
  const int mine = kBatch ? threadIdx.x % kWarp : 0;
  Queues<kBatch> queues{keys, scratch, count, bound, static_cast<int>(plan.capacity), static_cast<int>(plan.job.k),
                        mine, kNone,   0};
  queues.clear();
  scan<Code, kBatch, kShared, kLists>(plan, lane, reinterpret_cast<float*>(scratch + kSortKeys), queues);
  queues.cut(-1);
}

// Math:     the k best of the slices' k best, and their scores
// Tiling:   one block owns one query
// Memory:   slices * k keys are read once, coalesced; k scores are computed again from the codes, k results written
// Numerics: integer keys; the result does not depend on the order in which they are read
__global__ void __launch_bounds__(kThreads) merge_kernel(Plan plan, int width) {
  __shared__ Key queue[2 * kMaxFused];
  __shared__ Key scratch[kSortKeys];
  __shared__ int count;
  __shared__ Key bound;
  const int64_t q = blockIdx.x, k = plan.job.k;
  const Key* keys = plan.keys + (q / width * plan.slices * width + q % width) * plan.capacity;
  Queues<false> queues{queue, scratch, &count, &bound, static_cast<int>(plan.capacity), static_cast<int>(k),
                       0,     kNone,   0};
  queues.clear();
  for (int64_t base = 0; base < plan.slices * k; base += kRows * kThreads) {
    Key key[kRows];
    bool valid[kRows], any = false;
    for (int i = 0; i < kRows; ++i) {
      const int64_t at = base + i * kThreads + threadIdx.x;
      key[i] = at < plan.slices * k ? keys[at / k * width * plan.capacity + at % k] : kNone;
      any |= valid[i] = key[i] != kNone;
    }
    queues.offer(key, valid, any);
  }
  queues.cut(-1);
  for (int i = threadIdx.x; i < k; i += kThreads) emit(plan, q, i, queue[i]);
}

}  // namespace
}  // namespace drq
