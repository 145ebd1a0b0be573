"""Gradients that are sums over all rows, added in a fixed order."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .levels import LevelGradients, Scored


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
    short = torch.int16 if K < 1 << 15 else torch.int32  # a radix sort takes one pass per byte
    ordered, order = codes.to(short).sort(stable=True)
    first = torch.searchsorted(ordered, _numbers(K + 1, short, codes.device))
    splits = 4 if K <= 256 else 1  # more programs, since few codewords do not fill a GPU
    out = values.new_empty(splits, K, P)
    columns = min(512, triton.next_power_of_2(P))
    grid = (K, splits, triton.cdiv(P, columns))
    scatter_kernel[grid](
        values,
        order,
        first,
        out,
        K,
        P,
        SPLITS=splits,
        ROWS=8,
        COLUMNS=columns,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out.sum(dim=0)


@functools.lru_cache(maxsize=64)
def _numbers(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(count, dtype=dtype, device=device)


class Gradients(NamedTuple):
    """dx [N, D], dcodebook [K, D], dscale [M], in float32."""

    dx: Tensor
    dcodebook: Tensor
    dscale: Tensor


class Totals:
    """Accumulates gradients over parts of h [N, D]."""

    def __init__(self, h: Tensor, codec: Scored) -> None:
        self.h, self.codec = h, codec
        self.dx, self.dcodebook = torch.empty_like(h), h.new_zeros(codec.P, h.shape[1])
        self.dgram = h.new_zeros(codec.P, codec.P)
        self.dscale = h.new_zeros(len(codec.scale), dtype=torch.float64)

    def add(self, rows: slice, found: LevelGradients) -> None:
        """Adds the gradients of some rows, except for kappa Delta^T Delta."""
        part = self.h[rows]
        self.dgram[: self.codec.K].add_(scatter(found.moved, found.codes, self.codec.K))
        self.dgram.diagonal().add_(found.ddiagonal.sum(dim=0))
        self.dscale += found.dscale.sum(dim=0, dtype=torch.float64)
        torch.addmm(2 * found.dnorms[:, None] * part, found.dscores, self.codec.codebook, out=self.dx[rows])
        self.dcodebook.addmm_(found.dscores.T, part)

    def gradients(self) -> Gradients:
        """The sums of all parts."""
        self.dcodebook.addmm_(self.dgram + self.dgram.T, self.codec.codebook)
        return Gradients(self.dx, self.dcodebook[: self.codec.K], self.dscale.float())
