"""Decode: sums scaled codewords in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def decode_kernel(
    codes,
    codebook,
    scale,
    offset,
    out,
    N,
    D,
    M: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Math:     out[n] = sum_m scale[m] * codebook[codes[n, m]] + offset, docs/math.md section 2
    Tiling:   one program owns ROWS vectors and COLUMNS of their D dimensions; all M levels stay in registers
    Memory:   reads ROWS * M codes and as many codeword tiles (from L2), writes its tile once
    Numerics: float32, levels in order, products rounded before they are added (no FMA): the bits of backends.torch
    """
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    inside = (n < N)[:, None] & (d < D)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for m in tl.static_range(M):
        b = tl.load(codes + n * M + m, mask=n < N, other=0).to(tl.int64)  # [ROWS]
        piece = tl.load(codebook + b[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        total += tl.load(scale + m).to(tl.float32) * piece
    if HAS_OFFSET:
        total += tl.load(offset + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    tl.store(out + n[:, None] * D + d[None, :], total, mask=inside)


def decode(codes: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """codes [N, M] in 0..K-1, codebook [K, D], scale [>= M], offset [D] or None -> [N, D] in the codebook's dtype."""
    codes, codebook, scale = codes.contiguous(), codebook.contiguous(), scale.contiguous()
    (N, M), D = codes.shape, codebook.shape[1]
    out = torch.empty(N, D, dtype=codebook.dtype, device=codebook.device)
    if N == 0:
        return out
    rows, columns = 8, min(128, triton.next_power_of_2(D))
    grid = (triton.cdiv(N, rows), triton.cdiv(D, columns))
    decode_kernel[grid](
        codes,
        codebook,
        scale,
        codebook if offset is None else offset.contiguous(),
        out,
        N,
        D,
        M=M,
        HAS_OFFSET=offset is not None,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out
