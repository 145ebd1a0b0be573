// Compiled once per instruction set; see simd.h. docs/math.md, section 3, derives the gradients.
#include <cmath>

#include "cpu/tile.h"

namespace drq {
namespace DRQ_ISA {
namespace {

void copy(const float* from, int64_t count, float* to) { std::memcpy(to, from, count * sizeof(float)); }

// Replaces the keys of a level by p - onehot(b). The distances are d^2[k] = squared + key[k], except d^2[b] = nearest,
// which may have been computed from the residual vector. The others have larger rounding errors and are clamped to be
// no smaller.
void soften(float* p, int64_t P, float gamma, float squared, float nearest, int64_t b) {
  if (!std::isfinite(squared)) {  // min and max below would hide NaN and infinity
    for (int64_t k = 0; k < P; k += kWidth) Floats::all(NAN).store(p + k);
    return;
  }
  const Floats from = Floats::all(squared), least = Floats::all(std::sqrt(nearest > 0 ? nearest : 0));
  const Floats sharpness = Floats::all(-gamma);
  Floats total = Floats::all(0);
  for (int64_t k = 0; k < P; k += kWidth) {
    const Floats weight = exp_of_negative(sharpness * (max(root(from + Floats::load(p + k)), least) - least));
    weight.store(p + k);
    total = total + weight;
  }
  const Floats share = Floats::all(1 / (sum(total) + (1 - p[b])));
  p[b] = 1;
  for (int64_t k = 0; k < P; k += kWidth) (Floats::load(p + k) * share).store(p + k);
  p[b] -= 1;
}

// total = before + s * level, where there is a level before.
void add_level(const float* before, const float* level, float s, int64_t P, float* total) {
  const Floats factor = Floats::all(s);
  for (int64_t k = 0; k < P; k += kWidth) {
    const Floats term = factor * Floats::load(level + k);
    (before == nullptr ? term : Floats::load(before + k) + term).store(total + k);
  }
}

}  // namespace

void assign(const Training& job) {
  const Tile& tile = job.tile;
  const int64_t P = tile.P, M = tile.M;
  Buffer<float> t(P), residual(tile.D);
  for (int64_t n = 0; n < tile.N; ++n) {
    const float* now = tile.scores + n * P;
    int64_t* path = job.codes + n * M;
    float r = job.squared_norms[n] = squared_norm(tile, n), base = r;
    for (int64_t m = 0; m < M; ++m) {
      float* p = job.soft + (n * M + m) * P;
      const float best = keys_of(now, tile.bias + m * P, tile.scale[m], P, p), before = r;
      path[m] = first_equal(p, P, best);
      r = advance(tile, n, path, m, before + best, now, t.data, base, residual.data);
      soften(p, P, job.gamma, before, r, path[m]);
      job.residuals[n * M + m] = r;
      now = t.data;
    }
  }
}

void mix(const Training& job) {
  const int64_t P = job.tile.P, M = job.tile.M;
  for (int64_t n = 0; n < job.tile.N; ++n) {
    float* total = job.delta + n * P;
    for (int64_t m = 0; m < M; ++m)
      add_level(m ? total : nullptr, job.soft + (n * M + m) * P, job.tile.scale[m], P, total);
  }
}

namespace {

// Values of one row: t_{m+1} and, if errors are wanted, Delta_m and v = Delta_m G, [M, P] each; errors and their
// gradients, [M] each.
struct Row {
  explicit Row(const Tile& tile)
      : t(tile.M * tile.P),
        delta(tile.M * tile.P),
        v(tile.M * tile.P),
        residual(tile.D),
        soft(tile.M),
        joint(tile.M),
        dhard(tile.M),
        dsoft(tile.M),
        djoint(tile.M) {}

  // Computes t_{m+1} again, with the same bits as `assign`.
  void fill_scores(const Training& job, int64_t n) {
    const Tile& tile = job.tile;
    const int64_t* path = job.codes + n * tile.M;
    const float* now = tile.scores + n * tile.P;
    float r = job.squared_norms[n], base = r;
    for (int64_t m = 0; m < tile.M; ++m) {
      const float key = tile.bias[m * tile.P + path[m]] - 2 * tile.scale[m] * now[path[m]];
      float* next = t.data + m * tile.P;
      r = advance(tile, n, path, m, r + key, now, next, base, residual.data);
      now = next;
    }
  }

