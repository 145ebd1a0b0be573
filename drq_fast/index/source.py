"""The vectors that an index is built from: an array, or anything that is read in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from tqdm import tqdm

from .. import checks
from .. import fit as fitting

_ROWS = 1 << 16  # vectors in a block, at most
_NUMBERS = 1 << 24  # numbers in a block, unless one vector has more


@runtime_checkable
class Source(Protocol):
    """Vectors [N, dim] that are read in parts, such as files that are larger than memory."""

    dim: int

    def __len__(self) -> int: ...

    def read(self, first: int, last: int) -> Tensor:
        """Rows first to last - 1 [last - first, dim]."""

    def pick(self, rows: Tensor) -> Tensor:
        """The rows [n, dim] with these ascending numbers [n]."""


class ArraySource:
    """A tensor [N, dim], which may be mapped; a block of it is a view."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.dim = values, values.shape[1]

    def __len__(self) -> int:
        return len(self.values)

    def read(self, first: int, last: int) -> Tensor:
        """See Source."""
        return self.values[first:last]

    def pick(self, rows: Tensor) -> Tensor:
        """See Source."""
        return self.values[rows.to(self.values.device)]


def as_source(op: str, x: Any) -> Source:
    """A user's vectors, checked except for their values."""
    if isinstance(x, Source):
        return x
    values = checks.array(op, "x", x)
    if values.ndim != 2 or 0 in values.shape:
        checks.fail(op, "x", "[N, D] with at least one vector and one dimension", checks.shape_of(values))
    return ArraySource(values)


def sample_of(op: str, x: Source, rows: int, generator: torch.Generator) -> Tensor:
    """Up to `rows` random vectors [n, dim] float32 of x, in their order; ValueError if one is not finite."""
    chosen = None if len(x) <= rows else fitting.sample_rows(len(x), rows, generator)
    drawn = x.read(0, len(x)) if chosen is None else x.pick(chosen)
    checks.finite(op, "x", drawn, torch.float32, chosen)
    return drawn.float()


def in_blocks(read: Callable[[int, int], Tensor], N: int, dim: int, desc: str) -> Iterator[Tensor]:
    """Yields blocks [n, dim] of all N rows in their order, with a progress bar; see `Source.read`."""
    step = max(1, min(_ROWS, _NUMBERS // dim))
    with tqdm(total=N, desc=desc, unit="vector", unit_scale=True, delay=2, disable=None, leave=False) as bar:
        for first in range(0, N, step):
            block = read(first, min(first + step, N))
            yield block
            bar.update(len(block))
