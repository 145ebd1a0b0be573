"""Beam search in score space: at each level, the errors of all extended paths, then a selection of the best."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .levels import REBASE, TILE, Scored, residual_scores


@triton.jit(do_not_specialize=["N", "paths", "m", "base"])
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
    P,
    T,
    D,
    M,
    m,
    base,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Math:     d_m^2[k] = r + s^2 G[k, k] - 2 s t[k], t = S - sum_{i<m} s_i G[b_i, :], docs/math.md section 4
    Tiling:   one program owns ROWS paths, of one vector or several, and TILE codewords after them; the P codewords of
              level m begin in row `base` of T, and codes are rows
    Memory:   reads a tile of S and of m rows of G (from L2), writes errors [N, paths, P]
    Numerics: float32, no FMA; where r < n / 256, t and r are recomputed from x - xhat
    """
    path = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    n = path // paths
    live = n < N
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)  # [TILE]
    k = base + place
    s = tl.load(scale + m)
    r = tl.load(residuals + path, mask=live, other=0.0)
    t = tl.load(scores + n[:, None] * T + k[None, :], mask=live[:, None], other=0.0)  # [ROWS, TILE]
    for i in range(m):
        b = tl.load(codes + path * M + i, mask=live, other=0).to(tl.int64)
        t -= tl.load(scale + i) * tl.load(gram + b[:, None] * T + k[None, :])
    small = (r < tl.load(norms + n, mask=live, other=0.0) * REBASE) & (m > 0)
    if tl.max(small.to(tl.int32), axis=0) > 0:
        fresh, fresh_r = residual_scores(
            x, x, codebook, scale, codes, n, path, live, k, T, D, M, m, False, COLUMNS, PRECISION
        )
        t = tl.where(small[:, None], fresh, t)
        r = tl.where(small, fresh_r, r)
    error = r[:, None] + ((s * s * tl.load(diagonal + k))[None, :] - 2 * s * t)
    tl.store(errors + path[:, None] * P + place[None, :], error, mask=live[:, None])


