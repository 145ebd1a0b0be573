"""Shared by the kernels of all operations: scores of the residual, argmin, and products by torch.

Callers switch autocast and TF32 off, so that torch multiplies float32 as float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ON_CHIP = 256  # codewords up to which a row of scores stays in registers
MAX_SCORES = 1 << 24  # numbers in a buffer
TILE = 128  # codewords that a kernel processes at a time above MAX_ON_CHIP
REBASE = tl.constexpr(1 / 256)  # below this fraction of ||x||^2, ||h||^2 has lost too many bits to cancellation


@triton.jit
def residual_scores(
    x,
    offset,
    codebook,
    scale,
    codes,
    n,
    path,
    live,
    k,
    K,
    D,
    M,
    levels,
    HAS_OFFSET: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Math:     t = h C^T and r = ||h||^2 of h = x - offset - sum_{i<levels} s_i C[b_i], docs/math.md section 3
    Tiling:   rows n of x with rows `path` of codes, where `live`, and codewords k; COLUMNS of D dimensions at a time
    Memory:   reads x once, the codebook once and `levels` codewords per row
    Numerics: float32, of inputs of any width
    """
    t = tl.zeros((n.shape[0], k.shape[0]), dtype=tl.float32)
    r = tl.zeros((n.shape[0],), dtype=tl.float32)
    for start in range(0, D, COLUMNS):
        d = start + tl.arange(0, COLUMNS)
        inside = live[:, None] & (d < D)[None, :]
        h = tl.load(x + n[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)  # [ROWS, COLUMNS]
        words = tl.load(codebook + k[None, :] * D + d[:, None], mask=(k < K)[None, :] & (d < D)[:, None], other=0.0)
        if HAS_OFFSET:
            h -= tl.load(offset + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        for i in range(levels):
            b = tl.load(codes + path * M + i, mask=live, other=0).to(tl.int64)
            word = tl.load(codebook + b[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
            h -= tl.load(scale + i).to(tl.float32) * word
        r += tl.sum(h * h, axis=1)
        t = tl.dot(h, words.to(tl.float32), acc=t, input_precision=PRECISION)
    return t, r


@triton.jit
def residual_norm(x, codebook, scale, codes, n, live, D, M, levels, COLUMNS: tl.constexpr):
    """r = ||x - sum_{i<levels} s_i C[b_i]||^2 [ROWS] of centred rows n of x, as `residual_scores` adds it up."""
    r = tl.zeros((n.shape[0],), dtype=tl.float32)
    for start in range(0, D, COLUMNS):
        d = start + tl.arange(0, COLUMNS)
        inside = live[:, None] & (d < D)[None, :]
        h = tl.load(x + n[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        for i in range(levels):
            b = tl.load(codes + n * M + i, mask=live, other=0).to(tl.int64)
            word = tl.load(codebook + b[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
            h -= tl.load(scale + i).to(tl.float32) * word
        r += tl.sum(h * h, axis=1)
    return r


@triton.jit
def first_smallest(key, k, K):
    """The smallest of key [ROWS, KP] and its first index, [ROWS] each; index 0 if all are NaN."""
    best = tl.min(key, axis=1)
    place = tl.min(tl.where(key == best[:, None], k[None, :], K), axis=1)
    return best, tl.where(place < K, place, 0)


class Levels(NamedTuple):
    """Results of the levels, [N, M] each: codes int64, residuals r_{m+1}, soft (E_s^m)^2, joint J_m."""

    codes: Tensor
    residuals: Tensor
    soft: Tensor
    joint: Tensor


class LevelGradients(NamedTuple):
    """Results of the backward recursion; `lines` are all pairs of a vector and a level."""

    deltas: Tensor  # [lines, P]           Delta_m
    kappa: Tensor  # [lines]
    moved: Tensor  # [lines, P]            -s_m dL/dt_{m+1}, part of row b_m of dG
    codes: Tensor  # [lines]               b_m
    dscores: Tensor  # [N, P]
    dnorms: Tensor  # [N]
    ddiagonal: Tensor  # [programs, P]     to be summed over programs
    dscale: Tensor  # [programs, M]        likewise


def gram(codebook: Tensor) -> Tensor:
    """The inner products [K, K] of codebook [K, D], in float32."""
    wide = codebook.float()
    return wide @ wide.T


def padded(inner: Tensor, KP: int) -> Tensor:
    """inner [K, K], padded with zeros to [KP, KP]."""
    missing = KP - len(inner)
    return torch.nn.functional.pad(inner, (0, missing, 0, missing)) if missing else inner


class Scored:
    """A codec for kernels that read x C^T from memory: float32, codebook [K, D] padded with zeros to [P, D]."""

    def __init__(self, codebook: Tensor, scale: Tensor, P: int) -> None:
        self.K, self.P = len(codebook), P
        missing, wide = P - self.K, codebook.float()
        self.codebook = torch.nn.functional.pad(wide, (0, 0, 0, missing)) if missing else wide.contiguous()
        self.scale = scale.float().contiguous()
        self.gram = gram(self.codebook)
        self.diagonal = self.gram.diagonal().contiguous()

    def parts(self, x: Tensor, offset: Tensor | None, width: int) -> Iterator[tuple[slice, Tensor]]:
        """Yields (rows, x[rows] - offset in float32), with at most MAX_SCORES numbers at `width` numbers per row."""
        step = max(1, MAX_SCORES // width)
        for first in range(0, len(x), step):
            rows = slice(first, min(first + step, len(x)))
            wide = x[rows].float()
            yield rows, (wide if offset is None else wide - offset.float()).contiguous()

    def scores(self, h: Tensor) -> Tensor:
        """h C^T [n, P] of h [n, D]."""
        return h @ self.codebook.T


def power_of_2(count: int) -> int:
    """The next power of 2, at least 16, as matrix products require."""
    return max(16, triton.next_power_of_2(count))
