"""Greedy encode: all levels in one kernel, with the scores in registers up to 256 codewords and in memory above."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .levels import (
    MAX_ON_CHIP,
    REBASE,
    TILE,
    Scored,
    first_smallest,
    gram,
    padded,
    power_of_2,
    residual_scores,
)


@triton.jit(do_not_specialize=["N"])
def encode_kernel(
    x,
    offset,
    codebook,
    gram,
    scale,
    codes,
    N,
    K,
    D,
    M,
    HAS_OFFSET: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    KP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Math:     b_m = argmin_k s_m^2 G[k, k] - 2 s_m t_m[k], t_{m+1} = t_m - s_m G[b_m, :], docs/math.md section 3
    Tiling:   one program owns ROWS vectors, all their scores and all M levels
    Memory:   reads x once, the codebook and one row of G per level (from L2); writes codes. Programs with a small
              residual read x again
    Numerics: float32, no FMA in the key, ties to the smaller index; where r < n / 256, t and r are recomputed from
              x - xhat
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    x, codes = x + first * D, codes + first * M
    n = tl.arange(0, ROWS)  # [ROWS], from the first of this program
    k = tl.arange(0, KP)  # [KP]
    live = n < N - first
    t, norm = residual_scores(
        x, offset, codebook, scale, codes, n, n, live, k, K, D, M, 0, HAS_OFFSET, COLUMNS, PRECISION
    )
    r = norm
    for m in range(M):
        s = tl.load(scale + m).to(tl.float32)
        bias = tl.where(k < K, s * s * tl.load(gram + k * (KP + 1)), float("inf"))
        best, b = first_smallest(bias[None, :] - 2 * s * t, k, K)
        tl.store(codes + n * M + m, b, mask=live)
        r += best
        if m + 1 < M:
            t -= s * tl.load(gram + b[:, None] * KP + k[None, :])
            small = r < norm * REBASE
            if tl.max(small.to(tl.int32), axis=0) > 0:
                tl.debug_barrier()  # the codes are visible to all threads of this program
                fresh, fresh_r = residual_scores(
                    x,
                    offset,
                    codebook,
                    scale,
                    codes,
                    n,
                    n,
                    live,
                    k,
                    K,
                    D,
                    M,
                    m + 1,
                    HAS_OFFSET,
                    COLUMNS,
                    PRECISION,
                )
                t = tl.where(small[:, None], fresh, t)
                r = tl.where(small, fresh_r, r)


@triton.jit(do_not_specialize=["N"])
def encode_tiled_kernel(
    x,
    codebook,
    scores,
    norms,
    gram,
    diagonal,
    scale,
    codes,
    N,
    K,
    P,
    D,
    M,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Math:     as encode_kernel, from scores S = x C^T [N, P] and norms ||x||^2 [N] of centred x
    Tiling:   one program owns ROWS vectors and loops over their P scores once per level, TILE at a time
    Memory:   updates its scores in place and reads one row of G per level
    Numerics: as encode_kernel; ties go to the earlier tile
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    x, codes, scores, norms = x + first * D, codes + first * M, scores + first * P, norms + first
    n = tl.arange(0, ROWS)  # [ROWS], from the first of this program
    live = n < N - first
    norm = tl.load(norms + n, mask=live, other=0.0)
    r = norm
    b = tl.zeros((ROWS,), dtype=tl.int32)
    s_before = 0.0
    for m in range(M):
        s = tl.load(scale + m).to(tl.float32)
        small = (r < norm * REBASE) & (m > 0)
        rebase = tl.max(small.to(tl.int32), axis=0) > 0
        best = tl.full((ROWS,), float("inf"), dtype=tl.float32)
        chosen = tl.zeros((ROWS,), dtype=tl.int32)
        for start in range(0, P, TILE):
            k = start + tl.arange(0, TILE)  # [TILE]
            here = scores + n[:, None] * P + k[None, :]
            t = tl.load(here, mask=live[:, None], other=0.0)  # [ROWS, TILE]
            if m > 0:
                t -= s_before * tl.load(gram + b[:, None] * P + k[None, :])
                if rebase:
                    fresh, fresh_r = residual_scores(
                        x, x, codebook, scale, codes, n, n, live, k, K, D, M, m, False, COLUMNS, PRECISION
                    )
                    t = tl.where(small[:, None], fresh, t)
                    r = tl.where(small, fresh_r, r)
                tl.store(here, t, mask=live[:, None])
            bias = tl.where(k < K, s * s * tl.load(diagonal + k), float("inf"))
            tile_best, place = first_smallest(bias[None, :] - 2 * s * t, k, K)
            chosen = tl.where(tile_best < best, place, chosen)
            best = tl.where(tile_best < best, tile_best, best)
        b, s_before, r = chosen, s, r + best
        tl.store(codes + n * M + m, b, mask=live)
        tl.debug_barrier()  # scores and codes are visible to all threads of this program


def encode(
    x: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    precision: str = "tf32x3",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Greedy codes [N, M] of x [N, D], by default uint8 for K <= 256, else int32; precision: "tf32x3" or "ieee"."""
    (N, D), K, M = x.shape, len(codebook), len(scale)
    dtype = dtype or (torch.uint8 if K <= 256 else torch.int32)
    codes = torch.empty(N, M, dtype=dtype, device=x.device)
    if N == 0:
        return codes
    if K > MAX_ON_CHIP:
        return _encode_tiled(x, codebook, scale, offset, precision, codes)
    x, codebook, KP = x.contiguous(), codebook.contiguous(), power_of_2(K)
    inner = padded(gram(codebook), KP)
    settings = on_chip_settings(KP, precision)
    encode_kernel[(triton.cdiv(N, settings["ROWS"]),)](
        x,
        x if offset is None else offset.contiguous(),
        codebook,
        inner,
        scale.contiguous(),
        codes,
        N,
        K,
        D,
        M,
        HAS_OFFSET=offset is not None,
        **settings,
    )
    return codes


def on_chip_settings(KP: int, precision: str) -> dict[str, Any]:
    """Compile-time settings of encode_kernel for KP codewords: as many warps as spill no registers, or hardly any."""
    rows = 64 if KP <= 64 else 32
    warps = 16 if KP >= 128 else rows * KP // (256 if precision == "ieee" else 512)
    tiling = {"PRECISION": precision, "ROWS": rows, "KP": KP, "COLUMNS": 16}
    return tiling | {"num_warps": warps, "maxnreg": 128, "enable_fp_fusion": False}


def tiled_settings(precision: str) -> dict[str, Any]:
    """Compile-time settings of encode_tiled_kernel."""
    tiling = {"PRECISION": precision, "ROWS": 16, "TILE": TILE, "COLUMNS": 16}
    return tiling | {"num_warps": 8, "maxnreg": 128, "enable_fp_fusion": False}


def _encode_tiled(
    x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None, precision: str, codes: Tensor
) -> Tensor:
    K, M = len(codebook), len(scale)
    codec, settings = Scored(codebook, scale, triton.cdiv(K, TILE) * TILE), tiled_settings(precision)
    for rows, h in codec.parts(x, offset, codec.P):
        encode_tiled_kernel[(triton.cdiv(len(h), settings["ROWS"]),)](
            h,
            codec.codebook,
            codec.scores(h),
            h.square().sum(dim=1),
            codec.gram,
            codec.diagonal,
            codec.scale,
            codes[rows],
            len(h),
            K,
            codec.P,
            h.shape[1],
            M,
            **settings,
        )
    return codes
