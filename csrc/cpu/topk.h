// The k best of what a scan finds, in the order (cost, position). Included by files that are compiled once per
// instruction set; everything has internal linkage, see tile.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cpu/buffer.h"
#include "cpu/key.h"

namespace drq {
namespace DRQ_ISA {
namespace {

// A type of its own, so that no instance of a standard algorithm is shared between instruction sets.
struct Key {
  uint64_t bits;
  bool operator<(const Key& other) const { return bits < other.bits; }
};

// Keeps more than k candidates and throws the worst away whenever it is full: cheaper than a heap, for any k. Positions
// must be added in ascending order.
struct Reservoir {
  // How many candidates it holds, of so many codes.
  static int64_t capacity_for(int64_t k, int64_t codes) { return std::min(k + std::max<int64_t>(k, 28), codes + 1); }

  // Of codes that cost as much as the ceiling or more, none is wanted.
  void clear(float ceiling = std::numeric_limits<float>::infinity()) {
    count = 0, tau = ceiling, full = ceiling < std::numeric_limits<float>::infinity();
  }

  // Whether there are k; if not, the ceiling was too low, or there are no more codes.
  bool complete() {
    shrink();
    return count >= k;
  }

  // Whether a code of this cost, after all that came before it, is among the k best so far. NaN costs count as
  // infinite.
  bool wants(float cost) const { return !full || cost < tau; }

  void add(float cost, int64_t position) {
    keys[count++] = Key{key_of(cost, position)};
    if (count == capacity) shrink();
  }

  // Keeps the k best, in the order of their positions.
  void shrink() {
    if (count < k) return;
    std::memcpy(scratch, keys, count * sizeof(Key));
    std::nth_element(scratch, scratch + (k - 1), scratch + count);
    const Key last = scratch[k - 1];
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      keys[kept] = keys[i];
      kept += !(last < keys[i]);
    }
    count = kept, tau = cost_of(last.bits), full = tau == tau;
  }

  // The best, at most k, in order; returns how many.
  int64_t finish(uint64_t* out) {
    shrink();
    if (count <= 512)
      std::sort(keys, keys + count);
    else
      sort_by_cost();
    std::memcpy(out, keys, count * sizeof(Key));
    return count;
  }

  int64_t k, capacity;
  Key *keys, *scratch;  // [capacity]
  int64_t count = 0;
  float tau = std::numeric_limits<float>::infinity();  // the k-th best cost, once there are k, or the ceiling
  bool full = false;                                   // costs from tau on are not wanted; k that are no numbers are

 private:
  // Stable, three digits of eleven bits; positions are in order already.
  void sort_by_cost() {
    constexpr int kDigit = 11, kBuckets = 1 << kDigit;
    Buffer<int64_t> starts(kBuckets);
    Key *from = keys, *to = scratch;
    for (int shift = 32; shift < 64; shift += kDigit) {
      const auto digit = [shift](Key key) { return key.bits >> shift & (kBuckets - 1); };
      std::memset(starts.data, 0, kBuckets * sizeof(int64_t));
      for (int64_t i = 0; i < count; ++i) ++starts.data[digit(from[i])];
      int64_t start = 0;
      for (int64_t b = 0; b < kBuckets; ++b) {
        const int64_t size = starts.data[b];
        starts.data[b] = start;
        start += size;
      }
      for (int64_t i = 0; i < count; ++i) to[starts.data[digit(from[i])]++] = from[i];
      std::swap(from, to);
    }
    if (from != keys) std::memcpy(keys, from, count * sizeof(Key));
  }
};

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
