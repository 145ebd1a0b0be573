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

// All paths extended by every codeword. The error d^2[k] = r + (bias[k] - 2 s t[k]) of path b has the key paid + d^2
// tail. Only the smallest keys of groups of extensions are kept: they give a limit that drops nearly all the others.
struct Extensions {
  Extensions(const Encode& job)
      : job(job), P(job.tile.P), least(2 * job.beam * kWidth), folded(2 * job.beam * kWidth), within(P / kWord + 1) {}

  void start(int64_t m) {
    bias = job.tile.bias + m * P;
    twice = 2 * job.tile.scale[m], tail = job.still_to_come[m];
    paths = 0;
  }

  // Adds path `paths` of `now`. Its t[k] to t[k + 15] are scores_at(k), which are stored there.
  template <class Scores>
  void add(const Paths& now, Scores scores_at) {
    const Floats r = Floats::all(now.errors.data[paths]), paid = Floats::all(now.costs.data[paths]);
    float *t = now.scores.data + paths * P, *groups = least.data + 2 * paths * kWidth;
    // r is added to the least, which is that of the sums, because rounding keeps the order.
    Floats even = Floats::all(std::numeric_limits<float>::infinity()), odd = even;
    for (int64_t k = 0; k < P; k += 2 * kWidth) {
      const Floats scores = scores_at(k);
      scores.store(t + k);
      even = min(gain(k, scores), even);  // NaN is ignored
      if (k + kWidth == P) break;
      const Floats others = scores_at(k + kWidth);
      others.store(t + k + kWidth);
      odd = min(gain(k + kWidth, others), odd);
    }
    key(paid, r + even).store(groups);
    key(paid, r + odd).store(groups + kWidth);
    ++paths;
  }

  // A limit that at least `width` keys do not exceed, because the smallest keys of `width` groups do not; infinite if
  // there are fewer groups. Bisection makes it nearly the smallest such limit.
  float limit(int64_t width) const {
    const float* groups = least.data;
    int64_t rows = 2 * paths;
    while (rows % 2 == 0 && rows / 2 * kWidth >= 8 * width) {
      rows /= 2;
      for (int64_t i = 0; i < rows * kWidth; i += kWidth)
        min(Floats::load(groups + 2 * i), Floats::load(groups + 2 * i + kWidth)).store(folded.data + i);
      groups = folded.data;
    }
    if (rows * kWidth < width) return std::numeric_limits<float>::infinity();
    Floats highest = Floats::load(groups), lowest = highest;
    for (int64_t row = 1; row < rows; ++row) {
      const Floats here = Floats::load(groups + row * kWidth);
      lowest = min(lowest, here);
      if (row * kWidth < width) highest = max(highest, here);
    }
    float low = smallest(lowest), high = -smallest(Floats::all(0) - highest);
    if (!(high < std::numeric_limits<float>::infinity())) return high;
    for (int step = 0; step < 7; ++step) {
      const float middle = 0.5f * low + 0.5f * high;
      int64_t count = 0;
      for (int64_t row = 0; row < rows; ++row)
        count += __builtin_popcount(less_equal(Floats::load(groups + row * kWidth), Floats::all(middle)));
      const bool enough = count >= width;
      high = enough ? middle : high;
      low = enough ? low : middle;
    }
    return high;
  }

  // Offers the extensions of path b that are within the limit. There are few, so all are looked for first.
  void offer(const Paths& now, int64_t b, Best& best) const {
    const Floats limit = Floats::all(best.limit);
    const float* groups = least.data + 2 * b * kWidth;
    if (!less_equal(min(Floats::load(groups), Floats::load(groups + kWidth)), limit)) return;
    const float r = now.errors.data[b], paid = now.costs.data[b], *t = now.scores.data + b * P;
    const Floats rs = Floats::all(r), costs = Floats::all(paid);
    for (int64_t k = 0; k < P; k += kWord) {
      uint64_t bits = 0;
      for (int64_t i = 0; i < std::min(kWord, P - k); i += kWidth)
        bits |= uint64_t{less_equal(key(costs, error(rs, k + i, Floats::load(t + k + i))), limit)} << i;
      within.data[k / kWord] = bits;
    }
    for (int64_t k = 0; k < job.tile.K; k += kWord)
      for (uint64_t bits = within.data[k / kWord]; bits; bits &= bits - 1) {
        const int64_t codeword = k + __builtin_ctzll(bits);
        if (codeword >= job.tile.K) return;  // padding
        const float own = r + (bias[codeword] - twice * t[codeword]);
        best.offer({paid + own * tail, own, b * P + codeword});
      }
  }

