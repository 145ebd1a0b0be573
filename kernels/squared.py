"""Squared errors after each level, given the codes, and their gradients, in D dimensions."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .distortion import parts
from .totals import scatter


@triton.jit
def _centred(x, offset, n, d, D, inside, HAS_OFFSET: tl.constexpr):
    """The tile x[n, d] - offset[d] [ROWS, COLUMNS], where `inside`."""
    h = tl.load(x + n[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        h -= tl.load(offset + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    return h


@triton.jit
def _chosen(codebook, codes, line, live, d, D, inside):
    """The tile C[codes[line], d] [ROWS, COLUMNS], 0 where not `inside`."""
    b = tl.load(codes + line, mask=live, other=0).to(tl.int64)
    return tl.load(codebook + b[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["N"])
def squared_errors_kernel(
    x,
    offset,
    codebook,
    scale,
    codes,
    errors,
    N,
    D,
    M,
    HAS_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Math:     errors[part, n, m] = ||e_m||^2 over some dimensions, e_m = x - offset - sum_{i<=m} s_i C[b_i]
    Tiling:   one program owns ROWS vectors and COLUMNS of their D dimensions, and all M levels
    Memory:   reads x once and one codeword tile per vector and level (from L2); writes errors [D / COLUMNS, N, M]
    Numerics: float32, levels in order, products rounded before they are added (no FMA)
    """
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    part = tl.program_id(1).to(tl.int64)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    live = n < N
    inside = live[:, None] & (d < D)[None, :]
    e = _centred(x, offset, n, d, D, inside, HAS_OFFSET)  # [ROWS, COLUMNS]
    for m in range(M):
        e -= tl.load(scale + m).to(tl.float32) * _chosen(codebook, codes, n * M + m, live, d, D, inside)
        tl.store(errors + (part * N + n) * M + m, tl.sum(e * e, axis=1), mask=live)


