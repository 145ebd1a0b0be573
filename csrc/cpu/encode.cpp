// Compiled once per instruction set; see simd.h.
#include <algorithm>
#include <cmath>

#include "cpu/tile.h"

namespace drq {
namespace DRQ_ISA {
namespace {

void write(const Encode& job, int64_t n, const int32_t* path) {
  const int64_t M = job.tile.M;
  for (int64_t m = 0; m < M; ++m) {
    if (job.wide)
      static_cast<int32_t*>(job.codes)[n * M + m] = path[m];
    else
      static_cast<uint8_t*>(job.codes)[n * M + m] = static_cast<uint8_t>(path[m]);
  }
}

void greedy(const Encode& job) {
  const Tile& tile = job.tile;
  Buffer<float> t(tile.P), key(tile.P), residual(tile.D);
  Buffer<int32_t> path(tile.M);
  for (int64_t n = 0; n < tile.N; ++n) {
    const float* now = tile.scores + n * tile.P;
    float r = squared_norm(tile, n), base = r;
    for (int64_t m = 0; m < tile.M; ++m) {
      const float best = keys_of(now, tile.bias + m * tile.P, tile.scale[m], tile.P, key.data);
      path.data[m] = static_cast<int32_t>(first_equal(key.data, tile.P, best));
      if (m + 1 < tile.M) r = advance(tile, n, path.data, m, r + best, now, t.data, base, residual.data);
      now = t.data;
    }
    write(job, n, path.data);
  }
}

struct Candidate {
  float key;      // what the path is judged by
  float error;    // d_m^2
  int64_t place;  // parent * P + codeword: in the order of the code, parents being sorted by theirs
};

bool better(const Candidate& a, const Candidate& b) { return a.key < b.key || (a.key == b.key && a.place < b.place); }

// The `width` best candidates, as a heap with the worst on top.
struct Best {
  explicit Best(int64_t capacity) : items(capacity) {}
  bool full() const { return count == width; }
  void clear(int64_t new_width) { count = 0, width = new_width; }
  bool offer(const Candidate& candidate) {
    if (full()) {
      if (!better(candidate, items.data[0])) return false;
      std::pop_heap(items.data, items.data + count--, better);
    }
    items.data[count++] = candidate;
    std::push_heap(items.data, items.data + count, better);
    return true;
  }
  Buffer<Candidate> items;
  int64_t count = 0, width = 0;
};

// One vector's paths after a level, in the order of their codes.
struct Paths {
  Paths(int64_t beam, int64_t P, int64_t M)
      : scores(beam * P), errors(beam), bases(beam), costs(beam), codes(beam * M) {}
  Buffer<float> scores;   // t [beam, P]
  Buffer<float> errors;   // r [beam]
  Buffer<float> bases;    // see advance() [beam]
  Buffer<float> costs;    // sum of omega[i] d_i^2 so far [beam]
  Buffer<int32_t> codes;  // [beam, M]
};

// Offers path b, extended by every codeword, to `best`.
void extend(const Encode& job, const Paths& now, int64_t b, int64_t m, float* key, Best& best) {
  const Tile& tile = job.tile;
  const float r = now.errors.data[b], paid = now.costs.data[b], tail = job.still_to_come[m];
  // No key above the limit can enter: exact would be (worst - paid) / tail - r, the rest is slack for rounding.
  const auto limit_now = [&] {
    if (!best.full()) return std::numeric_limits<float>::infinity();
    const float exact = (best.items.data[0].key - paid) / tail - r;
    return exact + 1e-5f * (std::fabs(exact) + std::fabs(r) + std::fabs(paid / tail));
  };
  float limit = limit_now();
  if (keys_of(now.scores.data + b * tile.P, tile.bias + m * tile.P, tile.scale[m], tile.P, key) > limit) return;
  for (int64_t k = 0; k < tile.P; k += kWidth) {
    for (unsigned bits = less_equal(Floats::load(key + k), Floats::all(limit)); bits; bits &= bits - 1) {
      const int64_t codeword = k + __builtin_ctz(bits);
      if (codeword >= tile.K) return;  // padding
      const float error = r + key[codeword];
      if (best.offer({paid + error * tail, error, b * tile.P + codeword})) limit = limit_now();
    }
  }
}

void beamed(const Encode& job) {
  const Tile& tile = job.tile;
  const int64_t P = tile.P, M = tile.M;
  Paths first(job.beam, P, M), second(job.beam, P, M);
  Buffer<float> key(P), residual(tile.D);
  Best best(job.beam);
  for (int64_t n = 0; n < tile.N; ++n) {
    Paths *now = &first, *next = &second;
    std::memcpy(now->scores.data, tile.scores + n * P, P * sizeof(float));
    now->errors.data[0] = now->bases.data[0] = squared_norm(tile, n);
    now->costs.data[0] = 0;
    int64_t paths = 1;
    for (int64_t m = 0; m < M; ++m) {
      best.clear(m + 1 == M ? 1 : job.beam);
      for (int64_t b = 0; b < paths; ++b) extend(job, *now, b, m, key.data, best);
      // Only a vector that is not finite leaves nothing to choose from: it gets codeword 0, as in greedy encoding.
      if (best.count == 0) best.offer({0, 0, 0});
      paths = best.count;
      std::sort(best.items.data, best.items.data + paths,
                [](const Candidate& a, const Candidate& b) { return a.place < b.place; });
      for (int64_t i = 0; i < paths; ++i) {
        const Candidate& chosen = best.items.data[i];
        const int64_t parent = chosen.place / P, codeword = chosen.place % P;
        int32_t* path = next->codes.data + i * M;
        std::memcpy(path, now->codes.data + parent * M, m * sizeof(int32_t));
        path[m] = static_cast<int32_t>(codeword);
        if (m + 1 == M) break;
        next->costs.data[i] = now->costs.data[parent] + job.omega[m] * chosen.error;
        next->bases.data[i] = now->bases.data[parent];
        next->errors.data[i] = advance(tile, n, path, m, chosen.error, now->scores.data + parent * P,
                                       next->scores.data + i * P, next->bases.data[i], residual.data);
      }
      std::swap(now, next);
    }
    write(job, n, now->codes.data);
  }
}

}  // namespace

void encode(const Encode& job) {
  if (job.beam == 1)
    greedy(job);
  else
    beamed(job);
}

}  // namespace DRQ_ISA
}  // namespace drq
