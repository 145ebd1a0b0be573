"""Encode with a beam of any width, in score space: errors of all extended paths, then the best, level by level."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .levels import REBASE, TILE, Scored, residual_scores

_ON_CHIP = 4096  # candidates of a vector that are selected from in registers


@triton.jit(do_not_specialize=["N", "paths", "m"])
def beam_errors_kernel(
    x,
    codebook,
    scores,
    norms,
    gram,
    diagonal,
    scale,
    codes,
    residuals,
    errors,
    N,
    paths,
    K,
    P,
    D,
    M,
    m,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Math:     d_m^2[k] = r + s^2 G[k, k] - 2 s t[k], t = S - sum_{i<m} s_i G[b_i, :], docs/math.md section 4
    Tiling:   one program owns ROWS paths, of one vector or several, and TILE codewords after them
    Memory:   reads a piece of S and of m rows of G (from L2), writes errors [N, paths, P]
    Numerics: float32, no FMA; where r < n / 256, t and r come anew from x - xhat
    """
    path = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    n = path // paths
    live = n < N
    k = tl.program_id(1) * TILE + tl.arange(0, TILE)  # [TILE]
    s = tl.load(scale + m)
    r = tl.load(residuals + path, mask=live, other=0.0)
    t = tl.load(scores + n[:, None] * P + k[None, :], mask=live[:, None], other=0.0)  # [ROWS, TILE]
    for i in range(m):
        b = tl.load(codes + path * M + i, mask=live, other=0)
        t -= tl.load(scale + i) * tl.load(gram + b[:, None] * P + k[None, :])
    small = (r < tl.load(norms + n, mask=live, other=0.0) * REBASE) & (m > 0)
    if tl.max(small.to(tl.int32), axis=0) > 0:
        fresh, fresh_r = residual_scores(
            x, x, codebook, scale, codes, n, path, live, k, K, D, M, m, False, False, COLUMNS, PRECISION
        )
        t = tl.where(small[:, None], fresh, t)
        r = tl.where(small, fresh_r, r)
    error = r[:, None] + ((s * s * tl.load(diagonal + k))[None, :] - 2 * s * t)
    tl.store(errors + path[:, None] * P + k[None, :], error, mask=live[:, None])


@triton.jit
def _rank(errors, costs, tail, n, c, paths, K, P):
    """Keys of candidates c [TILE] of vector n as integers in the same order, NaN after numbers, padding at the end."""
    inside = c < paths * P
    error = tl.load(errors + n * paths * P + c, mask=inside, other=0.0)
    key = tl.load(costs + n * paths + c // P, mask=inside, other=0.0) + error * tail
    bits = (key + 0.0).to(tl.uint32, bitcast=True)  # -0 becomes 0
    rank = tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)
    rank = tl.where(key == key, rank, 0xFFFFFFFE)
    return tl.where(inside & (c % P < K), rank, 0xFFFFFFFF), error


