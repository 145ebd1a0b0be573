"""How many lists to probe and candidates to refine for a recall that is asked for: measured on sample queries."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from .. import checks
from .. import fit as fitting
from ..backends.torch import best_of, rank
from ..backends.types import SearchResult
from ..codec import directions
from .ids import MAX_ID
from .rows import Rows
from .source import Source, in_blocks

if TYPE_CHECKING:
    from . import Index

_QUERIES = 1000  # drawn where none are given
_NEIGHBOURS = 10  # that are looked for then
_CHANGED = 1.5  # times more or fewer vectors than were measured with
_CANDIDATES = (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)  # times k
_BLOCK = 256  # queries that are compared with all vectors at a time
_REFINED = 500.0  # codes that are scanned in the time that one candidate takes to be selected and scored, about


class Setting(NamedTuple):
    """What `search` is given, the share of the true neighbours that it found, and its cost.

    The cost is an estimate of the time of a query, in codes scanned; a candidate that is scored again counts as 500.
    """

    probes: int | None
    refine: int | None
    recall: float
    cost: float


class Tuning(NamedTuple):
    """The settings that found more than all cheaper ones, cheapest first, measured with `queries` queries for k.

    size: how many vectors the index had.
    """

    k: int
    queries: int
    size: int
    settings: tuple[Setting, ...]

    def holds_for(self, size: int) -> bool:
        """Whether an index of so many vectors is about as large as the one that was measured."""
        return self.size / _CHANGED <= size <= self.size * _CHANGED

    def cheapest(self, recall: float, k: int) -> Setting:
        """The cheapest setting that reached a recall, for k results."""
        by_codes = all(each.refine is None for each in self.settings)
        if k > self.k and not by_codes:
            checks.fail("search", "k", f"at most {self.k} where a recall is asked for, unless `tune` measures more", k)
        # Other queries find a little less or more, so a tenth of what is missing to 1 is added if it can be had.
        for wanted in (recall + (1 - recall) / 10, recall):
            first = bisect_left(self.settings, wanted, key=lambda each: each.recall)
            for setting in self.settings[first:]:
                # Scored again, the nearest of k are found more often than the others; else perhaps not.
                if setting.refine is not None or k == self.k:
                    return setting
        usable = [each.recall for each in self.settings if each.refine is not None or k == self.k]
        if not usable:
            why = "as codes alone were measured with this k only"
            checks.fail("search", "k", f"{self.k} where a recall is asked for, {why}", k)
        how = " by codes alone (an index that keeps vectors finds more)" if by_codes else ""
        checks.fail("search", "recall", f"at most {max(usable):.4f}, the highest that was measured{how}", recall)

    def as_json(self) -> dict[str, Any]:
        """What a file holds."""
        return self._asdict() | {"settings": [list(setting) for setting in self.settings]}


def from_json(value: Any, lists: int | None) -> Tuning:
    """What `as_json` gave; ValueError, TypeError or KeyError if it is something else."""
    settings = []
    for probes, refine, recall, cost in value["settings"]:
        if (probes is None) != (lists is None):
            checks.fail("load", "probes", "there if and only if there are lists", probes)
        if probes is not None:
            checks.integer("load", "probes", probes, 1, lists)
        if refine is not None:
            checks.integer("load", "refine", refine, 1, MAX_ID)
        if not (isinstance(recall, float) and 0 <= recall <= 1 and isinstance(cost, float) and cost >= 0):
            checks.fail("load", "tuning", "recall from 0 to 1 and cost >= 0", (recall, cost))
        settings.append(Setting(probes, refine, recall, cost))
    k, queries, size = (checks.integer("load", name, value[name], 1, MAX_ID) for name in ("k", "queries", "size"))
    return Tuning(k, queries, size, tuple(settings))


def by_own_vectors(index: Index, x: Source, ids: Tensor | None, seed: int | None) -> Tuning:
    """Of the index of vectors x [N, D] with these ids, by some of x as queries, which are not their own neighbours."""
    rows = fitting.sample_rows(len(x), _QUERIES, fitting.seeded(seed))
    query, k = x.pick(rows).to(index.device, torch.float32), min(_NEIGHBOURS, len(x) - 1)
    rows = rows.to(index.device)
    blocks = in_blocks(x.read, len(x), x.dim, "true neighbours")
    truth = _without(true_neighbours(query, blocks, index.metric, k + 1), rows, k)
    own = rows if ids is None else ids[rows]

    def found(k: int, probes: int | None, refine: int | None) -> Tensor:
        refine = None if refine is None else refine + 1
        return _without(index.search(query, k + 1, probes=probes, refine=refine).ids, own, k)

    return _tuned(index, found, truth if ids is None else ids[truth])


def by_queries(index: Index, query: Tensor, rows: Rows, k: int) -> Tuning:
    """By queries [Q, D] and the vectors of the living rows of the index."""
    stored = rows.content.stored()
    assert stored is not None
    blocks = in_blocks(lambda a, b: stored.floats(slice(a, b)), rows.size, index.dim, "true neighbours")
    truth = true_neighbours(query, blocks, index.metric, k)

    def found(k: int, probes: int | None, refine: int | None) -> Tensor:
        return index.search(query, k, probes=probes, refine=refine).ids

    return _tuned(index, found, rows.ids_at(truth))


def _tuned(index: Index, search: Callable[[int, int | None, int | None], Tensor], truth: Tensor) -> Tuning:
    """Tries settings: search(k, probes, refine) -> ids [Q, k], compared with the true neighbours [Q, k].

    Neighbours that are among the n best by codes are found by refine=n, so that one search for each number of probes
    shows about what all numbers of candidates are good for; those that pay are then measured.
    """
    (queries, k), size = truth.shape, len(index)
    most = min(_CANDIDATES[-1] * k, size) if index.vectors is not None else k
    counts = [n for n in dict.fromkeys(min(int(factor * k), size) for factor in _CANDIDATES) if n <= most]
    several = _several_probes(index.lists)
    expected = []
    for probes in tqdm(several, desc="tune", unit="searches", delay=2, disable=None, leave=False):
        scanned = size if probes is None or index.lists is None else index.lists + size * probes / index.lists
        by_rank = _found_by_rank(search(most, probes, None), truth)
        expected.append(Setting(probes, None, by_rank[k - 1], float(scanned)))
        if index.vectors is not None:
            expected += [Setting(probes, n, by_rank[n - 1], scanned + _REFINED * n) for n in counts]
    measured = []
    for setting in tqdm(_front(expected), desc="tune", unit="settings", delay=2, disable=None, leave=False):
        found = _found_by_rank(search(k, setting.probes, setting.refine), truth)
        measured.append(setting._replace(recall=found[k - 1]))
    return Tuning(k, queries, size, tuple(_front(measured)))


def _several_probes(lists: int | None) -> list[int | None]:
    """Powers of 2 and the numbers halfway between them, up to all lists."""
    if lists is None:
        return [None]
    few = sorted({n for i in range(lists.bit_length()) for n in (1 << i, 3 << i) if n < lists})
    return [*few, lists]


def _front(settings: list[Setting]) -> list[Setting]:
    """Those that find more than all cheaper ones, cheapest first."""
    best, front = -1.0, []
    for setting in sorted(settings, key=lambda each: (each.cost, -each.recall)):
        if setting.recall > best:
            best = setting.recall
            front.append(setting)
    return front


def _found_by_rank(found: Tensor, truth: Tensor) -> list[float]:
    """The share of the true neighbours [Q, k] that is among the first 1, 2, ..., n found [Q, n]."""
    hits = torch.zeros(found.shape[1], dtype=torch.int64, device=found.device)
    for some, right in zip(found.split(_BLOCK), truth.split(_BLOCK), strict=True):
        hits += (some[:, :, None] == right[:, None]).any(dim=2).sum(dim=0)
    return (hits.cumsum(dim=0).double() / truth.numel()).tolist()


def _without(found: Tensor, own: Tensor, k: int) -> Tensor:
    """The first k of found [Q, k + 1] that are not own [Q]."""
    order = (found == own[:, None]).to(torch.int8).argsort(dim=1, stable=True)
    return found.gather(1, order)[:, :k]


def true_neighbours(query: Tensor, x: Iterable[Tensor], metric: str, k: int) -> Tensor:
    """The k nearest rows [Q, k] of all blocks [n, D] of x, by the vectors themselves."""
    query = directions(query) if metric == "cosine" else query
    queries = query.split(_BLOCK)
    found: list[SearchResult | None] = [None] * len(queries)
    first = 0
    for block in x:
        rows = block.to(query.device, torch.float32)
        rows = directions(rows) if metric == "cosine" else rows
        for b, some in enumerate(queries):
            scores = some @ rows.T
            if metric == "l2":
                scores = rows.square().sum(dim=1) - 2 * scores  # less ||q||^2, which is the same for all
            order = rank(scores, k, metric)
            new, old = SearchResult(scores.gather(1, order), order + first), found[b]
            found[b] = new if old is None else best_of((old, new), k, metric)
        first += len(block)
    return torch.cat([each.positions for each in found if each is not None])
