#include <cuda_runtime.h>

#include "search.h"

namespace drq {
namespace {

constexpr int kThreads = 256;
constexpr int kCodesPerThread = 4;
constexpr int64_t kMaxSharedWords = 48 * 1024 / sizeof(float);  // available on every architecture without opting in

// Math:     sums[q, n] = sum_m fl(scale[m] * table[q, codes[n, m]]), docs/math.md section 5
// Tiling:   one block owns one query and kThreads * kCodesPerThread codes; one thread adds up one code at a time
// Memory:   the query's K table entries go to shared memory where they fit, else they are read through the cache;
//           codes are read once per query, sums written once, coalesced
// Numerics: float32, levels in order, no fused multiply-add, so the bits are those of the CPU
template <class Code, bool kShared>
__global__ void lookup_kernel(Lookup job) {
  extern __shared__ float staged[];
  const int64_t blocks = (job.N + kThreads * kCodesPerThread - 1) / (kThreads * kCodesPerThread);
  const int64_t q = blockIdx.x / blocks;
  const float* table = job.table + q * job.K;
  if (kShared) {
    for (int64_t k = threadIdx.x; k < job.K; k += kThreads) staged[k] = table[k];
    __syncthreads();
    table = staged;
  }
  const Code* codes = static_cast<const Code*>(job.codes);
  const int64_t first = blockIdx.x % blocks * (kThreads * kCodesPerThread) + threadIdx.x;
  for (int i = 0; i < kCodesPerThread; ++i) {
    const int64_t n = first + i * kThreads;
    if (n >= job.N) return;
    const Code* code = codes + n * job.M;
    float sum = __fmul_rn(job.scale[0], table[code[0]]);
    for (int64_t m = 1; m < job.M; ++m) sum = __fadd_rn(sum, __fmul_rn(job.scale[m], table[code[m]]));
    job.sums[q * job.N + n] = sum;
  }
}

template <class Code>
void launch(const Lookup& job, unsigned grid, cudaStream_t stream) {
  if (job.K <= kMaxSharedWords)
    lookup_kernel<Code, true><<<grid, kThreads, job.K * sizeof(float), stream>>>(job);
  else
    lookup_kernel<Code, false><<<grid, kThreads, 0, stream>>>(job);
}

}  // namespace

const char* lookup_cuda(const Lookup& job, void* stream) {
  const int64_t grid = job.Q * ((job.N + kThreads * kCodesPerThread - 1) / (kThreads * kCodesPerThread));
  if (grid == 0) return nullptr;
  if (grid > 0x7fffffff) return "more than 2^31 blocks: search fewer queries at a time";
  if (job.wide)
    launch<int32_t>(job, static_cast<unsigned>(grid), static_cast<cudaStream_t>(stream));
  else
    launch<uint8_t>(job, static_cast<unsigned>(grid), static_cast<cudaStream_t>(stream));
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

int cuda_runtime_version() {
  int version = 0;
  cudaRuntimeGetVersion(&version);
  return version;
}

int cuda_driver_version() {
  int version = 0;
  cudaDriverGetVersion(&version);
  return version;
}

}  // namespace drq
