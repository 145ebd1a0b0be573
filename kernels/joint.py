"""The products Delta G of the training pass up to 256 codewords, and J = <Delta G, Delta>, by large tiles."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .levels import Levels, Scored

_MANY_LINES = 1 << 14  # from which on large tiles of Delta G fill a GPU


@triton.jit(do_not_specialize=["LINES"])
def joint_kernel(
    deltas,
    factor,
    soft,
    joint,
    products,
    LINES,
    W,
    BY_CODEWORDS: tl.constexpr,
    KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    KP: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Math:     J = <Delta G, Delta> of LINES rows Delta, all pairs of a vector and a level, added to soft as well; the
              factor [KP, W] is G. BY_CODEWORDS: J = ||Delta C||^2, and the factor is C. KEEP: Delta G, without J
    Tiling:   one program owns ROWS lines, and loops over TILE of the W columns of the factor
    Memory:   reads deltas [LINES, KP] W / TILE times, all but once from L2, and once more for <Delta G, Delta>; the
              factor once (from L2); writes J, or products [LINES, KP]
    Numerics: float32
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    n = tl.arange(0, ROWS)  # [ROWS], from the first of this program
    live = n < LINES - first
    deltas, soft, joint, products = deltas + first * KP, soft + first, joint + first, products + first * KP
    inner = tl.zeros((ROWS,), dtype=tl.float32)
    if not KEEP:
        before = tl.load(soft + n, mask=live, other=0.0)  # here, because other threads hold copies of these rows
    for column in range(0, W, TILE):
        k = column + tl.arange(0, TILE)  # [TILE]
        product = tl.zeros((ROWS, TILE), dtype=tl.float32)
        for start in range(0, KP, COLUMNS):
            i = start + tl.arange(0, COLUMNS)
            piece = tl.load(deltas + n[:, None] * KP + i[None, :], mask=live[:, None], other=0.0)  # [ROWS, COLUMNS]
            block = tl.load(factor + i[:, None] * W + k[None, :], mask=(k < W)[None, :], other=0.0)  # [COLUMNS, TILE]
            product = tl.dot(piece, block, acc=product, input_precision=PRECISION)
        here = n[:, None] * KP + k[None, :]
        if KEEP:
            tl.store(products + here, product, mask=live[:, None])
        elif BY_CODEWORDS:
            inner += tl.sum(product * product, axis=1)
        else:
            inner += tl.sum(product * tl.load(deltas + here, mask=live[:, None], other=0.0), axis=1)
    if not KEEP:
        tl.store(joint + n, inner, mask=live)
        tl.store(soft + n, before + inner, mask=live)


def times_gram(deltas: Tensor, codec: Scored, levels: Levels, products: Tensor, precision: str, *, keep: bool) -> None:
    """Adds J to the soft errors and writes it to the joint ones, or keeps Delta G [lines, P] in `products`."""
    lines, D = levels.codes.numel(), codec.codebook.shape[1]
    by_codewords = not keep and D % 16 == 0 and 2 * D <= codec.P  # half of the products, and of the traffic, or less
    factor = codec.codebook if by_codewords else codec.gram
    tiling = settings(codec.P, precision, lines) | {"BY_CODEWORDS": by_codewords, "KEEP": keep}
    grid = (triton.cdiv(lines, tiling["ROWS"]),)
    joint_kernel[grid](deltas, factor, levels.soft, levels.joint, products, lines, factor.shape[1], **tiling)


def settings(P: int, precision: str, lines: int) -> dict[str, Any]:
    """Compile-time settings of joint_kernel: as many lines a program as fit, because each program reads its factor."""
    many = lines >= _MANY_LINES and precision != "ieee"
    tiling = {"ROWS": 128 if many else 32, "KP": P, "TILE": min(64, P), "COLUMNS": 16}
    compiler = {"num_warps": 16 if many else 4, "num_stages": 3, "maxnreg": 128, "enable_fp_fusion": False}
    return {"PRECISION": precision, **tiling, **compiler}
