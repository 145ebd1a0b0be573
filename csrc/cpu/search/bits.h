// One query against 32 codes at a time, with AVX2 or AVX-512 without VBMI: each term of a score is rounded to two to
// four bits, and each bit is stored as the set of the codewords whose term has it. Two look-ups of 16 bytes tell
// whether a codeword is in a set of 256. See one.h for AVX-512.
#pragma once

#include "cpu/search/bound.h"
#include "cpu/search/count.h"
#include "cpu/search/part.h"
#include "cpu/search/reservoir.h"

namespace drq {
namespace DRQ_ISA {
namespace {

#if (defined(DRQ_AVX2) || defined(DRQ_AVX512)) && !defined(DRQ_VBMI)
#define DRQ_BITS

// Bytes `first` and `first` + 1 of 16 rows of 4 or 8 bytes: as dword i those of rows i and i + 8.
template <int kStride>
inline __m256i pairs_of(const uint8_t* rows, int first) {
  const auto load = [](const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); };
  if constexpr (kStride == 4) {
    return _mm256_blend_epi16(load(rows + first), load(rows + 30 + first), 0xaa);
  } else {
    const auto dwords = [load](const uint8_t* p) {
      const __m256 low = _mm256_castsi256_ps(load(p)), high = _mm256_castsi256_ps(load(p + 32));
      return _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88)), 0xd8);
    };
    const __m256i low = dwords(rows), high = dwords(rows + 64);
    if (first == 0) return _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa);
    return _mm256_blend_epi16(_mm256_srli_epi32(low, 16), high, 0xaa);
  }
}

// The first kLevels codes of 32 rows, a vector for each level: as dword i those of rows i, i + 16, i + 8 and i + 24.
template <int kStride, int kLevels>
inline void codes_of(const uint8_t* rows, __m256i (&codes)[4]) {
  const __m256i even = _mm256_set1_epi16(0xff);
  for (int m = 0; m < kLevels; m += 2) {
    const __m256i first = pairs_of<kStride>(rows, m), second = pairs_of<kStride>(rows + 16 * kStride, m);
    codes[m] = _mm256_or_si256(_mm256_and_si256(first, even), _mm256_slli_epi16(second, 8));
    codes[m + 1] = _mm256_or_si256(_mm256_srli_epi16(first, 8), _mm256_andnot_si256(even, second));
  }
}

// Bit i is set where the byte that belongs to row i, in the order of codes_of(), has its highest bit.
inline uint32_t rows_of(__m256i marks) {
  const __m128i fours = _mm_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15);
  const __m256i apart = _mm256_shuffle_epi8(marks, _mm256_broadcastsi128_si256(fours));
  const __m256i in_order = _mm256_permutevar8x32_epi32(apart, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  return static_cast<uint32_t>(_mm256_movemask_epi8(in_order));
}

