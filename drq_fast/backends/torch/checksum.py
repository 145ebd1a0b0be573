"""Sums over blocks of bytes, for checksums of files."""

from __future__ import annotations

import torch
from torch import Tensor


def block_sums(data: Tensor, keys: Tensor) -> Tensor:
    """sums [blocks] int64: sum_i keys[i] * word[i] mod 2^64 for the 32-bit words of every block of data [n] uint8.

    keys [words of a block] int64. Words are little-endian; the last block is filled up with zeros.
    """
    width, sums = 4 * len(keys), []
    for part in data.split(64 * width):
        words = torch.nn.functional.pad(part, (0, -len(part) % width)).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        sums.append((words.view(-1, len(keys)) * keys).sum(dim=1))
    return torch.cat(sums) if sums else keys.new_empty(0)
