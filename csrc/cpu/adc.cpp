#include <algorithm>
#include <vector>

#include "cpu/parallel.h"
#include "search.h"

namespace drq {
namespace {

// Codes per unit of work: large enough to hide the cost of the M*K products, small enough to share out one query.
constexpr int64_t kBlock = 1 << 15;

template <class Code>
void lookup_range(const Lookup& job, int64_t begin, int64_t end) {
  const int64_t blocks = (job.N + kBlock - 1) / kBlock;
  const Code* codes = static_cast<const Code*>(job.codes);
  std::vector<float> terms(job.M * job.K);  // fl(scale[m] * table[q, k]) of the current query
  int64_t current = -1;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t q = unit / blocks;
    if (q != current) {
      const float* row = job.table + q * job.K;
      for (int64_t m = 0; m < job.M; ++m)
        for (int64_t k = 0; k < job.K; ++k) terms[m * job.K + k] = job.scale[m] * row[k];
      current = q;
    }
    const int64_t first = unit % blocks * kBlock;
    const int64_t last = std::min(first + kBlock, job.N);
    float* out = job.sums + q * job.N;
    for (int64_t n = first; n < last; ++n) {
      const Code* code = codes + n * job.M;
      const float* level = terms.data();
      float sum = level[code[0]];
      for (int64_t m = 1; m < job.M; ++m) sum += (level += job.K)[code[m]];
      out[n] = sum;
    }
  }
}

template <class Code>
void norms_range(const Norms& job, int64_t begin, int64_t end) {
  const Code* codes = static_cast<const Code*>(job.codes);
  int64_t list = 0;
  for (int64_t n = begin; n < end; ++n) {
    while (job.starts != nullptr && job.starts[list + 1] <= n) ++list;
    const Code* code = codes + n * job.stride;
    float total = 0;
    for (int64_t i = 0; i < job.M; ++i) {
      const int64_t at = job.bases[i] + code[i];
      const float* row = job.gram + at * job.T;
      for (int64_t j = 0; j < i; ++j) total += 2 * job.scale[i] * job.scale[j] * row[job.bases[j] + code[j]];
      total += job.scale[i] * job.scale[i] * row[at];
    }
    if (job.inner != nullptr) {
      const float* inner = job.inner + list * job.T;
      for (int64_t i = 0; i < job.M; ++i) total += job.scale[i] * inner[job.bases[i] + code[i]];
      total += job.constants[list];
    }
    job.norms[n] = total;
  }
}

}  // namespace

void norms_cpu(const Norms& job, int threads) {
  constexpr int64_t kLeast = 1 << 12;  // codes that are worth a thread
  parallel_for(job.N, static_cast<int>(std::min<int64_t>(threads, job.N / kLeast + 1)),
               [&](int64_t begin, int64_t end, int64_t) {
                 if (job.wide)
                   norms_range<uint16_t>(job, begin, end);
                 else
                   norms_range<uint8_t>(job, begin, end);
               });
}

void lookup_cpu(const Lookup& job, int threads) {
  const int64_t units = job.Q * ((job.N + kBlock - 1) / kBlock);
  parallel_for(units, threads, [&](int64_t begin, int64_t end, int64_t) {
    if (job.wide)
      lookup_range<int32_t>(job, begin, end);
    else
      lookup_range<uint8_t>(job, begin, end);
  });
}

}  // namespace drq
