// Compares encoding, training and squared errors of every instruction set with the portable code, bit by bit, on random
// cases.
// Usage: levels_test FIRST_SEED COUNT.
#include "levels.h"

#include <algorithm>

#include "isa.h"
#include "random.h"

namespace {

using drq::kIsaCount, drq::kIsaNames;

float dot(const float* a, const float* b, int64_t count) {
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// The results of one instruction set.
struct Result {
  std::vector<uint8_t> codes8;
  std::vector<int32_t> codes32;
  std::vector<int64_t> codes64;
  std::vector<std::vector<float>> floats;
  std::vector<double> doubles;  // dscale and, last, the loss
};

// The same bits; NaNs count as one.
template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const T& left, const T& right) {
    return std::memcmp(&left, &right, sizeof(T)) == 0 || (left != left && right != right);
  });
}

// Which part of two results differs, or null.
const char* difference(const Result& a, const Result& b) {
  if (!same(a.codes8, b.codes8) || !same(a.codes32, b.codes32)) return "codes";
  if (!same(a.codes64, b.codes64)) return "codes of training";
  const char* const names[] = {"squared_norms", "residuals", "soft",        "product",     "dscores",      "dnorms",
                               "dgram",         "ddiagonal", "hard errors", "soft errors", "joint errors", "delta",
                               "kappa",         "decoded",   "errors",      "pulls",       "dscale rows",  "dcodebook"};
  for (size_t i = 0; i < a.floats.size(); ++i)
    if (!same(a.floats[i], b.floats[i])) return names[i];
  return same(a.doubles, b.doubles) ? nullptr : "dscale or the loss";
}

constexpr int64_t kLoss = 0, kErrors = 1, kDelta = 2;

// A codec and some vectors, padded as levels.h asks for.
struct Case {
  explicit Case(uint64_t seed) : random(seed) {
    N = random.between(0, 12), D = random.between(1, 70), K = random.one_of({1, 2, 15, 16, 17, 60, 256, 300});
    M = random.between(1, 6), P = (K + 15) / 16 * 16;
    const bool whole = random.once_in(3);  // ties
    const auto number = [&] { return whole ? static_cast<float>(random.between(-1, 1)) : random.normal(); };
    x.resize(N * D), codebook.resize(P * D), scale.resize(M);
    for (int64_t i = 0; i < K * D; ++i) codebook[i] = number();
    for (auto& each : x) each = number();
    for (int64_t m = 0; m < M; ++m) scale[m] = (m % 3 == 1 ? -1.0f : 1.0f) / static_cast<float>(1 << m);
    if (N > 0 && random.once_in(3)) std::copy_n(codebook.begin(), D, x.begin());  // level 0 approximates it exactly
    fill();
    if (N > 0 && random.once_in(20)) x[random.below(N * D)] = scores[random.below(N * P)] = odd_value(random);
    wide = K > 256 || random.once_in(3), beam = random.one_of({1, 1, 2, 5, 20}), together = random.between(1, 3);
    gap = random.once_in(2), gamma = random.uniform() * 4;
    for (int64_t m = 0; m < M; ++m) omega.push_back(random.uniform() + 0.1f);
    still_to_come = omega;
    for (int64_t m = M - 1; m-- > 0;) still_to_come[m] += still_to_come[m + 1];
    of = random.one_of({kLoss, kErrors, kDelta}), with_gram = M > 1 || of != kDelta || random.once_in(2);
    for (int64_t i = 0; i < std::max(3 * N * M, N * P); ++i) upstream.push_back(random.normal());
    for (int64_t i = 0; i < N * M; ++i) given.push_back(random.below(K));
    unpadded.assign(codebook.begin(), codebook.begin() + K * D);
    offset.resize(random.once_in(2) ? D : 0);
    for (auto& each : offset) each = number();
    for (int64_t m = 0; m < M; ++m) factors.push_back(random.normal());
    cut = random.between(0, K);
  }

  void fill() {
    scores.resize(N * P), gram.resize(P * P), diagonal.resize(P);
    bias.assign(M * P, std::numeric_limits<float>::infinity());
    for (int64_t n = 0; n < N; ++n)
      for (int64_t k = 0; k < P; ++k) scores[n * P + k] = dot(&x[n * D], &codebook[k * D], D);
    for (int64_t i = 0; i < P; ++i)
      for (int64_t k = 0; k < P; ++k) gram[i * P + k] = dot(&codebook[i * D], &codebook[k * D], D);
    for (int64_t k = 0; k < P; ++k) diagonal[k] = gram[k * P + k];
    for (int64_t m = 0; m < M; ++m)
      for (int64_t k = 0; k < K; ++k) bias[m * P + k] = scale[m] * scale[m] * diagonal[k];
    bases.assign(M, 0);
    fill_apart();
  }

