// The AVX-512 intrinsics that the kernels use and SIMDe 0.7.4 lacks, lane by lane; included before a kernel's own text.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace drq_missing {

struct Lanes {
  explicit Lanes(__m512 a) { std::memcpy(v, &a, sizeof v); }
  float v[16];
};

template <class Vector, class Lane, int kCount>
Vector vector_of(const Lane (&lanes)[kCount]) {
  Vector out;
  static_assert(sizeof out == sizeof lanes, "all lanes");
  std::memcpy(&out, lanes, sizeof out);
  return out;
}

// Numbers outside the range of int32 become INT32_MIN, as on the processor.
inline int32_t whole(float x) { return x >= -2147483648.0f && x < 2147483648.0f ? static_cast<int32_t>(x) : INT32_MIN; }

template <class Operation>
__m512i to_ints(__m512 a, Operation operation) {
  const Lanes in(a);
  int32_t out[16];
  for (int i = 0; i < 16; ++i) out[i] = whole(operation(in.v[i]));
  return vector_of<__m512i>(out);
}

inline __m512i cvtps(__m512 a) {
  return to_ints(a, [](float x) { return std::nearbyint(x); });
}
inline __m512i cvttps(__m512 a) {
  return to_ints(a, [](float x) { return std::trunc(x); });
}

inline __m128i cvtusepi32_epi8(__m512i a) {
  uint32_t in[16];
  std::memcpy(in, &a, sizeof in);
  uint8_t out[16];
  for (int i = 0; i < 16; ++i) out[i] = static_cast<uint8_t>(in[i] < 255 ? in[i] : 255);
  return vector_of<__m128i>(out);
}

// Every lane has nearly the largest error that the processor may have, 2^-14, so that tests notice code that needs
// less.
inline __m512 rsqrt14(__m512 a) {
  const Lanes in(a);
  float out[16];
  for (int i = 0; i < 16; ++i) out[i] = 1 / std::sqrt(in.v[i]) * (i % 2 ? 1 + 1.0f / 16500 : 1 - 1.0f / 16500);
  return vector_of<__m512>(out);
}

template <class Narrow, class Vector>
__m512i widened(Vector a) {
  Narrow in[16];
  static_assert(sizeof in == sizeof a, "all lanes");
  std::memcpy(in, &a, sizeof in);
  uint32_t out[16];
  for (int i = 0; i < 16; ++i) out[i] = in[i];
  return vector_of<__m512i>(out);
}

inline __m512i widened_signed(__m128i a) {
  int8_t in[16];
  std::memcpy(in, &a, sizeof in);
  int32_t out[16];
  for (int i = 0; i < 16; ++i) out[i] = in[i];
  return vector_of<__m512i>(out);
}

inline __m512 cvtepi32(__m512i a) {
  int32_t in[16];
  std::memcpy(in, &a, sizeof in);
  float out[16];
  for (int i = 0; i < 16; ++i) out[i] = static_cast<float>(in[i]);
  return vector_of<__m512>(out);
}

inline __m512 cvtph(__m256i a) {
  uint16_t in[16];
  std::memcpy(in, &a, sizeof in);
  float out[16];
  for (int i = 0; i < 16; ++i) {
    const int exponent = in[i] >> 10 & 31, fraction = in[i] & 1023;
    const float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                       : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                       : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
    out[i] = std::copysign(size, in[i] & 0x8000 ? -1.0f : 1.0f);
  }
  return vector_of<__m512>(out);
}

}  // namespace drq_missing

#ifndef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32(a) drq_missing::cvtps(a)
#endif
#ifndef _mm512_cvttps_epi32
#define _mm512_cvttps_epi32(a) drq_missing::cvttps(a)
#endif
#ifndef _mm512_cvtusepi32_epi8
#define _mm512_cvtusepi32_epi8(a) drq_missing::cvtusepi32_epi8(a)
#endif
#ifndef _mm512_rsqrt14_ps
#define _mm512_rsqrt14_ps(a) drq_missing::rsqrt14(a)
#endif
#ifndef _mm512_cvtepu8_epi32
#define _mm512_cvtepu8_epi32(a) drq_missing::widened<uint8_t>(a)
#endif
#ifndef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32(a) drq_missing::widened<uint16_t>(a)
#endif
#ifndef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32(a) drq_missing::widened_signed(a)
#endif
#ifndef _mm512_cvtph_ps
#define _mm512_cvtph_ps(a) drq_missing::cvtph(a)
#endif
#ifndef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps(a) drq_missing::cvtepi32(a)
#endif
