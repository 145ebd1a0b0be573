// Compiled once per instruction set; see simd.h. Everything here but `encode` has internal linkage: a function of the
// standard library that the linker merged between the copies could carry AVX-512 into the portable one.
#include "encode.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/simd.h"

namespace drq {
namespace DRQ_ISA {
namespace {

template <class T>
struct Buffer {
  explicit Buffer(int64_t count) : data(new T[count]()) {}
  ~Buffer() { delete[] data; }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* data;
};

// Below this share of ||x||^2 a squared residual has lost too many bits in score space (docs/math.md, section 3).
constexpr float kRebaseBelow = 1.0f / 256;

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

// to = from - s * row: what the next level sees.
void step(const float* from, const float* row, float s, int64_t P, float* to) {
  const Floats factor = Floats::all(s);
  for (int64_t k = 0; k < P; k += kWidth) (Floats::load(from + k) - factor * Floats::load(row + k)).store(to + k);
}

float dot(const float* a, const float* b, int64_t count) {
  Floats total = Floats::all(0);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) total = total + Floats::load(a + i) * Floats::load(b + i);
  float result = sum(total);
  for (; i < count; ++i) result += a[i] * b[i];
  return result;
}

// Forms the residual itself and its products with all codewords; returns its squared norm.
float rebase(const Encode& job, int64_t n, const int32_t* path, int64_t length, float* residual, float* t) {
  std::memcpy(residual, job.x + n * job.D, job.D * sizeof(float));
  for (int64_t m = 0; m < length; ++m) {
    const float* word = job.codebook + path[m] * job.D;
    for (int64_t d = 0; d < job.D; ++d) residual[d] -= job.scale[m] * word[d];
  }
  for (int64_t k = 0; k < job.K; ++k) t[k] = dot(residual, job.codebook + k * job.D, job.D);
  return dot(residual, residual, job.D);
}

void write(const Encode& job, int64_t n, const int32_t* path) {
  for (int64_t m = 0; m < job.M; ++m) {
    if (job.wide)
      static_cast<int32_t*>(job.codes)[n * job.M + m] = path[m];
    else
      static_cast<uint8_t*>(job.codes)[n * job.M + m] = static_cast<uint8_t>(path[m]);
  }
}

void greedy(const Encode& job, int64_t begin, int64_t end) {
  Buffer<float> scores(job.P), keys(job.P), residual(job.D);
  Buffer<int32_t> codes(job.M);
  float *t = scores.data, *key = keys.data;
  int32_t* path = codes.data;
  for (int64_t n = begin; n < end; ++n) {
    std::memcpy(t, job.scores + n * job.K, job.K * sizeof(float));
    float r = job.squared_norms[n];
    const float small = r * kRebaseBelow;
    for (int64_t m = 0; m < job.M; ++m) {
      const float best = keys_of(t, job.bias + m * job.P, job.scale[m], job.P, key);
      path[m] = static_cast<int32_t>(first_equal(key, job.P, best));
      if (m + 1 == job.M) break;
      r += best;
      if (r < small)
        r = rebase(job, n, path, m + 1, residual.data, t);
      else
        step(t, job.gram + path[m] * job.P, job.scale[m], job.P, t);
    }
    write(job, n, path);
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
  Paths(int64_t beam, int64_t P, int64_t M) : scores(beam * P), errors(beam), costs(beam), codes(beam * M) {}
  Buffer<float> scores;   // t [beam, P]
  Buffer<float> errors;   // r [beam]
  Buffer<float> costs;    // sum of omega[i] d_i^2 so far [beam]
  Buffer<int32_t> codes;  // [beam, M]
};

// Offers path b, extended by every codeword, to `best`.
void extend(const Encode& job, const Paths& now, int64_t b, int64_t m, float* key, Best& best) {
  const float r = now.errors.data[b], paid = now.costs.data[b], tail = job.still_to_come[m];
  // No key above the limit can enter: exact would be (worst - paid) / tail - r, the rest is slack for rounding.
  const auto limit_now = [&] {
    if (!best.full()) return std::numeric_limits<float>::infinity();
    const float exact = (best.items.data[0].key - paid) / tail - r;
    return exact + 1e-5f * (std::fabs(exact) + std::fabs(r) + std::fabs(paid / tail));
  };
  float limit = limit_now();
  if (keys_of(now.scores.data + b * job.P, job.bias + m * job.P, job.scale[m], job.P, key) > limit) return;
  for (int64_t k = 0; k < job.P; k += kWidth) {
    for (unsigned bits = less_equal(Floats::load(key + k), Floats::all(limit)); bits; bits &= bits - 1) {
      const int64_t codeword = k + __builtin_ctz(bits);
      if (codeword >= job.K) return;  // padding
      const float error = r + key[codeword];
      if (best.offer({paid + error * tail, error, b * job.P + codeword})) limit = limit_now();
    }
  }
}

void beamed(const Encode& job, int64_t begin, int64_t end) {
  const int64_t P = job.P, M = job.M;
  Paths first(job.beam, P, M), second(job.beam, P, M);
  Buffer<float> key(P), residual(job.D);
  Best best(job.beam);
  for (int64_t n = begin; n < end; ++n) {
    Paths *now = &first, *next = &second;
    std::memcpy(now->scores.data, job.scores + n * job.K, job.K * sizeof(float));
    now->errors.data[0] = job.squared_norms[n];
    now->costs.data[0] = 0;
    const float small = job.squared_norms[n] * kRebaseBelow;
    int64_t paths = 1;
    for (int64_t m = 0; m < M; ++m) {
      best.clear(m + 1 == M ? 1 : job.beam);
      for (int64_t b = 0; b < paths; ++b) extend(job, *now, b, m, key.data, best);
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
        float* t = next->scores.data + i * P;
        next->errors.data[i] = chosen.error;
        next->costs.data[i] = now->costs.data[parent] + job.omega[m] * chosen.error;
        if (chosen.error < small)
          next->errors.data[i] = rebase(job, n, path, m + 1, residual.data, t);
        else
          step(now->scores.data + parent * P, job.gram + codeword * P, job.scale[m], P, t);
      }
      std::swap(now, next);
    }
    write(job, n, now->codes.data);
  }
}

}  // namespace

void encode(const Encode& job, int64_t begin, int64_t end) {
  if (job.beam == 1)
    greedy(job, begin, end);
  else
    beamed(job, begin, end);
}

}  // namespace DRQ_ISA
}  // namespace drq
