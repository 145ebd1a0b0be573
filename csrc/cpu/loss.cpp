// Compiled once per instruction set; see simd.h. docs/math.md, section 3, derives the gradients.
#include <cmath>

#include "cpu/tile.h"

namespace drq {
namespace DRQ_ISA {

void assign(const Loss& job) {
  const Tile& tile = job.tile;
  const int64_t P = tile.P, M = tile.M;
  Buffer<float> t(P), residual(tile.D);
  const Floats gamma = Floats::all(-job.gamma);
  for (int64_t n = 0; n < tile.N; ++n) {
    const float* now = tile.scores + n * P;
    int64_t* path = job.codes + n * M;
    float r = job.squared_norms[n] = squared_norm(tile, n), base = r;
    for (int64_t m = 0; m < M; ++m) {
      float* p = job.soft + (n * M + m) * P;
      const float best = keys_of(now, tile.bias + m * P, tile.scale[m], P, p);
      path[m] = first_equal(p, P, best);
      const Floats squared = Floats::all(r), nearest = Floats::all(std::sqrt(r + best > 0 ? r + best : 0));
      Floats total = Floats::all(0);
      for (int64_t k = 0; k < P; k += kWidth) {
        const Floats distance = root(squared + Floats::load(p + k));
        const Floats weight = exp_of_negative(gamma * (distance - nearest));
        weight.store(p + k);
        total = total + weight;
      }
      const Floats share = Floats::all(1 / sum(total));
      for (int64_t k = 0; k < P; k += kWidth) (Floats::load(p + k) * share).store(p + k);
      p[path[m]] -= 1;
      r = advance(tile, n, path, m, r + best, now, t.data, base, residual.data);
      job.residuals[n * M + m] = r;
      now = t.data;
    }
  }
}

namespace {

// t_1 .. t_M of row n, [M, P], as `assign` saw them.
void all_scores(const Loss& job, int64_t n, float* t, float* residual) {
  const Tile& tile = job.tile;
  const int64_t* path = job.codes + n * tile.M;
  const float* now = tile.scores + n * tile.P;
  float r = job.squared_norms[n], base = r;
  for (int64_t m = 0; m < tile.M; ++m) {
    const float key = tile.bias[m * tile.P + path[m]] - 2 * tile.scale[m] * now[path[m]];
    r = advance(tile, n, path, m, r + key, now, t + m * tile.P, base, residual);
    now = t + m * tile.P;
  }
}

// total = before + s * level, where there is a level before.
void add_level(const float* before, const float* level, float s, int64_t P, float* total) {
  const Floats factor = Floats::all(s);
  for (int64_t k = 0; k < P; k += kWidth) {
    const Floats term = factor * Floats::load(level + k);
    (before == nullptr ? term : Floats::load(before + k) + term).store(total + k);
  }
}

// Of one row: t_{m+1}, Delta_m and Delta_m G, [M, P] each, and the errors that follow from them, [M] each.
struct Row {
  explicit Row(const Tile& tile)
      : t(tile.M * tile.P), delta(tile.M * tile.P), v(tile.M * tile.P), residual(tile.D), soft_errors(tile.M) {}

  void fill(const Loss& job, int64_t n) {
    const Tile& tile = job.tile;
    const int64_t P = tile.P, M = tile.M;
    all_scores(job, n, t.data, residual.data);
    hard = soft = 0;
    for (int64_t m = 0; m < M; ++m) {
      const int64_t now = m * P, before = now - P, source = (n * M + m) * P;
      add_level(m ? delta.data + before : nullptr, job.soft + source, tile.scale[m], P, delta.data + now);
      add_level(m ? v.data + before : nullptr, job.product + source, tile.scale[m], P, v.data + now);
      joint = dot(delta.data + now, v.data + now, P);
      soft_errors.data[m] = job.residuals[n * M + m] - 2 * dot(delta.data + now, t.data + now, P) + joint;
      hard += job.omega[m] * root_of(job.residuals[n * M + m]);
      soft += job.omega[m] * root_of(soft_errors.data[m]);
    }
  }

  float loss(const Loss& job) const {
    const float e_joint = job.gap ? std::fabs(hard - soft) : joint > 0 ? joint : 0;
    return job.of_hard * hard + job.of_soft * soft + job.of_joint * e_joint;
  }

  static float root_of(float squared) { return squared <= 0 ? 0 : std::sqrt(squared); }

