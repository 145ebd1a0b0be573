"""Sums of rows that belong to the same codeword, in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def scatter_kernel(values, order, first, out, K, P, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Math:     out[split, b] = sum of values[order[i]] over a part of first[b] <= i < first[b + 1]
    Tiling:   one program owns one codeword b, one of SPLITS parts of the rows that chose it, and COLUMNS of P
    Memory:   reads every row of values [.., P] once, writes out [SPLITS, K, P]
    Numerics: float32, rows added in the order of `order`: no atomics
    """
    b, split = tl.program_id(0), tl.program_id(1)
    k = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)  # [COLUMNS]
    begin, end = tl.load(first + b), tl.load(first + b + 1)
    last = begin + (end - begin) * (split + 1) // SPLITS
    begin += (end - begin) * split // SPLITS
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(begin, last, ROWS):
        i = start + tl.arange(0, ROWS)
        row = tl.load(order + i, mask=i < last, other=0)
        some = (i < last)[:, None] & (k < P)[None, :]
        total += tl.sum(tl.load(values + row[:, None] * P + k[None, :], mask=some, other=0.0), axis=0)
    tl.store(out + (split.to(tl.int64) * K + b) * P + k, total, mask=k < P)


def scatter(values: Tensor, codes: Tensor, K: int) -> Tensor:
    """out [K, P]: out[b] = sum of values[i] over all i with codes[i] = b, always in the same order."""
    P = values.shape[1]
    ordered, order = codes.sort(stable=True)
    first = torch.searchsorted(ordered, torch.arange(K + 1, device=codes.device))
    splits = 4 if K <= 256 else 1  # few codewords alone would not fill a GPU
    out = values.new_empty(splits, K, P)
    columns = min(128, P)
    grid = (K, splits, triton.cdiv(P, columns))
    scatter_kernel[grid](
        values,
        order,
        first,
        out,
        K,
        P,
        SPLITS=splits,
        ROWS=16,
        COLUMNS=columns,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out.sum(dim=0)
