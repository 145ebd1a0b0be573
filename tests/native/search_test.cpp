// Compares search and norms of every instruction set with all scores sorted, on random cases.
// Usage: search_test FIRST_SEED COUNT.
#include "search.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <thread>

#include "cpu/search/count.h"
#include "cpu/search/key.h"
#include "isa.h"
#include "random.h"

namespace {

using drq::kCosine, drq::kIp, drq::kIsaCount, drq::kIsaNames, drq::kL2;

struct Found {
  std::vector<float> scores;
  std::vector<int64_t> positions;
};

// A search that owns its inputs. Arrays have no spare elements, so that sanitizers notice reads beyond their ends.
struct Case {
  explicit Case(uint64_t seed) : random(seed) {
    shapes();
    groups();
    codes();
    values();
  }

  // Codes that every scan can drop early: independent levels of decreasing scale, and small k.
  Case(int metric, int64_t Q, int64_t N, int64_t M)
      : random(1), Q(Q), N(N), K(256), T(256), M(M), k(10), stride(M), metric(metric), threads(1), wide(false) {
    bases.assign(M, 0);
    table = numbers(Q * K, 1, 1), constants = numbers(Q, 1, 1), lengths.assign(Q, 1);
    for (int64_t m = 0; m < M; ++m) scale.push_back(std::pow(0.5f, static_cast<float>(m)));
    for (int64_t i = 0; i < N * M; ++i) codes8.push_back(static_cast<uint8_t>(random.below(K)));
    for (int64_t n = 0; n < N && metric != kIp; ++n) norms.push_back(1 + random.uniform());
  }

  drq::Search job(Found& found) const {
    found.scores.assign(Q * k, -77);
    found.positions.assign(Q * k, -77);
    drq::Search out{};
    out.table = table.data(), out.scale = scale.data(), out.bases = bases.data(), out.codes = codes_at();
    out.norms = metric == kIp ? nullptr : norms.data();
    out.constants = constants.data();
    out.lengths = metric == kCosine ? lengths.data() : nullptr;
    out.keep = keep.empty() ? nullptr : keep.data();
    out.scores = found.scores.data(), out.positions = found.positions.data();
    out.Q = Q, out.N = N, out.K = K, out.T = T, out.M = M, out.k = k, out.stride = stride;
    out.metric = metric, out.wide = wide;
    return out;
  }

  const void* codes_at() const {
    return wide ? static_cast<const void*>(codes16.data()) : static_cast<const void*>(codes8.data());
  }
  int64_t code(int64_t n, int64_t m) const { return wide ? codes16[n * stride + m] : codes8[n * stride + m]; }

  // The entry of query q for level m of code n.
  float entry(int64_t q, int64_t n, int64_t m) const { return table[q * T + bases[m] + code(n, m)]; }

  void print() const {
    std::printf("Q=%lld N=%lld K=%lld T=%lld M=%lld k=%lld stride=%lld metric=%d wide=%d keep=%d threads=%d\n",
                static_cast<long long>(Q), static_cast<long long>(N), static_cast<long long>(K),
                static_cast<long long>(T), static_cast<long long>(M), static_cast<long long>(k),
                static_cast<long long>(stride), metric, wide, !keep.empty(), threads);
  }

  Random random;
  int64_t Q, N, K, T, M, k, stride;
  std::vector<int64_t> bases;
  int metric, threads;
  bool wide;
  std::vector<float> table, scale, norms, constants, lengths;
  std::vector<uint8_t> codes8, keep;
  std::vector<uint16_t> codes16;

