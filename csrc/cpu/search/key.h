// A cost and a position in 64 bits that compare as (cost, position): less is better, then older; NaN is the worst.
#pragma once

#include <cstdint>
#include <cstring>

namespace drq {
namespace {

inline uint64_t key_of(float cost, int64_t position) {
  cost = cost == cost ? cost + 0.0f : __builtin_nanf("");  // one zero, one NaN
  uint32_t bits;
  std::memcpy(&bits, &cost, sizeof bits);
  bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
  return static_cast<uint64_t>(bits) << 32 | static_cast<uint32_t>(position);
}

inline float cost_of(uint64_t key) {
  uint32_t bits = static_cast<uint32_t>(key >> 32);
  bits ^= bits >> 31 ? 0x80000000u : 0xffffffffu;
  float cost;
  std::memcpy(&cost, &bits, sizeof cost);
  return cost;
}

inline int64_t position_of(uint64_t key) { return static_cast<uint32_t>(key); }

}  // namespace
}  // namespace drq