// 32 whole numbers as bytes, saturated to 0..255, in the order of codes_of().
inline __m256i bytes_of(__m256i rows0, __m256i rows8, __m256i rows16, __m256i rows24) {
  const __m256i apart = _mm256_packus_epi16(_mm256_packs_epi32(rows0, rows8), _mm256_packs_epi32(rows16, rows24));
  const __m128i together = _mm_setr_epi8(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
  return _mm256_shuffle_epi8(apart, _mm256_broadcastsi128_si256(together));
}

// How one query drops codes by few bits (docs/math.md, section 5). With A and the limit of bound.h, and a step that
// goes 2^bits - 1 times into limit - sum of the minima of A_m - least, a code can only be among the k best if
//   sum_m floor((A_m[b_m] - min A_m) / step) + (norm - least) / step < 2^bits - 1,
// with the norm rounded down to parts of a step, and any number of first levels. Codes with norms below `least` are
// kept.
struct Bits {
  static constexpr int kBits = 4, kLevels = 4;  // the most

  explicit Bits(const Search& job) : job(job), by_floats(kLookUp * job.M) {}

  // Whether it supports the metric and rows of this length.
  static bool takes(const Search& job) {
    return !job.wide && is_norm_only(job.metric) && (job.stride == 4 || job.stride == 8) && job.M >= 2 &&
           job.stride >= job.M && job.K <= 256;
  }

  // For another query.
  void start(int64_t query, Reservoir& reservoir) {
    q = query, best = &reservoir;
    seen = chosen = 0, way = kFinest, expected = 0;
    least = std::numeric_limits<float>::infinity();
    usable = takes(job) && bound.start(job, q);
    if (!usable) return;
    for (int64_t m = 0; m < std::min<int64_t>(kLevels, job.M); ++m)
      for (int64_t k = 0; k < 256; ++k) table[m][k] = job.entries(q, m)[k < job.K ? k : 0];
  }

  // Scans as many of the codes begin..end as it can and returns where it stopped. The constant of the query may be
  // another one in each call.
  int64_t run(int64_t begin, int64_t end) {
    if (!usable || !bound.set_constant()) return begin;
    const int64_t whole =
        job.M < job.stride ? job.N - 1 : job.N;  // rows are read whole, but the last one may end after M
    end = std::min(end, whole);
    int64_t at = begin;
    while (end - at >= kShortest && at + kTried <= whole) {
      best->shrink();
      if (!best->full) break;
      const int64_t codes = std::min({end - at, std::max(kTried, seen), kTaken}) / 32 * 32;
      if (job.norms != nullptr) look_at_norms(at, codes);
      if (seen >= 2 * chosen || expected == by_floats) choose(at);
      if (expected == by_floats || !build(way)) break;
      const double found = cost_of_way(way, scan(way, at, at + codes, false), codes);
      if (found > 1.5 * expected) chosen = 0;
      DRQ_COUNT(bits, codes);
      at += codes, seen += codes;
    }
    return at;
  }

 private:
  struct Way {
    int bits, levels;
    double cost;  // time per code
  };
  // Only ratios matter: these are picoseconds on one processor.
  static constexpr Way kWays[] = {{2, 2, 125}, {2, 3, 200}, {3, 3, 260}, {4, 3, 330}, {4, 4, 420}};
  static constexpr double kCloser = 8000,
                          kLookUp = 210;  // to score a code that is left, and per level if all codes are scored
  static constexpr int kFinest = sizeof kWays / sizeof *kWays - 1;
  static constexpr int64_t kShortest = 256, kTried = 512, kGroups = 64;

  // Lowers `least` to the smallest of a sample of the norms.
  void look_at_norms(int64_t at, int64_t codes) {
    for (int64_t i = 0; i < 64; ++i) {
      const float norm = job.norms[at + codes * i / 64];
      if (norm < least) least = norm;
    }
  }

  // Builds the sets for the k-th best cost so far; false if no code may be dropped.
  bool build(int which) {
    const int bits = kWays[which].bits, all = (1 << bits) - 1;
    const double base = bound.base + (job.norms == nullptr ? 0 : least);
    if (!steps.set(base, bound.limit(best->tau), all)) return false;
    std::memset(sets, 0, sizeof sets);
    for (int m = 0; m < kWays[which].levels; ++m) {
      const Floats scale = Floats::all(job.scale[m]), signs = Floats::all(sign_of(job.metric));
      const Floats low = Floats::all(bound.minima[m]), inverse = Floats::all(steps.inverse);
      for (int64_t high = 0; high < 16; ++high) {
        const Floats term = signs * (scale * Floats::load(table[m] + 16 * high));
        uint8_t counts[16];
        min((term - low) * inverse, Floats::all(static_cast<float>(all))).store_bytes(counts);
        const __m128i each = _mm_loadu_si128(reinterpret_cast<const __m128i*>(counts));
        const __m128i place = _mm_set1_epi8(static_cast<char>(1 << high % 8));
        for (int bit = 0; bit < bits; ++bit) {
          const __m128i one = _mm_set1_epi8(static_cast<char>(1 << bit));
          const __m128i have = _mm_and_si128(_mm_cmpeq_epi8(_mm_and_si128(each, one), one), place);
          __m128i* const set = sets[m][bit] + high / 8;
          *set = _mm_or_si128(*set, have);
        }
      }
    }
    factor = steps.inverse * static_cast<float>(256 >> bits);
    shift = job.norms == nullptr ? 0 : static_cast<float>(static_cast<double>(least) * factor - 1);
    if (!std::isfinite(shift)) return false;
    tighten(bits);
    return true;
  }

  // Sets the threshold for the k-th best cost so far.
  void tighten(int bits) {
    const int all = (1 << bits) - 1, parts = 256 >> bits;
    const double most = std::fmax(steps.at(bound.limit(best->tau)), -1);
    const double byte = job.norms == nullptr ? -1 - std::fmin(std::floor(most), all - 1)
                                             : std::fmin(std::floor(std::fmax(most, 0) * parts) + 1, all * parts);
    threshold = _mm256_set1_epi8(static_cast<char>(static_cast<int>(byte)));
  }

  static double cost_of_way(int which, int64_t left, int64_t codes) {
    return kWays[which].cost + kCloser * left / codes;
  }

  // The cost of a way, estimated on the next kTried codes.
  double try_way(int which, int64_t at) {
    if (kWays[which].levels > job.M || !build(which)) return by_floats;
    return cost_of_way(which, scan(which, at, at + kTried, true), kTried);
  }

  // Chooses the fastest way; tries them from one step finer than the last choice on to coarser ones.
  void choose(int64_t at) {
    chosen = seen, expected = by_floats;
    for (int i = std::min(way + 1, kFinest); i >= 0; --i) {
      const double cost = try_way(i, at);
      if (cost > expected && i < way) break;
      if (cost < expected) way = i, expected = cost;
    }
    if (expected == by_floats) way = kFinest;
  }

  int64_t scan(int which, int64_t begin, int64_t end, bool trial) {
    if (job.stride == 4)
      return job.norms ? scan<4, true>(which, begin, end, trial) : scan<4, false>(which, begin, end, trial);
    return job.norms ? scan<8, true>(which, begin, end, trial) : scan<8, false>(which, begin, end, trial);
  }

  template <int kStride, bool kNorms>
  int64_t scan(int which, int64_t begin, int64_t end, bool trial) {
    if (which == 0) return scan<kStride, kNorms, 0>(begin, end, trial);
    if (which == 1) return scan<kStride, kNorms, 1>(begin, end, trial);
    if (which == 2) return scan<kStride, kNorms, 2>(begin, end, trial);
    if (which == 3) return scan<kStride, kNorms, 3>(begin, end, trial);
    return scan<kStride, kNorms, 4>(begin, end, trial);
  }

  // Returns how many codes were left.
  template <int kStride, bool kNorms, int kWay>
  int64_t scan(int64_t begin, int64_t end, bool trial) {
    constexpr int kBits = kWays[kWay].bits, kLevels = kWays[kWay].levels;
    int64_t left = 0;
    for (int64_t n = begin; n < end;) {
      const int64_t first = n, last = std::min(end, n + 32 * kGroups);
      __m256i marks[kGroups], any = _mm256_setzero_si256();
      for (__m256i* mark = marks; n < last; n += 32, ++mark) {
        const float* const norms = kNorms ? job.norms + n : nullptr;
        *mark = left_of<kStride, kNorms, kBits, kLevels>(row_of<uint8_t>(job, 0) + n * kStride, norms);
        any = _mm256_or_si256(any, *mark);
      }
      if (_mm256_movemask_epi8(any) != 0) left += look_closely(first, last, marks, trial ? 0 : kBits);
    }
    return left;
  }

  // Which of 32 codes are left, as bytes of ones, in the order of codes_of().
  template <int kStride, bool kNorms, int kBits, int kLevels>
  __attribute__((always_inline)) __m256i left_of(const uint8_t* rows, const float* norms) const {
    const __m256i top = _mm256_set1_epi8(-128), nibble = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
    const __m256i powers = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    __m256i codes[4], counts[kBits];
    codes_of<kStride, kLevels>(rows, codes);
    for (auto& count : counts) count = zero;
    for (int m = 0; m < kLevels; ++m) {
      const __m256i code = codes[m], other = _mm256_xor_si256(code, top);
      const __m256i place = _mm256_shuffle_epi8(powers, _mm256_and_si256(_mm256_srli_epi16(code, 4), nibble));
      for (int bit = 0; bit < kBits; ++bit) {
        const __m256i low = _mm256_broadcastsi128_si256(sets[m][bit][0]);
        const __m256i high = _mm256_broadcastsi128_si256(sets[m][bit][1]);
        const __m256i have = _mm256_or_si256(_mm256_shuffle_epi8(low, code), _mm256_shuffle_epi8(high, other));
        counts[bit] = _mm256_add_epi8(counts[bit], _mm256_cmpeq_epi8(_mm256_and_si256(have, place), place));
      }
    }
    __m256i sum = counts[kBits - 1];  // negative
    for (int bit = kBits - 2; bit >= 0; --bit) sum = _mm256_add_epi8(_mm256_add_epi8(sum, sum), counts[bit]);
    if constexpr (!kNorms) return _mm256_cmpgt_epi8(sum, threshold);
    const __m256i steps = _mm256_min_epu8(_mm256_sub_epi8(zero, sum), _mm256_set1_epi8((1 << kBits) - 1));
    const __m256i of_norms = kNorms ? steps_of(norms) : zero;
    const __m256i total = _mm256_adds_epu8(_mm256_slli_epi16(steps, 8 - kBits), of_norms);
    const __m256i within = _mm256_cmpeq_epi8(_mm256_subs_epu8(total, threshold), zero);
    return _mm256_or_si256(within, _mm256_cmpeq_epi8(of_norms, zero));
  }

  // 1 + the parts of a step by which 32 norms are above `least`; 0 for norms below it and for NaN.
  __m256i steps_of(const float* norms) const {
    const __m256 factors = _mm256_set1_ps(factor), shifts = _mm256_set1_ps(shift);
    const auto eight = [&](const float* p) {
      return _mm256_cvttps_epi32(_mm256_fmsub_ps(_mm256_loadu_ps(p), factors, shifts));
    };
    return bytes_of(eight(norms), eight(norms + 8), eight(norms + 16), eight(norms + 24));
  }

  // Scores the codes of first..last that are left, unless bits is 0; returns how many these are. Many at once, with few
  // branches that are hard to predict.
  __attribute__((noinline)) int64_t look_closely(int64_t first, int64_t last, const __m256i* marks, int bits) {
    int32_t groups[kGroups + 1], places[32 * kGroups];
    int64_t noted = 0, left = 0;
    float costs[32 * kGroups];
    for (int32_t g = 0; g < (last - first) / 32; ++g) {
      groups[noted] = g;
      noted += _mm256_movemask_epi8(marks[g]) != 0;
    }
    for (int64_t i = 0; i < noted; ++i)
      for (uint32_t rows = rows_of(marks[groups[i]]); rows; rows &= rows - 1)
        places[left++] = 32 * groups[i] + __builtin_ctz(rows);
    if (bits == 0) return left;
    for (int64_t i = 0; i < left; ++i) costs[i] = cost_of<uint8_t>(job, q, first + places[i]);
    const float before = best->tau;
    for (int64_t i = 0; i < left; ++i)
      if (best->wants(costs[i]) && (job.keep == nullptr || job.keep[first + places[i]]))
        best->add(costs[i], first + places[i]);
    if (best->tau != before) tighten(bits);
    return left;
  }

  const Search& job;
  const double by_floats;
  int64_t q = 0, seen = 0, chosen = 0;  // codes scanned so far: now, and when the way was chosen
  Reservoir* best = nullptr;
  int way = 0;
  __m256i threshold;    // without norms what the negative sum of steps must be above, with them the greatest sum
  double expected = 0;  // cost of the way
  bool usable = false;
  float least = 0, factor = 0, shift = 0;
  Bound bound;
  Steps steps;
  alignas(32) float table[kLevels][256];
  __m128i sets[kLevels][kBits][2];
};

#else

struct Bits {
  explicit Bits(const Search&) {}
  void start(int64_t, Reservoir&) {}
  int64_t run(int64_t begin, int64_t) { return begin; }
};

#endif

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