  void fill_errors(const Training& job, int64_t n) {
    const int64_t P = job.tile.P, M = job.tile.M;
    hard_total = soft_total = 0;
    for (int64_t m = 0; m < M; ++m) {
      const int64_t now = m * P, before = now - P, source = (n * M + m) * P;
      const float s = job.tile.scale[m], r = job.residuals[n * M + m];
      add_level(m ? delta.data + before : nullptr, job.soft + source, s, P, delta.data + now);
      add_level(m ? v.data + before : nullptr, job.product + source, s, P, v.data + now);
      joint.data[m] = dot(delta.data + now, v.data + now, P);
      soft.data[m] = r - 2 * dot(delta.data + now, t.data + now, P) + joint.data[m];
      if (job.omega == nullptr) continue;
      hard_total += job.omega[m] * root_of(r);
      soft_total += job.omega[m] * root_of(soft.data[m]);
    }
  }

  float loss(const Training& job) const {
    const float last = joint.data[job.tile.M - 1];
    const float e_joint = job.gap ? std::fabs(hard_total - soft_total) : last > 0 ? last : 0;
    return job.of_hard * hard_total + job.of_soft * soft_total + job.of_joint * e_joint;
  }

  // Sets the gradients of the errors: the given ones, or those of the loss.
  void fill_gradients(const Training& job, int64_t n) {
    const int64_t M = job.tile.M;
    if (job.omega == nullptr) {
      copy(job.dhard + n * M, M, dhard.data);
      copy(job.dsoft + n * M, M, dsoft.data);
      copy(job.djoint + n * M, M, djoint.data);
      return;
    }
    const float sign = static_cast<float>((hard_total > soft_total) - (hard_total < soft_total));
    const float gap = job.gap ? job.of_joint * sign : 0;
    for (int64_t m = 0; m < M; ++m) {
      dhard.data[m] = (job.of_hard + gap) * job.omega[m];
      dsoft.data[m] = (job.of_soft - gap) * job.omega[m];
      djoint.data[m] = !job.gap && m + 1 == M ? job.of_joint : 0;
    }
  }

  static float root_of(float squared) { return squared <= 0 ? 0 : std::sqrt(squared); }

