// The k best of what a scan finds, in the order (cost, position). Included by files that are compiled once per
// instruction set; everything has internal linkage, see simd.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "cpu/buffer.h"
#include "cpu/search/key.h"

namespace drq {
namespace DRQ_ISA {
namespace {

// A type of its own, so that no instance of a standard algorithm is shared between instruction sets.
struct Key {
  uint64_t bits;
  bool operator<(const Key& other) const { return bits < other.bits; }
};

// Keeps up to `capacity` candidates and drops all but the k best whenever it is full: cheaper than a heap, for any k.
// Positions must be added in ascending order, unless `any_order` is set. `sorted` reservoirs keep k candidates in order
// instead: tau is then up to date at any time, which pays for small k if few candidates come between two calls of
// shrink().
struct Reservoir {
  // The capacity for a search of so many codes.
  static int64_t capacity_for(int64_t k, int64_t codes) { return std::min(k + std::max<int64_t>(k, 28), codes + 1); }

  // Empties it. Codes that cost as much as the ceiling or more are not wanted.
  void clear(float ceiling = std::numeric_limits<float>::infinity()) {
    count = 0, tau = ceiling, full = ceiling < std::numeric_limits<float>::infinity();
  }

  // Whether k candidates are held; if not, the ceiling was too low, or there are fewer than k codes.
  bool complete() {
    shrink();
    return count >= k;
  }

  // Whether a code of this cost, at a later position than all others, is among the k best so far. NaN is the worst
  // cost. In any order, it says so of all codes that tie with the last of the k, too.
  bool wants(float cost) const { return !full || cost < tau; }

  void add(float cost, int64_t position) {
    if (sorted) return insert(Key{key_of(cost, position)});
    keys[count++] = Key{key_of(cost, position)};
    if (count == capacity) shrink();
  }

  // Adds consecutive positions; false, with nothing added, if k costs are known or not all positions fit.
  bool add_all(const float* costs, int64_t first, int64_t codes) {
    if (full || sorted || count + codes >= capacity) return false;
    for (int64_t i = 0; i < codes; ++i) keys[count + i] = Key{key_of(costs[i], first + i)};
    count += codes;
    return true;
  }

  // Keeps the k best, in the order of their positions.
  void shrink() {
    if (sorted || count < k) return;
    Key last = keys[0];
    if (count == k) {
      for (int64_t i = 1; i < count; ++i) last = last < keys[i] ? keys[i] : last;
    } else {
      std::memcpy(scratch, keys, count * sizeof(Key));
      std::nth_element(scratch, scratch + (k - 1), scratch + count);
      last = scratch[k - 1];
      int64_t kept = 0;
      for (int64_t i = 0; i < count; ++i) {
        keys[kept] = keys[i];
        kept += !(last < keys[i]);
      }
      count = kept;
    }
    set_tau(last);
  }

  // The best, at most k, in order; returns how many.
  int64_t finish(uint64_t* out) {
    shrink();
    if (sorted) {
      std::memcpy(out, keys, count * sizeof(Key));
    } else if (count > 512 && !any_order) {
      sort_by_cost(out);
    } else {
      std::sort(keys, keys + count);
      std::memcpy(out, keys, count * sizeof(Key));
    }
    return count;
  }

  int64_t k, capacity;
  Key *keys, *scratch;  // [capacity]
  int64_t count = 0;
  // The k-th best cost at the last shrink(), or the ceiling; in any order the next float above that cost.
  float tau = std::numeric_limits<float>::infinity();
  // True with a ceiling, and once k costs that are not NaN are held: later candidates must be below tau.
  bool full = false;
  bool any_order = false, sorted = false;

 private:
  // In any order a code that ties with the last one may come before it, so tau is the next cost: NaN after infinity.
  void set_tau(Key last) {
    tau = drq::cost_of(any_order ? last.bits + (uint64_t{1} << 32) : last.bits), full = tau == tau;
  }

  void insert(Key key) {
    if (count == k && !(key < keys[--count])) {
      ++count;
      return;
    }
    int64_t i = count++;
    for (; i > 0 && key < keys[i - 1]; --i) keys[i] = keys[i - 1];
    keys[i] = key;
    if (count == k) set_tau(keys[k - 1]);
  }

  // A stable radix sort by three digits of eleven bits; positions are in order already.
  void sort_by_cost(uint64_t* out) {
    constexpr int kDigit = 11, kBuckets = 1 << kDigit;
    Buffer<uint32_t> starts(3 * kBuckets);
    const auto digit = [](Key key, int place) { return key.bits >> (32 + place * kDigit) & (kBuckets - 1); };
    for (int64_t i = 0; i < count; ++i)
      for (int place = 0; place < 3; ++place) ++starts.data[place * kBuckets + digit(keys[i], place)];
    Key* const stops[] = {keys, scratch, keys, reinterpret_cast<Key*>(out)};
    for (int place = 0; place < 3; ++place) {
      uint32_t* const next = starts.data + place * kBuckets;
      uint32_t start = 0;
      for (int64_t b = 0; b < kBuckets; ++b) {
        const uint32_t size = next[b];
        next[b] = start;
        start += size;
      }
      const Key* from = stops[place];
      for (int64_t i = 0; i < count; ++i) stops[place + 1][next[digit(from[i], place)]++] = from[i];
    }
  }
};

// The reservoirs of a batch of queries, which share their scratch memory.
struct Reservoirs {
  Reservoirs(int64_t k, int64_t codes, int64_t lanes)
      : capacity(Reservoir::capacity_for(k, codes)), kept((lanes + 1) * capacity) {
    for (int64_t lane = 0; lane < lanes; ++lane)
      best[lane] = {k, capacity, kept.data + lane * capacity, kept.data + lanes * capacity};
  }
  int64_t capacity;
  Buffer<Key> kept;
  Reservoir best[64];
};

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
