"""Sums of the blocks of an array, for checksums of files."""

from __future__ import annotations

import torch
from torch import Tensor

from .extension import native, pointer


def block_sums(data: Tensor, keys: Tensor) -> Tensor:
    """The sums [blocks] int64 of data [n] uint8 with keys [words of a block] int64: see `backends.torch.block_sums`."""
    data, width = data.contiguous(), 4 * len(keys)
    sums = torch.empty(-(-len(data) // width), dtype=torch.int64, device="cpu")
    native.block_sums(pointer(data), len(data), pointer(keys), pointer(sums), torch.get_num_threads())
    return sums
