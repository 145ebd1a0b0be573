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
  float key;      // by which paths are compared
  float error;    // d_m^2
  int64_t place;  // parent * P + codeword: orders paths by their codes, because parents are sorted by theirs
};

bool better(const Candidate& a, const Candidate& b) { return a.key < b.key || (a.key == b.key && a.place < b.place); }

// Keeps the `width` best candidates. They must be offered in ascending order of their places, and stay in that order.
struct Best {
  explicit Best(int64_t beam) : capacity(2 * beam + 64), items(capacity) {}
  void clear(int64_t new_width, float new_limit) { count = 0, width = new_width, limit = new_limit; }
  void offer(const Candidate& candidate) {
    items.data[count++] = candidate;
    if (count == capacity) cut();
  }
  void cut() {
    if (count > width + 8) {
      std::nth_element(items.data, items.data + width - 1, items.data + count, better);
      limit = std::min(limit, items.data[width - 1].key);
      count = width;
      std::sort(items.data, items.data + count,
                [](const Candidate& a, const Candidate& b) { return a.place < b.place; });
    }
    while (count > width) {  // a few too many
      int64_t worst = 0;
      for (int64_t i = 1; i < count; ++i) worst = items.data[i].key < items.data[worst].key ? worst : i;
      --count;
      for (int64_t i = worst; i < count; ++i) items.data[i] = items.data[i + 1];
    }
  }
  int64_t capacity;
  Buffer<Candidate> items;
  int64_t count = 0, width = 0;
  float limit = 0;  // candidates with larger keys cannot be among the best
};

// One vector's paths after a level, in the order of their codes.
struct Paths {
  Paths(int64_t beam, int64_t P, int64_t M)
      : scores(beam * P), errors(beam), bases(beam), costs(beam), codes(beam * M) {}
  // Path b with a codeword for level m, as path i of `next`.
  const int32_t* continued(int64_t b, int64_t codeword, int64_t m, int64_t M, Paths& next, int64_t i) const {
    int32_t* path = next.codes.data + i * M;
    std::memcpy(path, codes.data + b * M, m * sizeof(int32_t));
    path[m] = static_cast<int32_t>(codeword);
    return path;
  }
  Buffer<float> scores;   // t [beam, P]
  Buffer<float> errors;   // r [beam]
  Buffer<float> bases;    // see advance() [beam]
  Buffer<float> costs;    // sum of omega[i] d_i^2 so far [beam]
  Buffer<int32_t> codes;  // [beam, M]
};

// The keys of all paths extended by every codeword, and a limit that drops most of them.
struct Extensions {
  Extensions(int64_t beam, int64_t P) : rows(rows_for(beam)), keys(beam * P), least(rows * kWidth) {}

  static int64_t rows_for(int64_t beam) {
    int64_t count = 4;
    while (count * kWidth < 4 * beam) count *= 2;
    return count;
  }

  // Computes the keys, and the smallest key of each of many groups.
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
        min(key, Floats::load(sixteen)).store(sixteen);  // NaN is ignored
        row = (row + 1) & (rows - 1);
      }
    }
  }

  // A limit that at least `width` keys do not exceed, because the smallest keys of `width` groups do not; infinite if
  // there are fewer keys. Bisection makes it nearly the smallest such limit.
  float limit(int64_t width) const {
    Floats highest = Floats::load(least.data), lowest = highest;
    for (int64_t row = 1; row < rows; ++row) {
      const Floats here = Floats::load(least.data + row * kWidth);
      lowest = min(lowest, here);
      if (row * kWidth < width) highest = max(highest, here);
    }
    float low = smallest(lowest), high = -smallest(Floats::all(0) - highest);
    if (!(high < std::numeric_limits<float>::infinity())) return high;
    for (int step = 0; step < 10; ++step) {
      const float middle = 0.5f * low + 0.5f * high;
      int64_t count = 0;
      for (int64_t row = 0; row < rows; ++row)
        count += __builtin_popcount(less_equal(Floats::load(least.data + row * kWidth), Floats::all(middle)));
      const bool enough = count >= width;
      high = enough ? middle : high;
      low = enough ? low : middle;
    }
    return high;
  }

  // The place of the best extension alone, for the last level; stores no keys.
  static int64_t single(const Encode& job, const Paths& now, int64_t paths, int64_t m) {
    const Tile& tile = job.tile;
    const Floats twice = Floats::all(2 * tile.scale[m]), tail = Floats::all(job.still_to_come[m]);
    const float* bias = tile.bias + m * tile.P;
    const auto keys_at = [&](int64_t b, int64_t k) {
      const Floats r = Floats::all(now.errors.data[b]), paid = Floats::all(now.costs.data[b]);
      const Floats t = Floats::load(now.scores.data + b * tile.P + k);
      return paid + (r + (Floats::load(bias + k) - twice * t)) * tail;
    };
    float best = std::numeric_limits<float>::infinity();
    int64_t parent = 0;
    for (int64_t b = 0; b < paths; ++b) {
      Floats lowest = Floats::all(best);
      for (int64_t k = 0; k < tile.P; k += kWidth) lowest = min(keys_at(b, k), lowest);
      if (equal(lowest, Floats::all(best)) == 0xFFFF) continue;  // none is below it
      best = smallest(lowest);
      parent = b;
    }
    for (int64_t k = 0; k < tile.P; k += kWidth)
      if (const unsigned bits = equal(keys_at(parent, k), Floats::all(best))) {
        const int64_t codeword = k + __builtin_ctz(bits);
        return parent * tile.P + (codeword < tile.K ? codeword : 0);  // padding is found only if everything else is NaN
      }
    return 0;
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

void prefetch(const float* row, int64_t count) {
  for (int64_t i = 0; i < count; i += kWidth) __builtin_prefetch(row + i);
}

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
    for (int64_t m = 0; m + 1 < M; ++m) {
      extensions.fill(job, *now, paths, m);
      best.clear(job.beam, extensions.limit(job.beam));
      for (int64_t b = 0; b < paths; ++b) extensions.offer(job, *now, b, m, best);
      best.cut();
      // Only a vector that is not finite leaves nothing to choose from: it gets codeword 0, as in greedy encoding.
      if (best.count == 0) best.offer({0, 0, 0});
      paths = best.count;
      for (int64_t i = 0; i < paths; ++i) {
        const Candidate& chosen = best.items.data[i];
        const int64_t parent = chosen.place / P;
        if (i + 1 < paths) prefetch(tile.gram + best.items.data[i + 1].place % P * P, P);
        const int32_t* path = now->continued(parent, chosen.place % P, m, M, *next, i);
        next->costs.data[i] = now->costs.data[parent] + job.omega[m] * chosen.error;
        next->bases.data[i] = now->bases.data[parent];
        next->errors.data[i] = advance(tile, n, path, m, chosen.error, now->scores.data + parent * P,
                                       next->scores.data + i * P, next->bases.data[i], residual.data);
      }
      std::swap(now, next);
    }
    const int64_t place = extensions.single(job, *now, paths, M - 1);
    write(job, n, now->continued(place / P, place % P, M - 1, M, *next, 0));
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