  Buffer<float> t, delta, v, residual, soft_errors;
  float hard = 0, soft = 0, joint = 0;  // E_h, E_s, and ||xsoft - xhat||^2 at the last level
};

}  // namespace

void evaluate(const Loss& job) {
  Row row(job.tile);
  for (int64_t n = 0; n < job.tile.N; ++n) {
    row.fill(job, n);
    *job.value += row.loss(job);
  }
}

namespace {

// A squared distance below this share of ||x||^2 is rounding: the vector is met exactly, and the gradient is 0 there.
// What score space computes of it, dS C + 2 dn x, would be the difference of two large numbers.
constexpr float kNoise = 1.0f / (1LL << 36);

// The derivative of the square root.
float half_over_root(float squared, float noise) { return squared > noise ? 0.5f / std::sqrt(squared) : 0; }

// One level's share of the gradients of row n. t = t_m, rho = dL/dr_{m+1}, a = dL/dDelta_j summed over j >= m; dt comes
// as dL/dt_{m+1} and leaves as dL/dt_m; returns dL/dr_m. Turns p - onehot in `soft` into p.
float level_backward(const Loss& job, int64_t n, int64_t m, const float* t, float rho, const float* a, float* dt) {
  const Tile& tile = job.tile;
  const int64_t P = tile.P, b = job.codes[n * tile.M + m];
  const float s = tile.scale[m];
  float* p = job.soft + (n * tile.M + m) * P;

  // t_{m+1} = t_m - s G[b], and Delta_m = Delta_{m-1} + s (p - onehot).
  const float* row = tile.gram + b * P;
  float* drow = job.dgram + b * P;
  const Floats factor = Floats::all(s);
  Floats by_row = Floats::all(0), by_soft = Floats::all(0);
  for (int64_t k = 0; k < P; k += kWidth) {
    const Floats gradient = Floats::load(dt + k);
    by_row = by_row + gradient * Floats::load(row + k);
    by_soft = by_soft + Floats::load(p + k) * Floats::load(a + k);
    (Floats::load(drow + k) - factor * gradient).store(drow + k);
  }
  const float of_soft = sum(by_soft);
  double ds = static_cast<double>(of_soft) - sum(by_row);

  // p = softmax(-gamma d), d^2[k] = r_m - 2 s t[k] + s^2 G[k, k]; q is the gradient by d^2.
  p[b] += 1;
  const float r = m ? job.residuals[n * tile.M + m - 1] : job.squared_norms[n];
  const float* bias = tile.bias + m * P;
  const Floats squared = Floats::all(r), mean = Floats::all(of_soft + a[b]), slope = Floats::all(-0.5f * job.gamma * s);
  const Floats twice = Floats::all(2 * s), scale_squared = Floats::all(s * s);
  const Floats nearest = Floats::all(std::sqrt(job.squared_norms[n] * kNoise));
  Floats dr = Floats::all(0), by_t = Floats::all(0), by_diagonal = Floats::all(0);
  for (int64_t k = 0; k < P; k += kWidth) {
    const Floats score = Floats::load(t + k);
    const Floats distance = root(squared + (Floats::load(bias + k) - twice * score));
    const Floats q = slope * Floats::load(p + k) * (Floats::load(a + k) - mean) * inverse_above(distance, nearest);
    dr = dr + q;
    by_t = by_t + q * score;
    by_diagonal = by_diagonal + q * Floats::load(tile.diagonal + k);
    (Floats::load(dt + k) - twice * q).store(dt + k);
    (Floats::load(job.ddiagonal + k) + scale_squared * q).store(job.ddiagonal + k);
  }
  ds += 2 * (static_cast<double>(s) * sum(by_diagonal) - sum(by_t));

  // r_{m+1} = d^2[b].
  dt[b] -= 2 * s * rho;
  job.ddiagonal[b] += s * s * rho;
  ds += 2.0 * rho * (s * tile.diagonal[b] - t[b]);
  job.dscale[m] += ds;
  return rho + sum(dr);
}

}  // namespace

void backward(const Loss& job) {
  const Tile& tile = job.tile;
  const int64_t P = tile.P, M = tile.M;
  Row row(tile);
  Buffer<float> a(P), dt(P);
  for (int64_t n = 0; n < tile.N; ++n) {
    row.fill(job, n);
    *job.value += row.loss(job);
    const float gap = job.gap ? job.of_joint * static_cast<float>((row.hard > row.soft) - (row.hard < row.soft)) : 0;
    const float noise = job.squared_norms[n] * kNoise;
    std::memset(a.data, 0, P * sizeof(float));
    std::memset(dt.data, 0, P * sizeof(float));
    float rho = 0;
    for (int64_t m = M - 1; m >= 0; --m) {
      // soft_error = r_{m+1} - 2 <Delta, t_{m+1}> + Delta G Delta^T, joint = Delta G Delta^T.
      const float alpha = (job.of_soft - gap) * job.omega[m] * half_over_root(row.soft_errors.data[m], noise);
      const float kappa = alpha + (!job.gap && m + 1 == M ? job.of_joint : 0);
      const Floats by_t = Floats::all(-2 * alpha), by_v = Floats::all(2 * kappa), weight = Floats::all(kappa);
      const float *t_next = row.t.data + m * P, *delta = row.delta.data + m * P, *v = row.v.data + m * P;
      float* weighted = job.product + (n * M + m) * P;
      for (int64_t k = 0; k < P; k += kWidth) {
        const Floats change = Floats::load(delta + k);
        (Floats::load(a.data + k) + by_t * Floats::load(t_next + k) + by_v * Floats::load(v + k)).store(a.data + k);
        (Floats::load(dt.data + k) + by_t * change).store(dt.data + k);
        (weight * change).store(weighted + k);
      }
      rho += alpha + (job.of_hard + gap) * job.omega[m] * half_over_root(job.residuals[n * M + m], noise);
      const float* t = m ? row.t.data + (m - 1) * P : tile.scores + n * P;
      rho = level_backward(job, n, m, t, rho, a.data, dt.data);
      std::memcpy(job.soft + (n * M + m) * P, delta, P * sizeof(float));
    }
    std::memcpy(job.dscores + n * P, dt.data, P * sizeof(float));
    job.dsquared_norms[n] = rho;
  }
}

}  // namespace DRQ_ISA
}  // namespace drq
