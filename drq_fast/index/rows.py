"""The rows of an index: codes, ids and marks of removal, as snapshots that a search can read while others are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.types import Stored


class Rows(NamedTuple):
    """A snapshot of the rows, oldest first. Tensors have room for more rows than are in use."""

    codes: Tensor  # [>= size, levels] uint8, or two-byte codes bit for bit in int16
    vectors: Stored | None  # [>= size, dim]; None if only codes are kept
    ids: Tensor | None  # [>= size] int64; None while every id is the number of its row
    alive: Tensor | None  # [>= size] bool; None while nothing has been removed
    size: int  # rows in use, including the removed ones
    removed: int | None  # how many of those are removed; None: to be counted
    next_id: int
    generation: int  # changes when rows are dropped, so that positions change

    def living_count(self) -> int:
        """The number of rows that have not been removed."""
        if self.removed is None and self.alive is not None:
            return int(self.alive[: self.size].sum())
        return self.size - (self.removed or 0)

    def tensors(self) -> dict[str, Tensor]:
        """What a file holds of them, by name."""
        values, steps = self.vectors or (None, None)
        named = {"codes": self.codes, "ids": self.ids, "vectors": values, "steps": steps}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def used(self) -> Rows:
        """The same without room for more."""
        return self._map(lambda tensor: tensor[: self.size])

    def living(self) -> Rows:
        """Those that have not been removed, in their order."""
        rows = self.used()
        if rows.alive is None:
            return rows
        at = rows.alive.nonzero().squeeze(1)
        living = rows._replace(alive=None)._map(lambda tensor: tensor[at])
        return living._replace(ids=at if rows.ids is None else living.ids, size=len(at), removed=0)

    def compacted(self) -> Rows:
        """The same without the removed rows."""
        return self.living()._replace(generation=self.generation + 1)

    def copied(self) -> Rows:
        """The same in memory of its own, without room for more."""
        return self.used()._map(torch.Tensor.clone)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Rows:
        vectors = self.vectors
        if vectors is not None:
            vectors = Stored(change(vectors.values), None if vectors.steps is None else change(vectors.steps))
        ids, alive = (None if part is None else change(part) for part in (self.ids, self.alive))
        return self._replace(codes=change(self.codes), vectors=vectors, ids=ids, alive=alive)

    def marks(self) -> Tensor:
        """`alive`, made where nothing has been removed yet."""
        if self.alive is not None:
            return self.alive
        return torch.ones(len(self.codes), dtype=torch.bool, device=self.codes.device)

    def appended(self, codes: Tensor, vectors: Stored | None, ids: Tensor, replaced: Tensor) -> Rows:
        """With new rows behind the others, and the rows at positions `replaced` removed.

        Tensors double when they are full, so that adding a row is O(1) on average. A search that reads this snapshot
        does not look beyond its size, so that new rows may be written there.
        """
        size, end = self.size, self.size + len(codes)
        numbered = self.ids is None and (
            len(ids) == 0 or bool((ids == torch.arange(size, end, device=ids.device)).all())
        )
        stored_ids = None if numbered else torch.arange(size, device=ids.device) if self.ids is None else self.ids
        stored_codes = _extended(self.codes, size, codes.to(self.codes.dtype))
        stored_vectors = self.vectors
        if stored_vectors is not None and vectors is not None:
            values, steps = (
                None if old is None or new is None else _extended(old, size, new)
                for old, new in zip(stored_vectors, vectors, strict=True)
            )
            assert values is not None
            stored_vectors = Stored(values, steps)
        if stored_ids is not None:
            stored_ids = _extended(stored_ids, size, ids)
        alive = self.alive
        if len(replaced):
            alive = self.marks().clone().index_fill_(0, replaced, False)
        if alive is not None:
            alive = with_room(alive, size, end)
            alive[size:end] = True
        next_id = max(self.next_id, int(ids.max()) + 1) if len(ids) else self.next_id
        removed = self.size - self.living_count() + len(replaced)
        return Rows(stored_codes, stored_vectors, stored_ids, alive, end, removed, next_id, self.generation)


def _extended(tensor: Tensor, used: int, new: Tensor) -> Tensor:
    """The tensor with new rows behind those in use."""
    tensor = with_room(tensor, used, used + len(new))
    tensor[used : used + len(new)] = new
    return tensor


def with_room(tensor: Tensor, used: int, needed: int) -> Tensor:
    """The tensor itself where it has room for so many rows, else a copy of the used ones with twice the room."""
    if needed <= len(tensor):
        return tensor
    grown = torch.empty(max(needed, 2 * len(tensor)), *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
    grown[:used] = tensor[:used]
    return grown
