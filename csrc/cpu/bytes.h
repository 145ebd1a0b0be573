// As many unsigned bytes as a register holds, and the few operations that the scan of a batch needs. Included by
// files that are compiled once per instruction set; see simd.h.
#pragma once

#include "cpu/simd.h"

namespace drq {
namespace DRQ_ISA {
namespace {

#if defined(DRQ_AVX512)

constexpr int64_t kLanes = 64;
struct Bytes {
  __m512i v;
  static Bytes load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
};
inline Bytes add_saturated(Bytes a, Bytes b) { return {_mm512_adds_epu8(a.v, b.v)}; }
inline Bytes min(Bytes a, Bytes b) { return {_mm512_min_epu8(a.v, b.v)}; }
// Bit i is set where lane i of a is below that of b.
inline uint64_t less(Bytes a, Bytes b) { return _mm512_cmplt_epu8_mask(a.v, b.v); }

#elif defined(DRQ_AVX2)

constexpr int64_t kLanes = 32;
struct Bytes {
  __m256i v;
  static Bytes load(const uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
};
inline Bytes add_saturated(Bytes a, Bytes b) { return {_mm256_adds_epu8(a.v, b.v)}; }
inline Bytes min(Bytes a, Bytes b) { return {_mm256_min_epu8(a.v, b.v)}; }
inline uint64_t less(Bytes a, Bytes b) {
  const __m256i not_less = _mm256_cmpeq_epi8(_mm256_max_epu8(a.v, b.v), a.v);
  return ~static_cast<uint32_t>(_mm256_movemask_epi8(not_less));
}

#else

constexpr int64_t kLanes = 32;
struct Bytes {
  uint8_t v[kLanes];
  static Bytes load(const uint8_t* p) {
    Bytes out;
    std::memcpy(out.v, p, kLanes);
    return out;
  }
};
inline Bytes add_saturated(const Bytes& a, const Bytes& b) {
  Bytes out;
  for (int64_t i = 0; i < kLanes; ++i) {
    const uint8_t sum = static_cast<uint8_t>(a.v[i] + b.v[i]);
    out.v[i] = sum < a.v[i] ? 255 : sum;
  }
  return out;
}
inline Bytes min(const Bytes& a, const Bytes& b) {
  Bytes out;
  for (int64_t i = 0; i < kLanes; ++i) out.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return out;
}
inline uint64_t less(const Bytes& a, const Bytes& b) {
  uint64_t bits = 0;
  for (int64_t i = 0; i < kLanes; ++i) bits |= static_cast<uint64_t>(a.v[i] < b.v[i]) << i;
  return bits;
}

#endif

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