@triton.jit(do_not_specialize=["paths", "width", "m"])
def beam_select_kernel(
    errors,
    costs,
    codes,
    omega,
    still_to_come,
    next_costs,
    next_residuals,
    next_codes,
    paths,
    width,
    K,
    P,
    M,
    m,
    ONE_TILE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Math:     the `width` smallest of cost + d_m^2 * still_to_come[m], docs/math.md section 4
    Tiling:   one program owns one vector and walks over its paths * P candidates, TILE at a time
    Memory:   reads errors once if they are one tile, else 33 times; writes the paths that are left
    Numerics: the width-th smallest key is found bit by bit; ties go to the smaller code, as the order of the candidates
              is that of their codes and stays so
    """
    n = tl.program_id(0).to(tl.int64)
    tail = tl.load(still_to_come + m)
    weight = tl.load(omega + m)
    c = tl.arange(0, TILE)  # [TILE]
    rank, error = _rank(errors, costs, tail, n, c, paths, K, P)
    threshold = tl.zeros((1,), dtype=tl.uint32)
    for bit in range(32):
        trial = threshold | (tl.full((1,), 1, dtype=tl.uint32) << (31 - bit))
        if ONE_TILE:
            below = tl.sum((rank < trial).to(tl.int32), axis=0)
        else:
            below = 0
            for start in range(0, paths * P, TILE):
                rank, error = _rank(errors, costs, tail, n, start + c, paths, K, P)
                below += tl.sum((rank < trial).to(tl.int32), axis=0)
        threshold = tl.where(below < width, trial, threshold)

    below = 0
    for start in range(0, paths * P, TILE):
        rank, error = _rank(errors, costs, tail, n, start + c, paths, K, P)
        below += tl.sum((rank < threshold).to(tl.int32), axis=0)
    ties = width - below  # of the candidates at the threshold, the first so many
    written = 0
    for start in range(0, paths * P, TILE):
        place = start + c
        rank, error = _rank(errors, costs, tail, n, place, paths, K, P)
        tied = (rank == threshold).to(tl.int32)
        chosen = (rank < threshold) | ((tied != 0) & (tl.cumsum(tied, axis=0) <= ties))
        to = n * width + written + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        parent = n * paths + place // P
        cost = tl.load(costs + parent, mask=chosen, other=0.0) + weight * error
        tl.store(next_costs + to, cost, mask=chosen)
        tl.store(next_residuals + to, error, mask=chosen)
        for i in range(m):
            tl.store(next_codes + to * M + i, tl.load(codes + parent * M + i, mask=chosen, other=0), mask=chosen)
        tl.store(next_codes + to * M + m, place % P, mask=chosen)
        written += tl.sum(chosen.to(tl.int32), axis=0)
        ties -= tl.sum(tied, axis=0)


def encode_beam(
    x: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None,
    beam: int,
    omega: Tensor,
    still_to_come: Tensor,
    precision: str = "tf32x3",
) -> Tensor:
    """Codes [N, M] of x [N, D] as `reference.encode` finds them; omega [M] and still_to_come [M] weigh the levels."""
    K, M = len(codebook), len(scale)
    codes = torch.empty(len(x), M, dtype=torch.uint8 if K <= 256 else torch.int32, device=x.device)
    codec = Scored(codebook, scale)
    for rows, h in codec.parts(x, offset, beam * codec.P):
        codes[rows] = _encode_part(h, codec, K, beam, omega.float(), still_to_come.float(), precision)
    return codes


def _encode_part(
    h: Tensor, codec: Scored, K: int, beam: int, omega: Tensor, still_to_come: Tensor, precision: str
) -> Tensor:
    (N, D), M, P = h.shape, len(codec.scale), codec.P
    scores, norms = codec.scores(h), h.square().sum(dim=1)
    paths, residuals, costs = 1, norms, torch.zeros_like(norms)
    codes = torch.zeros(N, 1, M, dtype=torch.int32, device=h.device)
    for m in range(M):
        width = 1 if m == M - 1 else min(beam, paths * K)
        errors = torch.empty(N, paths, P, dtype=torch.float32, device=h.device)
        beam_errors_kernel[(triton.cdiv(N * paths, 16), P // TILE)](
            h,
            codec.codebook,
            scores,
            norms,
            codec.gram,
            codec.diagonal,
            codec.scale,
            codes,
            residuals,
            errors,
            N,
            paths,
            K,
            P,
            D,
            M,
            m,
            PRECISION=precision,
            ROWS=16,
            TILE=TILE,
            COLUMNS=16,
            num_warps=4,
            enable_fp_fusion=False,
        )
        next_costs = torch.empty(N, width, dtype=torch.float32, device=h.device)
        next_residuals = torch.empty_like(next_costs)
        next_codes = torch.zeros(N, width, M, dtype=torch.int32, device=h.device)
        tile = min(_ON_CHIP, triton.next_power_of_2(paths * P))
        beam_select_kernel[(N,)](
            errors,
            costs,
            codes,
            omega,
            still_to_come,
            next_costs,
            next_residuals,
            next_codes,
            paths,
            width,
            K,
            P,
            M,
            m,
            ONE_TILE=paths * P <= tile,
            TILE=tile,
            num_warps=4,
            enable_fp_fusion=False,
        )
        paths, costs, residuals, codes = width, next_costs, next_residuals, next_codes
    return codes[:, 0]
