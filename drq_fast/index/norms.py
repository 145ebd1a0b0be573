"""The squared norms that l2 and cosine need of every row, kept by code length."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import backends, modes
from ..backends.types import Lists
from ..codec import Codec
from .rows import with_room


class Known(NamedTuple):
    """The norms of the first `size` rows, with room for more: a search that reads them does not look beyond."""

    values: Tensor  # [>= size] float32
    size: int


Norms = dict[int, Known]  # by code length


def extended_norms(known: Norms, codes: Tensor, codec: Codec, metric: str, lists: Lists | None) -> Tensor:
    """The norms of all rows, codes [size, length]; computed for the new ones and kept in `known`.

    With lists, which rows do not join one by one, they are computed for all or none.
    """
    (size, length), device = codes.shape, codes.device
    values, done = known.get(length) or Known(torch.empty(0, dtype=torch.float32, device=device), 0)
    if done < size:
        with modes.plain(device):
            column = backends.choose_for_norms(device.type, codec)
            done = done if lists is None else 0
            values = with_room(values, done, size)
            values[done:size] = column.squared_norms(codes[done:], codec, metric, lists)
            known[length] = Known(values, size)
    return values[:size]


def copied_norms(known: Norms) -> Norms:
    """The same in memory of its own, without room for more."""
    return {length: Known(values[:size].clone(), size) for length, (values, size) in known.items()}
