// One query against 64 codes at a time: with AVX-512 a table of 256 bytes fits in four registers. Elsewhere one query
// is scanned by floats, which is as fast there.
#pragma once

#include "cpu/scan.h"

namespace drq {
namespace DRQ_ISA {
namespace {

#if defined(DRQ_AVX512)

constexpr int64_t kWorthABatch = 20;  // queries from which kLanes at a time are faster
constexpr int64_t kChunk = 4096;      // codes whose least and largest norm are looked at together

struct First64 {
  constexpr First64() : bytes() {
    for (int i = 0; i < 64; ++i) bytes[i] = static_cast<uint8_t>(i);
  }
  alignas(64) uint8_t bytes[64];
};
constexpr First64 kFirst64;

// 64 rows of kStride bytes (a power of two) to one register per level. With four levels the rows come out in another
// order, by groups of four: 16 l + 4 r + i holds row 16 r + 4 l + i. That is the order in which norms pack, too.
template <int kStride>
inline void planes(const uint8_t* rows, __m512i (&level)[kStride]) {
  __m512i now[kStride];
  for (int i = 0; i < kStride; ++i) now[i] = _mm512_loadu_si512(rows + 64 * i);
  if constexpr (kStride == 4) {
    // In each quarter of a register: four rows of four levels to four levels of four rows; then the same with dwords.
    const __m512i by_level =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    for (int i = 0; i < 4; ++i) now[i] = _mm512_shuffle_epi8(now[i], by_level);
    const __m512i a = _mm512_unpacklo_epi32(now[0], now[1]), b = _mm512_unpackhi_epi32(now[0], now[1]);
    const __m512i c = _mm512_unpacklo_epi32(now[2], now[3]), d = _mm512_unpackhi_epi32(now[2], now[3]);
    level[0] = _mm512_unpacklo_epi64(a, c), level[1] = _mm512_unpackhi_epi64(a, c);
    level[2] = _mm512_unpacklo_epi64(b, d), level[3] = _mm512_unpackhi_epi64(b, d);
    return;
  }
  // Bytes 0, 2, 4, .. of two registers, and bytes 1, 3, 5, ..
  const __m512i even = _mm512_add_epi8(_mm512_load_si512(kFirst64.bytes), _mm512_load_si512(kFirst64.bytes));
  const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi8(1));
  __m512i next[kStride];
  // Each round halves the stride: register i * width + j holds bytes j of rows i * 64 / width and following.
  for (int width = 1; width < kStride; width *= 2) {
    for (int pair = 0; pair < kStride / 2 / width; ++pair)
      for (int j = 0; j < width; ++j) {
        const __m512i a = now[2 * pair * width + j], b = now[(2 * pair + 1) * width + j];
        next[2 * pair * width + j] = _mm512_permutex2var_epi8(a, even, b);
        next[2 * pair * width + width + j] = _mm512_permutex2var_epi8(a, odd, b);
      }
    for (int i = 0; i < kStride; ++i) now[i] = next[i];
  }
  for (int i = 0; i < kStride; ++i) level[i] = now[i];
}

// Where planes() moves dword 4 r + l: to 4 l + r, and back.
inline __m512i dwords_moved() { return _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15); }

// The same for a mask: a transposition of four by four groups of four bits.
inline uint64_t rows_in_order(uint64_t mask) {
  mask = (mask & 0xf0f00f0ff0f00f0f) | (mask & 0x0000f0f00000f0f0) << 12 | (mask >> 12 & 0x0000f0f00000f0f0);
  return (mask & 0xff00ff0000ff00ff) | (mask & 0x00000000ff00ff00) << 24 | (mask >> 24 & 0x00000000ff00ff00);
}

inline __m512i look_up(const __m512i (&table)[4], __m512i code) {
  const __m512i low = _mm512_permutex2var_epi8(table[0], code, table[1]);
  const __m512i high = _mm512_permutex2var_epi8(table[2], code, table[3]);
  return _mm512_mask_blend_epi8(_mm512_movepi8_mask(code), low, high);
}

template <int kStride, int kM>
struct One {
  static constexpr bool kMoved = kStride == 4;  // see planes()

  One(const Search& job, int64_t q, Reservoir& best) : job(job), q(q), best(best) {
    const float* table = job.table + q * job.K;
    for (int64_t k = 0; k < job.K; ++k) {
      table_low = table[k] < table_low ? table[k] : table_low;
      table_high = table[k] > table_high ? table[k] : table_high;
    }
  }

