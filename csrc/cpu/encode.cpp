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
        if (i + 1 < paths) prefetch(tile.gram + best.items.data[i + 1].place % P * tile.pitch, P);
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

// t_m of the paths of one vector, from the scores: t = S - sum_{i<m} s_i G[b_i]. Paths come in the order of their
// codes, and what two neighbours have in common is computed once.
struct Tree {
  Tree(int64_t P, int64_t M) : sums(M * P), known(M) {}

  void start(const Tile& tile, int64_t n, int64_t m) {
    group = tile.bases[m];
    root = tile.scores + n * tile.T + group;
    depth = 0;
  }

  // Writes t [P].
  void fill(const Tile& tile, const int32_t* path, int64_t m, float* t) {
    if (m == 0) return static_cast<void>(std::memcpy(t, root, tile.P * sizeof(float)));
    int64_t i = 0;
    while (i < depth && known.data[i] == path[i]) ++i;
    for (; i + 1 < m; ++i) {
      subtract_level(tile, path, i, group, before(i, tile.P), sums.data + i * tile.P);
      known.data[i] = path[i];
    }
    depth = m - 1;
    subtract_level(tile, path, m - 1, group, before(m - 1, tile.P), t);
  }

 private:
  const float* before(int64_t i, int64_t P) const { return i == 0 ? root : sums.data + (i - 1) * P; }

  int64_t group = 0;
  const float* root = nullptr;  // S
  Buffer<float> sums;           // [M, P]  after each level of the last path
  Buffer<int32_t> known;        // [M]     that path
  int64_t depth = 0;            // how many of its levels are known
};

// The paths of all vectors between two levels.
struct Kept {
  Kept(int64_t N, int64_t beam, int64_t M)
      : beam(beam), M(M), counts(N), errors(N * beam), costs(N * beam), codes(N * beam * M) {}

  void load(int64_t n, int64_t levels, Paths& paths) const {
    std::memcpy(paths.errors.data, errors.data + n * beam, counts.data[n] * sizeof(float));
    std::memcpy(paths.costs.data, costs.data + n * beam, counts.data[n] * sizeof(float));
    for (int64_t b = 0; b < counts.data[n]; ++b)
      copy_codes(codes.data + (n * beam + b) * M, levels, paths.codes.data + b * M);
  }
  void store(int64_t n, int64_t levels, const Paths& paths, int64_t count) {
    counts.data[n] = count;
    std::memcpy(errors.data + n * beam, paths.errors.data, count * sizeof(float));
    std::memcpy(costs.data + n * beam, paths.costs.data, count * sizeof(float));
    for (int64_t b = 0; b < count; ++b) copy_codes(paths.codes.data + b * M, levels, codes.data + (n * beam + b) * M);
  }

  const int64_t beam, M;
  Buffer<int64_t> counts;       // [N]
  Buffer<float> errors, costs;  // [N, beam]
  Buffer<int32_t> codes;        // [N, beam, M]

 private:
  static void copy_codes(const int32_t* from, int64_t levels, int32_t* to) {
    std::memcpy(to, from, levels * sizeof(int32_t));
  }
};

// A beam where levels have codewords of their own. All vectors pass a level before the next one, so that the part of G
// that a level reads stays in cache.
void beamed_by_levels(const Encode& job) {
  const Tile& tile = job.tile;
  const int64_t P = tile.P, M = tile.M;
  Paths now(job.beam, P, M), next(job.beam, 0, M);
  Buffer<float> residual(tile.D), norms(tile.N);
  Extensions extensions(job.beam, P);
  Tree tree(P, M);
  Best best(job.beam);
  Kept kept(tile.N, job.beam, M);
  for (int64_t n = 0; n < tile.N; ++n) {
    kept.counts.data[n] = 1;
    norms.data[n] = kept.errors.data[n * job.beam] = squared_norm(tile, n);
    kept.costs.data[n * job.beam] = 0;
  }
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < tile.N; ++n) {
      const int64_t paths = kept.counts.data[n];
      kept.load(n, m, now);
      tree.start(tile, n, m);
      for (int64_t b = 0; b < paths; ++b) {
        const int32_t* path = now.codes.data + b * M;
        float& error = now.errors.data[b];
        if (m > 0 && error < norms.data[n] * kRebaseBelow)
          error = rebase(tile, n, path, m - 1, now.scores.data + b * P, residual.data);
        else
          tree.fill(tile, path, m, now.scores.data + b * P);
      }
      if (m + 1 == M) {
        const int64_t place = extensions.single(job, now, paths, m);
        write(job, n, now.continued(place / P, place % P, m, M, next, 0));
        continue;
      }
      extensions.fill(job, now, paths, m);
      best.clear(job.beam, extensions.limit(job.beam));
      for (int64_t b = 0; b < paths; ++b) extensions.offer(job, now, b, m, best);
      best.cut();
      if (best.count == 0) best.offer({0, 0, 0});  // as in beamed()
      for (int64_t i = 0; i < best.count; ++i) {
        const Candidate& chosen = best.items.data[i];
        const int64_t parent = chosen.place / P;
        now.continued(parent, chosen.place % P, m, M, next, i);
        next.costs.data[i] = now.costs.data[parent] + job.omega[m] * chosen.error;
        next.errors.data[i] = chosen.error;
      }
      kept.store(n, m + 1, next, best.count);
    }
}

}  // namespace

void encode(const Encode& job) {
  if (job.beam == 1)
    greedy(job);
  else if (job.tile.T == job.tile.P)
    beamed(job);
  else
    beamed_by_levels(job);
}

}  // namespace DRQ_ISA
}  // namespace drq
