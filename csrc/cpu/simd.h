// Sixteen floats and the few operations that the kernels need, for AVX-512, AVX2, NEON and plain C++. The width is the
// same everywhere and nothing is fused, so that a kernel gives the same bits on every instruction set. A file that
// includes this one is compiled once per set, with DRQ_ISA as the namespace of its code.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(DRQ_SIMDE)  // in tests AVX-512 is emulated, whatever the processor has
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#define DRQ_AVX512
#elif defined(__AVX512BW__)
#include <immintrin.h>
#define DRQ_AVX512
#elif defined(__AVX2__)
#include <immintrin.h>
#define DRQ_AVX2
#elif defined(DRQ_NEON)  // defined by setup.py: the portable copy does without, though every compiler has it
#include <arm_neon.h>
#endif
#if defined(__AVX512VBMI__)
#define DRQ_VBMI  // defined by the tests that emulate it
#endif

namespace drq {
namespace DRQ_ISA {
namespace {

constexpr int64_t kWidth = 16;

#if defined(DRQ_AVX512)

struct Floats {
  __m512 v;
  static Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Floats load(const uint16_t* halves) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)))};
  }
  static Floats load(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
  }
  static Floats all(float x) { return {_mm512_set1_ps(x)}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  // Rounded down to bytes and saturated at 255; lanes must not be negative.
  void store_bytes(uint8_t* p) const {
    const __m512i whole = _mm512_cvttps_epi32(_mm512_min_ps(v, _mm512_set1_ps(255)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtusepi32_epi8(whole));
  }
};
inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats root(Floats a) { return {_mm512_sqrt_ps(_mm512_max_ps(a.v, _mm512_setzero_ps()))}; }
// 1 / a where a is above the limit, else 0.
inline Floats inverse_above(Floats a, Floats limit) {
  return {_mm512_maskz_div_ps(_mm512_cmp_ps_mask(a.v, limit.v, _CMP_GT_OQ), _mm512_set1_ps(1), a.v)};
}
// a / b where b is above 0, else 0.
inline Floats ratio_or_zero(Floats a, Floats b) {
  return {_mm512_maskz_div_ps(_mm512_cmp_ps_mask(b.v, _mm512_setzero_ps(), _CMP_GT_OQ), a.v, b.v)};
}
inline Floats power_of_two(Floats n) {
  return {
      _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
// Bit i is set where lane i of a equals that of b; is less or equal; is not greater, NaN included.
inline unsigned equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
inline unsigned less_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ); }
inline unsigned not_above(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_NGT_UQ); }

#elif defined(DRQ_AVX2)