  // Codewords of their own for all levels: those of level m are the shared ones, moved by m dimensions.
  void fill_apart() {
    T = M * P, pitch = T + 16;
    own.resize(T * D), own_gram.resize((T - 1) * pitch + T), own_bias = bias;
    for (int64_t m = 0; m < M; ++m) {
      own_bases.push_back(m * P);
      for (int64_t k = 0; k < P; ++k)
        for (int64_t d = 0; d < D; ++d) own[(m * P + k) * D + d] = codebook[k * D + (d + m) % D];
    }
    for (int64_t i = 0; i < T; ++i)
      for (int64_t k = 0; k < T; ++k) own_gram[i * pitch + k] = dot(&own[i * D], &own[k * D], D);
    for (int64_t m = 0; m < M; ++m)
      for (int64_t k = 0; k < K; ++k)
        own_bias[m * P + k] = scale[m] * scale[m] * own_gram[(m * P + k) * pitch + m * P + k];
  }

  drq::Tile tile_apart() const {
    drq::Tile out = tile();
    out.codebook = own.data(), out.gram = own_gram.data(), out.diagonal = nullptr;
    out.bias = own_bias.data(), out.bases = own_bases.data(), out.T = T, out.pitch = pitch;
    return out;
  }

  drq::Tile tile() const {
    drq::Tile out{};
    out.scores = scores.data(), out.x = x.data(), out.codebook = codebook.data();
    out.gram = with_gram ? gram.data() : nullptr;
    out.diagonal = diagonal.data(), out.bias = bias.data(), out.scale = scale.data();
    out.bases = bases.data();
    out.N = N, out.K = K, out.P = out.T = out.pitch = P, out.D = D, out.M = M;
    return out;
  }

  Result by(int isa) const {
    Result result;
    encode(isa, tile(), result);
    if (beam > 1) beam_by_groups(isa, result);
    training(isa, result);
    squared(isa, result);
    return result;
  }

  Random random;
  int64_t N, D, K, M, P, beam;
  int64_t together;  // levels of a group that has codewords of its own
  int64_t T, pitch;  // rows of the codewords that levels have for themselves, and of their inner products
  bool wide, gap;
  int64_t of;      // what gradients are given of
  bool with_gram;  // of Delta alone, one level works without
  float gamma;
  int64_t cut;  // the codebook's gradients are added up in two parts
  std::vector<float> x, codebook, scale, scores, gram, diagonal, bias, omega, still_to_come, upstream;
  // Of squared errors: [K, D]; [D] or empty; [M], no powers of two, whose products would be exact.
  std::vector<float> unpadded, offset, factors;
  std::vector<int64_t> given;  // [N, M]  their codes
  std::vector<float> own, own_gram, own_bias;
  std::vector<int64_t> bases, own_bases;

 private:
  // Adds the codes that run(job) writes.
  template <class Run>
  void encoded(const drq::Tile& tile, Result& result, Run run) const {
    drq::Encode job{};
    job.tile = tile, job.omega = omega.data(), job.still_to_come = still_to_come.data();
    job.beam = beam, job.wide = wide;
    std::vector<uint8_t> codes8(wide ? 0 : N * M, 77);
    std::vector<int32_t> codes32(wide ? N * M : 0, 77);
    job.codes = wide ? static_cast<void*>(codes32.data()) : static_cast<void*>(codes8.data());
    run(job);
    result.codes8.insert(result.codes8.end(), codes8.begin(), codes8.end());
    result.codes32.insert(result.codes32.end(), codes32.begin(), codes32.end());
  }

  void encode(int isa, const drq::Tile& tile, Result& result) const {
    encoded(tile, result, [&](const drq::Encode& job) { drq::encode_cpu(job, isa); });
  }