@triton.jit
def _rank(errors, costs, tail, n, c, N, paths, K, P: tl.constexpr):
    """Errors of candidates c of vectors n, and keys as integers in the same order: NaN after numbers, padding last."""
    inside = (n < N)[:, None] & (c < paths * P)[None, :]
    error = tl.load(errors + n[:, None] * paths * P + c[None, :], mask=inside, other=0.0)  # [ROWS, TILE]
    key = tl.load(costs + n[:, None] * paths + (c // P)[None, :], mask=inside, other=0.0) + error * tail
    bits = (key + 0.0).to(tl.uint32, bitcast=True)  # -0 becomes 0
    rank = tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)
    rank = tl.where(key == key, rank, 0xFFFFFFFE)
    return error, tl.where(inside & (c % P < K)[None, :], rank, 0xFFFFFFFF)


@triton.jit(do_not_specialize=["N", "paths", "width", "m", "base"])
def beam_select_kernel(
    errors,
    costs,
    codes,
    omega,
    still_to_come,
    next_costs,
    next_residuals,
    next_codes,
    N,
    paths,
    width,
    K,
    M,
    m,
    base,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Math:     the `width` smallest of cost + d_m^2 * still_to_come[m], docs/math.md section 4
    Tiling:   one program owns ROWS vectors and loops over their paths * P candidates, TILE at a time; the codewords of
              level m begin in row `base`, and codes are rows
    Memory:   reads errors 3 times if they fit into one tile, else 35 times (from L2); writes the selected paths
    Numerics: the width-th smallest key is found bit by bit; candidates stay sorted by code, so ties go to the smaller
              code
    """
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    c = tl.arange(0, TILE)  # [TILE]
    tail = tl.load(still_to_come + m)
    error, rank = _rank(errors, costs, tail, n, c, N, paths, K, P)
    threshold = tl.zeros((ROWS,), dtype=tl.uint32)
    for bit in range(32):
        trial = threshold | (tl.full((ROWS,), 1, dtype=tl.uint32) << (31 - bit))
        below = tl.sum((rank < trial[:, None]).to(tl.int32), axis=1)
        for start in range(TILE, paths * P, TILE):
            _, more = _rank(errors, costs, tail, n, start + c, N, paths, K, P)
            below += tl.sum((more < trial[:, None]).to(tl.int32), axis=1)
        threshold = tl.where(below < width, trial, threshold)

    below = tl.zeros((ROWS,), dtype=tl.int32)
    for start in range(0, paths * P, TILE):
        _, rank = _rank(errors, costs, tail, n, start + c, N, paths, K, P)
        below += tl.sum((rank < threshold[:, None]).to(tl.int32), axis=1)
    ties = width - below  # so many candidates at the threshold are kept, the first ones
    to = n * width
    for start in range(0, paths * P, TILE):
        place = start + c
        error, rank = _rank(errors, costs, tail, n, place, N, paths, K, P)
        tied = (rank == threshold[:, None]).to(tl.int32)
        chosen = (rank < threshold[:, None]) | ((tied != 0) & (tl.cumsum(tied, axis=1) <= ties[:, None]))
        chosen &= (n < N)[:, None]
        slot = to[:, None] + tl.cumsum(chosen.to(tl.int32), axis=1) - 1
        parent = n[:, None] * paths + (place // P)[None, :]
        cost = tl.load(costs + parent, mask=chosen, other=0.0) + tl.load(omega + m) * error
        tl.store(next_costs + slot, cost, mask=chosen)
        tl.store(next_residuals + slot, error, mask=chosen)
        for i in range(m):
            tl.store(next_codes + slot * M + i, tl.load(codes + parent * M + i, mask=chosen, other=0), mask=chosen)
        tl.store(next_codes + slot * M + m, (base + place % P)[None, :] + tl.zeros_like(tied), mask=chosen)
        to += tl.sum(chosen.to(tl.int32), axis=1)
        ties -= tl.sum(tied, axis=1)


def encode_beam(
    x: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None,
    groups: tuple[int, ...] | None = None,
    beam: int,
    omega: Tensor,
    still_to_come: Tensor,
    precision: str = "tf32x3",
) -> Tensor:
    """Codes [N, M] of x [N, D], see `backends.torch.encode`; omega [M] and still_to_come [M] weight the levels.

    groups [M]: which of the codebooks stacked in codebook [G * K, D] each level has; None is one for all.
    """
    groups = (0,) * len(scale) if groups is None else groups
    G, M = groups[-1] + 1, len(scale)
    K = len(codebook) // G
    P = triton.cdiv(K, TILE) * TILE
    codes = torch.empty(len(x), M, dtype=torch.uint8 if K <= 256 else torch.int32, device=x.device)
    apart = torch.nn.functional.pad(codebook.unflatten(0, (G, K)), (0, 0, 0, P - K)).flatten(0, 1)
    codec, bases = Scored(apart, scale, G * P), [P * group for group in groups]
    for rows, h in codec.parts(x, offset, max(beam * P, codec.P)):
        found = _encode_part(h, codec, K, P, bases, beam, omega.float(), still_to_come.float(), precision)
        codes[rows] = found if G == 1 else found % P
    return codes


def errors_settings(precision: str) -> dict[str, Any]:
    """Compile-time settings of beam_errors_kernel."""
    tiling = {"PRECISION": precision, "ROWS": 16, "TILE": TILE, "COLUMNS": 16}
    return tiling | {"num_warps": 4, "maxnreg": 128, "enable_fp_fusion": False}


def select_settings(candidates: int) -> dict[str, Any]:
    """Compile-time settings of beam_select_kernel by candidates per vector, of which up to 4096 fit in registers."""
    tile = min(4096, triton.next_power_of_2(candidates))
    tiling = {"ROWS": max(1, 2048 // tile), "TILE": tile}
    return tiling | {"num_warps": 16, "maxnreg": 128, "enable_fp_fusion": False}


def _encode_part(
    h: Tensor,
    codec: Scored,
    K: int,
    P: int,
    bases: list[int],
    beam: int,
    omega: Tensor,
    still_to_come: Tensor,
    precision: str,
) -> Tensor:
    """Rows [N, M] of the padded codebook, of which the P of level m begin in bases[m]."""
    (N, D), M = h.shape, len(codec.scale)
    scores, norms = codec.scores(h), h.square().sum(dim=1)
    paths, residuals, costs = 1, norms, torch.zeros_like(norms)
    codes = torch.zeros(N, 1, M, dtype=torch.int32, device=h.device)
    settings = errors_settings(precision)
    for m in range(M):
        width = 1 if m == M - 1 else min(beam, paths * K)
        errors = torch.empty(N, paths, P, dtype=torch.float32, device=h.device)
        beam_errors_kernel[(triton.cdiv(N * paths, settings["ROWS"]), P // settings["TILE"])](
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
            P,
            codec.P,
            D,
            M,
            m,
            bases[m],
            **settings,
        )
        next_costs = torch.empty(N, width, dtype=torch.float32, device=h.device)
        next_residuals = torch.empty_like(next_costs)
        next_codes = torch.zeros(N, width, M, dtype=torch.int32, device=h.device)
        selecting = select_settings(paths * P)
        beam_select_kernel[(triton.cdiv(N, selecting["ROWS"]),)](
            errors,
            costs,
            codes,
            omega,
            still_to_come,
            next_costs,
            next_residuals,
            next_codes,
            N,
            paths,
            width,
            K,
            M,
            m,
            bases[m],
            P=P,
            **selecting,
        )
        paths, costs, residuals, codes = width, next_costs, next_residuals, next_codes
    return codes[:, 0]
