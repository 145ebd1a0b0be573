"""What a search of an index reads, and the scan of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from .. import backends, checks, functional
from ..backends.torch import best_of
from ..backends.types import Database, SearchResult
from ..codec import Codec
from .coarse import Coarse, tail_of
from .norms import Norms, extended_norms
from .rows import Rows

_QUERIES = 1 << 10  # queries between two updates of the progress bar, at least
_WORK = 1 << 34  # scores between two updates
_LARGE = 2.0**40  # numbers between 1 / _LARGE and _LARGE can be squared and added up


class Searched(NamedTuple):
    """The rows of an index, those that are scanned where they are, and copies of others in the order of lists."""

    rows: Rows
    database: Database
    tail: Database | None = None
    tail_rows: Tensor | None = None  # [n]: where the rows of the tail are

    def filtered(self, mask: Tensor) -> Searched:
        """Only the rows that mask [size] marks."""
        database = _filtered(self.database, mask[: len(self.database.codes)])
        if self.tail is None:
            return self._replace(database=database)
        return self._replace(database=database, tail=_filtered(self.tail, mask[self.tail_rows]))

    def tensors(self) -> Iterator[Tensor | None]:
        """All that a search may read."""
        for database in (self.database, self.tail):
            if database is not None:
                yield from (database.codes, database.norms, database.keep)
                yield from () if database.lists is None else (database.lists.starts, database.lists.centroids)
        yield from (self.tail_rows, *self.rows.content, self.rows.ids, self.rows.alive)

    def scan(self, query: Tensor, k: int, probes: int | None, limits: Tensor | None = None) -> SearchResult:
        """Scores [Q, k] and rows [Q, k] of the best codes; equal scores in the order of the lists, the tail last.

        limits [Q]: scores that are worse may be left out.
        """
        found = _scan(query, k, self.database, probes, limits)
        if self.tail is None or self.tail_rows is None:
            return found
        late, ordered = _scan(query, k, self.tail, probes, limits), len(self.database.codes)
        places = (late.positions + ordered).where(late.positions >= 0, -1)
        scores, found_at = best_of((found, SearchResult(late.scores, places)), k, self.database.metric)
        in_tail = found_at >= ordered
        return SearchResult(scores, self.tail_rows[(found_at - ordered).where(in_tail, 0)].where(in_tail, found_at))


def of_moderate_length(query: Tensor) -> Tensor:
    """Queries [Q, D] for cosine, to which lengths do not matter: very long and very short ones times a power of 2.

    float32 can then represent their squared lengths. All others stay as they are, to the bit.
    """
    if not query.is_floating_point() or query.numel() == 0:
        return query
    largest = torch.linalg.vector_norm(query.detach(), ord=float("inf"), dim=1)
    low, high = (bound.item() for bound in largest.aminmax())
    if low >= 1 / _LARGE and high <= _LARGE:
        return query
    extreme = (largest > 0) & ((largest < 1 / _LARGE) | (largest > _LARGE)) & (largest <= checks.LARGEST)
    factors = torch.ldexp(torch.ones_like(largest), -torch.frexp(largest).exponent.clamp(-100, 100))
    return query * torch.where(extreme, factors, 1)[:, None]


def searched_rows(rows: Rows, length: int, codec: Codec, metric: str, coarse: Coarse | None, known: Norms) -> Searched:
    """The first `length` levels of the rows that were not removed. known: norms by length, which are extended."""
    used, lists = rows.used(), None
    codes, numbers = used.codes[:, :length], used.content.lists
    if coarse is not None and numbers is not None:
        codes, lists = codes[: rows.ordered], coarse.lists_of(numbers[: rows.ordered])
    norms = None if metric == "ip" else extended_norms(known, codes, codec, metric, lists)
    searched = Searched(rows, Database(codes, codec, metric, norms, lists=lists))
    tail = None if coarse is None else tail_of(used)
    if coarse is not None and tail is not None:
        assert tail.content.lists is not None
        lists = coarse.lists_of(tail.content.lists)
        database = Database(tail.content.codes[:, :length], codec, metric, lists=lists)
        searched = searched._replace(tail=database, tail_rows=tail.rows)
    return searched if used.alive is None else searched.filtered(used.alive)


def _filtered(database: Database, keep: Tensor) -> Database:
    return Database(database.codes, database.codec, database.metric, database.norms, keep, database.lists)


def _scan(query: Tensor, k: int, database: Database, probes: int | None, limits: Tensor | None) -> SearchResult:
    """Scores [Q, k] and positions [Q, k]; in blocks of queries with a progress bar where it takes long."""
    codes, device = database.codes, database.device
    if query.dtype is torch.float64:
        checks.finite("search", "query", query, torch.float32)
    if query.dtype is not torch.float32 or query.device != device:
        query = query.to(device, torch.float32)
    unsupported = backends.cannot_search(query, codes, database.codec, database.norms)
    column = backends.choose("search", device.type, None, unsupported)
    step = max(_QUERIES, _WORK // max(1, codes.shape[0]))
    if query.shape[0] <= step:
        options = functional.pruning(column, limits)
        return column.search(query, database, k, finite=True, probes=probes, **options)
    parts = []
    checks.finite("search", "query", query, torch.float32)
    with tqdm(total=len(query), desc="search", unit="queries", delay=2, disable=None, leave=False) as bar:
        for first in range(0, len(query), step):
            part = query[first : first + step]
            options = functional.pruning(column, None if limits is None else limits[first : first + step])
            parts.append(column.search(part, database, k, finite=True, probes=probes, **options))
            bar.update(len(part))
    return SearchResult(torch.cat([part.scores for part in parts]), torch.cat([part.positions for part in parts]))
