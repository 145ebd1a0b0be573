// The interface of the native code: raw pointers, sizes and a stream. No torch, no Python, no allocation
// of device memory, no state. Outputs are written by the callee and owned by the caller.
#pragma once

#include <cstdint>

namespace drq {

// Table look-up of asymmetric distance computation (docs/math.md, section 5):
//   sums[q, n] = sum over m = 0..M-1, in this order and without fused multiply-add, of fl(scale[m] * table[q, codes[n,
//   m]])
// All arrays are dense and row-major; every code must be in 0..K-1 (callers check).
struct Lookup {
  const float* table;  // [Q, K]
  const float* scale;  // [M]
  const void* codes;   // [N, M], uint8 or int32
  float* sums;         // [Q, N]
  int64_t Q, N, K, M;
  bool wide;  // codes are int32
};

void lookup_cpu(const Lookup& job, int threads);

#ifdef DRQ_FAST_CUDA
// Enqueues on `stream` (a cudaStream_t) and returns at once. Null on success, else CUDA's own words.
const char* lookup_cuda(const Lookup& job, void* stream);
int cuda_runtime_version();
int cuda_driver_version();  // 0 where there is no driver
#endif

}  // namespace drq