  // Scans begin..end, a multiple of 64 codes, and returns where it stopped: before a chunk of which nothing may be
  // dropped, or at the end.
  int64_t run(int64_t begin, int64_t end) {
    int64_t rebuild = begin;
    for (int64_t at = begin; at < end; at += kChunk) {
      const int64_t stop = std::min(at + kChunk, end);
      const bool wider = job.norms != nullptr && widen(at, stop);
      if (at >= rebuild || wider) {
        if (!build()) return at;
        rebuild = at + (at - begin) * (kGrowth - 1) + 4 * kChunk;
      }
      if (job.metric == kIp) scan<kIp>(at, stop);
      if (job.metric == kL2) scan<kL2>(at, stop);
      if (job.metric == kCosine) scan<kCosine>(at, stop);
    }
    return end;
  }

 private:
  // Takes the norms of a chunk into account; true where they are outside of what the tables were made for. One NaN
  // makes the least norm NaN: its cosine is 0, whatever its sum.
  bool widen(int64_t at, int64_t stop) {
    __m512 low = _mm512_set1_ps(norms_low), high = _mm512_set1_ps(norms_high);
    unsigned unordered = 0;
    for (int64_t n = at; n < stop; n += 16) {
      const __m512 norms = _mm512_loadu_ps(job.norms + n);
      low = _mm512_min_ps(norms, low), high = _mm512_max_ps(norms, high);
      unordered |= _mm512_cmp_ps_mask(norms, norms, _CMP_UNORD_Q);
    }
    const float highest = _mm512_reduce_max_ps(high);
    const float lowest = unordered ? std::numeric_limits<float>::quiet_NaN() : _mm512_reduce_min_ps(low);
    if (lowest >= norms_low && highest <= norms_high) return false;
    norms_low = lowest, norms_high = highest;
    return true;
  }

  bool build() {
    best.shrink();
    if (!best.full || !filter.set(job, q, best.tau, table_low, table_high, norms_low, norms_high)) return false;
    const float sign = job.metric == kL2 ? -2 : -1;
    alignas(64) uint8_t bytes[256];
    alignas(64) float steps[16];
    for (int64_t m = 0; m < kM; ++m) {
      const float low = Filter::lowest(sign, job.scale[m], table_low, table_high);
      for (int64_t k = 0; k < job.K; k += 16) {
        for (int64_t i = 0; i < 16; ++i) {
          const float entry = k + i < job.K ? job.table[q * job.K + k + i] : table_low;
          steps[i] = (sign * (job.scale[m] * entry) - low) * filter.inverse;
        }
        Floats::load(steps).store_bytes(bytes + k);
      }
      for (int i = 0; i < 4; ++i) tables[m][i] = _mm512_load_si512(bytes + 64 * i);
    }
    bound = filter.bound(job, q, best.tau);
    return true;
  }

  // The norms of 64 codes as steps. For cosine the root is approximate, and off to the safe side.
  template <int kMetric>
  __m512i norm_steps(int64_t n) const {
    const float c = filter.factor * (filter.factor >= 0 ? 1 - 1.0f / 4096 : 1 + 1.0f / 4096);
    const __m512 low = _mm512_set1_ps(filter.norm_low), inverse = _mm512_set1_ps(filter.inverse);
    __m512i steps[4];
    for (int i = 0; i < 4; ++i) {
      __m512 norm = _mm512_loadu_ps(job.norms + n + 16 * i);
      if (kMetric == kCosine) norm = _mm512_mul_ps(_mm512_set1_ps(c), _mm512_mul_ps(norm, _mm512_rsqrt14_ps(norm)));
      const __m512 real = _mm512_mul_ps(_mm512_sub_ps(norm, low), inverse);
      steps[i] = _mm512_cvttps_epi32(_mm512_min_ps(real, _mm512_set1_ps(255)));  // packing makes 0 of what is below
    }
    const __m512i packed =
        _mm512_packus_epi16(_mm512_packus_epi32(steps[0], steps[1]), _mm512_packus_epi32(steps[2], steps[3]));
    return kMoved ? packed : _mm512_permutexvar_epi32(dwords_moved(), packed);
  }

