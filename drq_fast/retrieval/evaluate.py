"""Retrieval metrics as expectations over all orders of equal scores, so that tie-breaking cannot bias them.

Hundreds of items may have equal codes, so distinct codes are ranked, each with its number of items and of relevant
items; no matrix of queries and items is formed. If N0 items with R0 relevant ones precede a group of n items with r
relevant ones, the first N0 + i items contain R0 + i r/n relevant ones on average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import checks, functional
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
    """For every entry [q, U] of a ranking, in float64: items and relevant items before and after its group."""

    N0: Tensor
    R0: Tensor
    N1: Tensor
    R1: Tensor
    last: Tensor  # bool: the last entry of its group


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
) -> list[Figures]:
    """Metrics at every prefix length of codes [N, levels] with labels [N, C], for queries [Q, dim], not quantized.

    Items are ranked by `metric`; those that share a label with the query are relevant. R: depth of mAP, N by default.

    >>> for figures in evaluate_codes(layer, layer.encode(x), labels, query, query_labels, R=5000): ...
    """
    op = "evaluate_codes"
    flat = checks.code_rows(op, checks.array(op, "codes", codes, integer=True), layer.levels)
    codec, figures = layer.codec(), []
    for L in range(1, flat.shape[1] + 1):
        distinct, copies = torch.unique(flat[:, :L], dim=0, return_inverse=True)

        def rank(batch: Tensor, distinct: Tensor = distinct) -> tuple[Tensor, Tensor]:
            found = functional.search(
                batch,
                distinct,
                codec.codebook,
                codec.scale,
                k=len(distinct),
                offset=codec.offset,
                codebooks=codec.sizes,
                metric=metric,
            )
            return found.scores, found.positions

        length = bits(layer.codewords, L)
        figures.append(_evaluate(op, rank, copies, len(distinct), labels, query, query_labels, R, depths, length))
    return figures


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

    def rank(batch: Tensor) -> tuple[Tensor, Tensor]:
        order = ((norms if metric == "l2" else 0) - 2 * batch @ x.T).sort(dim=1)
        return order.values, order.indices

    return _evaluate(op, rank, copies, len(x), labels, query, query_labels, R, depths, None)


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
    ordered, order = scores.sort(dim=1, descending=largest)
    counts = torch.ones_like(ordered, dtype=torch.float64)
    return _average_precision(_groups(ordered, counts, relevant.gather(1, order).double()), R)


def _evaluate(
    op: str,
    rank: Callable[[Tensor], tuple[Tensor, Tensor]],
    copies: Tensor,
    U: int,
    labels: Tensor,
    query: Tensor,
    query_labels: Tensor,
    R: int | None,
    depths: Sequence[int],
    length: int | None,
) -> Figures:
    """Metrics of rankings of U distinct codes or vectors, of which items [N] are copies."""
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
    counts = torch.bincount(copies, minlength=U).double()
    kinds, kind = torch.unique(labels, dim=0, return_inverse=True)  # a kind is a distinct row of labels
    one = torch.ones(len(kind), dtype=torch.float32, device=kind.device)
    table = torch.sparse_coo_tensor(  # [U, kinds]: how many items of each kind
        torch.stack([copies, kind]), one, (U, len(kinds)), check_invariants=True
    ).coalesce()
    totals = torch.zeros(1 + len(depths) + RECALLS, dtype=torch.float64, device=query.device)
    answerable = 0
    for rows in torch.arange(len(query)).split(max(1, _ENTRIES // U)):
        wanted = similar(kinds, query_labels[rows])  # [kinds, q]
        relevant = torch.sparse.mm(table, wanted.float()).T.double()  # [q, U]
        scores, positions = rank(query[rows])
        groups = _groups(scores, counts[positions], relevant.gather(1, positions))
        answered = groups.R1[:, -1] > 0
        answerable += int(answered.sum())
        totals[0] += _average_precision(groups, R).sum()
        totals[1 : 1 + len(depths)] += _precision(groups, depths).sum(dim=0)
        totals[1 + len(depths) :] += _precision_at_recall(groups)[answered].sum(dim=0)
    first, *precision = (totals[: 1 + len(depths)] / len(query)).tolist()
    curve = (totals[1 + len(depths) :] / max(answerable, 1)).tolist()
    return Figures(length, first, tuple(precision), tuple(curve))


def _groups(scores: Tensor, counts: Tensor, relevant: Tensor) -> _Groups:
    """Groups of equal scores in a ranking [q, U] of entries with these counts of items and of relevant items."""
    last = torch.ones_like(scores, dtype=torch.bool)
    last[:, :-1] = scores[:, 1:] != scores[:, :-1]
    N1, R1 = counts.cumsum(dim=1), relevant.cumsum(dim=1)
    starts = []
    for after in (N1, R1):  # non-decreasing, so a running maximum finds the last group that has ended
        ended = torch.where(last, after, 0).cummax(dim=1).values
        starts.append(torch.cat([torch.zeros_like(ended[:, :1]), ended[:, :-1]], dim=1))
    ends = [torch.where(last, after, torch.inf).flip(1).cummin(dim=1).values.flip(1) for after in (N1, R1)]
    return _Groups(starts[0], starts[1], ends[0], ends[1], last)


def _average_precision(groups: _Groups, R: int | None) -> Tensor:
    """AP@R [q]. In the group that contains R, the relevant items among the first m are hypergeometric."""
    N0, R0, N1, R1, last = groups
    if N0.numel() == 0:
        return N0.new_zeros(len(N0))
    N = int(N1[0, -1])
    cut = N if R is None else min(R, N)
    inverse = torch.cat([N0.new_zeros(1), 1 / torch.arange(1, N + 1, dtype=N0.dtype, device=N0.device)]).cumsum(0)
    n, r = N1 - N0, R1 - R0
    A = inverse[N1.long()] - inverse[N0.long()]  # sum of 1 / (N0 + i), i = 1..n
    B = n - (N0 + 1) * A  # sum of (i - 1) / (N0 + i)
    sums = r / n * ((R0 + 1) * A + (r - 1) / (n - 1).clamp_min(1) * B)
    precisions = torch.where(last & (cut >= N1), sums, 0).sum(dim=1)
    at = torch.searchsorted(N1, N1.new_full((len(N1), 1), cut))  # the group that contains item R
    N0, n, R0, r = (t.gather(1, at) for t in (N0, n, R0, r))
    if bool((cut - N0 == n).all()):  # R is the end of a group for all queries
        return precisions / (R0 + r).squeeze(1).clamp_min(1)
    widest = int(torch.minimum(r, cut - N0).max()) + 1
    found = [
        _expectation(precisions[q], N0[q], n[q], R0[q], r[q], cut, inverse)
        for q in torch.arange(len(N0)).split(max(1, _ENTRIES // widest))
    ]
    return torch.cat(found)


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


def _precision(groups: _Groups, depths: Sequence[int]) -> Tensor:
    """The expected precision at each depth: [q, depths]. Places after the last item count as not relevant."""
    N = groups.N1[:, -1:]
    depth = groups.N1.new_tensor(list(depths)).expand(len(N), -1).contiguous()
    within = torch.minimum(depth, N)
    at = torch.searchsorted(groups.N1.contiguous(), within)
    N0, R0, N1, R1 = (t.gather(1, at) for t in groups[:4])
    return (R0 + (within - N0) * (R1 - R0) / (N1 - N0)) / depth


def _precision_at_recall(groups: _Groups) -> Tensor:
    """The precision where the expected recall reaches 1 %, 2 %, ... 100 %: [q, RECALLS]."""
    R1 = groups.R1.contiguous()
    percent = torch.arange(1, RECALLS + 1, dtype=R1.dtype, device=R1.device)
    wanted = R1[:, -1:] * percent / RECALLS  # multiply first, so that integers stay exact
    at = torch.searchsorted(R1, wanted).clamp_max(R1.shape[1] - 1)
    N0, R0, N1, end = (t.gather(1, at) for t in groups[:4])
    place = N0 + (wanted - R0) * (N1 - N0) / (end - R0).clamp_min(1e-300)
    return torch.where(wanted > 0, wanted / place.clamp_min(1e-300), 0)