 private:
  void shapes() {
    const int64_t size = random.below(40);
    metric = static_cast<int>(random.below(3));
    threads = static_cast<int>(random.between(1, 4));
    Q = random.one_of({1, 1, 2, 3, 5, 20, 33, 64, 70});
    M = random.one_of({1, 2, 3, 4, 4, 4, 5, 6, 7, 8, 8, 12, 13, 16, 18, 24, 33, 64});
    K = random.one_of({1, 2, 7, 16, 64, 100, 255, 256, 256, 256, 257, 300, 1000, 4096});
    if (size < 16) N = random.between(0, 300), Q = random.between(0, 5);
    if (size >= 16) N = random.between(2049, 9000);
    const bool sampled = size >= 33 && size < 37;  // enough codes for k to guess from a sample
    if (sampled) N = random.between(12288, 16000), Q = random.one_of({20, 33, 70});
    if (size >= 37) N = random.between(65536, 110000), Q = std::min<int64_t>(Q, 20);  // ranges of codes by threads
    if (size == 39) N = random.between(20000, 30000), Q = random.between(129, 150);   // batches by threads
    if (random.once_in(2)) N = N / 64 * 64;                                           // no remainder of a block
    wide = K > 256 || random.once_in(5);
    const int64_t many = std::max<int64_t>(1, N / 64 - 1);  // the most for which a scan drops codes by bytes
    k = random.one_of({1, 2, 3, 10, 10, 50, many, random.between(1, many), random.between(1, std::max<int64_t>(1, N))});
    if (k * Q > 100000) k = 10;
    if (sampled) k = random.between(24, N / 512);
    stride =
        random.once_in(2)
            ? M
            : random.one_of({M + 1, std::max<int64_t>(M, 8), std::max<int64_t>(M, 16), std::max<int64_t>(M, 4), M + 5});
    if (random.once_in(20)) stride = random.between(1, M);  // rows that overlap
    if (size >= 16 && size < 33 && random.once_in(2)) {     // one query, and rows of 4 or 8 bytes
      Q = random.between(1, 2), N = random.between(2049, 20000), K = random.between(100, 256), wide = false;
      M = random.one_of({2, 3, 4, 4, 4, 8}), stride = M <= 4 && !random.once_in(4) ? 4 : 8;
      k = random.one_of({1, 10, 10, 30});
    }
  }

  // Which levels share their codewords: all, none, or some neighbours.
  void groups() {
    const int64_t kind = random.one_of({0, 0, 0, 1, 2});
    int64_t group = 0;
    bases.assign(M, 0);
    for (int64_t m = 1; m < M; ++m) {
      if (kind == 1 || (kind == 2 && random.once_in(3))) ++group;
      bases[m] = group * K;
    }
    T = (group + 1) * K;
  }

  void codes() {
    const int64_t distinct = random.one_of({N, N, N, N, 1, 2, 40, 700});
    const int64_t used = random.once_in(6) ? random.between(1, K) : K;  // codewords that occur
    const int64_t length = N == 0 ? 0 : (N - 1) * stride + M;           // nothing after the last code
    std::vector<uint16_t> all(length);
    for (int64_t n = 0; n < N; ++n) {
      const int64_t like = n < distinct ? n : random.below(distinct);
      for (int64_t i = n * stride; i < std::min(n * stride + stride, length); ++i)
        all[i] = static_cast<uint16_t>(like == n ? random.below(used) : all[like * stride + i - n * stride]);
    }
    if (random.once_in(6))  // a sample that misleads: all others are copies of one code
      for (int64_t i = stride; i < length; ++i)
        if (i / stride % 17 != 0) all[i] = all[i % stride + (length > 20 * stride ? 19 * stride : 0)];
    if (wide)
      codes16 = all;
    else
      codes8.assign(all.begin(), all.end());
    if (random.once_in(3)) {
      const int64_t share = random.one_of({1, 2, 2, 10, 1000});
      keep.resize(N);
      for (auto& mark : keep) mark = random.once_in(share) ? static_cast<uint8_t>(random.between(1, 255)) : 0;
    }
  }

  // Random numbers: small integers (kind 0), so that different codes tie, or normal ones times `spread`.
  std::vector<float> numbers(int64_t count, int kind, float spread) {
    std::vector<float> out(count);
    for (auto& x : out) x = kind == 0 ? static_cast<float>(random.between(-3, 3)) : spread * random.normal();
    return out;
  }

