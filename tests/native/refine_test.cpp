// Compares the refinement of candidates by every instruction set with its definition, on random cases.
// Usage: refine_test FIRST_SEED COUNT.
#include <algorithm>
#include <cmath>
#include <utility>

#include "isa.h"
#include "random.h"
#include "search.h"

namespace {

using drq::kCosine, drq::kIp, drq::kIsaCount, drq::kIsaNames, drq::kL2;

struct Found {
  std::vector<float> scores;
  std::vector<int64_t> positions;
};

// The first place that differs, or -1.
int64_t difference(const Found& a, const Found& b) {
  for (size_t i = 0; i < a.scores.size(); ++i)
    if (a.positions[i] != b.positions[i] || std::memcmp(&a.scores[i], &b.scores[i], sizeof(float)) != 0)
      return static_cast<int64_t>(i);
  return -1;
}

// Vectors of one kind, as they are stored and as floats.
struct Vectors {
  Vectors(Random& random, int64_t N, int64_t D, int kind) : kind(kind), floats(N * D) {
    for (int64_t n = 0; n < N; ++n) steps.push_back(random.uniform());
    for (int64_t i = 0; i < N * D; ++i) {
      bytes.push_back(static_cast<int8_t>(random.between(-127, 127)));
      halves.push_back(static_cast<uint16_t>(random.below(1 << 16) & 0xbfff));  // finite, and not large
      const int exponent = halves[i] >> 10 & 31, fraction = halves[i] & 1023;
      const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                       : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
      floats[i] = kind == drq::kInt8      ? steps[i / D] * static_cast<float>(bytes[i])
                  : kind == drq::kFloat16 ? std::copysign(size, halves[i] & 0x8000 ? -1.0f : 1.0f)
                                          : random.normal();
    }
  }
  const void* data() const {
    return kind == drq::kInt8      ? static_cast<const void*>(bytes.data())
           : kind == drq::kFloat16 ? static_cast<const void*>(halves.data())
                                   : static_cast<const void*>(floats.data());
  }
  int kind;
  std::vector<float> floats, steps;
  std::vector<int8_t> bytes;
  std::vector<uint16_t> halves;
};

// Sixty-four sums side by side, the last dimensions padded with zeros.
template <class Term>
float in_blocks(int64_t D, const Term& term) {
  float sums[4][16] = {};
  for (int64_t d = 0; d < D; ++d) sums[d / 16 % 4][d % 16] += term(d);
  for (int64_t i = 0; i < 16; ++i) sums[0][i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
  for (int64_t half = 8; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) sums[0][i] += sums[0][i + half];
  return sums[0][0];
}

float exact_cost(int metric, const float* q, const float* x, int64_t D) {
  if (metric == kL2) return in_blocks(D, [=](int64_t d) { return (q[d] - x[d]) * (q[d] - x[d]); });
  const float inner = in_blocks(D, [=](int64_t d) { return q[d] * x[d]; });
  if (metric == kIp) return 0.0f - inner;
  const float lengths = std::sqrt(in_blocks(D, [=](int64_t d) { return q[d] * q[d]; })) *
                        std::sqrt(in_blocks(D, [=](int64_t d) { return x[d] * x[d]; }));
  return 0.0f - (lengths > 0 ? inner / lengths : 0);
}

// Candidates scored by stored vectors: all instruction sets, against the definition.
bool check(uint64_t seed) {
  Random random(seed);
  const int64_t Q = random.between(0, 4), N = random.between(1, 50), n = random.between(1, 60);
  const int64_t D = random.one_of({1, 5, 16, 17, 63, 64, 65, 130}), k = random.between(1, 70);
  const int metric = static_cast<int>(random.below(3)), kind = static_cast<int>(random.below(3));
  const Vectors vectors(random, N, D, kind);
  std::vector<float> queries(Q * D);
  std::vector<int64_t> candidates(Q * n);
  for (auto& x : queries) x = random.normal();
  for (auto& row : candidates) row = random.between(-1, N - 1);
  Found expected{std::vector<float>(Q * k), std::vector<int64_t>(Q * k)};
  for (int64_t q = 0; q < Q; ++q) {
    std::vector<std::pair<float, int64_t>> all;
    for (int64_t i = 0; i < n; ++i)
      if (const int64_t row = candidates[q * n + i]; row >= 0)
        all.emplace_back(exact_cost(metric, &queries[q * D], &vectors.floats[row * D], D), row);
    std::sort(all.begin(), all.end());
    for (size_t i = 0; i < static_cast<size_t>(k); ++i) {
      const float cost = i < all.size() ? all[i].first : std::numeric_limits<float>::infinity();
      expected.scores[q * k + i] = drq::turned(metric, cost);
      expected.positions[q * k + i] = i < all.size() ? all[i].second : -1;
    }
  }
  for (int isa = 0; isa < kIsaCount; ++isa) {
    if (!drq::isa_supported(isa)) continue;
    Found found{std::vector<float>(Q * k, -77), std::vector<int64_t>(Q * k, -77)};
    const float* steps = kind == drq::kInt8 ? vectors.steps.data() : nullptr;
    drq::refine_cpu({queries.data(), candidates.data(), vectors.data(), steps, found.scores.data(),
                     found.positions.data(), Q, n, k, D, metric, kind},
                    isa, 2);
    if (const int64_t i = difference(expected, found); i >= 0) {
      std::printf("%s: refinement differs at %lld: metric=%d kind=%d D=%lld\n", kIsaNames[isa],
                  static_cast<long long>(i), metric, kind, static_cast<long long>(D));
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) { return run_seeds(argc, argv, check); }
