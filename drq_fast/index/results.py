"""The best of several results, such as those of the shards of an index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import checks

MOST_PADDED = 1 << 20  # results per query that may be requested from an index of fewer vectors


class IndexResult(NamedTuple):
    """scores [Q, k], best first, and ids [Q, k] int64, -1 where there were fewer than k; in kind with the query."""

    scores: Any
    ids: Any


def merge(results: Sequence[Any], k: int | None = None, *, metric: str = "l2") -> IndexResult:
    """The k best of results (scores [Q, n], ids [Q, n]), best first each, in the order (score, id); in kind.

    results: of the same queries, from indexes with the same codec and metric, so that scores can be compared; n may
    differ, and id -1 is none. k: the largest n by default. Where fewer than k remain: id -1 and the worst score. An id
    that several results have is returned several times.

    >>> scores, ids = merge([shard.search(query, k=10) for shard in shards], k=10, metric="l2")
    """
    checks.choice("merge", "metric", metric, checks.METRICS)
    results = list(results)
    if not results:
        checks.fail("merge", "results", "at least one", "none")
    parts = [_checked(*result) for result in results]
    single = parts[0].single
    Q = len(parts[0].scores)
    for part in parts:
        if len(part.scores) != Q or part.single != single:
            checks.fail("merge", "results", f"of the same {Q} queries", f"{len(part.scores)}")
    k = checks.integer("merge", "k", max(p.scores.shape[1] for p in parts) if k is None else k, 1, checks.MAX_RESULTS)
    costs = [part.scores if metric == "l2" else -part.scores for part in parts]
    bound = _bound(costs, [part.ids for part in parts], k)
    picked = [_candidates(*each, bound) for each in zip(costs, parts, strict=True)]
    row, cost, score, id = (np.concatenate(column) for column in zip(*picked, strict=True))
    order = _order(row, cost, id)
    row, score, id = row[order], score[order], id[order]
    column = np.arange(len(row)) - np.searchsorted(row, row)  # the rank of each candidate among those of its query
    kept = column < k
    scores = np.full((Q, k), np.inf if metric == "l2" else -np.inf, parts[0].scores.dtype)
    ids = np.full((Q, k), -1, np.int64)
    scores[row[kept], column[kept]], ids[row[kept], column[kept]] = score[kept], id[kept]
    return IndexResult(*(_in_kind(value[0] if single else value, results[0][0]) for value in (scores, ids)))


class _Part(NamedTuple):
    scores: np.ndarray  # [Q, n]
    ids: np.ndarray  # [Q, n]
    single: bool  # of one query [D]


def _checked(scores: Any, ids: Any) -> _Part:
    values, numbers = _as_numpy(scores), _as_numpy(ids)
    if values.shape != numbers.shape or values.ndim not in (1, 2) or values.dtype.kind != "f":
        what = f"{values.dtype} {list(values.shape)} and {list(numbers.shape)}"
        checks.fail("merge", "results", "scores [Q, k] and ids [Q, k]", what)
    single = values.ndim == 1
    return _Part(values[None] if single else values, numbers[None] if single else numbers, single)


def _as_numpy(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def _in_kind(value: np.ndarray, like: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(value)).to(like.device) if isinstance(like, Tensor) else value


def _bound(costs: list[np.ndarray], ids: list[np.ndarray], k: int) -> np.ndarray:
    """[Q, 1]: a cost that at least k candidates do not exceed; infinite where fewer are known.

    If the cost in column j does not exceed c in i of the results, which are sorted, (j + 1) i candidates do not.
    """
    bound, j = np.full((len(costs[0]), 1), np.inf, costs[0].dtype), 0
    while j < k:
        at = [
            np.where(id[:, j] >= 0, cost[:, j], np.inf)
            for cost, id in zip(costs, ids, strict=True)
            if cost.shape[1] > j
        ]
        needed = -(-k // (j + 1))
        if needed <= len(at):
            column = np.partition(np.stack(at, axis=1), needed - 1, axis=1)[:, needed - 1 : needed]
            bound = np.minimum(bound, column)
        j = 2 * j + 1
    return bound


def _candidates(cost: np.ndarray, part: _Part, bound: np.ndarray) -> tuple[np.ndarray, ...]:
    """(row, cost, score, id) [n] of those that may be among the k best."""
    at = np.flatnonzero((cost <= bound) & (part.ids >= 0))
    return at // max(1, cost.shape[1]), *(np.ravel(value)[at] for value in (cost, part.scores, part.ids))


def _order(row: np.ndarray, cost: np.ndarray, id: np.ndarray) -> np.ndarray:
    """The order (row, cost, id)."""
    if cost.dtype != np.float32:
        return np.lexsort((id, cost, row))
    bits = (cost + np.float32(0)).view(np.uint32)  # one zero
    bits = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))  # compare as the floats do
    keys = row.astype(np.uint64) << np.uint64(32) | bits
    order = np.argsort(keys)
    keys = keys[order]
    equal = keys[1:] == keys[:-1]
    tied = np.flatnonzero(np.append(equal, False) | np.append(False, equal))  # those that only the id can order
    order[tied] = order[tied][np.lexsort((id[order[tied]], keys[tied]))]
    return order
