"""Search in plain torch: scores by tables, the best of them, squared norms, and scores by stored vectors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks, modes
from ..types import Database, Lists, Parameters, SearchResult, Stored
from . import inverted
from .levels import decode, root, widened

_MAX_SCORES = 1 << 22  # numbers that a search holds at a time
_MAX_GRAM = 8192  # codewords up to which their inner products K x K are formed


def lookup(table: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
    """sums [Q, N] = <q, xhat_n>: the terms fl(scale[m] * T[rows_m]) added level by level, without fused multiply-add.

    rows [N, M] of the codebook are the same for all queries, rows [Q, N, M] are each query's own.
    """
    terms = [_entries(scale[m] * table, rows[..., m]) for m in range(rows.shape[-1])]
    return reduce(torch.add, terms)


def _entries(table: Tensor, columns: Tensor) -> Tensor:
    columns = columns.long()
    return table[:, columns] if columns.ndim == 1 else table.gather(1, columns)


class Prepared(NamedTuple):
    """What a search knows of its queries: table [Q, K] = q C^T; constants [Q]: ||q||^2 (l2) or <q, offset>;
    lengths [Q]: ||q|| (cosine). For l2, q is the query less the offset. With lists, constants [Q, N] are those of the
    list that a row belongs to."""

    table: Tensor
    constants: Tensor
    lengths: Tensor | None


def prepare(query: Tensor, codebook: Tensor, offset: Tensor | None, metric: str) -> Prepared:
    """Of queries [Q, D], in the dtype they all have in common."""
    if metric == "l2":
        query = query if offset is None else query - offset
        return Prepared(query @ codebook.T, query.square().sum(dim=1), None)
    constants = query.new_zeros(len(query)) if offset is None else query @ offset
    lengths = _nearest_root(query.square().sum(dim=1)) if metric == "cosine" else None
    return Prepared(query @ codebook.T, constants, lengths)


def scores_of(sums: Tensor, norms: Tensor | None, prepared: Prepared, metric: str) -> Tensor:
    """Scores [Q, N] from sums [Q, N] and norms [N] or [Q, N]."""
    constants, lengths = prepared.constants, prepared.lengths
    constants = constants[:, None] if constants.ndim == 1 else constants
    if metric == "ip":
        return sums + constants
    assert norms is not None
    if metric == "l2":
        return (norms - 2 * sums) + constants
    assert lengths is not None
    inner = sums + constants
    both = lengths[:, None] * _nearest_root(norms)
    return torch.where(both > 0, inner / torch.where(both > 0, both, 1), 0)


def adc(query: Tensor, codes: Tensor, codec: Parameters, metric: str, norms: Tensor | None) -> Tensor:
    """Scores [Q, N] of all codes [N, L] for queries [Q, D] that are not quantized themselves; differentiable.

    "l2" is the squared distance (less is better), "ip" the inner product, "cosine" the cosine (more is better).
    norms [N]: what `squared_norms` returns; computed if None. Codes [Q, N, L] are each query's own, with norms [Q, N].
    """
    with modes.precise(query.device.type):
        query, codebook, scale, offset, norms = widened(query, *codec.tensors(), norms)
        codes = numbers(codes)
        prepared = prepare(query, codebook, offset, metric)
        sums = lookup(prepared.table, codec.rows(codes), scale)  # <q, xhat>
        if metric != "ip" and norms is None:
            wide = Parameters(codebook, scale, offset, codec.groups)
            norms = squared_norms(codes.flatten(0, -2), wide, metric).view(codes.shape[:-1])
        return scores_of(sums, norms, prepared, metric)


def search(
    query: Tensor, database: Database, k: int, *, finite: bool = False, probes: int | None = None
) -> SearchResult:
    """The k best codes for each query [Q, D], in the order (score, position); scores are differentiable.

    Where fewer than k remain: position -1 and the worst possible score. finite: refuse queries that have NaN or
    infinity. probes: with lists, look at the codes of so many lists, the nearest to each query; None: of all lists.
    """
    if finite:
        checks.finite("search", "query", query, torch.float32)
    if database.lists is not None:
        return _search_lists(query, database, database.lists, k, probes)
    candidates = None if database.keep is None else database.keep.nonzero().squeeze(1)
    if candidates is not None:
        database = database.rows(candidates)
    codes, codec, metric, norms = database.codes, database.codec, database.metric, database.norms
    rows = _rows_at_a_time(codes)
    if metric != "ip" and norms is None:
        _, codebook, scale, offset = widened(query, *codec.tensors())
        norms = squared_norms(codes, Parameters(codebook, scale, offset, codec.groups), metric)

    def best_from(some: Tensor, first: int) -> tuple[Tensor, Tensor]:
        own = None if norms is None else norms[first : first + rows]
        scores = adc(some, codes[first : first + rows], codec, metric, own)
        order = rank(scores.detach(), k, metric)
        return scores.gather(1, order), order + first

    def best(some: Tensor) -> SearchResult:
        found = [best_from(some, first) for first in range(0, max(1, len(codes)), rows)]
        scores, positions = (torch.cat(columns, dim=1) for columns in zip(*found, strict=True))
        if len(found) > 1:
            order = rank(scores.detach(), k, metric)  # equal scores stand in the order of their positions
            scores, positions = scores.gather(1, order), positions.gather(1, order)
        return pad_result(scores, positions if candidates is None else candidates[positions], k, metric)

    parts = [best(some) for some in query.split(max(1, _MAX_SCORES // max(1, min(rows, len(codes)))))]
    return SearchResult(torch.cat([p.scores for p in parts]), torch.cat([p.positions for p in parts]))


def _rows_at_a_time(codes: Tensor) -> int:
    """How many codes [N, L] are scored at a time: a code takes about L + 2 numbers of 8 bytes."""
    return max(1, _MAX_SCORES // (codes.shape[1] + 2))


@torch.no_grad()
def refine(query: Tensor, positions: Tensor, stored: Stored, metric: str, k: int) -> SearchResult:
    """The k best of the candidates at positions [Q, n], by the stored vectors, in the order (score, position).

    query [Q, D] float32; position -1 is none. Sums over dimensions have a fixed order, so that every backend computes
    the same bits.
    """
    query = query.float()

    def best(some: Tensor, at: Tensor) -> SearchResult:
        at = at.sort(dim=1).values
        scores = _exact_scores(some, stored.floats(at.clamp_min(0)), metric)
        worst = float("inf") if metric == "l2" else float("-inf")
        scores = torch.where((at < 0) | scores.isnan(), worst, scores)
        # Equal scores keep the order of positions, and those without a candidate come last.
        order = _cost(scores, metric).sort(dim=1, stable=True).indices
        order = order.gather(1, (at < 0).gather(1, order).to(torch.int8).sort(dim=1, stable=True).indices)[:, :k]
        return pad_result(scores.gather(1, order), at.gather(1, order), k, metric)

    step = max(1, _MAX_SCORES // max(1, positions.shape[1] * query.shape[1]))
    parts = [best(*some) for some in zip(query.split(step), positions.split(step), strict=True)]
    return SearchResult(torch.cat([p.scores for p in parts]), torch.cat([p.positions for p in parts]))


def _exact_scores(query: Tensor, x: Tensor, metric: str) -> Tensor:
    """Scores [Q, n] of vectors x [Q, n, D] for queries [Q, D]."""
    query = query[:, None]
    if metric == "l2":
        return _ordered_sum((query - x).square())
    inner = _ordered_sum(query * x)
    if metric == "ip":
        return inner
    lengths = _nearest_root(_ordered_sum(query.square())) * _nearest_root(_ordered_sum(x.square()))
    return torch.where(lengths > 0, inner / torch.where(lengths > 0, lengths, 1), 0)


def _ordered_sum(terms: Tensor) -> Tensor:
    """The sum over the last dimension: 64 partial sums, in order, which are then added in halves."""
    blocks = torch.nn.functional.pad(terms, (0, -terms.shape[-1] % 64)).unflatten(-1, (-1, 4, 16))
    total = reduce(torch.add, blocks.unbind(dim=-3))
    total = (total[..., 0, :] + total[..., 1, :]) + (total[..., 2, :] + total[..., 3, :])
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def _search_lists(query: Tensor, database: Database, lists: Lists, k: int, probes: int | None) -> SearchResult:
    codec, metric = database.codec, database.metric
    with modes.precise(query.device.type):
        wide, codebook, _, offset, centroids = widened(query, *codec.tensors(), lists.centroids)
        prepared = prepare(wide, codebook, offset, metric)
        return search_given_lists(
            prepared, inverted.products_of(wide, centroids, offset, metric), database, lists, k, probes
        )


def search_given_lists(
    prepared: Prepared, products: Tensor, database: Database, lists: Lists, k: int, probes: int | None
) -> SearchResult:
    """The same, given the products [Q, L] of queries and centroids."""
    codec, metric, N = database.codec, database.metric, len(database.codes)
    scale, norms = codec.scale.to(prepared.table.dtype), database.norms
    if metric != "ip" and norms is None:
        norms = squared_norms(database.codes, codec, metric, lists)
    list_of = lists.of(torch.arange(N, device=lists.device))
    nearest = inverted.nearest_lists(products, prepared.constants, lists, metric, probes)
    constants = inverted.constants_of(products, prepared.constants, metric)
    found = []
    for q, mine in enumerate(nearest):
        wanted = torch.isin(list_of, mine)
        rows = (wanted if database.keep is None else wanted & database.keep).nonzero().squeeze(1)
        lengths = None if prepared.lengths is None else prepared.lengths[q : q + 1]
        own = Prepared(prepared.table[q : q + 1], constants[q : q + 1, list_of[rows]], lengths)
        sums = lookup(own.table, codec.rows(numbers(database.codes[rows])), scale)
        scores = scores_of(sums, None if norms is None else norms[rows].to(sums.dtype), own, metric)
        order = rank(scores.detach(), k, metric)
        found.append(pad_result(scores.gather(1, order), rows[order], k, metric))
    if not found:
        return pad_result(products.new_empty(0, 0), list_of.new_empty(0, 0), k, metric)
    return SearchResult(torch.cat([each.scores for each in found]), torch.cat([each.positions for each in found]))


def squared_norms(codes: Tensor, codec: Parameters, metric: str, lists: Lists | None = None) -> Tensor:
    """The squared norms [N] that a metric needs of codes [N, L]: ||xhat||^2 for l2, ||offset + xhat||^2 for cosine.

    With lists, xhat has the centroid of its list in it. A function of the codes (and their list) alone, added up in a
    fixed order, so that equal codes tie exactly.
    """
    with modes.precise(codec.codebook.device.type):
        codebook, scale, offset = widened(*codec.tensors())
        shift = offset if metric == "cosine" else None
        if len(codebook) > _MAX_GRAM:
            codes, shifted = numbers(codes), Parameters(codebook, scale, shift, codec.groups)
            return (
                _squared_norms_of_distinct(codes, shifted) if lists is None else _decoded_norms(codes, shifted, lists)
            )
        gram, step = codebook @ codebook.T, _rows_at_a_time(codes)
        inner, constant = (
            (None, None) if shift is None or lists is not None else (2 * (codebook @ shift), shift @ shift)
        )

        def of_codes(some: Tensor) -> Tensor:
            rows = codec.rows(numbers(some))
            total = _gram_sums(rows, gram, scale)
            if inner is None or constant is None:
                return total
            for i, b_i in enumerate(rows.unbind(dim=1)):
                total = total + scale[i] * inner[b_i]
            return total + constant

        total = torch.cat([of_codes(some) for some in codes.split(step)])
        if lists is None:
            return total
        for part in inverted.shifts_of(Parameters(codebook, scale, offset), metric, lists):
            for first in range(part.begin, part.end, step):
                here = slice(first, min(first + step, part.end))
                own = lists.of(torch.arange(here.start, here.stop, device=codes.device)) - part.first
                for i, b_i in enumerate(codec.rows(numbers(codes[here])).unbind(dim=1)):
                    total[here] += scale[i] * part.inner[own, b_i]
                total[here] += part.constants[own]
        return total


def _gram_sums(rows: Tensor, gram: Tensor, scale: Tensor) -> Tensor:
    """||sum_m scale[m] C[rows_m]||^2 [N] from inner products [T, T] of codewords."""
    columns = rows.unbind(dim=1)
    total = torch.zeros(len(rows), dtype=gram.dtype, device=gram.device)
    for i, b_i in enumerate(columns):
        for j, b_j in enumerate(columns[:i]):
            total = total + (2 * scale[i] * scale[j]) * gram[b_i, b_j]
        total = total + scale[i] * scale[i] * gram[b_i, b_i]
    return total


def _decoded_norms(codes: Tensor, codec: Parameters, lists: Lists) -> Tensor:
    """The same with lists where K x K is too large: all codes are decoded, some at a time."""
    norms = []
    for rows in torch.arange(len(codes), device=codes.device).split(max(1, (1 << 24) // codec.codebook.shape[1])):
        x_hat = decode(codes[rows], codec) + lists.centroids[lists.of(rows)].to(codec.codebook.dtype)
        norms.append(x_hat.square().sum(dim=1))
    return torch.cat(norms) if norms else codec.scale.new_empty(0)


def numbers(codes: Tensor) -> Tensor:
    """Codes to compute with: two-byte codes, which an index stores bit for bit in int16, become int32."""
    return codes.to(torch.int32) & 0xFFFF if codes.dtype == torch.int16 else codes


def _squared_norms_of_distinct(codes: Tensor, codec: Parameters) -> Tensor:
    """The same where K x K is too large: each distinct code is decoded once, some at a time."""
    distinct, which = codes.unique(dim=0, return_inverse=True)
    rows = max(1, (1 << 24) // codec.codebook.shape[1])
    return torch.cat([decode(part, codec).square().sum(dim=1) for part in distinct.split(rows)])[which]


def rank(scores: Tensor, k: int, metric: str) -> Tensor:
    """The columns [Q, min(k, N)] of the best scores [Q, N] in the order (score, position), without sorting all of N."""
    k = min(k, scores.shape[1])
    if 4 * k >= scores.shape[1]:
        return _cost(scores, metric).sort(dim=1, stable=True).indices[:, :k]
    cost = _cost(scores, metric)
    threshold = cost.topk(k, dim=1, largest=False).values[:, -1:]
    rows, columns = (~(cost > threshold)).nonzero(as_tuple=True)  # the k best and all that tie with the last of them
    order = cost[rows, columns].sort(stable=True).indices
    order = order[rows[order].sort(stable=True).indices]
    counts = rows.bincount(minlength=len(scores))
    first = counts.cumsum(0) - counts
    return columns[order[first[:, None] + torch.arange(k, device=scores.device)]]


def best_of(results: Sequence[SearchResult], k: int, metric: str) -> SearchResult:
    """The k best of several results [Q, n], of different positions each, in the order (score, position)."""
    all_scores, found = (torch.cat(parts, dim=1) for parts in zip(*results, strict=True))
    order = torch.where(found < 0, torch.iinfo(torch.int64).max, found).argsort(dim=1, stable=True)
    order = order.gather(1, _cost(all_scores.gather(1, order), metric).argsort(dim=1, stable=True))[:, :k]
    return SearchResult(all_scores.gather(1, order), found.gather(1, order))


def pad_result(scores: Tensor, positions: Tensor, k: int, metric: str) -> SearchResult:
    """Fills [Q, fewer than k] up to [Q, k] with position -1 and the worst possible score."""
    missing = (len(scores), k - scores.shape[1])
    worst = float("inf") if metric == "l2" else float("-inf")
    return SearchResult(
        torch.cat([scores, scores.new_full(missing, worst)], dim=1),
        torch.cat([positions, positions.new_full(missing, -1)], dim=1),
    )


def _cost(scores: Tensor, metric: str) -> Tensor:
    """Scores turned so that less is better."""
    return scores if metric == "l2" else -scores


def _nearest_root(squared: Tensor) -> Tensor:
    """The square root, correctly rounded: torch's own in float32 may be off by the last bit, that of float64 is not."""
    return root(squared.double()).to(squared.dtype)
