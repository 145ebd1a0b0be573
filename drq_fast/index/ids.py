"""Ids: what users may give, and where each one is."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks
from .rows import Rows

MAX_ID = (1 << 62) - 1


def checked_ids(op: str, ids: Any, device: torch.device) -> Tensor:
    """A user's ids as int64 [n]: in 0..MAX_ID, no id twice."""
    values = checks.id_array(op, "ids", ids)
    values = checks.integers(op, "ids", values).to(device, torch.int64)
    for bound in torch.aminmax(values) if len(values) else ():
        checks.integer(op, "ids", int(bound), 0, MAX_ID)
    ordered = values.sort().values
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        checks.fail(op, "ids", "unique", f"{int(twice[0])} more than once")
    return values


class _Run(NamedTuple):
    """Rows first..last, sorted by id, equal ids by age; ids and rows are None where they are stored in order."""

    first: int
    last: int
    ids: Tensor | None
    rows: Tensor | None

    def sorted_ids(self, stored: Tensor) -> Tensor:
        """The ids [n] in order; stored [size]: those of all rows."""
        return stored[self.first : self.last] if self.ids is None else self.ids

    def sorted_rows(self, device: torch.device) -> Tensor:
        """Their rows [n]."""
        return torch.arange(self.first, self.last, device=device) if self.rows is None else self.rows


class Places(NamedTuple):
    """Where ids are: sorted runs of rows, each more than twice as long as the next, the newest rows last.

    New ids become a run of their own, which is merged with those before it that are not much longer, so that an id is
    sorted O(log N) times in all and adding a few to millions stays cheap.
    """

    generation: int = -1
    runs: tuple[_Run, ...] = ()

    def extended(self, rows: Rows) -> Places:
        """With all rows that are in use."""
        runs = list(self.runs) if self.generation == rows.generation else []
        covered = runs[-1].last if runs else 0
        if rows.ids is None or covered >= rows.size:
            return Places(rows.generation, tuple(runs))
        run = _sorted(rows.ids, covered, rows.size)
        while runs and runs[-1].last - runs[-1].first <= 2 * (run.last - run.first):
            run = _merged(rows.ids, runs.pop(), run)
        return Places(rows.generation, (*runs, run))

    def find(self, rows: Rows, ids: Tensor) -> Tensor:
        """The row of each id [n], -1 where it is not in the index; all rows must be covered."""
        if rows.size == 0:
            return torch.full_like(ids, -1)
        if rows.ids is None:
            places = torch.where(ids < rows.size, ids, -1)
        else:
            places = torch.full_like(ids, -1)
            sought = ids.clamp_max(torch.iinfo(rows.ids.dtype).max).to(rows.ids.dtype)
            for run in self.runs:  # a later run has the later row of an id that was removed and added again
                ordered = run.sorted_ids(rows.ids)
                at = torch.searchsorted(ordered, sought, right=True).sub_(1).clamp_min_(0)
                row = at + run.first if run.rows is None else run.rows[at]
                places = torch.where(ordered[at] == ids, row, places)
        if rows.alive is not None:
            places = torch.where(rows.alive[places.clamp_min(0)], places, -1)
        return places


def _sorted(stored: Tensor, first: int, last: int) -> _Run:
    ids = stored[first:last]
    if bool((ids[1:] >= ids[:-1]).all()):
        return _Run(first, last, None, None)
    order = ids.argsort(stable=True)
    return _Run(first, last, ids[order], order + first)


def _merged(stored: Tensor, older: _Run, newer: _Run) -> _Run:
    if older.ids is None and newer.ids is None and bool(stored[older.last - 1] <= stored[newer.first]):
        return _Run(older.first, newer.last, None, None)
    ids = torch.cat([older.sorted_ids(stored), newer.sorted_ids(stored)])
    rows = torch.cat([older.sorted_rows(ids.device), newer.sorted_rows(ids.device)])
    order = ids.argsort(stable=True)
    return _Run(older.first, newer.last, ids[order], rows[order])
