// What encoding and training share, for one instruction set; see simd.h. Everything has internal linkage: a function
// that the linker merged between the copies could carry AVX-512 into the portable one.
#pragma once

#include <cstring>
#include <limits>

#include "cpu/buffer.h"
#include "cpu/simd.h"
#include "levels.h"

namespace drq {
namespace DRQ_ISA {
namespace {

int64_t first_equal(const float* values, int64_t count, float wanted) {
  const Floats target = Floats::all(wanted);
  for (int64_t k = 0; k < count; k += kWidth)
    if (const unsigned bits = equal(Floats::load(values + k), target)) return k + __builtin_ctz(bits);
  return 0;  // only where everything is NaN
}

// key[k] = bias[k] - 2 s t[k], and the smallest of them.
float keys_of(const float* t, const float* bias, float s, int64_t P, float* key) {
  const Floats twice = Floats::all(2 * s);
  Floats best = Floats::all(std::numeric_limits<float>::infinity());
  for (int64_t k = 0; k < P; k += kWidth) {
    const Floats value = Floats::load(bias + k) - twice * Floats::load(t + k);
    value.store(key + k);
    best = min(best, value);
  }
  return smallest(best);
}

float squared_norm(const Tile& tile, int64_t n) { return dot(tile.x + n * tile.D, tile.x + n * tile.D, tile.D); }

// A squared residual below this fraction of the base (see advance) has lost too many bits to cancellation.
constexpr float kRebaseBelow = 1.0f / 256;

// G[path[m]] at the codewords from row `group` on.
template <class Code>
const float* gram_row(const Tile& tile, const Code* path, int64_t m, int64_t group) {
  return tile.gram + (tile.bases[m] + path[m]) * tile.pitch + group;
}

// t_next = t - s_m G[path[m]], at the codewords from row `group` on.
template <class Code>
void subtract_level(const Tile& tile, const Code* path, int64_t m, int64_t group, const float* t, float* t_next) {
  const float* row = gram_row(tile, path, m, group);
  const Floats factor = Floats::all(tile.scale[m]);
  for (int64_t k = 0; k < tile.P; k += kWidth) (Floats::load(t + k) - factor * Floats::load(row + k)).store(t_next + k);
}

// t_next of level m + 1 and r_{m+1}, which is returned, from the residual vector. Without gram only t_next[path[m]] is
// computed.
template <class Code>
float rebase(const Tile& tile, int64_t n, const Code* path, int64_t m, float* t_next, float* residual) {
  const int64_t b = path[m], group = tile.bases[m + 1 < tile.M ? m + 1 : m];
  std::memcpy(residual, tile.x + n * tile.D, tile.D * sizeof(float));
  for (int64_t i = 0; i <= m; ++i) {
    const float* word = tile.codebook + (tile.bases[i] + path[i]) * tile.D;
    for (int64_t d = 0; d < tile.D; ++d) residual[d] -= tile.scale[i] * word[d];
  }
  const bool all = tile.gram != nullptr;
  for (int64_t k = all ? 0 : b; k < (all ? tile.K : b + 1); ++k)
    t_next[k] = dot(residual, tile.codebook + (group + k) * tile.D, tile.D);
  for (int64_t k = tile.K; all && k < tile.P; ++k) t_next[k] = 0;
  return dot(residual, residual, tile.D);
}

// Advances row n from level m to m + 1, which has the same codewords: t_next = t - s_m G[path[m]], given r = r_{m+1};
// returns r. `base` is the squared norm of the vector from which t was last computed directly. If r is small relative
// to it, t_next and r are computed from the residual vector, which becomes the new base. t_next may be t.
template <class Code>
float advance(const Tile& tile, int64_t n, const Code* path, int64_t m, float r, const float* t, float* t_next,
              float& base, float* residual) {
  const int64_t b = path[m];
  if (r < base * kRebaseBelow) return base = rebase(tile, n, path, m, t_next, residual);
  if (tile.gram == nullptr)
    t_next[b] = t[b] - tile.scale[m] * tile.diagonal[b];
  else
    subtract_level(tile, path, m, tile.bases[m], t, t_next);
  return r;
}

}  // namespace
}  // namespace DRQ_ISA
}  // namespace drq
