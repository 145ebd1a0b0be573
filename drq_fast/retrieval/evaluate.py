"""Retrieval metrics as expectations over all orders of equal scores, so that tie-breaking cannot bias them.

Hundreds of items may have equal codes, so distinct codes are ranked, each with its number of items and of relevant
items; no matrix of queries and items is formed. If N0 items with R0 relevant ones precede a group of n items with r
relevant ones, the first N0 + i items contain R0 + i r/n relevant ones on average.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import checks, functional
from ..backends.native.threads import in_parallel
from ..codes import bits
from ..quantizer import RecurrentQuantizer
from .losses import check_labels, similar

RECALLS = 100  # points of the precision-recall curve: recall 1 %, 2 %, ...
_ENTRIES = 1 << 20  # queries x distinct codes that are ranked at a time


class Figures(NamedTuple):
    """Means over queries: mAP@R, precision at each depth, and precision at recall 1 %, 2 %, ... 100 %."""

    bits: int | None
    mean_average_precision: float
    precision: tuple[float, ...]
    precision_at_recall: tuple[float, ...]


class _Groups(NamedTuple):
    """For entries [q, n] of a ranking, in float64: items and relevant items before and after their groups."""

    N0: Tensor
    R0: Tensor
    N1: Tensor
    R1: Tensor


class _Ranking(NamedTuple):
    """Entries [q, U], best first: costs, in any numbers that ascend, and how many items and relevant items there are up
    to each of them, int32."""

    costs: Tensor
    items: Tensor
    relevant: Tensor

    def last(self, at: Tensor) -> Tensor:
        """The last entry of the group of each entry at [q, n]."""
        return torch.searchsorted(self.costs, self.costs.gather(1, at), right=True) - 1

    def groups(self, at: Tensor) -> _Groups:
        """The groups of the entries at [q, n]."""
        first, last = torch.searchsorted(self.costs, self.costs.gather(1, at)), self.last(at)
        before = (first - 1).clamp_min(0)
        starts = [torch.where(first > 0, t.gather(1, before), 0).double() for t in (self.items, self.relevant)]
        return _Groups(*starts, *(t.gather(1, last).double() for t in (self.items, self.relevant)))


def evaluate_codes(
    layer: RecurrentQuantizer,
    codes: Tensor,
    labels: Tensor,
    query: Tensor,
    query_labels: Tensor,
    *,
    R: int | None = None,
    metric: str = "l2",
    depths: Sequence[int] = (),
    levels: int | None = None,
) -> list[Figures]:
    """Metrics at every prefix length of codes [N, levels] with labels [N, C], for queries [Q, dim], not quantized.

    Items are ranked by `metric`; those that share a label with the query are relevant. R: depth of mAP, N by default.
    levels: evaluate this length alone.

    >>> for figures in evaluate_codes(layer, layer.encode(x), labels, query, query_labels, R=5000): ...
    """
    op = "evaluate_codes"
    flat = checks.code_rows(op, checks.array(op, "codes", codes, integer=True), layer.levels)
    checks.code_range(op, flat, layer.codewords)
    checks.choice(op, "metric", metric, checks.METRICS)
    checks.vectors(op, "query", query, layer.dim, flat.device)
    codec, figures = layer.codec(), []
    every = range(1, flat.shape[1] + 1)
    for L in every if levels is None else (checks.integer(op, "levels", levels, 1, every[-1]),):
        distinct, copies = torch.unique(flat[:, :L], dim=0, return_inverse=True)
        score = functional.scorer(query, distinct, codec, metric)
        cost = score if metric == "l2" else functools.partial(_negated, score)
        length = bits(layer.codewords, L)
        figures.append(_evaluate(op, cost, copies, len(distinct), labels, query, query_labels, R, depths, length))
    return figures


def _negated(score: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    return -score(batch)


def evaluate_vectors(
    x: Tensor,
    labels: Tensor,
    query: Tensor,
    query_labels: Tensor,
    *,
    R: int | None = None,
    metric: str = "l2",
    depths: Sequence[int] = (),
    copies: Tensor | None = None,
) -> Figures:
    """The same for vectors x [N, D] that are not quantized. With `copies` [N], item i is row copies[i] of x.

    Scores are float32, or float64 if x or query is. Equal vectors are ranked as one, so they always tie.
    """
    op = "evaluate_vectors"
    checks.choice(op, "metric", metric, checks.METRICS)
    for name, value in (("x", x), ("query", query)):
        checks.floating(op, name, value)
        checks.finite(op, name, value)
    if x.ndim != 2:
        checks.fail(op, "x", "[N, D]", checks.shape_of(x))
    checks.vectors(op, "query", query, x.shape[1], x.device)
    wide = torch.promote_types(torch.promote_types(x.dtype, query.dtype), torch.float32)
    x, query = x.to(wide), query.to(wide)
    for name, value in (("x", x), ("query", query)):
        if not bool((value * value).sum(dim=1).isfinite().all()):
            checks.fail(op, name, f"small enough for its squares in {wide}", f"up to {float(value.abs().max()):.3g}")
    if metric == "cosine":
        x, query = (torch.nn.functional.normalize(v, dim=1) for v in (x, query))
    if metric == "l2" and len(x):  # keeps distances, and avoids cancellation for vectors far from 0
        x, query = x - x.mean(dim=0), query - x.mean(dim=0)
    x, same = torch.unique(x, dim=0, return_inverse=True)
    copies = same if copies is None else same[_row_numbers(op, copies, len(same))]
    norms = (x * x).sum(dim=1)

    def cost(batch: Tensor) -> Tensor:
        return (norms if metric == "l2" else 0) - 2 * batch @ x.T

    return _evaluate(op, cost, copies, len(x), labels, query, query_labels, R, depths, None)


def _row_numbers(op: str, copies: Tensor, N: int) -> Tensor:
    """Row numbers below N as int64."""
    numbers = checks.integers(op, "copies", copies).long()
    if numbers.ndim != 1 or (len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < N):
        checks.fail(op, "copies", f"row numbers in 0..{N - 1}", checks.shape_of(copies))
    return numbers


def recall(found: Tensor | np.ndarray, neighbours: Tensor | np.ndarray) -> float:
    """The mean fraction of the true neighbours [Q, t] that is among the ids found [Q, k]; for data without labels.

    Both arguments may be torch or numpy.

    >>> recall(index.search(query, k=100).ids, nearest[:, :10])  # 10 nearest within 100
    """
    found = checks.array("recall", "found", found, integer=True)
    neighbours = checks.array("recall", "neighbours", neighbours, integer=True)
    if found.ndim != 2 or neighbours.ndim != 2 or len(found) != len(neighbours):
        shapes = f"{checks.shape_of(found)} and {checks.shape_of(neighbours)}"
        checks.fail("recall", "found and neighbours", "[Q, k] and [Q, t]", shapes)
    hits = sum(int((f[:, None] == n[None, :]).any(dim=0).sum()) for f, n in zip(found, neighbours, strict=True))
    return hits / max(neighbours.numel(), 1)


def average_precision(scores: Tensor, relevant: Tensor, R: int | None = None, *, largest: bool = False) -> Tensor:
    """AP@R [Q] in float64 of scores [Q, N] with relevant [Q, N] bool; R is N by default.

    Smaller scores are better unless `largest`. AP@R is the mean of the precisions at the relevant items among the first
    R, or 0 if there are none. The result is its expectation over all orders of equal scores.
    """
    checks.tensor("average_precision", "scores", scores)
    if scores.ndim != 2 or relevant.shape != scores.shape or relevant.dtype != torch.bool:
        checks.fail("average_precision", "relevant", "bool [Q, N] like scores", checks.shape_of(relevant))
    if R is not None:
        checks.integer("average_precision", "R", R, 1)
    if bool(scores.isnan().any()):
        checks.fail("average_precision", "scores", "numbers", "NaN")
    ordered, order = _sorted(-scores if largest else scores)
    return _average_precision(_ranking(ordered, torch.ones_like(order), relevant.gather(1, order)), R)


def _evaluate(
    op: str,
    cost: Callable[[Tensor], Tensor],
    copies: Tensor,
    U: int,
    labels: Tensor,
    query: Tensor,
    query_labels: Tensor,
    R: int | None,
    depths: Sequence[int],
    length: int | None,
) -> Figures:
    """Metrics of rankings of U distinct codes or vectors, of which items [N] are copies.

    cost: of all of them for some queries, [q, U]; less is better.
    """
    checks.floating(op, "query", query)
    checks.finite(op, "query", query)
    check_labels(op, labels, len(copies), copies.device)
    check_labels(op, query_labels, len(query), query.device)
    if labels.shape[1] != query_labels.shape[1]:
        checks.fail(op, "query_labels", f"[Q, {labels.shape[1]}]", checks.shape_of(query_labels))
    if len(copies) == 0 or len(query) == 0:
        checks.fail(op, "codes and queries", "at least one of each", f"{len(copies)} and {len(query)}")
    for depth in (*depths, *([R] if R is not None else [])):
        checks.integer(op, "R and depths", depth, 1)
    counts = torch.bincount(copies, minlength=U).int()
    kinds, kind = torch.unique(labels, dim=0, return_inverse=True)  # a kind is a distinct row of labels
    one = torch.ones(len(kind), dtype=torch.float32, device=kind.device)
    table = torch.sparse_coo_tensor(  # [U, kinds]: how many items of each kind
        torch.stack([copies, kind]), one, (U, len(kinds)), check_invariants=True
    ).coalesce()

    @torch.no_grad()
    def sums(rows: Tensor) -> tuple[Tensor, int]:
        """Sums over these queries, and how many of them have relevant items."""
        asked, which = torch.unique(query_labels[rows], dim=0, return_inverse=True)
        relevant = torch.sparse.mm(table, similar(kinds, asked).float()).T.contiguous().int()[which]  # [q, U]
        costs, order = _sorted(cost(query[rows]))
        ranking = _ranking(costs, counts[order], relevant.gather(1, order))
        answered = ranking.relevant[:, -1] > 0
        found = [
            _average_precision(ranking, R).sum()[None],
            _precision(ranking, depths).sum(dim=0),
            _precision_at_recall(ranking)[answered].sum(dim=0),
        ]
        return torch.cat(found), int(answered.sum())

    rows = torch.arange(len(query), device=query.device).split(max(1, _ENTRIES // U))
    found = in_parallel([functools.partial(sums, some) for some in rows])  # the same sums for any number of threads
    totals, answerable = torch.stack([each for each, _ in found]).sum(dim=0), sum(count for _, count in found)
    first, *precision = (totals[: 1 + len(depths)] / len(query)).tolist()
    curve = (totals[1 + len(depths) :] / max(answerable, 1)).tolist()
    return Figures(length, first, tuple(precision), tuple(curve))


def _sorted(costs: Tensor) -> tuple[Tensor, Tensor]:
    """Costs [q, U] in ascending order, or integers that compare as they do, and where they came from, int64 [q, U].

    NaN is as bad as infinity.
    """
    costs = torch.where(costs.isnan(), torch.inf, costs + 0.0)  # -0.0 + 0.0 is 0.0
    if costs.device.type != "cpu" or costs.dtype != torch.float32:
        return costs.sort(dim=1)
    numbers = costs.view(torch.int32)
    numbers = numbers ^ (numbers >> 31 & 0x7FFFFFFF)  # integers in the order of the floats
    keys = (numbers.long() << 32) | torch.arange(costs.shape[1])
    keys.numpy().sort(axis=1)  # by vector instructions, several times as fast as torch
    return (keys >> 32).int(), keys & 0xFFFFFFFF


def _ranking(costs: Tensor, counts: Tensor, relevant: Tensor) -> _Ranking:
    """A ranking by costs [q, U], which ascend, of entries with these counts of items and of relevant items."""
    return _Ranking(costs, *(each.cumsum(dim=1, dtype=torch.int32) for each in (counts, relevant)))


def _average_precision(ranking: _Ranking, R: int | None) -> Tensor:
    """AP@R [q]. In the group that contains R, the relevant items among the first m are hypergeometric."""
    if ranking.items.numel() == 0:
        return ranking.items.new_zeros(len(ranking.items), dtype=torch.float64)
    N = int(ranking.items[0, -1])
    cut = N if R is None else min(R, N)
    at = torch.searchsorted(ranking.items, ranking.items.new_full((len(ranking.items), 1), cut))  # has item R
    width = int(ranking.last(at).max()) + 1
    terms = 1 / torch.arange(1, cut + 1, dtype=torch.float64, device=at.device)
    inverse = torch.cat([terms.new_zeros(1), terms]).cumsum(0)
    precisions = _complete_groups(_Ranking(*(each[:, :width] for each in ranking)), cut, inverse)
    N0, R0, N1, R1 = ranking.groups(at)
    n, r = N1 - N0, R1 - R0
    if bool((cut - N0 == n).all()):  # R is the end of a group for all queries
        return precisions / R1.squeeze(1).clamp_min(1)
    widest = int(torch.minimum(r, cut - N0).max()) + 1
    found = [
        _expectation(precisions[q], N0[q], n[q], R0[q], r[q], cut, inverse)
        for q in torch.arange(len(N0)).split(max(1, _ENTRIES // widest))
    ]
    return torch.cat(found)


def _complete_groups(ranking: _Ranking, cut: int, inverse: Tensor) -> Tensor:
    """Sums [q] of the expected precisions at the relevant items of all groups that end within the first `cut` items."""
    costs, items, relevant = ranking
    last = torch.ones_like(costs, dtype=torch.bool)
    last[:, :-1] = costs[:, 1:] != costs[:, :-1]
    N0, R0 = (_before(torch.where(last, after, 0)) for after in (items, relevant))
    n, r = items - N0, relevant - R0
    A = inverse[items.clamp_max(cut)] - inverse[N0.clamp_max(cut).long()]  # sum of 1 / (N0 + i), i = 1..n
    B = n - (N0 + 1) * A  # sum of (i - 1) / (N0 + i)
    sums = r / n * ((R0 + 1) * A + (r - 1) / (n - 1).clamp_min(1) * B)
    return torch.where(last & (items <= cut), sums, 0).sum(dim=1)


def _before(ended: Tensor) -> Tensor:
    """For each entry the number [q, U] at the end of the last group before it, given the numbers at ends, else 0."""
    highest = ended.cummax(dim=1).values  # the numbers do not decrease
    return torch.cat([torch.zeros_like(ended[:, :1]), highest[:, :-1]], dim=1).double()


def _expectation(precisions: Tensor, N0: Tensor, n: Tensor, R0: Tensor, r: Tensor, cut: int, inverse: Tensor) -> Tensor:
    """AP from the sum of precisions [q] of complete groups and from the group [q, 1] that contains item R."""
    m = cut - N0  # items of the group among the first R; a complete group is in `precisions` already
    A = inverse[cut] - inverse[N0.long()]
    B = m - (N0 + 1) * A
    j = torch.arange(
        float(torch.minimum(r, m).max()) + 1, dtype=n.dtype, device=n.device
    )  # relevant ones among the first m
    log_choose = lambda a, b: torch.lgamma(a + 1) - torch.lgamma(b + 1) - torch.lgamma(a - b + 1)  # noqa: E731
    possible = (j <= r) & (j <= m) & (m - j <= n - r)
    inside = torch.where(possible, j, torch.minimum(r, m))
    log_chance = log_choose(r, inside) + log_choose(n - r, (m - inside).clamp_max(n - r)) - log_choose(n, m)
    chance = torch.where(possible, log_chance.exp(), 0)
    partial = j / m * ((R0 + 1) * A + (j - 1) / (m - 1).clamp_min(1) * B)
    total = torch.where(m < n, precisions[:, None] + partial, precisions[:, None])
    return (chance * torch.where(R0 + j > 0, total / (R0 + j).clamp_min(1), 0)).sum(dim=1)


def _precision(ranking: _Ranking, depths: Sequence[int]) -> Tensor:
    """The expected precision at each depth: [q, depths]. Places after the last item count as not relevant."""
    N = ranking.items[:, -1:]
    depth = N.new_tensor([*depths]).expand(len(N), -1)
    within = torch.minimum(depth, N)
    N0, R0, N1, R1 = ranking.groups(torch.searchsorted(ranking.items, within))
    return (R0 + (within - N0) * (R1 - R0) / (N1 - N0)) / depth


def _precision_at_recall(ranking: _Ranking) -> Tensor:
    """The precision where the expected recall reaches 1 %, 2 %, ... 100 %: [q, RECALLS]."""
    total = ranking.relevant[:, -1:].double()
    percent = torch.arange(1, RECALLS + 1, dtype=total.dtype, device=total.device)
    wanted = total * percent / RECALLS  # multiply first, so that integers stay exact
    at = torch.searchsorted(ranking.relevant, wanted.ceil().int()).clamp_max(ranking.relevant.shape[1] - 1)
    N0, R0, N1, R1 = ranking.groups(at)
    place = N0 + (wanted - R0) * (N1 - N0) / (R1 - R0).clamp_min(1e-300)
    return torch.where(wanted > 0, wanted / place.clamp_min(1e-300), 0)