  void values() {
    const int kind = static_cast<int>(random.below(4));
    const float spreads[] = {1, 1, 1, 1, 1e-3f, 1e4f, 1e-38f, 1e18f, 1e30f};
    const float spread = spreads[random.below(9)];
    table = numbers(Q * T, kind, spread);
    scale = numbers(M, kind, 1);
    const float other_sign = random.once_in(3) ? -1.0f : 1.0f;
    if (!random.once_in(4))
      for (int64_t m = 0; m < M; ++m)
        scale[m] = (m % 3 == 1 ? other_sign : 1.0f) / std::pow(1.5f, static_cast<float>(m));
    constants = numbers(Q, kind, spread);
    if (random.once_in(4))  // all inner products negative, or all positive
      for (auto& x : constants) x += spread * static_cast<float>(random.one_of({-30, 30}));
    lengths = numbers(Q, kind, spread);
    for (auto& x : lengths) x = x < 0 ? -x : x;
    norms = numbers(metric == kIp ? 0 : N, kind, spread);
    const bool positive = !random.once_in(8), alike = random.once_in(8);
    const float least = random.once_in(2) ? spread : 0;
    for (auto& x : norms) x = alike ? least + spread : positive ? least + (x < 0 ? -x : x) : x;
    if (random.once_in(2)) norms_of_codes();
    if (random.once_in(5)) apart();
    if (random.once_in(8)) std::sort(norms.begin(), norms.end());
    if (random.once_in(6) && !norms.empty())
      for (int64_t i = 0; i < 20; ++i) norms[random.below(N)] *= static_cast<float>(random.one_of({0, 100, 10000000}));
    if (random.once_in(8)) spoil(table), spoil(norms);
    if (metric == kCosine && random.once_in(4))  // scores of 0, late
      for (int64_t i = 0; i < N; i += 1000)
        norms[N - 1 - random.below((N + 1) / 2)] = std::numeric_limits<float>::quiet_NaN();
    if (random.once_in(40)) spoil(scale);
    if (random.once_in(40)) spoil(constants), spoil(lengths);
  }

  // Multiplies each array by its own power of ten.
  void apart() {
    for (auto* values : {&table, &constants, &norms, &lengths}) {
      const float factor = std::pow(10.0f, static_cast<float>(random.between(-22, 17)));
      for (auto& x : *values) x *= factor;
    }
  }

  void spoil(std::vector<float>& values) {
    if (values.empty()) return;
    const int64_t length = static_cast<int64_t>(values.size()), many = random.once_in(4) ? length / 2 : 3;
    const bool runs = random.once_in(3);  // the first ones, so that a scan meets them before any better cost
    for (int64_t i = 0; i < many; ++i) values[runs ? i % length : random.below(length)] = odd_value(random);
  }

  // Equal codes have equal norms, as in use; here a sum of a random number for each codeword.
  void norms_of_codes() {
    if (norms.empty()) return;
    const std::vector<float> share = numbers(K, 1, 1);
    for (int64_t n = 0; n < N; ++n) {
      norms[n] = 0.01f;
      for (int64_t m = 0; m < M; ++m) norms[n] += share[code(n, m)] * share[code(n, m)];
    }
  }
};

// The scores of the codes for which wanted(q, n), by score_of() with constant(q, n), sorted by key_of().
template <class Wanted, class Constant>
Found sorted(const Case& c, const Wanted& wanted, const Constant& constant) {
  Found found;
  const drq::Search job = c.job(found);
  std::vector<uint64_t> keys;
  for (int64_t q = 0; q < c.Q; ++q) {
    keys.clear();
    for (int64_t n = 0; n < c.N; ++n) {
      if ((job.keep != nullptr && !job.keep[n]) || !wanted(q, n)) continue;
      float sum = c.scale[0] * c.entry(q, n, 0);
      for (int64_t m = 1; m < c.M; ++m) sum += c.scale[m] * c.entry(q, n, m);
      const float score = drq::score_of(c.metric, sum, job.norms ? job.norms[n] : 0, constant(q, n), c.lengths[q]);
      keys.push_back(drq::key_of(c.metric == kL2 ? score : -score, n));
    }
    const int64_t count = std::min(c.k, static_cast<int64_t>(keys.size()));
    std::partial_sort(keys.begin(), keys.begin() + count, keys.end());
    for (int64_t i = 0; i < c.k; ++i) {
      const float cost = i < count ? drq::cost_of(keys[i]) : std::numeric_limits<float>::infinity();
      found.scores[q * c.k + i] = c.metric == kL2 ? cost : 0.0f - cost;
      found.positions[q * c.k + i] = i < count ? drq::position_of(keys[i]) : -1;
    }
  }
  return found;
}

// All scores, sorted.
Found sorted(const Case& c) {
  return sorted(c, [](int64_t, int64_t) { return true; }, [&](int64_t q, int64_t) { return c.constants[q]; });
}

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0 || (a != a && b != b); }