  // The place of the best extension alone, for the last level.
  int64_t single(const Paths& now) const {
    float best = std::numeric_limits<float>::infinity();
    int64_t parent = 0;
    for (int64_t b = 0; b < paths; ++b) {
      const float* groups = least.data + 2 * b * kWidth;
      const float own = smallest(min(Floats::load(groups), Floats::load(groups + kWidth)));
      if (own < best) best = own, parent = b;
    }
    const Floats r = Floats::all(now.errors.data[parent]), paid = Floats::all(now.costs.data[parent]);
    const float* t = now.scores.data + parent * P;
    for (int64_t k = 0; k < P; k += kWidth)
      if (const unsigned bits = equal(key(paid, error(r, k, Floats::load(t + k))), Floats::all(best))) {
        const int64_t codeword = k + __builtin_ctz(bits);
        return parent * P + (codeword < job.tile.K ? codeword : 0);  // padding is found only if everything else is NaN
      }
    return 0;
  }

  const Encode& job;
  const int64_t P;
  int64_t paths = 0;

 private:
  Floats gain(int64_t k, Floats scores) const { return Floats::load(bias + k) - Floats::all(twice) * scores; }
  Floats error(Floats r, int64_t k, Floats scores) const { return r + gain(k, scores); }
  Floats key(Floats paid, Floats error) const { return paid + error * Floats::all(tail); }
  static constexpr int64_t kWord = 64;

  const float* bias = nullptr;
  float twice = 0, tail = 0;
  Buffer<float> least;      // [2 beam, 16]  each of a group of keys; two rows for every path
  Buffer<float> folded;     // the same, of larger groups
  Buffer<uint64_t> within;  // [P / 64]  bit i: whether that extension of a path is within the limit
};

void prefetch(const float* row, int64_t count) {
  for (int64_t i = 0; i < count; i += kWidth) __builtin_prefetch(row + i);
}

// The best `beam` extensions, in the order of their places.
void choose(const Extensions& extensions, const Paths& now, Best& best) {
  best.clear(extensions.job.beam, extensions.limit(extensions.job.beam));
  for (int64_t b = 0; b < extensions.paths; ++b) extensions.offer(now, b, best);
  best.cut();
  // Only a vector that is not finite leaves nothing to choose from: it gets codeword 0, as in greedy encoding.
  if (best.count == 0) best.offer({0, 0, 0});
}

void beamed(const Encode& job) {
  const Tile& tile = job.tile;
  const int64_t P = tile.P, M = tile.M;
  Paths first(job.beam, P, M), second(job.beam, P, M);
  Buffer<float> residual(tile.D);
  Extensions extensions(job);
  Best best(job.beam);
  for (int64_t n = 0; n < tile.N; ++n) {
    Paths *now = &first, *next = &second;
    now->errors.data[0] = now->bases.data[0] = squared_norm(tile, n);
    now->costs.data[0] = 0;
    extensions.start(0);
    extensions.add(*now, [scores = tile.scores + n * P](int64_t k) { return Floats::load(scores + k); });
    for (int64_t m = 0; m + 1 < M; ++m) {
      choose(extensions, *now, best);
      extensions.start(m + 1);
      const Floats factor = Floats::all(tile.scale[m]);
      for (int64_t i = 0; i < best.count; ++i) {
        const Candidate& chosen = best.items.data[i];
        const int64_t parent = chosen.place / P, codeword = chosen.place % P;
        if (i + 1 < best.count) prefetch(tile.gram + best.items.data[i + 1].place % P * tile.pitch, P);
        const int32_t* path = now->continued(parent, codeword, m, M, *next, i);
        next->costs.data[i] = now->costs.data[parent] + job.omega[m] * chosen.error;
        next->bases.data[i] = now->bases.data[parent];
        next->errors.data[i] = chosen.error;
        float* t_next = next->scores.data + i * P;
        if (chosen.error < next->bases.data[i] * kRebaseBelow) {
          next->errors.data[i] = next->bases.data[i] = rebase(tile, n, path, m, t_next, residual.data);
          extensions.add(*next, [=](int64_t k) { return Floats::load(t_next + k); });
        } else {
          const float *t = now->scores.data + parent * P, *row = tile.gram + codeword * tile.pitch;
          extensions.add(*next, [=](int64_t k) { return Floats::load(t + k) - factor * Floats::load(row + k); });
        }
      }
      std::swap(now, next);
    }
    const int64_t place = extensions.single(*now);
    write(job, n, now->continued(place / P, place % P, M - 1, M, *next, 0));
  }
}

// t_m of the paths of one vector: t = S - sum of s_i G[b_i] over the levels i that not all paths share. Paths come in
// the order of their codes, and what two neighbours have in common is computed once.
struct Tree {
  Tree(int64_t P, int64_t M) : sums(M * P), known(M) {}

  void start(const float* scores, int64_t rows_from, int64_t shared_levels) {
    root = scores, group = rows_from, shared = depth = shared_levels;
  }

  // What s_{m-1} G[b_{m-1}] is still to be subtracted from, for a path that is longer than the shared levels.
  const float* before_last(const Tile& tile, const int32_t* path, int64_t m) {
    int64_t i = shared;
    while (i < depth && known.data[i] == path[i]) ++i;
    for (; i + 1 < m; ++i) {
      subtract_level(tile, path, i, group, before(i, tile.P), sums.data + i * tile.P);
      known.data[i] = path[i];
    }
    depth = m - 1;
    return before(m - 1, tile.P);
  }

