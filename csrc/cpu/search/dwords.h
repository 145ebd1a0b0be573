// Vectors of dwords, each with four bytes of a code or with a sum, and what the scan of one query does with them:
// look-ups in a table of 256 bytes that stays in registers, and products of bytes. For AVX-512 with VBMI and for NEON,
// which define DRQ_DWORDS; others have no such look-ups. Included by files that are compiled once per instruction set;
// see simd.h.
//
// dwords_of(): bytes 4 group .. 4 group + 3 of so many rows of kStride bytes (1, 2, 4, 8 or 16), or all that such a row
// has; kStride is 0 for rows of any other length. four_dwords_of(): the first four dwords of such rows.
// look_up(): replaces each byte by its entry in a table of 256 bytes, from all of which kLess has been subtracted. A
// Quarter has 64 of them. GCC keeps quarters in registers if each is a variable of its own.
// add_products(): adds to each sum the products of its four entries with four weights, the signed bytes of a dword.
// steps_of(): factor * norm - shift of so many norms, or of their roots, as whole numbers; kMost if they are greater.
// NaN and norms without a root give a number so far below -2e9 that no sum of products, less kLess or not, changes
// that. Roots have a relative error of up to 2^-14. differences(): 0 in lanes of `before` that are 0 where a equals b.
// at_most(), zero(), nonzero(): bit i of the mask is for the i-th of 64 dwords or bytes.
#pragma once

#include "cpu/simd.h"

#if defined(DRQ_VBMI) || defined(DRQ_NEON)
#define DRQ_DWORDS

namespace drq {
namespace DRQ_ISA {
namespace {

constexpr float kMost = 1e9f;

#if defined(DRQ_VBMI)

struct Dwords {
  static constexpr int kLanes = 16;
  __m512i v;
  static Dwords all(int32_t x) { return {_mm512_set1_epi32(x)}; }
};

template <int kStride>
inline Dwords dwords_of(const uint8_t* rows, int group, int stride) {
  if constexpr (kStride == 0) {
    const __m256i first8 = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i places = _mm256_mullo_epi32(first8, _mm256_set1_epi32(stride));
    const auto of_eight = [&](int row) {
      const uint8_t* const from = rows + row * stride + 4 * group;
      return _mm256_i32gather_epi32(reinterpret_cast<const int*>(from), places, 1);
    };
    return {_mm512_inserti64x4(_mm512_castsi256_si512(of_eight(0)), of_eight(8), 1)};
  } else if constexpr (kStride == 1) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows)))};
  } else if constexpr (kStride == 2) {
    return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows)))};
  } else if constexpr (kStride == 4) {
    return {_mm512_loadu_si512(rows)};
  } else {
    const __m512i first16 = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i apart = _mm512_mullo_epi32(first16, _mm512_set1_epi32(kStride / 4));
    const __m512i places = _mm512_add_epi32(apart, _mm512_set1_epi32(group));
    const auto of_two = [places](const uint8_t* p) {
      return _mm512_permutex2var_epi32(_mm512_loadu_si512(p), places, _mm512_loadu_si512(p + 64));
    };
    if constexpr (kStride == 8) return {of_two(rows)};
    return {_mm512_shuffle_i32x4(of_two(rows), of_two(rows + 128), 0x44)};
  }
}

inline void four_dwords_of(const uint8_t* rows, int stride, Dwords (&out)[4]) {
  const auto load = [rows, stride](int row) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + row * stride));
  };
  const auto of_two = [load](int row, int other) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load(row)), load(other), 1);
  };
  const auto of_four = [of_two](int row) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(of_two(row, row + 4)), of_two(row + 8, row + 12), 1);
  };
  const __m512i r0 = of_four(0), r1 = of_four(1), r2 = of_four(2), r3 = of_four(3);
  const __m512i low = _mm512_unpacklo_epi32(r0, r1), low2 = _mm512_unpacklo_epi32(r2, r3);
  const __m512i high = _mm512_unpackhi_epi32(r0, r1), high2 = _mm512_unpackhi_epi32(r2, r3);
  out[0] = {_mm512_unpacklo_epi64(low, low2)}, out[1] = {_mm512_unpackhi_epi64(low, low2)};
  out[2] = {_mm512_unpacklo_epi64(high, high2)}, out[3] = {_mm512_unpackhi_epi64(high, high2)};
}

constexpr int kLess = 0;
using Quarter = __m512i;
inline Quarter load_quarter(const uint8_t* entries) { return _mm512_loadu_si512(entries); }

