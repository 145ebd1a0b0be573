"""The squared norms that l2 and cosine need of every row, kept by code length."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import backends, modes
from ..codec import Codec

# length -> norms [n] of the first n rows. Never changed in place: a search may be reading it.
Norms = dict[int, Tensor]


def extended_norms(known: Norms, codes: Tensor, codec: Codec, metric: str) -> Tensor:
    """The norms of all rows, codes [size, length]; computed for the new ones and kept in `known`."""
    length = codes.shape[1]
    norms = known.get(length)
    if norms is None or norms.shape[0] < codes.shape[0]:
        with modes.plain(codes.device):
            column = backends.choose_for_norms(codes.device.type, codec)
            before = torch.empty(0, dtype=torch.float32, device=codes.device) if norms is None else norms
            norms = known[length] = torch.cat([before, column.squared_norms(codes[len(before) :], codec, metric)])
    return norms