  template <int kMetric>
  void scan(int64_t at, int64_t stop) {
    __m512i table[kM][4];
    for (int m = 0; m < kM; ++m)
      for (int i = 0; i < 4; ++i) table[m][i] = tables[m][i];
    __m512i limit = _mm512_set1_epi8(static_cast<char>(bound));
    const uint8_t* rows = static_cast<const uint8_t*>(job.codes);
    for (int64_t n = at; n < stop; n += 64) {
      __m512i code[kStride];
      planes<kStride>(rows + n * kStride, code);
      __m512i sum = look_up(table[0], code[0]);
      for (int m = 1; m < kM; ++m) sum = _mm512_adds_epu8(sum, look_up(table[m], code[m]));
      if (kMetric != kIp) sum = _mm512_adds_epu8(sum, norm_steps<kMetric>(n));
      uint64_t candidates = _mm512_cmplt_epu8_mask(sum, limit);
      if (job.keep != nullptr) {
        __m512i keep = _mm512_loadu_si512(job.keep + n);
        if (kMoved) keep = _mm512_permutexvar_epi32(dwords_moved(), keep);
        candidates &= _mm512_test_epi8_mask(keep, keep);
      }
      if (__builtin_expect(candidates != 0, 0)) {
        // Copies of the code that was turned down last need no second look.
        uint64_t copies = rejected >= 0 ? candidates : 0;
        for (int m = 0; m < kM; ++m)
          copies &= _mm512_cmpeq_epi8_mask(code[m], _mm512_set1_epi8(static_cast<char>(rejected_code[m])));
        if (kMoved) candidates = rows_in_order(candidates), copies = rows_in_order(copies);
        if (kMetric != kIp)
          for (int i = 0; i < 4; ++i) {
            const uint64_t other =
                _mm512_cmp_ps_mask(_mm512_loadu_ps(job.norms + n + 16 * i), _mm512_set1_ps(rejected_norm), _CMP_NEQ_UQ);
            copies &= ~(other << (16 * i));
          }
        look_closely(n, candidates & ~copies);
        limit = _mm512_set1_epi8(static_cast<char>(bound));
      }
    }
  }

  __attribute__((noinline)) void look_closely(int64_t first, uint64_t candidates) {
    for (; candidates; candidates &= candidates - 1) {
      const int64_t n = first + __builtin_ctzll(candidates);
      const float cost = cost_of<uint8_t>(job, q, n), before = best.tau;
      if (best.wants(cost)) {
        best.add(cost, n);
        if (best.tau != before) bound = filter.bound(job, q, best.tau);
      } else {
        rejected = n;
        std::memcpy(rejected_code, row_of<uint8_t>(job, n), kM);
        rejected_norm = job.norms == nullptr ? 0 : job.norms[n];
      }
    }
  }

  const Search& job;
  int64_t q;
  Reservoir& best;
  Filter filter;
  float table_low = std::numeric_limits<float>::infinity(), table_high = -table_low;
  float norms_low = std::numeric_limits<float>::infinity(), norms_high = -norms_low;
  __m512i tables[kM][4];
  uint8_t bound = 0;
  int64_t rejected = -1;
  uint8_t rejected_code[kM] = {};
  float rejected_norm = 0;
};

template <int kStride>
int64_t run_one(const Search& job, int64_t q, int64_t begin, int64_t end, Reservoir& best) {
  if (job.M == 1) return One<kStride, 1>(job, q, best).run(begin, end);
  if constexpr (kStride >= 2)
    if (job.M == 2) return One<kStride, 2>(job, q, best).run(begin, end);
  if constexpr (kStride >= 4) {
    if (job.M == 3) return One<kStride, 3>(job, q, best).run(begin, end);
    if (job.M == 4) return One<kStride, 4>(job, q, best).run(begin, end);
  }
  if constexpr (kStride >= 8) {
    if (job.M == 6) return One<kStride, 6>(job, q, best).run(begin, end);
    if (job.M == 8) return One<kStride, 8>(job, q, best).run(begin, end);
  }
  return begin;
}

// Scans as many codes as it can from `begin`, after the seeds, and returns where it stopped.
int64_t scan_one(const Search& job, int64_t q, int64_t begin, int64_t end, Reservoir& best) {
  if (job.wide) return begin;
  // Rows are read whole, but the last one of all may end after M codes.
  const int64_t whole = end == job.N && job.M < job.stride ? end - 1 : end;
  const int64_t last = begin + (whole - begin) / 64 * 64;
  if (job.stride == 1) return run_one<1>(job, q, begin, last, best);
  if (job.stride == 2) return run_one<2>(job, q, begin, last, best);
  if (job.stride == 4) return run_one<4>(job, q, begin, last, best);
  if (job.stride == 8) return run_one<8>(job, q, begin, last, best);
  return begin;
}

#else

constexpr int64_t kWorthABatch = 3;

int64_t scan_one(const Search&, int64_t, int64_t begin, int64_t, Reservoir&) { return begin; }

#endif

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
