"""Every operation in plain torch: the definition that all other code is measured against.

Symbols are the paper's: x [N, D] vectors, codebook [K, D], scale [M] one factor per level, gamma the sharpness of the
soft assignment, codes [N, M], offset [D] or None. Codes [N, L] with L < M are prefixes. Arguments are taken as checked
(see `functional`). 16-bit floats are computed in float32, autocast is off inside. docs/math.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks
from . import inverted
from .types import (
    CodewordSums,
    Database,
    Distortion,
    Lists,
    Loss,
    Parameters,
    Quantized,
    SearchResult,
    SquaredErrors,
    Stored,
)

_MAX_SCORES = 1 << 22  # numbers that encoding or a search holds at a time
_MAX_GRAM = 8192  # codewords up to which their inner products K x K are formed

FLOOR = 1e-3  # share of the sum of level weights that levels at the end count at least, above the rounding of float32


class Level(NamedTuple):
    """What one level adds: codes [N], hard [N, D], soft [N, D]."""

    codes: Tensor
    hard: Tensor
    soft: Tensor


OneLevel = Callable[[int, Tensor, Tensor, Tensor], Level]  # m, h [N, D], codebook [K, D], scale[m] -> level m of h


def quantize(x: Tensor, codec: Parameters, gamma: float | Tensor, level: OneLevel | None = None) -> Quantized:
    """Soft and hard approximation of x [N, D] by M levels, and the codes; differentiable.

    level: another backend's, which computes the same.
    """
    with torch.autocast(x.device.type, enabled=False):
        h, codebook, scale, offset = _centred(x, codec)
        levels = list(_levels(h, codebook, scale, level or _level_with(gamma)))
        shift = 0 if offset is None else offset
        soft = sum((found.soft for found in levels), torch.zeros_like(h)) + shift
        hard = sum((found.hard for found in levels), torch.zeros_like(h)) + shift
        return Quantized(soft.to(x.dtype), hard.to(x.dtype), torch.stack([found.codes for found in levels], dim=1))


def distortion(x: Tensor, codec: Parameters, gamma: float | Tensor, level: OneLevel | None = None) -> Distortion:
    """The errors of x [N, D] after each of M levels, each [N, M], and the codes; differentiable.

    level: another backend's, which computes the same.
    """
    with torch.autocast(x.device.type, enabled=False):
        h, codebook, scale, _ = _centred(x, codec)
        hard_error, soft_error = h, h
        hard, soft, joint, codes = [], [], [], []
        for found in _levels(h, codebook, scale, level or _level_with(gamma)):
            hard_error = hard_error - found.hard
            soft_error = soft_error - found.soft
            hard.append(_norm(hard_error))
            soft.append(_norm(soft_error))
            joint.append((hard_error - soft_error).square().sum(dim=1))
            codes.append(found.codes)
        return Distortion(*(torch.stack(columns, dim=1) for columns in (hard, soft, joint, codes)))


def loss(
    x: Tensor,
    codec: Parameters,
    gamma: float | Tensor,
    weights: tuple[float, float, float],
    omega: Tensor | None,
    joint: str,
) -> Loss:
    """weights . (E_h, E_s, E_j), each per vector of x [N, D], averaged over the batch, and the codes; differentiable.

    omega [M] weighs the levels within E_h and E_s, None counts all alike. joint "gap": E_j = |E_h - E_s|; "mse": the
    squared distance of the two approximations after the last level. An empty batch has loss 0.
    """
    with torch.autocast(x.device.type, enabled=False):
        if not any(weights[1:]):
            return hard_loss(squared_errors(x, codec, 1.0), weights[0], omega)
        return loss_of(distortion(x, codec, gamma), weights, omega, joint)


def hard_loss(found: SquaredErrors, weight: float, omega: Tensor | None) -> Loss:
    """The loss where only E_h counts, given squared errors with commitment 1: no soft assignment is computed."""
    squared = found.errors - found.errors.detach() / 2  # ||x - xhat||^2, with its gradients by x and by the codec
    hard = _sqrt(squared)
    return loss_of(Distortion(hard, hard.detach(), hard.detach(), found.codes), (weight, 0.0, 0.0), omega, "mse")


def loss_of(errors: Distortion, weights: tuple[float, float, float], omega: Tensor | None, joint: str) -> Loss:
    """The loss, given the errors after each level."""
    N, M = errors.hard.shape
    omega = errors.hard.new_ones(M) if omega is None else omega.to(errors.hard)
    e_hard, e_soft = errors.hard @ omega, errors.soft @ omega
    e_joint = (e_hard - e_soft).abs() if joint == "gap" else errors.joint[:, -1]
    total = weights[0] * e_hard + weights[1] * e_soft + weights[2] * e_joint
    return Loss(total.sum() / torch.sym_max(N, 1), errors.codes)


def squared_errors(x: Tensor, codec: Parameters, commitment: float) -> SquaredErrors:
    """The squared errors of x [N, D] after each of M greedy levels, and the codes; differentiable.

    The codec is drawn to x, and x to what its code stands for, `commitment` times as much.
    """
    with torch.autocast(x.device.type, enabled=False):
        x, codebook, scale, offset = _wide(x, *codec.tensors())
        with torch.no_grad():
            codes = _encode_greedy(x if offset is None else x - offset, codebook, scale)
        x_hat, errors = torch.zeros_like(x) if offset is None else offset.expand(x.shape), []
        for m, s in enumerate(scale.unbind()):
            x_hat = x_hat + s * codebook[codes[:, m]]
            of_codec = (x.detach() - x_hat).square().sum(dim=1)
            of_x = (x - x_hat.detach()).square().sum(dim=1)
            errors.append(of_codec + commitment * of_x)
        return SquaredErrors(torch.stack(errors, dim=1), codes)


@torch.no_grad()
def codeword_sums(x: Tensor, codes: Tensor, codec: Parameters, weights: Tensor) -> CodewordSums:
    """What a step of k-means adds up for each codeword, over the places (n, m) of codes [N, M] that have it.

    sums[k] = sum of weights[n, m] scale[m] h_{m+1}, the residual after level m, and mass[k] = sum of weights[n, m]
    scale[m]^2: codebook + sums / mass minimises the weighted sum of ||h_m - scale[m] C[b_m]||^2, given h. Vectors of x
    [N, D] whose weights [N, M] are 0 may hold anything.
    """
    with torch.autocast(x.device.type, enabled=False):
        x, codebook, scale, offset, weights = _wide(x, *codec.tensors(), weights)
        h, sums = x if offset is None else x - offset, torch.zeros_like(codebook)
        for m, s in enumerate(scale.unbind()):
            h = h - s * codebook[codes[:, m]]
            pulls = (s * weights[:, m, None]) * h
            sums = sums.index_add(0, codes[:, m], torch.where(weights[:, m, None] == 0, 0, pulls))
        return CodewordSums(sums, codeword_mass(codes, scale, weights, len(codebook)))


def codeword_mass(codes: Tensor, scale: Tensor, weights: Tensor, K: int) -> Tensor:
    """[K]: weights[n, m] scale[m]^2 added up by codes [N, M]."""
    mass = scale.new_zeros(K, dtype=torch.float64)
    return mass.index_add(0, codes.flatten(), (weights * scale.square()).flatten().double()).to(scale.dtype)


def encode(x: Tensor, codec: Parameters, beam: int, omega: Tensor | None) -> Tensor:
    """Codes [N, M] of x [N, D], uint8 for K <= 256, else int32; greedy, or the best path found by a beam.

    A path is judged by sum_m omega[m] * d_m^2, all levels alike if omega is None; `beam=1` is greedy.
    """
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        h, codebook, scale, _ = _centred(x, codec)
        rows = max(1, _MAX_SCORES // (beam * max(codebook.shape)))  # of [rows, beam, K] or [rows, beam, D] at a time
        if beam == 1:
            parts = [_encode_greedy(part, codebook, scale) for part in h.split(rows)]
        else:
            parts = [_encode_beam(part, codebook, scale, beam, omega) for part in h.split(rows)]
        return torch.cat(parts).to(code_dtype(len(codebook)))


def code_dtype(K: int) -> torch.dtype:
    """What codes are returned in: torch's uint16 has neither indexing nor comparison."""
    return torch.uint8 if K <= 256 else torch.int32


