// 32 or 64 unsigned bytes, and the few operations that the scan of a batch needs. Included by files that are
// compiled once per instruction set; see simd.h.
#pragma once

#include "cpu/simd.h"

namespace drq {
namespace DRQ_ISA {
namespace {

// less(): bit i is set where lane i of a is below that of b; any_less(): whether one is.
template <int kLanes>
struct Bytes;

#if defined(DRQ_AVX512)

template <>
struct Bytes<64> {
  __m512i v;
  static Bytes load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
};
inline Bytes<64> add_saturated(Bytes<64> a, Bytes<64> b) { return {_mm512_adds_epu8(a.v, b.v)}; }
inline Bytes<64> min(Bytes<64> a, Bytes<64> b) { return {_mm512_min_epu8(a.v, b.v)}; }
inline uint64_t less(Bytes<64> a, Bytes<64> b) { return _mm512_cmplt_epu8_mask(a.v, b.v); }

#endif
#if defined(DRQ_AVX512) || defined(DRQ_AVX2)

template <>
struct Bytes<32> {
  __m256i v;
  static Bytes load(const uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
};
inline Bytes<32> add_saturated(Bytes<32> a, Bytes<32> b) { return {_mm256_adds_epu8(a.v, b.v)}; }
inline Bytes<32> min(Bytes<32> a, Bytes<32> b) { return {_mm256_min_epu8(a.v, b.v)}; }
inline uint64_t less(Bytes<32> a, Bytes<32> b) {
  const __m256i not_less = _mm256_cmpeq_epi8(_mm256_max_epu8(a.v, b.v), a.v);
  return static_cast<uint32_t>(~_mm256_movemask_epi8(not_less));
}

#elif defined(DRQ_NEON)

template <int kLanes>
struct Bytes {
  static constexpr int kCount = kLanes / 16;
  uint8x16_t v[kCount];
  static Bytes load(const uint8_t* p) {
    Bytes out;
    for (int i = 0; i < kCount; ++i) out.v[i] = vld1q_u8(p + 16 * i);
    return out;
  }
};
template <int kLanes>
inline Bytes<kLanes> add_saturated(Bytes<kLanes> a, const Bytes<kLanes>& b) {
  for (int i = 0; i < a.kCount; ++i) a.v[i] = vqaddq_u8(a.v[i], b.v[i]);
  return a;
}
template <int kLanes>
inline Bytes<kLanes> min(Bytes<kLanes> a, const Bytes<kLanes>& b) {
  for (int i = 0; i < a.kCount; ++i) a.v[i] = vminq_u8(a.v[i], b.v[i]);
  return a;
}
template <int kLanes>
inline uint64_t less(const Bytes<kLanes>& a, const Bytes<kLanes>& b) {
  uint64_t bits = 0;
  for (int i = 0; i < a.kCount; ++i) bits |= uint64_t{bits_of(vcltq_u8(a.v[i], b.v[i]))} << (16 * i);
  return bits;
}
template <int kLanes>
inline bool any_less(const Bytes<kLanes>& a, const Bytes<kLanes>& b) {
  uint8x16_t any = vcltq_u8(a.v[0], b.v[0]);
  for (int i = 1; i < a.kCount; ++i) any = vorrq_u8(any, vcltq_u8(a.v[i], b.v[i]));
  return vmaxvq_u32(vreinterpretq_u32_u8(any)) != 0;
}

#else

template <int kLanes>
struct Bytes {
  uint8_t v[kLanes];
  static Bytes load(const uint8_t* p) {
    Bytes out;
    std::memcpy(out.v, p, kLanes);
    return out;
  }
};
template <int kLanes>
inline Bytes<kLanes> add_saturated(const Bytes<kLanes>& a, const Bytes<kLanes>& b) {
  Bytes<kLanes> out;
  for (int i = 0; i < kLanes; ++i) {
    const uint8_t sum = static_cast<uint8_t>(a.v[i] + b.v[i]);
    out.v[i] = sum < a.v[i] ? 255 : sum;
  }
  return out;
}
template <int kLanes>
inline Bytes<kLanes> min(const Bytes<kLanes>& a, const Bytes<kLanes>& b) {
  Bytes<kLanes> out;
  for (int i = 0; i < kLanes; ++i) out.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return out;
}
template <int kLanes>
inline uint64_t less(const Bytes<kLanes>& a, const Bytes<kLanes>& b) {
  uint64_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint64_t>(a.v[i] < b.v[i]) << i;
  return bits;
}

#endif
#if !defined(DRQ_NEON)

template <int kLanes>
inline bool any_less(const Bytes<kLanes>& a, const Bytes<kLanes>& b) {
  return less(a, b) != 0;
}

#endif

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