// The first place that differs, or -1.
int64_t difference(const Found& a, const Found& b) {
  for (size_t i = 0; i < a.scores.size(); ++i)
    if (a.positions[i] != b.positions[i] || !same_bits(a.scores[i], b.scores[i])) return static_cast<int64_t>(i);
  return -1;
}

bool agrees(const Case& c, const Found& expected, const Found& found, const char* name) {
  const int64_t i = difference(expected, found);
  if (i < 0) return true;
  c.print();
  std::printf("%s: query %lld, place %lld is %lld (%.9g), expected %lld (%.9g)\n", name,
              static_cast<long long>(i / c.k), static_cast<long long>(i % c.k),
              static_cast<long long>(found.positions[i]), found.scores[i],
              static_cast<long long>(expected.positions[i]), expected.scores[i]);
  return false;
}

// Several threads search the same job, each by another instruction set where there are more.
bool at_once(const Case& c, const Found& expected) {
  constexpr int kThreads = 4;
  std::vector<Found> found(kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&c, &found, i] {
      const drq::Search job = c.job(found[i]);
      drq::search_cpu(job, {}, drq::isa_supported(i % kIsaCount) ? i % kIsaCount : 0, c.threads);
    });
  for (auto& thread : threads) thread.join();
  for (const Found& each : found)
    if (!agrees(c, expected, each, "at once")) return false;
  return true;
}

bool norms_agree(Case& c) {
  if (c.T > 3000) return true;
  std::vector<float> gram(c.T * c.T), inner(c.T), norms(c.N, -77);
  for (auto& x : gram) x = c.random.normal();
  for (auto& x : inner) x = c.random.normal();
  const bool offset = c.random.once_in(2);
  const float constant = 0.7f;
  drq::Norms job{};
  job.gram = gram.data(), job.scale = c.scale.data(), job.bases = c.bases.data(),
  job.inner = offset ? inner.data() : nullptr;
  job.constants = &constant, job.codes = c.codes_at(), job.norms = norms.data();
  job.N = c.N, job.T = c.T, job.M = c.M, job.stride = c.stride, job.wide = c.wide;
  drq::norms_cpu(job, c.threads);
  const auto row = [&](int64_t n, int64_t m) { return c.bases[m] + c.code(n, m); };
  for (int64_t n = 0; n < c.N; ++n) {
    float total = 0;
    for (int64_t i = 0; i < c.M; ++i) {
      for (int64_t j = 0; j < i; ++j) total += (2 * c.scale[i] * c.scale[j]) * gram[row(n, i) * c.T + row(n, j)];
      total += (c.scale[i] * c.scale[i]) * gram[row(n, i) * c.T + row(n, i)];
    }
    for (int64_t i = 0; offset && i < c.M; ++i) total += c.scale[i] * inner[row(n, i)];
    if (offset) total += 0.7f;
    if (same_bits(total, norms[n])) continue;
    c.print();
    std::printf("norm %lld is %.9g, expected %.9g\n", static_cast<long long>(n), norms[n], total);
    return false;
  }
  return true;
}

// The sum of fl(a b) over 64 dimensions at a time, and the sum of these.
float product(const float* a, const float* b, int64_t D) {
  float total = 0;
  for (int64_t first = 0; first < D; first += 64) {
    float sum = 0;
    for (int64_t d = first; d < std::min(first + 64, D); ++d) sum += a[d] * b[d];
    total += sum;
  }
  return total;
}