@triton.jit(do_not_specialize=["N"])
def squared_errors_backward_kernel(
    x,
    offset,
    codebook,
    scale,
    codes,
    derrors,
    pulls,
    doffset,
    dscale,
    N,
    D,
    M,
    HAS_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Math:     g_i = sum_{m>=i} -2 derrors_m e_m, the gradient of s_i C[b_i]; pulls_i = s_i g_i is that of C[b_i],
              <C[b_i], g_i> that of s_i, and g_0 that of the offset
    Tiling:   as squared_errors_kernel; all levels upwards for e_m, then downwards for g_m
    Memory:   reads x once and two codeword tiles per vector and level (from L2); writes e_m to pulls [N, M, D], reads
              it again (from L2) and replaces it; writes g_0 to doffset [N, D]
    Numerics: float32, levels in order; the sum over its tile goes to the program's own row of dscale [programs, M]: no
              atomics
    """
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    live = n < N
    inside = live[:, None] & (d < D)[None, :]
    e = _centred(x, offset, n, d, D, inside, HAS_OFFSET)  # [ROWS, COLUMNS]
    for m in range(M):
        e -= tl.load(scale + m).to(tl.float32) * _chosen(codebook, codes, n * M + m, live, d, D, inside)
        tl.store(pulls + (n * M + m)[:, None] * D + d[None, :], e, mask=inside)
    tl.debug_barrier()  # the residuals are visible to all threads of this program
    g = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for up in range(M):
        m = M - 1 - up
        here = pulls + (n * M + m)[:, None] * D + d[None, :]
        weight = -2 * tl.load(derrors + n * M + m, mask=live, other=0.0)
        g += weight[:, None] * tl.load(here, mask=inside, other=0.0)
        word = _chosen(codebook, codes, n * M + m, live, d, D, inside)
        tl.store(dscale + program * M + m, tl.sum(tl.sum(g * word, axis=1), axis=0))
        tl.debug_barrier()  # all threads have read the residual
        tl.store(here, tl.load(scale + m).to(tl.float32) * g, mask=inside)
    tl.store(doffset + n[:, None] * D + d[None, :], g, mask=inside)


@triton.jit(do_not_specialize=["N"])
def own_pulls_kernel(
    x,
    offset,
    codebook,
    scale,
    codes,
    weights,
    pulls,
    N,
    D,
    M,
    HAS_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Math:     pulls_m = weights_m s_m e_m, and 0 where the weight is 0, whatever x holds
    Tiling:   as squared_errors_kernel
    Memory:   reads x once and one codeword tile per vector and level (from L2); writes pulls [N, M, D]
    Numerics: float32, levels in order, products rounded before they are added (no FMA)
    """
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    live = n < N
    inside = live[:, None] & (d < D)[None, :]
    e = _centred(x, offset, n, d, D, inside, HAS_OFFSET)  # [ROWS, COLUMNS]
    for m in range(M):
        s = tl.load(scale + m).to(tl.float32)
        e -= s * _chosen(codebook, codes, n * M + m, live, d, D, inside)
        weight = tl.load(weights + n * M + m, mask=live, other=0.0)
        pull = tl.where((weight == 0)[:, None], 0.0, s * (weight[:, None] * e))
        tl.store(pulls + (n * M + m)[:, None] * D + d[None, :], pull, mask=inside)


def squared_errors(x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None, codes: Tensor) -> Tensor:
    """||x - xhat_m||^2 [N, M] of x [N, D] and codes [N, M], in float32."""
    (N, D), M = x.shape, len(scale)
    x, grid = x.contiguous(), _grid(N, D)
    errors = torch.empty(grid[1], N, M, dtype=torch.float32, device=x.device)
    squared_errors_kernel[grid](
        x,
        x if offset is None else offset.contiguous(),
        codebook.contiguous(),
        scale.contiguous(),
        codes,
        errors,
        N,
        D,
        M,
        HAS_OFFSET=offset is not None,
        **settings(D),
    )
    return errors[0] if len(errors) == 1 else errors.sum(dim=0)


def squared_errors_backward(
    x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None, codes: Tensor, derrors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(doffset [N, D], to be summed over vectors, dcodebook [K, D], dscale [M]) of the errors, in float32.

    The gradient of x is -doffset. Vectors are taken in blocks, so that pulls [n, M, D] stay small.
    """
    (N, D), (K, _), M = x.shape, codebook.shape, len(scale)
    x, codebook, scale, derrors = (t.contiguous() for t in (x, codebook, scale, derrors.float()))
    doffset = torch.empty(N, D, dtype=torch.float32, device=x.device)
    dcodebook = dscale = None
    blocks = list(parts(N, M * D))
    pulls = doffset.new_empty(blocks[0].stop, M, D)
    for rows in blocks:
        count = rows.stop - rows.start
        grid = _grid(count, D)
        by_program = doffset.new_empty(grid[0] * grid[1], M)
        squared_errors_backward_kernel[grid](
            x[rows],
            x if offset is None else offset.contiguous(),
            codebook,
            scale,
            codes[rows],
            derrors[rows],
            pulls,
            doffset[rows],
            by_program,
            count,
            D,
            M,
            HAS_OFFSET=offset is not None,
            **settings(D),
        )
        of_codebook = scatter(pulls.view(-1, D), codes[rows].reshape(-1), K)
        of_scale = by_program.sum(dim=0, dtype=torch.float64)
        dcodebook = of_codebook if dcodebook is None else dcodebook.add_(of_codebook)
        dscale = of_scale if dscale is None else dscale.add_(of_scale)
    assert dcodebook is not None  # there is one block at least
    assert dscale is not None
    return doffset, dcodebook, dscale.float()


def codeword_sums(
    x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None, codes: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """(sums [K, D], mass [K]) of weighted residuals by codeword, in float32 and in a fixed order."""
    (N, D), (K, _), M = x.shape, codebook.shape, len(scale)
    x, codebook, scale, codes, weights = (t.contiguous() for t in (x, codebook, scale, codes, weights.float()))
    sums = torch.zeros(K, D, dtype=torch.float32, device=x.device)
    blocks = list(parts(N, M * D))
    pulls = sums.new_empty(blocks[0].stop, M, D)
    for rows in blocks:
        count = rows.stop - rows.start
        own_pulls_kernel[_grid(count, D)](
            x[rows],
            x if offset is None else offset.contiguous(),
            codebook,
            scale,
            codes[rows],
            weights[rows],
            pulls,
            count,
            D,
            M,
            HAS_OFFSET=offset is not None,
            **settings(D),
        )
        sums += scatter(pulls[:count].view(-1, D), codes[rows].reshape(-1), K)
    mass = scatter((weights * scale.float().square()).view(-1, 1), codes.view(-1), K)
    return sums, mass[:, 0]


def settings(D: int) -> dict[str, Any]:
    """Compile-time settings of these kernels for D dimensions."""
    tiling = {"ROWS": 8, "COLUMNS": min(128, triton.next_power_of_2(D))}
    return tiling | {"num_warps": 4, "maxnreg": 80, "enable_fp_fusion": False}


def _grid(N: int, D: int) -> tuple[int, int]:
    tile = settings(D)
    return triton.cdiv(N, tile["ROWS"]), triton.cdiv(D, tile["COLUMNS"])
