// Encoding in score space (docs/math.md, section 3), given the products of vectors and codewords.
#pragma once

#include <cstdint>

namespace drq {

// Rows are padded to P, a multiple of 16: `gram` with zeros, `bias` with infinity, so that padding is never chosen.
struct Encode {
  const float* scores;         // [N, K]     S = x C^T
  const float* squared_norms;  // [N]        ||x||^2
  const float* x;              // [N, D]     read only for rows that are re-based
  const float* codebook;       // [K, D]     likewise
  const float* gram;           // [K, P]     G = C C^T
  const float* bias;           // [M, P]     scale[m]^2 G[k, k]
  const float* scale;          // [M]
  const float* omega;          // [M]        weights of the levels, for a beam
  const float* still_to_come;  // [M]        weight of the present error after level m, for a beam
  void* codes;                 // [N, M]     uint8 or int32
  int64_t N, K, P, D, M, beam;
  bool wide;  // codes are int32
};

// isa: an index into kIsaNames for which isa_supported() holds.
void encode_cpu(const Encode& job, int isa, int threads);

constexpr const char* kIsaNames[] = {"portable", "avx2", "avx512"};
constexpr int kIsaCount = 3;
bool isa_supported(int isa);  // compiled in, and this processor has it

}  // namespace drq
