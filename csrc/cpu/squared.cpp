// Squared errors after each level, given the codes, and their gradients. Compiled once per instruction set; see simd.h.
#include "cpu/buffer.h"
#include "cpu/simd.h"
#include "levels.h"

namespace drq {
namespace DRQ_ISA {
namespace {

// to = from + factor * values
void add_scaled(const float* from, float factor, const float* values, int64_t count, float* to) {
  const Floats f = Floats::all(factor);
  int64_t d = 0;
  for (; d + kWidth <= count; d += kWidth) (Floats::load(from + d) + f * Floats::load(values + d)).store(to + d);
  for (; d < count; ++d) to[d] = from[d] + factor * values[d];
}

}  // namespace

void decode(const Squared& job) {
  for (int64_t n = 0; n < job.N; ++n) {
    float* out = job.decoded + n * job.D;
    for (int64_t d = 0; d < job.D; ++d) out[d] = -0.0f;  // to which adding anything, 0 included, changes no bit
    for (int64_t m = 0; m < job.M; ++m)
      add_scaled(out, job.scale[m], job.codebook + job.codes[n * job.M + m] * job.D, job.D, out);
    if (job.offset != nullptr) add_scaled(out, 1, job.offset, job.D, out);
  }
}

void squared_errors(const Squared& job) {
  Buffer<float> residual(job.D);
  for (int64_t n = 0; n < job.N; ++n) {
    const float* from = job.x + n * job.D;
    for (int64_t m = 0; m < job.M; ++m) {
      add_scaled(from, -job.scale[m], job.codebook + job.codes[n * job.M + m] * job.D, job.D, residual.data);
      job.errors[n * job.M + m] = dot(residual.data, residual.data, job.D);
      from = residual.data;
    }
  }
}

void pulls(const Squared& job) {
  const int64_t M = job.M, D = job.D;
  for (int64_t n = 0; n < job.N; ++n) {
    float* const rows = job.pulls + n * M * D;  // first the residuals after each level
    const float* from = job.x + n * D;
    for (int64_t m = 0; m < M; ++m, from = rows + (m - 1) * D)
      add_scaled(from, -job.scale[m], job.codebook + job.codes[n * M + m] * D, D, rows + m * D);
    for (int64_t m = M - 1; m >= 0; --m) {
      float* const row = rows + m * D;
      const float weight = -2 * job.derrors[n * M + m];
      const Floats factor = Floats::all(weight);
      int64_t d = 0;
      for (; d + kWidth <= D; d += kWidth) {
        const Floats own = factor * Floats::load(row + d);
        (m + 1 < M ? own + Floats::load(row + D + d) : own).store(row + d);
      }
      for (; d < D; ++d) row[d] = weight * row[d] + (m + 1 < M ? row[D + d] : 0);
      job.dscale[n * M + m] = dot(job.codebook + job.codes[n * M + m] * D, row, D);
    }
  }
}

void own_pulls(const Squared& job) {
  Buffer<float> residual(job.D);
  for (int64_t n = 0; n < job.N; ++n) {
    const float* from = job.x + n * job.D;
    for (int64_t m = 0; m < job.M; ++m) {
      const int64_t place = n * job.M + m;
      const float weight = job.weights[place];
      float* const pull = job.pulls + place * job.D;
      add_scaled(from, -job.scale[m], job.codebook + job.codes[place] * job.D, job.D, residual.data);
      for (int64_t d = 0; d < job.D; ++d) pull[d] = weight == 0 ? 0 : weight * residual.data[d];
      from = residual.data;
    }
  }
}

void add_pulls(const Squared& job, const int64_t* starts, const int64_t* places, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; ++k)
    for (int64_t i = starts[k]; i < starts[k + 1]; ++i) {
      float* total = job.dcodebook + k * job.D;
      add_scaled(total, job.scale[places[i] % job.M], job.pulls + places[i] * job.D, job.D, total);
    }
}

}  // namespace DRQ_ISA
}  // namespace drq