  Buffer<float> t, delta, v, residual, soft, joint, dhard, dsoft, djoint;  // soft and joint are squared
  float hard_total = 0, soft_total = 0;                                    // E_h and E_s
};

}  // namespace

void evaluate(const Training& job) {
  Row row(job.tile);
  const int64_t M = job.tile.M;
  for (int64_t n = 0; n < job.tile.N; ++n) {
    row.fill_scores(job, n);
    row.fill_errors(job, n);
    if (job.omega != nullptr) *job.value += row.loss(job);
    if (job.hard_errors == nullptr) continue;
    for (int64_t m = 0; m < M; ++m) {
      job.hard_errors[n * M + m] = Row::root_of(job.residuals[n * M + m]);
      job.soft_errors[n * M + m] = Row::root_of(row.soft.data[m]);
      job.joint_errors[n * M + m] = row.joint.data[m] <= 0 ? 0 : row.joint.data[m];
    }
  }
}

namespace {

// A squared distance below this fraction of ||x||^2 is only rounding error: the approximation is exact, and the
// gradient is set to 0. Score space would compute it as dS C + 2 dn x, the difference of two large numbers.
constexpr float kNoise = 1.0f / (1LL << 36);

// The derivative of the square root.
float half_over_root(float squared, float noise) { return squared > noise ? 0.5f / std::sqrt(squared) : 0; }

// Adds the gradients of the errors after level m to a = dL/dDelta and dt = dL/dt_{m+1}; returns the term of
// dL/dr_{m+1}. soft^2 = r_{m+1} - 2 <Delta, t_{m+1}> + Delta G Delta^T, joint = Delta G Delta^T.
float errors_backward(const Training& job, const Row& row, int64_t n, int64_t m, float* a, float* dt) {
  const int64_t P = job.tile.P, place = n * job.tile.M + m;
  const float noise = job.squared_norms[n] * kNoise;
  const float alpha = row.dsoft.data[m] * half_over_root(row.soft.data[m], noise);
  const float kappa = alpha + row.djoint.data[m];
  const Floats by_t = Floats::all(-2 * alpha), by_v = Floats::all(2 * kappa);
  const float *t = row.t.data + m * P, *delta = row.delta.data + m * P, *v = row.v.data + m * P;
  job.kappa[place] = kappa;
  for (int64_t k = 0; k < P; k += kWidth) {
    (Floats::load(a + k) + by_t * Floats::load(t + k) + by_v * Floats::load(v + k)).store(a + k);
    (Floats::load(dt + k) + by_t * Floats::load(delta + k)).store(dt + k);
  }
  return alpha + row.dhard.data[m] * half_over_root(job.residuals[place], noise);
}

// Adds the gradients of level m of row n; returns dL/dr_m. t = t_m, next = t_{m+1}, rho = dL/dr_{m+1}; a is the sum of
// dL/dDelta_j over j >= m; dt is dL/dt_{m+1} before and dL/dt_m after the call.
float level_backward(const Training& job, int64_t n, int64_t m, const float* t, const float* next, float rho,
                     const float* a, float* dt) {
  const Tile& tile = job.tile;
  const int64_t P = tile.P, b = job.codes[n * tile.M + m];
  const float s = tile.scale[m];
  float* p = job.soft + (n * tile.M + m) * P;
  const float own = p[b], p_b = own + 1;

  // t_{m+1} = t_m - s G[b], and Delta_m = Delta_{m-1} + s (p - onehot).
  const bool last = tile.gram == nullptr;  // nothing depends on t_{m+1}
  if (last) p[b] = 0;                      // the sum over many codewords is more precise without it
  const float* row = last ? nullptr : tile.gram + b * P;
  float* drow = last ? nullptr : job.dgram + b * P;
  const Floats factor = Floats::all(s);
  Floats by_row = Floats::all(0), by_soft = Floats::all(0);
  for (int64_t k = 0; k < P; k += kWidth) {
    by_soft = by_soft + Floats::load(p + k) * Floats::load(a + k);
    if (last) continue;
    const Floats gradient = Floats::load(dt + k);
    by_row = by_row + gradient * Floats::load(row + k);
    (Floats::load(drow + k) - factor * gradient).store(drow + k);
  }
  const float of_soft = sum(by_soft), average = of_soft + (last ? p_b : 1) * a[b];
  double ds = static_cast<double>(last ? average - a[b] : of_soft) - sum(by_row);
  p[b] = 0;

  // p = softmax(-gamma d), d^2[k] = r_m - 2 s t[k] + s^2 G[k, k]; q is the gradient by d^2. First all but d[b].
  const float r = m ? job.residuals[n * tile.M + m - 1] : job.squared_norms[n];
  const float* bias = tile.bias + m * P;
  const float slope = -0.5f * job.gamma * s, noise = job.squared_norms[n] * kNoise;
  const Floats squared = Floats::all(r), mean = Floats::all(average), slopes = Floats::all(slope);
  const Floats twice = Floats::all(2 * s), scale_squared = Floats::all(s * s), limit = Floats::all(std::sqrt(noise));
  const Floats least = Floats::all(Row::root_of(job.residuals[n * tile.M + m]));
  Floats dr = Floats::all(0), by_t = Floats::all(0), by_diagonal = Floats::all(0);
  for (int64_t k = 0; k < P; k += kWidth) {
    const Floats score = Floats::load(t + k);
    const Floats distance = max(root(squared + (Floats::load(bias + k) - twice * score)), least);
    const Floats q = slopes * Floats::load(p + k) * (Floats::load(a + k) - mean) * inverse_above(distance, limit);
    dr = dr + q;
    by_t = by_t + q * score;
    by_diagonal = by_diagonal + q * Floats::load(tile.diagonal + k);
    (Floats::load(dt + k) - twice * q).store(dt + k);
    (Floats::load(job.ddiagonal + k) + scale_squared * q).store(job.ddiagonal + k);
  }
  p[b] = own;
  ds += 2 * (static_cast<double>(s) * sum(by_diagonal) - sum(by_t));

  // d^2[b] = r_{m+1}, which may have been computed from the residual vector, and t_{m+1}[b] = t_m[b] - s G[b, b].
  const float by_root = 2 * half_over_root(job.residuals[n * tile.M + m], noise);
  const float q_b = slope * p_b * (a[b] - average) * by_root + rho;
  dt[b] -= 2 * s * q_b;
  job.ddiagonal[b] += s * s * q_b;
  job.dscale[m] += ds - 2.0 * q_b * next[b];
  return q_b + sum(dr);
}

}  // namespace

void backward(const Training& job) {
  const Tile& tile = job.tile;
  const int64_t P = tile.P, M = tile.M;
  const bool errors = job.product != nullptr;
  Row row(tile);
  Buffer<float> a(P), dt(P);
  for (int64_t n = 0; n < tile.N; ++n) {
    row.fill_scores(job, n);
    if (errors) {
      row.fill_errors(job, n);
      row.fill_gradients(job, n);
      if (job.omega != nullptr) *job.value += row.loss(job);
      std::memset(a.data, 0, P * sizeof(float));
    } else {
      copy(job.ddelta + n * P, P, a.data);
    }
    std::memset(dt.data, 0, P * sizeof(float));
    float rho = 0;
    for (int64_t m = M - 1; m >= 0; --m) {
      if (errors) rho += errors_backward(job, row, n, m, a.data, dt.data);
      const float *next = row.t.data + m * P, *t = m ? next - P : tile.scores + n * P;
      rho = level_backward(job, n, m, t, next, rho, a.data, dt.data);
      if (errors) copy(row.delta.data + m * P, P, job.soft + (n * M + m) * P);
    }
    copy(dt.data, P, job.dscores + n * P);
    job.dsquared_norms[n] = rho;
  }
}

}  // namespace DRQ_ISA
}  // namespace drq
