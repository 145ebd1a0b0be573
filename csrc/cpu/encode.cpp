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

// The `width` best of the candidates that are offered, in no order once `cut`.
struct Best {
  explicit Best(int64_t beam) : capacity(2 * beam + 64), items(capacity) {}
  void clear(int64_t new_width, float new_limit) { count = 0, width = new_width, limit = new_limit; }
  void offer(const Candidate& candidate) {
    items.data[count++] = candidate;
    if (count == capacity) cut();
  }
  void cut() {
    if (count <= width) return;
    std::nth_element(items.data, items.data + width - 1, items.data + count, better);
    count = width;
    limit = std::min(limit, items.data[width - 1].key);
  }
  int64_t capacity;
  Buffer<Candidate> items;
  int64_t count = 0, width = 0;
  float limit = 0;  // no key above it can be among them
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

// All paths extended by every codeword, and which of that is worth a closer look.
struct Extensions {
  Extensions(int64_t beam, int64_t P) : rows(rows_for(beam)), keys(beam * P), least(rows * kWidth) {}

  static int64_t rows_for(int64_t beam) {
    int64_t count = 4;
    while (count * kWidth < 4 * beam) count *= 2;
    return count;
  }

  // Their keys, and the smallest of each of many groups.
  void fill(const Encode& job, const Paths& now, int64_t paths, int64_t m) {
    const Tile& tile = job.tile;
    const Floats twice = Floats::all(2 * tile.scale[m]), tail = Floats::all(job.still_to_come[m]);
    const float* bias = tile.bias + m * tile.P;
    for (int64_t i = 0; i < rows * kWidth; ++i) least.data[i] = std::numeric_limits<float>::infinity();
    int64_t row = 0;
    for (int64_t b = 0; b < paths; ++b) {
      const Floats r = Floats::all(now.errors.data[b]), paid = Floats::all(now.costs.data[b]);
      const float* t = now.scores.data + b * tile.P;
      for (int64_t k = 0; k < tile.P; k += kWidth) {
        const Floats key = paid + (r + (Floats::load(bias + k) - twice * Floats::load(t + k))) * tail;
        key.store(keys.data + b * tile.P + k);
        float* sixteen = least.data + row * kWidth;
        min(key, Floats::load(sixteen)).store(sixteen);  // a NaN is passed over
        row = (row + 1) & (rows - 1);
      }
    }
  }

  // At least `width` keys, if there are so many, are not above this: as many groups have one.
  float limit(int64_t width) {
    float *begin = least.data, *end = begin + rows * kWidth;
    std::nth_element(begin, begin + width - 1, end, [](float a, float b) { return a < b; });
    return begin[width - 1];
  }

  void offer(const Encode& job, const Paths& now, int64_t b, int64_t m, Best& best) const {
    const Tile& tile = job.tile;
    const float twice = 2 * tile.scale[m], *bias = tile.bias + m * tile.P, *t = now.scores.data + b * tile.P;
    for (int64_t k = 0; k < tile.P; k += kWidth) {
      const Floats key = Floats::load(keys.data + b * tile.P + k);
      for (unsigned bits = less_equal(key, Floats::all(best.limit)); bits; bits &= bits - 1) {
        const int64_t codeword = k + __builtin_ctz(bits);
        if (codeword >= tile.K) return;  // padding
        const float error = now.errors.data[b] + (bias[codeword] - twice * t[codeword]);
        best.offer({keys.data[b * tile.P + codeword], error, b * tile.P + codeword});
      }
    }
  }

  int64_t rows;         // a power of 2
  Buffer<float> keys;   // [beam, P]
  Buffer<float> least;  // [rows, 16], each of a group of keys
};

void beamed(const Encode& job) {
  const Tile& tile = job.tile;
  const int64_t P = tile.P, M = tile.M;
  Paths first(job.beam, P, M), second(job.beam, P, M);
  Buffer<float> residual(tile.D);
  Extensions extensions(job.beam, P);
  Best best(job.beam);
  for (int64_t n = 0; n < tile.N; ++n) {
    Paths *now = &first, *next = &second;
    std::memcpy(now->scores.data, tile.scores + n * P, P * sizeof(float));
    now->errors.data[0] = now->bases.data[0] = squared_norm(tile, n);
    now->costs.data[0] = 0;
    int64_t paths = 1;
    for (int64_t m = 0; m < M; ++m) {
      const int64_t width = m + 1 == M ? 1 : job.beam;
      extensions.fill(job, *now, paths, m);
      best.clear(width, extensions.limit(width));
      for (int64_t b = 0; b < paths; ++b) extensions.offer(job, *now, b, m, best);
      best.cut();
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
