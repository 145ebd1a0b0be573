// Quantization in score space (docs/math.md, section 3), given the products of vectors and codewords.
#pragma once

#include <cstdint>

namespace drq {

// A codec in score space. Level m chooses among K codewords, which begin in row bases[m]. K is padded to P, a multiple
// of 16: codewords and gram with zeros, bias with infinity, so that padding is never chosen. T is the number of rows, P
// if all levels share their codewords, as training takes them.
struct Levels {
  const float* codebook;  // [T, D]  read without gram, and for rows that are re-based
  const float* gram;      // [T, T]  G = C C^T, in rows that begin `pitch` floats apart; null with M = 1
  const float* diagonal;  // [T]     G[k, k]
  const float* bias;      // [M, P]  scale[m]^2 G[k, k]
  const float* scale;     // [M]
  const int64_t* bases;   // [M]     ascending multiples of P
  int64_t K, P, T, D, M, pitch;
};

// Some vectors and their products with the codewords.
struct Tile : Levels {
  const float* x;       // [N, D]
  const float* scores;  // [N, P]  S = x C^T
  int64_t N;
};

struct Encode {
  Tile tile;
  const float* omega;          // [M]     weights of the levels, for a beam
  const float* still_to_come;  // [M]     weight of the present error at level m, for a beam
  void* codes;                 // [N, M]  uint8 or int32
  int64_t beam;
  bool wide;  // codes are int32
};
void encode_cpu(const Encode& job, int isa);

// The paths of a beam where groups of levels have codewords of their own, one group after the other. Before the first
// group each vector has one path without levels, and its residual is x.
struct Beam {
  Encode encode;        // its tile has the products [N, P] of the residuals with the codewords of this group
  int64_t first, last;  // the levels of the group: from first to last - 1
  int64_t* counts;      // [N]               paths
  int64_t* shared;   // [N]               levels that all paths have in common, which are subtracted from the residual
  float* squares;    // [N]               squared norms of the residuals
  float* residuals;  // [N, D]
  float* errors;     // [N, beam]         r of each path
  float* costs;      // [N, beam]         the sum of omega[i] d_i^2
  int32_t* codes;    // [N, beam, pitch]  paths, in the order of their codes; pitch: M, padded to a multiple of 16
  int64_t pitch;
};
// Writes the codes after the last group.
void beam_cpu(const Beam& job, int isa);

// The errors after each level, or the approximations themselves, and their gradients, in steps with matrix products by
// the caller in between:
//   assign    codes, squared_norms, residuals and, in `soft`, p_m - onehot(b_m); then the caller sets product = soft G
//   evaluate  the errors of all rows, and adds their loss to `value`
//   mix       in `delta`, what soft and hard approximation differ by; product is not read
//   backward  dscores, dsquared_norms, and added up over rows dgram, ddiagonal and dscale, from the gradients of
//             - the errors, dhard, dsoft and djoint, or, where these are null, of the loss, which it adds to `value`;
//               it leaves in `soft` the sums Delta_m of scale[i] (p_i - onehot(b_i)) over i <= m, and in `kappa` the
//               gradients of Delta_m G Delta_m^T; then the caller adds Delta_m^T kappa_m Delta_m to dgram
//             - or, where product is null, of Delta_{M-1} alone
struct Training {
  Tile tile;
  float gamma;
  int64_t* codes;        // [N, M]
  float* squared_norms;  // [N]        ||x||^2
  float* residuals;      // [N, M]     r_{m+1} = ||x - xhat_m||^2
  float* soft;           // [N, M, P]
  const float* product;  // [N, M, P]
  float* kappa;          // [N, M]
  float* delta;          // [N, P]     Delta_{M-1}

  float* hard_errors;   // [N, M]     ||x - xhat_m||; null where errors are not wanted
  float* soft_errors;   // [N, M]     ||x - xsoft_m||
  float* joint_errors;  // [N, M]     ||xsoft_m - xhat_m||^2

  const float* omega;                // [M]        weights of the levels in E_h and E_s; null where there is no loss
  float of_hard, of_soft, of_joint;  // weights of E_h, E_s and E_j
  bool gap;                          // E_j = |E_h - E_s|, else ||xsoft - xhat||^2
  double* value;                     // [1]        added to

  const float* dhard;     // [N, M]
  const float* dsoft;     // [N, M]
  const float* djoint;    // [N, M]
  const float* ddelta;    // [N, P]
  float* dscores;         // [N, P]     may be the scores
  float* dsquared_norms;  // [N]
  float* dgram;           // [P, P]     added to
  float* ddiagonal;       // [P]        likewise; belongs on the diagonal of dgram
  double* dscale;         // [M]        likewise
};
void assign_cpu(const Training& job, int isa);
void evaluate_cpu(const Training& job, int isa);
void mix_cpu(const Training& job, int isa);
void backward_cpu(const Training& job, int isa);

// What codes stand for and how far it is from x, after each level. With e_m = x - sum over i <= m of scale[i] C[b_i]:
//   decode          decoded = sum over m of scale[m] C[b_m], in this order, + offset
//   squared_errors  errors[n, m] = ||e_m||^2
//   pulls           pulls[n, i] = sum over m >= i of -2 derrors[n, m] e_m, the gradient of scale[i] C[b_i];
//                   dscale[n, i] = <C[b_i], pulls[n, i]>
//   own_pulls       pulls[n, i] = weights[n, i] e_i; 0 where the weight is 0, whatever x holds
//   add_pulls       dcodebook[k] += scale[i] pulls[n, i] over all (n, i) with code k in ascending order, for codewords
//                   begin..end; group_codes() finds them
struct Squared {
  const float* x;         // [N, D]  less the offset
  const float* codebook;  // [K, D]
  const float* scale;     // [M]
  const float* offset;    // [D]     null without one
  const int64_t* codes;   // [N, M]
  int64_t N, D, K, M;
  float* decoded;        // [N, D]
  float* errors;         // [N, M]
  const float* derrors;  // [N, M]
  const float* weights;  // [N, M]
  float* pulls;          // [N, M, D]
  float* dscale;         // [N, M]
  float* dcodebook;      // [K, D]  added to
};
void decode_cpu(const Squared& job, int isa);
void squared_errors_cpu(const Squared& job, int isa);
void pulls_cpu(const Squared& job, int isa);
void own_pulls_cpu(const Squared& job, int isa);
void add_pulls_cpu(const Squared& job, const int64_t* starts, const int64_t* places, int64_t begin, int64_t end,
                   int isa);

// The places [N M] of all codes in the order (code, place); those of code k are from starts[k] to starts[k + 1].
void group_codes(const Squared& job, int64_t* starts, int64_t* places);

}  // namespace drq