inline Dwords look_up(const Quarter& first, const Quarter& second, const Quarter& third, const Quarter& fourth,
                      Dwords code) {
  const __m512i low = _mm512_permutex2var_epi8(first, code.v, second);
  const __m512i high = _mm512_permutex2var_epi8(third, code.v, fourth);
  return {_mm512_mask_blend_epi8(_mm512_movepi8_mask(code.v), low, high)};
}

inline Dwords add_products(Dwords sums, Dwords entries, int32_t weights) {
  return {_mm512_dpbusd_epi32(sums.v, entries.v, _mm512_set1_epi32(weights))};
}

template <bool kRoot>
inline Dwords steps_of(const float* norms, float factor, float shift) {
  __m512 x = _mm512_loadu_ps(norms);
  if (kRoot) x = _mm512_mul_ps(x, _mm512_rsqrt14_ps(x));
  const __m512 steps = _mm512_fmsub_ps(x, _mm512_set1_ps(factor), _mm512_set1_ps(shift));
  return {_mm512_cvttps_epi32(_mm512_min_ps(_mm512_set1_ps(kMost), steps))};
}

inline Dwords min(Dwords a, Dwords b) { return {_mm512_min_epi32(a.v, b.v)}; }
inline Dwords differences(Dwords before, Dwords a, int32_t b) {
  return {_mm512_or_si512(before.v, _mm512_xor_si512(a.v, _mm512_set1_epi32(b)))};
}
inline bool any_at_most(Dwords a, int32_t b) { return _mm512_cmple_epi32_mask(a.v, _mm512_set1_epi32(b)) != 0; }
inline uint64_t at_most(const Dwords (&all)[4], int32_t b) {
  uint64_t bits = 0;
  for (int i = 0; i < 4; ++i) bits |= uint64_t{_mm512_cmple_epi32_mask(all[i].v, _mm512_set1_epi32(b))} << (16 * i);
  return bits;
}
inline uint64_t zero(const Dwords (&all)[4]) {
  uint64_t bits = 0;
  for (int i = 0; i < 4; ++i) bits |= uint64_t{_mm512_cmpeq_epi32_mask(all[i].v, _mm512_setzero_si512())} << (16 * i);
  return bits;
}
inline uint64_t nonzero(const uint8_t* bytes) {
  const __m512i all = _mm512_loadu_si512(bytes);
  return _mm512_test_epi8_mask(all, all);
}

#else

struct Dwords {
  static constexpr int kLanes = 4;
  int32x4_t v;
  static Dwords all(int32_t x) { return {vdupq_n_s32(x)}; }
};

template <int kStride>
inline Dwords dwords_of(const uint8_t* rows, int group, int stride) {
  const auto load = [rows](int i) { return vreinterpretq_s32_u8(vld1q_u8(rows + 16 * i)); };
  if constexpr (kStride == 0) {
    const auto of_row = [from = rows + 4 * group, stride](int row) {
      int32_t dword;
      std::memcpy(&dword, from + row * stride, 4);
      return dword;
    };
    const int32x4_t two = vsetq_lane_s32(of_row(1), vdupq_n_s32(of_row(0)), 1);
    return {vsetq_lane_s32(of_row(3), vsetq_lane_s32(of_row(2), two, 2), 3)};
  } else if constexpr (kStride == 1) {
    uint32_t four;
    std::memcpy(&four, rows, 4);
    return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))))};
  } else if constexpr (kStride == 2) {
    return {vreinterpretq_s32_u32(vmovl_u16(vreinterpret_u16_u8(vld1_u8(rows))))};
  } else if constexpr (kStride == 4) {
    return {load(0)};
  } else if constexpr (kStride == 8) {
    return {group == 0 ? vuzp1q_s32(load(0), load(1)) : vuzp2q_s32(load(0), load(1))};
  } else {
    const bool odd = group % 2 == 1;
    const int32x4_t low = odd ? vuzp2q_s32(load(0), load(1)) : vuzp1q_s32(load(0), load(1));
    const int32x4_t high = odd ? vuzp2q_s32(load(2), load(3)) : vuzp1q_s32(load(2), load(3));
    return {group < 2 ? vuzp1q_s32(low, high) : vuzp2q_s32(low, high)};
  }
}