struct Floats {
  __m256 v[2];
  static Floats load(const float* p) { return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}}; }
  static Floats load(const uint16_t* halves) {
    const auto* p = reinterpret_cast<const __m128i*>(halves);
    return {{_mm256_cvtph_ps(_mm_loadu_si128(p)), _mm256_cvtph_ps(_mm_loadu_si128(p + 1))}};
  }
  static Floats load(const int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {{_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
             _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))}};
  }
  static Floats all(float x) { return {{_mm256_set1_ps(x), _mm256_set1_ps(x)}}; }
  void store(float* p) const {
    _mm256_storeu_ps(p, v[0]);
    _mm256_storeu_ps(p + 8, v[1]);
  }
  void store_bytes(uint8_t* p) const {
    const __m256 most = _mm256_set1_ps(255);
    const __m256i a = _mm256_cvttps_epi32(_mm256_min_ps(v[0], most)),
                  b = _mm256_cvttps_epi32(_mm256_min_ps(v[1], most));
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  }
};
inline Floats operator+(Floats a, Floats b) { return {{_mm256_add_ps(a.v[0], b.v[0]), _mm256_add_ps(a.v[1], b.v[1])}}; }
inline Floats operator-(Floats a, Floats b) { return {{_mm256_sub_ps(a.v[0], b.v[0]), _mm256_sub_ps(a.v[1], b.v[1])}}; }
inline Floats operator*(Floats a, Floats b) { return {{_mm256_mul_ps(a.v[0], b.v[0]), _mm256_mul_ps(a.v[1], b.v[1])}}; }
inline Floats min(Floats a, Floats b) { return {{_mm256_min_ps(a.v[0], b.v[0]), _mm256_min_ps(a.v[1], b.v[1])}}; }
inline Floats max(Floats a, Floats b) { return {{_mm256_max_ps(a.v[0], b.v[0]), _mm256_max_ps(a.v[1], b.v[1])}}; }
inline Floats root(Floats a) {
  const __m256 zero = _mm256_setzero_ps();
  return {{_mm256_sqrt_ps(_mm256_max_ps(a.v[0], zero)), _mm256_sqrt_ps(_mm256_max_ps(a.v[1], zero))}};
}
inline __m256 inverse_above(__m256 a, __m256 limit) {
  return _mm256_and_ps(_mm256_div_ps(_mm256_set1_ps(1), a), _mm256_cmp_ps(a, limit, _CMP_GT_OQ));
}
inline Floats inverse_above(Floats a, Floats limit) {
  return {{inverse_above(a.v[0], limit.v[0]), inverse_above(a.v[1], limit.v[1])}};
}
inline __m256 ratio_or_zero(__m256 a, __m256 b) {
  return _mm256_and_ps(_mm256_div_ps(a, b), _mm256_cmp_ps(b, _mm256_setzero_ps(), _CMP_GT_OQ));
}
inline Floats ratio_or_zero(Floats a, Floats b) {
  return {{ratio_or_zero(a.v[0], b.v[0]), ratio_or_zero(a.v[1], b.v[1])}};
}
inline __m256 power_of_two(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Floats power_of_two(Floats n) { return {{power_of_two(n.v[0]), power_of_two(n.v[1])}}; }
template <int kRelation>
inline unsigned compare(Floats a, Floats b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a.v[0], b.v[0], kRelation)) |
         _mm256_movemask_ps(_mm256_cmp_ps(a.v[1], b.v[1], kRelation)) << 8;
}
inline unsigned equal(Floats a, Floats b) { return compare<_CMP_EQ_OQ>(a, b); }
inline unsigned less_equal(Floats a, Floats b) { return compare<_CMP_LE_OQ>(a, b); }
inline unsigned not_above(Floats a, Floats b) { return compare<_CMP_NGT_UQ>(a, b); }

#elif defined(DRQ_NEON)

