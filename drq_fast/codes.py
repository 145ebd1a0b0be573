"""Packs codes into bits, `ceil(log2 K)` per level, level 0 first; a prefix of the bits is the shorter code."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from . import checks

Array = TypeVar("Array", Tensor, np.ndarray)

_ROWS = 1 << 16  # codes that are expanded to single bits at a time


def bits(codewords: int, levels: int = 1) -> int:
    """Length in bits of a code with `levels` levels of `codewords` codewords.

    >>> bits(256, levels=4)
    32
    """
    return _bits("bits", codewords, levels)


def packed_bytes(codewords: int, levels: int) -> int:
    """Size of one packed code in bytes."""
    return -(-_bits("packed_bytes", codewords, levels) // 8)


def _bits(op: str, codewords: int, levels: int = 1) -> int:
    width = (checks.integer(op, "codewords", codewords, 2, checks.MAX_CODEWORDS) - 1).bit_length()
    return checks.integer(op, "levels", levels, 1) * width


def pack(codes: Array, codewords: int) -> Array:
    """codes [..., M] of any integer dtype, torch or numpy -> in kind uint8 [..., packed_bytes(codewords, M)].

    Most significant bit first: the highest bit of level 0 is the highest bit of byte 0. The last byte is padded with
    zeros.

    >>> pack(torch.tensor([[5, 2, 7]]), codewords=8)
    tensor([[171, 128]], dtype=torch.uint8)
    """
    width = _bits("pack", codewords)
    values = checks.array("pack", "codes", codes, integer=True)
    if values.ndim < 1 or values.shape[-1] < 1:
        checks.fail("pack", "codes", "[..., M] with M >= 1", checks.shape_of(values))
    checks.code_range("pack", values, codewords)
    if width == 8:
        return checks.in_kind(values.to(torch.uint8, copy=True), codes)
    M = values.shape[-1]
    flat = values.reshape(-1, M)
    packed = torch.empty(len(flat), packed_bytes(codewords, M), dtype=torch.uint8, device=flat.device)
    shifts = torch.arange(width - 1, -1, -1, device=flat.device)
    for part, out in zip(flat.split(_ROWS), packed.split(_ROWS), strict=True):
        single = ((part[:, :, None].to(torch.int32) >> shifts) & 1).flatten(1).to(torch.uint8)
        out.copy_(_bytes(torch.nn.functional.pad(single, (0, 8 * packed.shape[1] - M * width))))
    return checks.in_kind(packed.reshape(*values.shape[:-1], packed.shape[1]), codes)


def unpack(packed: Array, codewords: int, levels: int) -> Array:
    """The inverse of `pack`: uint8 [..., bytes] -> codes [..., levels] in kind: uint8 for K <= 256, else int32.

    `levels` may be fewer than were packed; the remaining bytes are ignored.

    >>> unpack(torch.tensor([[171, 128]], dtype=torch.uint8), codewords=8, levels=2)
    tensor([[5, 2]], dtype=torch.uint8)
    """
    width, needed = _bits("unpack", codewords), -(-_bits("unpack", codewords, levels) // 8)
    values = _check_packed("unpack", packed, needed)
    dtype = torch.uint8 if codewords <= 256 else torch.int32
    flat = values[..., :needed].reshape(-1, needed)
    codes = torch.empty(len(flat), levels, dtype=dtype, device=flat.device)
    weights = 1 << torch.arange(width - 1, -1, -1, dtype=torch.int32, device=flat.device)
    for part, out in zip(flat.split(_ROWS), codes.split(_ROWS), strict=True):
        single = _single_bits(part)[:, : levels * width].unflatten(1, (levels, width))
        out.copy_((single * weights).sum(dim=2))
    checks.code_range("unpack", codes, codewords, name="packed codes")
    return checks.in_kind(codes.reshape(*values.shape[:-1], levels), packed)


def cut(packed: Array, codewords: int, levels: int) -> Array:
    """Truncates packed codes [..., bytes] to their first `levels` levels, as if packed at that length.

    >>> cut(torch.tensor([[171, 128]], dtype=torch.uint8), codewords=8, levels=1)
    tensor([[160]], dtype=torch.uint8)
    """
    length = _bits("cut", codewords, levels)
    needed = -(-length // 8)
    short = _check_packed("cut", packed, needed)[..., :needed].clone()
    spare = 8 * needed - length
    short[..., -1] &= 0xFF << spare & 0xFF
    return checks.in_kind(short, packed)


def _check_packed(op: str, packed: Any, needed: int) -> Tensor:
    values = checks.array(op, "packed", packed, integer=True)
    if values.dtype != torch.uint8:
        checks.fail(op, "packed", "a uint8 tensor", values.dtype, error=TypeError)
    if values.ndim < 1 or values.shape[-1] < needed:
        checks.fail(op, "packed", f"[..., {needed}] or longer for that many levels", checks.shape_of(values))
    return values


def _bytes(single: Tensor) -> Tensor:
    """Bits [N, 8 B], highest first -> bytes [N, B]."""
    groups = single.unflatten(1, (-1, 8))
    out = groups[..., 0].clone()
    for i in range(1, 8):
        out = (out << 1) | groups[..., i]
    return out


def _single_bits(packed: Tensor) -> Tensor:
    """Bytes [N, B] -> bits [N, 8 B], highest first."""
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, None] >> shifts) & 1).flatten(1)