def decode(codes: Tensor, codec: Parameters, lengths: Tensor | None = None) -> Tensor:
    """The vectors [N, D] that codes [N, L] stand for, or the first lengths [N] levels of each; differentiable."""
    with torch.autocast(codec.codebook.device.type, enabled=False):
        codebook, scale, offset = _wide(*codec.tensors())
        first, *others = codes.long().unbind(dim=1)
        x_hat = scale[0] * codebook[first]
        for m, column in enumerate(others, start=1):
            level = scale[m] * codebook[column]
            x_hat = x_hat + (level if lengths is None else torch.where((m < lengths)[:, None], level, 0))
        if offset is not None:
            x_hat = x_hat + offset
        return x_hat.to(codec.codebook.dtype)


def lookup(table: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """sums [Q, N] = <q, xhat_n>: the terms fl(scale[m] * T[b_m]) added level by level, without fused multiply-add.

    codes [N, M] are the same for all queries, codes [Q, N, M] are each query's own.
    """
    terms = [_entries(scale[m] * table, codes[..., m].long()) for m in range(codes.shape[-1])]
    return reduce(torch.add, terms)


def _entries(table: Tensor, columns: Tensor) -> Tensor:
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
    with torch.autocast(query.device.type, enabled=False):
        query, codebook, scale, offset, norms = _wide(query, *codec.tensors(), norms)
        codes = numbers(codes)
        prepared = prepare(query, codebook, offset, metric)
        sums = lookup(prepared.table, codes, scale)  # <q, xhat>
        if metric != "ip" and norms is None:
            wide = Parameters(codebook, scale, offset)
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
    if metric != "ip" and norms is None:
        norms = squared_norms(codes, Parameters(*_wide(query, *codec.tensors())[1:]), metric)

    def best(some: Tensor) -> SearchResult:
        scores = adc(some, codes, codec, metric, norms)
        order = rank(scores.detach(), k, metric)
        return pad_result(scores.gather(1, order), order if candidates is None else candidates[order], k, metric)

    parts = [best(some) for some in query.split(max(1, _MAX_SCORES // max(1, len(codes))))]
    return SearchResult(torch.cat([p.scores for p in parts]), torch.cat([p.positions for p in parts]))


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
    with torch.autocast(query.device.type, enabled=False):
        wide, codebook, _, offset, centroids = _wide(query, *codec.tensors(), lists.centroids)
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
        sums = lookup(own.table, numbers(database.codes[rows]), scale)
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
    with torch.autocast(codec.codebook.device.type, enabled=False):
        codebook, scale, offset = _wide(*codec.tensors())
        shift, codes = (offset if metric == "cosine" else None), numbers(codes)
        if len(codebook) > _MAX_GRAM:
            shifted = Parameters(codebook, scale, shift)
            return (
                _squared_norms_of_distinct(codes, shifted) if lists is None else _decoded_norms(codes, shifted, lists)
            )
        total = _gram_sums(codes, codebook, scale)
        if lists is not None:
            for part in inverted.shifts_of(Parameters(codebook, scale, offset), metric, lists):
                own = lists.of(torch.arange(part.begin, part.end, device=codes.device)) - part.first
                for i, b_i in enumerate(codes[part.begin : part.end].long().unbind(dim=1)):
                    total[part.begin : part.end] += scale[i] * part.inner[own, b_i]
                total[part.begin : part.end] += part.constants[own]
        elif shift is not None:
            inner = 2 * (codebook @ shift)
            for i, b_i in enumerate(codes.long().unbind(dim=1)):
                total = total + scale[i] * inner[b_i]
            total = total + shift @ shift
        return total


def _gram_sums(codes: Tensor, codebook: Tensor, scale: Tensor) -> Tensor:
    """||sum_m scale[m] C[b_m]||^2 [N] from inner products of codewords."""
    gram = codebook @ codebook.T
    columns = [column.long() for column in codes.unbind(dim=1)]
    total = torch.zeros(len(codes), dtype=codebook.dtype, device=codebook.device)
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


def block_sums(data: Tensor, keys: Tensor) -> Tensor:
    """sums [blocks] int64: sum_i keys[i] * word[i] mod 2^64 for the 32-bit words of every block of data [n] uint8.

    keys [words of a block] int64. Words are little-endian; the last block is filled up with zeros.
    """
    width, sums = 4 * len(keys), []
    for part in data.split(64 * width):
        words = torch.nn.functional.pad(part, (0, -len(part) % width)).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        sums.append((words.view(-1, len(keys)) * keys).sum(dim=1))
    return torch.cat(sums) if sums else keys.new_empty(0)


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


def best_of(scores: Sequence[Tensor], positions: Sequence[Tensor], k: int, metric: str) -> SearchResult:
    """The k best of several results [Q, n], of different positions each, in the order (score, position)."""
    all_scores, found = torch.cat(list(scores), dim=1), torch.cat(list(positions), dim=1)
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


def _levels(h: Tensor, codebook: Tensor, scale: Tensor, level: OneLevel) -> Iterator[Level]:
    """The recurrence of the paper: each level quantizes what the hard choices before it left over."""
    for m, s in enumerate(scale.unbind()):
        found = level(m, h, codebook, s)
        yield found
        h = h - found.hard


def _level_with(gamma: float | Tensor) -> OneLevel:
    def level(_: int, h: Tensor, codebook: Tensor, s: Tensor) -> Level:
        key = _key(h, codebook, s)  # [N, K]
        distance = _sqrt(h.square().sum(dim=1, keepdim=True) + key)  # d_m [N, K]
        codes = key.detach().argmin(dim=1)
        soft = s * (torch.softmax(-gamma * distance, dim=1) @ codebook)
        return Level(codes, s * codebook[codes], soft)

    return level


def _key(h: Tensor, codebook: Tensor, s: Tensor) -> Tensor:
    """d^2 without ||h||^2, [..., K]: what the argmin looks at, ties to the smaller index."""
    return s * s * codebook.square().sum(dim=1) - 2 * s * (h @ codebook.T)


def _encode_greedy(h: Tensor, codebook: Tensor, scale: Tensor) -> Tensor:
    codes = []
    for s in scale.unbind():
        codes.append(_key(h, codebook, s).argmin(dim=1))
        h = h - s * codebook[codes[-1]]
    return torch.stack(codes, dim=1)


def _encode_beam(h: Tensor, codebook: Tensor, scale: Tensor, beam: int, omega: Tensor | None) -> Tensor:
    """Keeps the `beam` best paths [N, B] after each level, sorted by code, so that ties go to the smaller code."""
    N, K, M = len(h), len(codebook), len(scale)
    omega = torch.ones(M, dtype=h.dtype, device=h.device) if omega is None else omega.to(h)
    tail = still_to_come(omega)
    residual = h[:, None]  # [N, B, D]
    paid = h.new_zeros(N, 1)  # [N, B]
    codes = torch.empty(N, 1, 0, dtype=torch.int64, device=h.device)
    for m, s in enumerate(scale.unbind()):
        error = residual.square().sum(dim=2, keepdim=True) + _key(residual, codebook, s)  # d^2 [N, B, K]
        key = (paid[:, :, None] + error * tail[m]).flatten(1)
        width = 1 if m == M - 1 else beam
        chosen = key.sort(dim=1, stable=True).indices[:, :width].sort(dim=1).values  # [N, B'], in order of the code
        parent, codeword = chosen // K, chosen % K
        paid = paid.gather(1, parent) + omega[m] * error.flatten(1).gather(1, chosen)
        rows = torch.arange(N, device=h.device)[:, None]
        codes = torch.cat([codes[rows, parent], codeword[:, :, None]], dim=2)
        residual = residual[rows, parent] - s * codebook[codeword]
    return codes[:, 0]


def still_to_come(omega: Tensor) -> Tensor:
    """[M]: a path in a beam pays what its finished levels cost, plus its present error times this."""
    return omega.flip(0).cumsum(0).flip(0).clamp_min(FLOOR * float(omega.sum()))


def _cost(scores: Tensor, metric: str) -> Tensor:
    """Scores turned so that less is better."""
    return scores if metric == "l2" else -scores


def _centred(x: Tensor, codec: Parameters) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(x - offset, codebook, scale, offset) in one dtype."""
    x, codebook, scale, offset = _wide(x, *codec.tensors())
    return (x if offset is None else x - offset), codebook, scale, offset


def _wide(*tensors: Tensor | None) -> tuple:  # type: ignore[type-arg]  # as many tensors as came in
    """All tensors in one dtype: the widest among them, at least float32."""
    dtype = reduce(torch.promote_types, (t.dtype for t in tensors if t is not None), torch.float32)
    return tuple(None if t is None else t.to(dtype) for t in tensors)


def _nearest_root(squared: Tensor) -> Tensor:
    """The square root, correctly rounded: torch's own in float32 may be off by the last bit, that of float64 is not."""
    return _sqrt(squared.double()).to(squared.dtype)


def _norm(v: Tensor) -> Tensor:
    return _sqrt(v.square().sum(dim=1))


def _sqrt(squared: Tensor) -> Tensor:
    """The square root; value and gradient are 0 where rounding, or an exact hit, left nothing above 0."""
    nothing = squared <= 0
    return torch.where(nothing, 0, torch.where(nothing, 1, squared).sqrt())