struct Floats {
  float32x4_t v[4];
  static Floats load(const float* p) { return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}}; }
  static Floats load(const uint16_t* halves) {
    const float16x8_t low = vreinterpretq_f16_u16(vld1q_u16(halves)),
                      high = vreinterpretq_f16_u16(vld1q_u16(halves + 8));
    return {{vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
             vcvt_high_f32_f16(high)}};
  }
  static Floats load(const int8_t* p) {
    const int8x16_t bytes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))}};
  }
  static Floats all(float x) { return {{vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}}; }
  void store(float* p) const {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, v[i]);
  }
  void store_bytes(uint8_t* p) const;
};
// Intrinsics are called in lambdas: a pointer to one links only where the compiler happens to inline it.
template <class Operation>
inline Floats each(Floats a, Floats b, Operation operation) {
  return {{operation(a.v[0], b.v[0]), operation(a.v[1], b.v[1]), operation(a.v[2], b.v[2]), operation(a.v[3], b.v[3])}};
}
inline Floats operator+(Floats a, Floats b) {
  return each(a, b, [](float32x4_t x, float32x4_t y) { return vaddq_f32(x, y); });
}
inline Floats operator-(Floats a, Floats b) {
  return each(a, b, [](float32x4_t x, float32x4_t y) { return vsubq_f32(x, y); });
}
inline Floats operator*(Floats a, Floats b) {
  return each(a, b, [](float32x4_t x, float32x4_t y) { return vmulq_f32(x, y); });
}
// The second operand where one is NaN, as on x86; NEON's own minimum and maximum are others.
inline float32x4_t min(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline float32x4_t max(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline float32x4_t where(uint32x4_t mask, float32x4_t a) {
  return vreinterpretq_f32_u32(vandq_u32(mask, vreinterpretq_u32_f32(a)));
}
inline Floats min(Floats a, Floats b) {
  return each(a, b, [](float32x4_t x, float32x4_t y) { return min(x, y); });
}
inline Floats max(Floats a, Floats b) {
  return each(a, b, [](float32x4_t x, float32x4_t y) { return max(x, y); });
}
inline Floats root(Floats a) {
  return each(a, a, [](float32x4_t x, float32x4_t) { return vsqrtq_f32(max(x, vdupq_n_f32(0))); });
}
inline Floats inverse_above(Floats a, Floats limit) {
  return each(a, limit, [](float32x4_t x, float32x4_t least) {
    return where(vcgtq_f32(x, least), vdivq_f32(vdupq_n_f32(1), x));
  });
}
inline Floats ratio_or_zero(Floats a, Floats b) {
  return each(a, b, [](float32x4_t x, float32x4_t y) { return where(vcgtq_f32(y, vdupq_n_f32(0)), vdivq_f32(x, y)); });
}
inline Floats power_of_two(Floats n) {
  return each(n, n, [](float32x4_t x, float32x4_t) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(x), vdupq_n_s32(127)), 23));
  });
}
// The lowest byte of each of sixteen lanes.
inline uint8x16_t low_bytes(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {
  const auto even = [](uint32x4_t x, uint32x4_t y) {
    return vreinterpretq_u8_u16(vuzp1q_u16(vreinterpretq_u16_u32(x), vreinterpretq_u16_u32(y)));
  };
  return vuzp1q_u8(even(a, b), even(c, d));
}
inline void Floats::store_bytes(uint8_t* p) const {
  const auto whole = [](float32x4_t x) { return vcvtq_u32_f32(min(x, vdupq_n_f32(255))); };
  vst1q_u8(p, low_bytes(whole(v[0]), whole(v[1]), whole(v[2]), whole(v[3])));
}
// Bit i is set where byte i is; each must be 0 or 255.
inline unsigned bits_of(uint8x16_t bytes) {
  constexpr uint8_t kPlaces[] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  uint8x16_t sums = vandq_u8(bytes, vld1q_u8(kPlaces));
  for (int i = 0; i < 3; ++i) sums = vpaddq_u8(sums, sums);
  return vgetq_lane_u16(vreinterpretq_u16_u8(sums), 0);
}
template <class Relation>
inline unsigned compare(Floats a, Floats b, Relation holds) {
  return bits_of(low_bytes(holds(a.v[0], b.v[0]), holds(a.v[1], b.v[1]), holds(a.v[2], b.v[2]), holds(a.v[3], b.v[3])));
}
inline unsigned equal(Floats a, Floats b) {
  return compare(a, b, [](float32x4_t x, float32x4_t y) { return vceqq_f32(x, y); });
}
inline unsigned less_equal(Floats a, Floats b) {
  return compare(a, b, [](float32x4_t x, float32x4_t y) { return vcleq_f32(x, y); });
}
inline unsigned not_above(Floats a, Floats b) {
  return ~compare(a, b, [](float32x4_t x, float32x4_t y) { return vcgtq_f32(x, y); }) & 0xffff;
}

#else

inline float half_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(fraction) * 0x1p-24f;
  const uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

struct Floats {
  float v[kWidth];
  template <class Number>
  static Floats load(const Number* p) {
    Floats out;
    for (int i = 0; i < kWidth; ++i) out.v[i] = p[i];
    return out;
  }
  static Floats load(const uint16_t* halves) {
    Floats out;
    for (int i = 0; i < kWidth; ++i) out.v[i] = half_to_float(halves[i]);
    return out;
  }
  static Floats all(float x) {
    Floats out;
    for (int i = 0; i < kWidth; ++i) out.v[i] = x;
    return out;
  }
  void store(float* p) const {
    for (int i = 0; i < kWidth; ++i) p[i] = v[i];
  }
  void store_bytes(uint8_t* p) const {
    for (int i = 0; i < kWidth; ++i) p[i] = static_cast<uint8_t>(v[i] < 255 ? v[i] : 255);
  }
};
template <class Operation>
inline Floats each(const Floats& a, const Floats& b, Operation operation) {
  Floats out;
  for (int i = 0; i < kWidth; ++i) out.v[i] = operation(a.v[i], b.v[i]);
  return out;
}
inline Floats operator+(const Floats& a, const Floats& b) {
  return each(a, b, [](float x, float y) { return x + y; });
}
inline Floats operator-(const Floats& a, const Floats& b) {
  return each(a, b, [](float x, float y) { return x - y; });
}
inline Floats operator*(const Floats& a, const Floats& b) {
  return each(a, b, [](float x, float y) { return x * y; });
}
inline Floats min(const Floats& a, const Floats& b) {
  return each(a, b, [](float x, float y) { return x < y ? x : y; });
}
inline Floats max(const Floats& a, const Floats& b) {
  return each(a, b, [](float x, float y) { return x > y ? x : y; });
}
inline Floats root(const Floats& a) {
  return each(a, a, [](float x, float) { return std::sqrt(x > 0 ? x : 0); });
}
inline Floats inverse_above(const Floats& a, const Floats& limit) {
  return each(a, limit, [](float x, float least) { return x > least ? 1 / x : 0; });
}
inline Floats ratio_or_zero(const Floats& a, const Floats& b) {
  return each(a, b, [](float x, float y) { return y > 0 ? x / y : 0; });
}
inline Floats power_of_two(const Floats& n) {
  return each(n, n, [](float x, float) {
    const int32_t bits = (static_cast<int32_t>(x) + 127) << 23;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
  });
}
inline unsigned equal(const Floats& a, const Floats& b) {
  unsigned bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= static_cast<unsigned>(a.v[i] == b.v[i]) << i;
  return bits;
}
inline unsigned less_equal(const Floats& a, const Floats& b) {
  unsigned bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= static_cast<unsigned>(a.v[i] <= b.v[i]) << i;
  return bits;
}
inline unsigned not_above(const Floats& a, const Floats& b) {
  unsigned bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= static_cast<unsigned>(!(a.v[i] > b.v[i])) << i;
  return bits;
}

#endif

// exp(x) for x <= 0, to about one unit in the last place; results are at least about 1e-38.
inline Floats exp_of_negative(Floats x) {
  x = max(x, Floats::all(-87.0f));
  const Floats shift = Floats::all(12582912.0f);  // 1.5 * 2^23: adding it rounds to whole numbers
  const Floats n = (x * Floats::all(1.44269504f) + shift) - shift;
  const Floats f = (x - n * Floats::all(0.693359375f)) - n * Floats::all(-2.12194440e-4f);  // x - n ln 2, |f| <= 0.35
  Floats y = Floats::all(1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = y * f + Floats::all(c);
  return y * power_of_two(n);
}

// The smallest lane, and the sum of all lanes in a fixed order.
inline float smallest(const Floats& a) {
  float lanes[kWidth];
  a.store(lanes);
  float best = lanes[0];
  for (int i = 1; i < kWidth; ++i) best = lanes[i] < best ? lanes[i] : best;
  return best;
}
inline float sum(const Floats& a) {
  float lanes[kWidth];
  a.store(lanes);
  for (int half = kWidth / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

inline bool all_finite(const float* values, int64_t count) {
  Floats zeros = Floats::all(0);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) zeros = zeros + (Floats::load(values + i) - Floats::load(values + i));
  float rest = sum(zeros);
  for (; i < count; ++i) rest += values[i] - values[i];
  return rest == 0;
}

// The least and the greatest of at least one number; false if one of them is not finite.
inline bool extremes(const float* values, int64_t count, float& low, float& high) {
  Floats least = Floats::all(values[0]), most = least;
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth)
    least = min(Floats::load(values + i), least), most = max(Floats::load(values + i), most);
  low = smallest(least), high = -smallest(Floats::all(0) - most);
  for (; i < count; ++i) low = values[i] < low ? values[i] : low, high = values[i] > high ? values[i] : high;
  return all_finite(values, count);
}

// Four sums side by side hide the latency of the additions; their order is fixed.
inline float dot(const float* a, const float* b, int64_t count) {
  Floats totals[4] = {Floats::all(0), Floats::all(0), Floats::all(0), Floats::all(0)};
  int64_t i = 0;
  for (; i + 4 * kWidth <= count; i += 4 * kWidth)
    for (int64_t j = 0; j < 4; ++j)
      totals[j] = totals[j] + Floats::load(a + i + j * kWidth) * Floats::load(b + i + j * kWidth);
  for (; i + kWidth <= count; i += kWidth) totals[0] = totals[0] + Floats::load(a + i) * Floats::load(b + i);
  float result = sum((totals[0] + totals[1]) + (totals[2] + totals[3]));
  for (; i < count; ++i) result += a[i] * b[i];
  return result;
}

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
