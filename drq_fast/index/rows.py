"""The rows of an index: what is stored for each vector, as snapshots that a search can read while others are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..backends.types import Stored


class Content(NamedTuple):
    """What is stored for each of n rows, beside its id; None if it is not kept."""

    codes: Tensor  # [n, levels] uint8, or two-byte codes bit for bit in int16
    lists: Tensor | None = None  # [n] int16 or int32: the number of its inverted list
    vectors: Tensor | None = None  # [n, dim], see Stored
    steps: Tensor | None = None  # [n] float32

    def map(self, change: Callable[[Tensor], Tensor]) -> Content:
        """The same with changed tensors."""
        return Content(*(None if tensor is None else change(tensor) for tensor in self))  # type: ignore[arg-type]

    def extended(self, used: int, new: Content) -> Content:
        """With new rows behind those in use."""
        pairs = zip(self, new, strict=True)
        return Content(*(None if a is None or b is None else _extended(a, used, b) for a, b in pairs))  # type: ignore[arg-type]

    def stored(self) -> Stored | None:
        """The vectors."""
        return None if self.vectors is None else Stored(self.vectors, self.steps)


class Rows(NamedTuple):
    """A snapshot of the rows. Tensors have room for more rows than are in use.

    The first `ordered` rows are in the order of their lists, then of age; all others in that of age. Without lists all
    are in the order of age.
    """

    content: Content  # [>= size]
    ids: Tensor | None  # [>= size] int32 or, where next_id asks for it, int64; None while they are the rows' numbers
    alive: Tensor | None  # [>= size] bool; None while nothing has been removed
    size: int  # rows in use, including the removed ones
    ordered: int
    removed: int | None  # how many are removed; None: to be counted
    next_id: int
    generation: int  # changes when positions do

    @property
    def codes(self) -> Tensor:
        """[>= size, levels]."""
        return self.content.codes

    def living_count(self) -> int:
        """The number of rows that have not been removed."""
        if self.removed is None and self.alive is not None:
            return int(self.alive[: self.size].sum())
        return self.size - (self.removed or 0)

    def tensors(self) -> dict[str, Tensor]:
        """What a file holds of them, by name."""
        named = {**self.content._asdict(), "ids": self.ids}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def ids_at(self, positions: Tensor) -> Tensor:
        """The ids [...] int64 of the rows at positions [...]; -1 stays -1."""
        if self.ids is None:
            return positions
        if positions.device.type == "cpu":  # numpy takes a quarter of the time for the results of one query
            rows = positions.numpy()
            ids = self.ids.numpy().take(rows, mode="clip").astype(np.int64)
            if rows.size and rows.min() < 0:
                ids[rows < 0] = -1
            return torch.from_numpy(ids)
        return self.ids[positions.clamp_min(0)].long().where(positions >= 0, -1)

    def codes_alone(self) -> Rows:
        """The same without all that may be large."""
        return self._replace(content=Content(self.codes))

    def used(self) -> Rows:
        """The same without room for more."""
        return self._map(lambda tensor: tensor[: self.size])

    def living(self) -> Rows:
        """Those that have not been removed, in their order."""
        rows = self.used()
        if rows.alive is None:
            return rows
        return rows._at(rows.alive.nonzero().squeeze(1))._replace(
            alive=None, ordered=int(rows.alive[: self.ordered].sum()), removed=0, generation=self.generation
        )

    def compacted(self) -> Rows:
        """The same without the removed rows."""
        return self.living()._replace(generation=self.generation + 1)

    def in_lists(self) -> Rows:
        """Those that have not been removed, all in the order of their lists.

        A removed row may have the id of a later one, which is known as the later one by the order of age alone.
        """
        rows = self.living()
        assert rows.content.lists is not None
        return rows._at(rows.content.lists.argsort(stable=True))._replace(ordered=rows.size)

    def _at(self, rows: Tensor) -> Rows:
        """The rows at these positions [n]."""
        some = self._map(lambda tensor: tensor[rows])
        ids = rows.to(id_dtype(self.next_id)) if self.ids is None else some.ids
        return some._replace(ids=ids, size=len(rows), generation=self.generation + 1)

    def copied(self) -> Rows:
        """The same in memory of its own, without room for more."""
        return self.used()._map(torch.Tensor.clone)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Rows:
        ids, alive = (None if part is None else change(part) for part in (self.ids, self.alive))
        return self._replace(content=self.content.map(change), ids=ids, alive=alive)

    def marks(self) -> Tensor:
        """`alive`, made where nothing has been removed yet."""
        if self.alive is not None:
            return self.alive
        return torch.ones(len(self.codes), dtype=torch.bool, device=self.codes.device)

    def appended(self, new: Content, ids: Tensor, replaced: Tensor) -> Rows:
        """With new rows behind the others, and the rows at positions `replaced` removed.

        Tensors double when they are full, so that adding a row is O(1) on average. A search that reads this snapshot
        does not look beyond its size, so that new rows may be written there.
        """
        size, end = self.size, self.size + len(new.codes)
        numbered = self.ids is None and (
            len(ids) == 0 or bool((ids == torch.arange(size, end, device=ids.device)).all())
        )
        next_id = max(self.next_id, int(ids.max()) + 1) if len(ids) else self.next_id
        stored_ids = None if numbered else torch.arange(size, device=ids.device) if self.ids is None else self.ids
        if stored_ids is not None:
            stored_ids = _extended(stored_ids.to(id_dtype(next_id)), size, ids)
        alive = self.alive
        if len(replaced):
            alive = self.marks().clone().index_fill_(0, replaced, False)
        if alive is not None:
            alive = with_room(alive, size, end)
            alive[size:end] = True
        return self._replace(
            content=self.content.extended(size, new),
            ids=stored_ids,
            alive=alive,
            size=end,
            removed=self.size - self.living_count() + len(replaced),
            next_id=next_id,
        )


def no_rows(content: Content) -> Rows:
    """The rows of a new index."""
    return Rows(content, None, None, size=0, ordered=0, removed=0, next_id=0, generation=0)


def id_dtype(next_id: int) -> torch.dtype:
    """How ids below next_id are stored."""
    return torch.int32 if next_id <= 1 << 31 else torch.int64


def _extended(tensor: Tensor, used: int, new: Tensor) -> Tensor:
    """The tensor with new rows behind those in use."""
    tensor = with_room(tensor, used, used + len(new))
    tensor[used : used + len(new)] = new.to(tensor.dtype)
    return tensor


def with_room(tensor: Tensor, used: int, needed: int) -> Tensor:
    """The tensor itself where it has room for so many rows, else a copy of the used ones with twice the room."""
    if needed <= len(tensor):
        return tensor
    grown = torch.empty(max(needed, 2 * len(tensor)), *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
    grown[:used] = tensor[:used]
    return grown
