"""Vectors that an index keeps beside the codes, or that a user has by id, to score candidates again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import backends, checks
from ..backends.torch import pad_result
from ..backends.types import SearchResult, Stored
from ..codec import directions
from ..constants import VECTORS

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in VECTORS}
_SMALL = 1e-4  # below which float16 loses digits
IdsAt = Callable[[Tensor], Tensor]  # positions of rows -> their ids
_GATHERED = 1 << 24  # numbers of a user's vectors that are in memory at a time


def empty(name: str, dim: int, device: torch.device) -> Stored:
    """No vectors yet, of a kind in DTYPES."""
    steps = torch.empty(0, device=device, dtype=torch.float32) if name == "int8" else None
    return Stored(torch.empty(0, dim, dtype=DTYPES[name], device=device), steps)


def stored_as(op: str, x: Tensor, kind: Stored, first: int = 0) -> Stored:
    """x [N, D] as `kind` has it. int8: rounded to 127 steps on either side of 0, of a size of its own for each row.

    first: the number that the first row has in the user's array.
    """
    dtype, x = kind.values.dtype, checks.floats(x.to(kind.values.device))
    if dtype is torch.float16:
        sizes = x.abs().amax(dim=1) if len(x) else x.new_zeros(0)
        small = ((sizes > 0) & (sizes < _SMALL)).nonzero()
        if len(small):
            wanted = f"0 or at least {_SMALL} somewhere in each vector, for float16"
            checks.fail(op, "x", wanted, f"smaller numbers in row {first + int(small[0])}")
    if dtype is not torch.int8:
        checks.finite(op, "x", x, dtype, range(first, first + len(x)))
        return Stored(x.to(dtype))
    x = x.float()
    steps = x.abs().amax(dim=1) / 127 if len(x) else x.new_zeros(0)
    scaled = x / torch.where(steps > 0, steps, 1)[:, None]
    return Stored(scaled.round().clamp(-127, 127).to(torch.int8), steps)


def refined(query: Tensor, positions: Tensor, stored: Stored, metric: str, k: int) -> SearchResult:
    """The k best of the candidates at positions [Q, n] by the vectors themselves."""
    column = backends.choose("refine", query.device.type)
    return column.refine(query, positions, stored, metric, k)


class Given:
    """A user's vectors [n, D], a tensor, an array or a memory map, whose row i is the vector of id i."""

    def __init__(self, value: Any, dim: int) -> None:
        if not isinstance(value, (np.ndarray, Tensor)):
            kind = type(value).__name__
            checks.fail("search", "vectors", "an array or a tensor, which may be mapped", kind, error=TypeError)
        if value.ndim != 2 or value.shape[1] != dim:
            checks.fail("search", "vectors", f"[n, {dim}], by id", f"{value.dtype} {list(value.shape)}")
        checked = checks.array("search", "vectors", value if isinstance(value, Tensor) else value[:0])
        self.value = checked if isinstance(value, Tensor) else value  # torch would copy some arrays

    def refined(self, query: Tensor, positions: Tensor, ids_at: IdsAt, metric: str, k: int) -> SearchResult:
        """`refined`, for the rows of an index; ids_at(rows) are their ids."""
        step = max(1, _GATHERED // (positions.shape[1] * query.shape[1]))
        blocks = zip(query.split(step), positions.split(step), strict=True)
        parts = [self._refined(*block, ids_at, metric, k) for block in blocks]
        return SearchResult(torch.cat([p.scores for p in parts]), torch.cat([p.positions for p in parts]))

    def _refined(self, query: Tensor, positions: Tensor, ids_at: IdsAt, metric: str, k: int) -> SearchResult:
        rows, places = positions.unique(return_inverse=True)  # in order, so that ties stay in order
        if len(rows) and int(rows[0]) < 0:  # some are no candidates
            rows, places = rows[1:], places - 1
        if len(rows) == 0:
            return pad_result(query.new_empty(len(query), 0), positions[:, :0], k, metric)
        own = ids_at(rows).cpu()
        values = self._rows(own).to(query.device, torch.float32)
        checks.finite("search", "vectors", values, rows=own)
        stored = Stored(directions(values) if metric == "cosine" else values)
        scores, found = refined(query, places, stored, metric, k)
        return SearchResult(scores, rows[found.clamp_min(0)].where(found >= 0, -1))

    def _rows(self, ids: Tensor) -> Tensor:
        """Copies of the vectors of these ids [n]."""
        if len(ids) and int(ids.max()) >= len(self.value):
            checks.fail("search", "vectors", f"[n, D] with a row for id {int(ids.max())}", f"{len(self.value)} rows")
        if isinstance(self.value, Tensor):
            return self.value[ids.to(self.value.device)]
        with np.errstate(over="ignore"):  # infinities are refused afterwards
            return torch.from_numpy(np.ascontiguousarray(self.value[ids.numpy()]).astype(np.float32, copy=False))