inline void four_dwords_of(const uint8_t* rows, int stride, Dwords (&out)[4]) {
  const auto load = [rows, stride](int row) { return vreinterpretq_s32_u8(vld1q_u8(rows + row * stride)); };
  const auto joined = [](int32x4_t low, int32x4_t high) {
    const int64x2_t a = vreinterpretq_s64_s32(low), b = vreinterpretq_s64_s32(high);
    return int32x4x2_t{vreinterpretq_s32_s64(vtrn1q_s64(a, b)), vreinterpretq_s32_s64(vtrn2q_s64(a, b))};
  };
  const int32x4x2_t first = vtrnq_s32(load(0), load(1)), second = vtrnq_s32(load(2), load(3));
  const int32x4x2_t even = joined(first.val[0], second.val[0]), odd = joined(first.val[1], second.val[1]);
  out[0] = {even.val[0]}, out[1] = {odd.val[0]}, out[2] = {even.val[1]}, out[3] = {odd.val[1]};
}

constexpr int kLess = 128;  // both factors of a product of bytes are signed here
using Quarter = uint8x16x4_t;
inline Quarter load_quarter(const uint8_t* entries) {
  return {{vld1q_u8(entries), vld1q_u8(entries + 16), vld1q_u8(entries + 32), vld1q_u8(entries + 48)}};
}

// The instructions look up 64 entries; all but the first leave the bytes whose place is beyond these.
__attribute__((always_inline)) inline Dwords look_up(const Quarter& first, const Quarter& second, const Quarter& third,
                                                     const Quarter& fourth, Dwords code) {
  const uint8x16_t place = vreinterpretq_u8_s32(code.v);
  uint8x16_t entries = vqtbl4q_u8(first, place);
  entries = vqtbx4q_u8(entries, second, vsubq_u8(place, vdupq_n_u8(64)));
  entries = vqtbx4q_u8(entries, third, vsubq_u8(place, vdupq_n_u8(128)));
  entries = vqtbx4q_u8(entries, fourth, vsubq_u8(place, vdupq_n_u8(192)));
  return {vreinterpretq_s32_u8(entries)};
}

inline Dwords add_products(Dwords sums, Dwords entries, int32_t weights) {
  const int8x16_t a = vreinterpretq_s8_s32(entries.v), b = vreinterpretq_s8_s32(vdupq_n_s32(weights));
#if defined(__ARM_FEATURE_DOTPROD)
  return {vdotq_s32(sums.v, a, b)};
#else
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
  const int32x4_t high = vpaddlq_s16(vmull_high_s8(a, b));
  return {vaddq_s32(sums.v, vpaddq_s32(low, high))};
#endif
}

// One step of Newton's method makes an estimate of 8 bits one of 15. What has no root, 0 included, becomes NaN.
template <bool kRoot>
inline Dwords steps_of(const float* norms, float factor, float shift) {
  float32x4_t x = vld1q_f32(norms);
  if (kRoot) {
    const float32x4_t inverse = vrsqrteq_f32(x), root = vmulq_f32(x, inverse);
    x = vmulq_f32(root, vrsqrtsq_f32(root, inverse));
  }
  const float32x4_t steps = vfmaq_f32(vdupq_n_f32(-shift), x, vdupq_n_f32(factor));
  return {vcvtq_s32_f32(vminnmq_f32(vmaxnmq_f32(steps, vdupq_n_f32(-2.1e9f)), vdupq_n_f32(kMost)))};
}

inline Dwords min(Dwords a, Dwords b) { return {vminq_s32(a.v, b.v)}; }
inline Dwords differences(Dwords before, Dwords a, int32_t b) {
  return {vorrq_s32(before.v, veorq_s32(a.v, vdupq_n_s32(b)))};
}
inline bool any_at_most(Dwords a, int32_t b) { return vminvq_s32(a.v) <= b; }
template <class Relation>
inline uint64_t mask_of(const Dwords (&all)[16], Relation holds) {
  uint64_t bits = 0;
  for (int i = 0; i < 4; ++i) {
    const Dwords* const four = all + 4 * i;
    bits |= uint64_t{bits_of(low_bytes(holds(four[0].v), holds(four[1].v), holds(four[2].v), holds(four[3].v)))}
            << (16 * i);
  }
  return bits;
}
inline uint64_t at_most(const Dwords (&all)[16], int32_t b) {
  return mask_of(all, [b](int32x4_t a) { return vcleq_s32(a, vdupq_n_s32(b)); });
}
inline uint64_t zero(const Dwords (&all)[16]) {
  return mask_of(all, [](int32x4_t a) { return vceqzq_s32(a); });
}
inline uint64_t nonzero(const uint8_t* bytes) {
  uint64_t bits = 0;
  for (int i = 0; i < 4; ++i) {
    const uint8x16_t some = vld1q_u8(bytes + 16 * i);
    bits |= uint64_t{bits_of(vtstq_u8(some, some))} << (16 * i);
  }
  return bits;
}

#endif

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq

#endif
