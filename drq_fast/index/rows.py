"""The rows of an index: codes, ids and marks of removal, as snapshots that a search can read while others are made."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """A snapshot of the rows, oldest first. Tensors have room for more rows than are in use."""

    codes: Tensor  # [>= size, levels] uint8, or two-byte codes bit for bit in int16
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

    def used(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """codes, ids and alive of the rows in use."""
        codes, ids, alive = self[:3]
        return (
            codes[: self.size],
            None if ids is None else ids[: self.size],
            None if alive is None else alive[: self.size],
        )

    def living(self) -> tuple[Tensor, Tensor | None]:
        """codes and ids of the rows that have not been removed, in their order."""
        codes, ids, alive = self.used()
        if alive is None:
            return codes, ids
        rows = alive.nonzero().squeeze(1)
        return codes[rows], rows if ids is None else ids[rows]

    def compacted(self) -> Rows:
        """The same without the removed rows."""
        codes, ids = self.living()
        return Rows(codes, ids, None, len(codes), 0, self.next_id, self.generation + 1)

    def copied(self) -> Rows:
        """The same in memory of its own, without room for more."""
        codes, ids, alive = (None if part is None else part.clone() for part in self.used())
        assert codes is not None
        return self._replace(codes=codes, ids=ids, alive=alive)

    def marks(self) -> Tensor:
        """`alive`, made where nothing has been removed yet."""
        if self.alive is not None:
            return self.alive
        return torch.ones(len(self.codes), dtype=torch.bool, device=self.codes.device)

    def appended(self, codes: Tensor, ids: Tensor, replaced: Tensor) -> Rows:
        """With new rows behind the others, and the rows at positions `replaced` removed.

        Tensors double when they are full, so that adding a row is O(1) on average. A search that reads this snapshot
        does not look beyond its size, so that new rows may be written there.
        """
        size, end = self.size, self.size + len(codes)
        numbered = self.ids is None and (
            len(ids) == 0 or bool((ids == torch.arange(size, end, device=ids.device)).all())
        )
        stored_ids = None if numbered else torch.arange(size, device=ids.device) if self.ids is None else self.ids
        stored_codes = with_room(self.codes, size, end)
        stored_codes[size:end] = codes.to(stored_codes.dtype)
        if stored_ids is not None:
            stored_ids = with_room(stored_ids, size, end)
            stored_ids[size:end] = ids
        alive = self.alive
        if len(replaced):
            alive = self.marks().clone().index_fill_(0, replaced, False)
        if alive is not None:
            alive = with_room(alive, size, end)
            alive[size:end] = True
        next_id = max(self.next_id, int(ids.max()) + 1) if len(ids) else self.next_id
        removed = self.size - self.living_count() + len(replaced)
        return Rows(stored_codes, stored_ids, alive, end, removed, next_id, self.generation)


def with_room(tensor: Tensor, used: int, needed: int) -> Tensor:
    """The tensor itself where it has room for so many rows, else a copy of the used ones with twice the room."""
    if needed <= len(tensor):
        return tensor
    grown = torch.empty(max(needed, 2 * len(tensor)), *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
    grown[:used] = tensor[:used]
    return grown