  // The levels in groups of `together`, each of which multiplies the residuals with its first level's codewords; with
  // more than one, the levels of a group take the same codewords.
  void beam_by_groups(int isa, Result& result) const {
    drq::Tile tile = tile_apart();
    std::vector<int64_t> grouped = own_bases;
    std::vector<float> grouped_bias = own_bias;
    for (int64_t m = 0; m < M; ++m) {
      const int64_t first = m / together * together;
      grouped[m] = own_bases[first];
      for (int64_t k = 0; k < K; ++k)
        grouped_bias[m * P + k] = scale[m] * scale[m] * own_gram[(grouped[m] + k) * pitch + grouped[m] + k];
    }
    tile.bases = grouped.data(), tile.bias = grouped_bias.data();
    std::vector<float> products(N * P), squares(N), residuals = x, errors(N * beam), costs(N * beam);
    std::vector<int64_t> counts(N, 1), shared(N, 0);
    std::vector<int32_t> paths(N * beam * 16, 77);
    for (int64_t n = 0; n < N; ++n) squares[n] = errors[n * beam] = dot(&x[n * D], &x[n * D], D);
    encoded(tile, result, [&](drq::Encode& job) {
      for (int64_t first = 0; first < M; first += together) {
        for (int64_t n = 0; n < N; ++n)
          for (int64_t k = 0; k < P; ++k)
            products[n * P + k] = dot(&residuals[n * D], &own[(grouped[first] + k) * D], D);
        job.tile.scores = products.data();
        drq::beam_cpu({job, first, std::min(M, first + together), counts.data(), shared.data(), squares.data(),
                       residuals.data(), errors.data(), costs.data(), paths.data(), 16},
                      isa);
      }
    });
  }

  void training(int isa, Result& result) const {
    result.codes64.assign(N * M, 77);
    result.doubles.assign(M + 1, 0);
    for (const int64_t size : {N, N * M, N * M * P, N * M * P, N * P, N, P * P, P, N * M, N * M, N * M, N * P, N * M})
      result.floats.emplace_back(size);
    auto& floats = result.floats;
    drq::Training job{};
    job.tile = tile(), job.gamma = gamma, job.codes = result.codes64.data();
    job.squared_norms = floats[0].data(), job.residuals = floats[1].data(), job.soft = floats[2].data();
    job.product = floats[3].data(), job.dscores = floats[4].data(), job.dsquared_norms = floats[5].data();
    job.dgram = floats[6].data(), job.ddiagonal = floats[7].data(), job.dscale = result.doubles.data();
    job.hard_errors = floats[8].data(), job.soft_errors = floats[9].data(), job.joint_errors = floats[10].data();
    job.delta = floats[11].data(), job.kappa = floats[12].data();
    if (of == kLoss) {
      job.omega = omega.data(), job.of_hard = 1, job.of_soft = 0.5f, job.of_joint = 0.25f;
      job.gap = gap, job.value = &result.doubles[M];
    }
    job.dhard = upstream.data(), job.dsoft = job.dhard + N * M, job.djoint = job.dsoft + N * M;
    job.ddelta = upstream.data();
    drq::assign_cpu(job, isa);
    drq::mix_cpu(job, isa);
    for (int64_t row = 0; row < N * M; ++row)
      for (int64_t k = 0; k < P; ++k) floats[3][row * P + k] = dot(&floats[2][row * P], &gram[k * P], P);
    drq::evaluate_cpu(job, isa);
    if (of == kDelta) job.product = nullptr;
    drq::backward_cpu(job, isa);
  }

  void squared(int isa, Result& result) const {
    const size_t first = result.floats.size();
    for (const int64_t size : {N * D, N * M, N * M * D, N * M, K * D}) result.floats.emplace_back(size);
    auto* const floats = &result.floats[first];
    drq::Squared job{};
    job.x = x.data(), job.codebook = unpadded.data(), job.scale = factors.data(), job.codes = given.data();
    job.offset = offset.empty() ? nullptr : offset.data(), job.derrors = upstream.data();
    job.N = N, job.D = D, job.K = K, job.M = M;
    job.decoded = floats[0].data(), job.errors = floats[1].data(), job.pulls = floats[2].data();
    job.dscale = floats[3].data(), job.dcodebook = floats[4].data();
    drq::decode_cpu(job, isa);
    drq::squared_errors_cpu(job, isa);
    drq::pulls_cpu(job, isa);
    std::vector<int64_t> starts(K + 1), places(N * M);
    drq::group_codes(job, starts.data(), places.data());
    drq::add_pulls_cpu(job, starts.data(), places.data(), 0, cut, isa);
    drq::add_pulls_cpu(job, starts.data(), places.data(), cut, K, isa);
  }
};

bool check(uint64_t seed) {
  const Case c(seed);
  const Result expected = c.by(0);
  for (int isa = 1; isa < kIsaCount; ++isa) {
    if (!drq::isa_supported(isa)) continue;
    if (const char* what = difference(expected, c.by(isa))) {
      std::printf("N=%d D=%d K=%d M=%d beam=%d wide=%d: %s by %s\n", static_cast<int>(c.N), static_cast<int>(c.D),
                  static_cast<int>(c.K), static_cast<int>(c.M), static_cast<int>(c.beam), c.wide, what, kIsaNames[isa]);
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) { return run_seeds(argc, argv, check); }