 private:
  const float* before(int64_t i, int64_t P) const { return i == shared ? root : sums.data + (i - 1) * P; }

  const float* root = nullptr;  // S
  int64_t group = 0, shared = 0;
  Buffer<float> sums;     // [M, P]  after each level of the last path
  Buffer<int32_t> known;  // [M]     that path
  int64_t depth = 0;      // how many of its levels are known
};

// The paths of a vector between two levels of a Beam.
struct Vector {
  Vector(const Beam& job, int64_t n)
      : count(job.counts[n]),
        shared(job.shared[n]),
        square(job.squares[n]),
        residual(job.residuals + n * job.encode.tile.D),
        errors(job.errors + n * job.encode.beam),
        costs(job.costs + n * job.encode.beam),
        codes(job.codes + n * job.encode.beam * job.pitch) {}
  int64_t &count, &shared;
  float &square, *residual, *errors, *costs;
  int32_t* codes;
};

void copy_path(const int32_t* from, int64_t levels, int32_t* to) {  // rows are padded
  for (int64_t m = 0; m < levels; m += kWidth) std::memcpy(to + m, from + m, kWidth * sizeof(int32_t));
}

// Subtracts the levels that all paths share from the residual.
void share(const Beam& job, int64_t n) {
  const Tile& tile = job.encode.tile;
  Vector vector(job, n);
  const int32_t *path = vector.codes, *last = path + (vector.count - 1) * job.pitch;
  int64_t& m = vector.shared;
  for (; m < job.last && path[m] == last[m]; ++m) {  // paths come in the order of their codes
    const float *word = tile.codebook + (tile.bases[m] + path[m]) * tile.D, s = tile.scale[m];
    for (int64_t d = 0; d < tile.D; ++d) vector.residual[d] -= s * word[d];
  }
  vector.square = dot(vector.residual, vector.residual, tile.D);
}

}  // namespace

void encode(const Encode& job) { job.beam == 1 ? greedy(job) : beamed(job); }

// All vectors pass a level before the next one, so that the parts of G that a level reads stay in cache.
void beam(const Beam& job) {
  const Encode& encode = job.encode;
  const Tile& tile = encode.tile;
  const int64_t P = tile.P, beam = encode.beam, pitch = job.pitch;
  Paths now(beam, P, pitch);
  Buffer<float> residual(tile.D);
  Extensions extensions(encode);
  Tree tree(P, tile.M);
  Best best(beam);
  for (int64_t m = job.first; m < job.last; ++m) {
    const Floats factor = Floats::all(m > 0 ? tile.scale[m - 1] : 0);
    for (int64_t n = 0; n < tile.N; ++n) {
      Vector vector(job, n);
      std::memcpy(now.errors.data, vector.errors, vector.count * sizeof(float));
      std::memcpy(now.costs.data, vector.costs, vector.count * sizeof(float));
      std::memcpy(now.codes.data, vector.codes, vector.count * pitch * sizeof(int32_t));
      const float* scores = tile.scores + n * P;
      tree.start(scores, tile.bases[m], vector.shared);
      extensions.start(m);
      for (int64_t b = 0; b < vector.count; ++b) {
        const int32_t* path = now.codes.data + b * pitch;
        float *t = now.scores.data + b * P, &error = now.errors.data[b];
        if (m == vector.shared) {
          extensions.add(now, [=](int64_t k) { return Floats::load(scores + k); });
        } else if (error < vector.square * kRebaseBelow) {
          error = rebase(tile, n, path, m - 1, t, residual.data);
          extensions.add(now, [=](int64_t k) { return Floats::load(t + k); });
        } else {
          const float *before = tree.before_last(tile, path, m), *row = gram_row(tile, path, m - 1, tile.bases[m]);
          extensions.add(now, [=](int64_t k) { return Floats::load(before + k) - factor * Floats::load(row + k); });
        }
      }
      if (m + 1 == tile.M) {
        const int64_t place = extensions.single(now);
        int32_t* path = now.codes.data + place / P * pitch;
        path[m] = static_cast<int32_t>(place % P);
        write(encode, n, path);
        continue;
      }
      choose(extensions, now, best);
      vector.count = best.count;
      for (int64_t i = 0; i < best.count; ++i) {
        const Candidate& chosen = best.items.data[i];
        const int64_t parent = chosen.place / P;
        int32_t* path = vector.codes + i * pitch;
        copy_path(now.codes.data + parent * pitch, m, path);
        path[m] = static_cast<int32_t>(chosen.place % P);
        vector.costs[i] = now.costs.data[parent] + encode.omega[m] * chosen.error;
        vector.errors[i] = chosen.error;
      }
    }
  }
  if (job.last < tile.M)
    for (int64_t n = 0; n < tile.N; ++n) share(job, n);
}

}  // namespace DRQ_ISA
}  // namespace drq