// Sixteen sums side by side four times over, the rest one by one: the order of dot() in simd.h.
float side_by_side(const float* a, const float* b, int64_t D) {
  float sums[4][16] = {};
  const int64_t fours = D / 64 * 64, whole = D / 16 * 16;
  for (int64_t d = 0; d < whole; ++d) sums[d < fours ? d / 16 % 4 : 0][d % 16] += a[d] * b[d];
  for (int64_t i = 0; i < 16; ++i) sums[0][i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
  for (int64_t half = 8; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) sums[0][i] += sums[0][i + half];
  for (int64_t d = whole; d < D; ++d) sums[0][0] += a[d] * b[d];
  return sums[0][0];
}

// The same search with queries instead of tables: first the definition of the tables, then all instruction sets.
bool queries_agree(Case& c) {
  if (c.T * c.Q > 20000) return true;
  const int64_t D = c.random.one_of({1, 3, 15, 16, 17, 64, 65, 100, 128, 200});
  const bool moved = c.random.once_in(2);
  std::vector<float> rows(c.Q * D), codebook(c.T * D), columns(drq::packed_size(c.T, D)), offset(D);
  for (auto* values : {&rows, &codebook, &offset})
    for (auto& x : *values) x = c.random.normal();
  int64_t odd = -1;
  if (c.Q > 0 && c.random.once_in(4)) odd = c.random.below(c.Q), rows[odd * D + c.random.below(D)] = NAN;
  if (odd >= 0 && c.random.once_in(2)) rows[(c.Q - 1) * D] = std::numeric_limits<float>::infinity();
  drq::pack_codebook(codebook.data(), columns.data(), c.T, D);
  for (int64_t q = 0; q < c.Q; ++q) {
    const float* row = &rows[q * D];
    c.lengths[q] = std::sqrt(side_by_side(row, row, D));
    std::vector<float> x(row, row + D);
    for (int64_t d = 0; moved && c.metric == kL2 && d < D; ++d) x[d] -= offset[d];
    for (int64_t k = 0; k < c.T; ++k) c.table[q * c.T + k] = product(x.data(), &codebook[k * D], D);
    c.constants[q] = c.metric == kL2 ? side_by_side(x.data(), x.data(), D)
                     : moved         ? side_by_side(row, offset.data(), D)
                                     : 0;
  }
  const Found expected = sorted(c);
  const drq::Queries queries{rows.data(), columns.data(), moved ? offset.data() : nullptr, D};
  for (int isa = 0; isa < kIsaCount; ++isa) {
    if (!drq::isa_supported(isa)) continue;
    Found found;
    drq::Search job = c.job(found);
    job.table = job.constants = job.lengths = nullptr;
    const int64_t first = drq::search_cpu(job, queries, isa, c.threads);
    if (first != odd)
      std::printf("row %lld is odd, not %lld\n", static_cast<long long>(odd), static_cast<long long>(first));
    if (first != odd || !agrees(c, expected, found, kIsaNames[isa])) return false;
  }
  return true;
}

// The codes of a case in lists, some of them empty.
struct InLists {
  explicit InLists(Case& c) : c(c), L(c.random.one_of({1, 2, 5, 17, 40})), norms(L), products(c.Q * L) {
    starts.push_back(0);
    for (int64_t l = 1; l < L; ++l) starts.push_back(c.random.once_in(4) ? starts.back() : c.random.between(0, c.N));
    starts.push_back(c.N);
    std::sort(starts.begin(), starts.end());
    for (int64_t l = 0; l < L; ++l) list_of.insert(list_of.end(), starts[l + 1] - starts[l], l);
    probes = c.random.between(1, L);
    const float spread = c.constants.empty() ? 1 : std::fabs(c.constants[0]);
    for (auto& x : norms) x = c.random.once_in(3) ? 1 : std::fabs(c.random.normal());
    for (auto& x : products) x = c.random.once_in(5) ? 1 : spread * c.random.normal();
    if (c.random.once_in(8) && !products.empty()) products[c.random.below(c.Q * L)] = odd_value(c.random);
  }

  drq::Lists job() const { return {starts.data(), nullptr, norms.data(), products.data(), L, probes}; }

  Found expected() const {
    std::vector<bool> chosen(c.Q * L);
    for (int64_t q = 0; q < c.Q; ++q) {
      std::vector<uint64_t> keys;
      for (int64_t l = 0; l < L; ++l) {
        const float product = products[q * L + l];
        keys.push_back(drq::key_of(c.metric == kL2 ? (norms[l] - 2 * product) + c.constants[q] : 0 - product, l));
      }
      std::sort(keys.begin(), keys.end());
      for (int64_t i = 0; i < probes; ++i) chosen[q * L + drq::position_of(keys[i])] = true;
    }
    return sorted(
        c, [&](int64_t q, int64_t n) { return chosen[q * L + list_of[n]]; },
        [&](int64_t q, int64_t n) {
          const float product = products[q * L + list_of[n]];
          return c.metric == kL2 ? c.constants[q] - 2 * product : c.constants[q] + product;
        });
  }

  const Case& c;
  int64_t L, probes;
  std::vector<int64_t> starts, list_of;
  std::vector<float> norms, products;
};

bool lists_agree(Case& c) {
  const InLists lists(c);
  const Found expected = lists.expected();
  for (int isa = 0; isa < kIsaCount; ++isa) {
    if (!drq::isa_supported(isa)) continue;
    Found found;
    drq::search_lists_cpu(c.job(found), {}, lists.job(), isa, c.threads);
    if (agrees(c, expected, found, kIsaNames[isa])) continue;
    std::printf("in %lld of %lld lists\n", static_cast<long long>(lists.probes), static_cast<long long>(lists.L));
    return false;
  }
  return true;
}

// Whether one scan processes at least half of the codes where it should, and the result is right.
bool runs(const char* name, std::atomic<int64_t>& count, const Case& c, int isa) {
  count = 0;
  Found found;
  drq::search_cpu(c.job(found), {}, isa, c.threads);
  if (count < c.N / 2) {
    c.print();
    std::printf("%s: the scan \"%s\" processed %lld of the codes\n", kIsaNames[isa], name,
                static_cast<long long>(count));
    return false;
  }
  return agrees(c, sorted(c), found, kIsaNames[isa]);
}

// The same where the codes are in lists.
bool runs_in_lists(const char* name, std::atomic<int64_t>& count, Case c, int isa) {
  InLists lists(c);
  lists.probes = lists.L;
  for (auto& x : lists.products) x *= 0.01f;  // no list is far from all others
  count = 0;
  Found found;
  drq::search_lists_cpu(c.job(found), {}, lists.job(), isa, c.threads);
  if (count < c.N / 2)
    std::printf("%s: the scan \"%s\" processed %lld of the codes in lists\n", kIsaNames[isa], name,
                static_cast<long long>(count));
  return count >= c.N / 2 && agrees(c, lists.expected(), found, kIsaNames[isa]);
}

// A scan that never runs would go unnoticed, because another one gives the same results.
bool every_scan_runs() {
  drq::Counts& counts = drq::counts;
  for (int isa = 0; isa < kIsaCount; ++isa) {
    if (!drq::isa_supported(isa)) continue;
    const std::string name = kIsaNames[isa];
    const bool by_dwords = name == "vbmi" || name == "neon" || name == "dotprod";
    for (const int metric : {kL2, kIp, kCosine}) {
      const bool cosine = metric == kCosine, by_bits = (name == "avx2" || name == "avx512") && !cosine;
      const Case small(metric, 1, 1000, 4), batch(metric, 64, 20000, 4), quads(metric, 1, 20000, 4);
      const Case fives(metric, 1, 20000, 5), many(metric, 1, 20000, 18);  // rows that are not of 1, 2, 4, 8 or 16 bytes
      if (!runs("floats", counts.floats, small, isa) || !runs("batch", counts.batch, batch, isa)) return false;
      if (by_bits && !runs("bits", counts.bits, quads, isa)) return false;
      if (by_bits && !runs_in_lists("bits", counts.bits, quads, isa)) return false;
      if (!by_dwords && !cosine && !runs("few", counts.few, fives, isa)) return false;
      if (!by_dwords) continue;
      for (const Case* each : {&quads, &fives, &many})
        if (!runs("one", counts.one, *each, isa)) return false;
      if (!runs_in_lists("one", counts.one, quads, isa) || !runs_in_lists("one", counts.one, many, isa)) return false;
    }
  }
  return true;
}

bool check(uint64_t seed) {
  Case c(seed);
  const Found expected = sorted(c);
  for (int isa = 0; isa < kIsaCount; ++isa) {
    if (!drq::isa_supported(isa)) continue;
    Found found;
    drq::search_cpu(c.job(found), {}, isa, c.threads);
    if (!agrees(c, expected, found, kIsaNames[isa])) return false;
  }
  return (seed % 4 != 0 || at_once(c, expected)) && norms_agree(c) && lists_agree(c) && queries_agree(c);
}

}  // namespace

int main(int argc, char** argv) { return every_scan_runs() ? run_seeds(argc, argv, check) : 1; }
