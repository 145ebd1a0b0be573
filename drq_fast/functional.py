"""The operations without objects: check, choose a backend, compute. No arithmetic here.

x [N, D] vectors, codebook [G * K, D], scale [M], codes [N, M] in 0..K-1 of any integer dtype, offset [D] or None.
codebooks: G, so that every M / G neighbouring levels share K codewords, or how many levels each of them serves; 1 is
the paper's one codebook. Every function takes `backend=None`: "torch", "native" or "triton" is used or raises
BackendUnavailable; None takes the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from . import backends, checks, devices, modes
from .backends.types import CodewordSums, Database, Distortion, Loss, Parameters, Quantized, SearchResult, SquaredErrors

__all__ = [
    "Distortion",
    "Loss",
    "Quantized",
    "SearchResult",
    "SquaredErrors",
    "adc",
    "decode",
    "distortion",
    "encode",
    "loss",
    "quantize",
    "search",
    "squared_errors",
]


def squared_errors(
    x: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    commitment: float = 1.0,
    offset: Tensor | None = None,
    codebooks: int | Sequence[int] = 1,
    backend: str | None = None,
) -> SquaredErrors:
    """Squared errors after each level: SquaredErrors(errors [N, M], codes [N, M] int64); differentiable once.

    errors[:, m] = ||sg[x] - xhat_m||^2 + commitment * ||x - sg[xhat_m]||^2, where sg stops the gradient: the first term
    trains the codec, the second moves x.

    >>> loss = squared_errors(x, codebook, scale).errors.mean()
    """
    codec = _codec("squared_errors", codebook, scale, offset, codebooks)
    checks.vectors("squared_errors", "x", x, codec.codebook.shape[1], codec.device)
    commitment = checks.commitment("squared_errors", commitment)
    column = backends.choose("squared_errors", x.device.type, backend, backends.cannot_encode(x, codec, 1))
    return column.squared_errors(x, codec, commitment)


def codeword_sums_checked(x: Tensor, codes: Tensor, codec: Parameters, weights: Tensor) -> CodewordSums:
    """Residuals of x [N, D] and their weights [N, M], added up by codes [N, M]: see `backends.torch.codeword_sums`."""
    unsupported = backends.cannot_compile(codec, x, registered=True)
    column = backends.choose("codeword_sums", x.device.type, None, unsupported)
    return column.codeword_sums(x, codes, codec, weights)


def quantize(
    x: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    gamma: float | Tensor,
    offset: Tensor | None = None,
    codebooks: int | Sequence[int] = 1,
    backend: str | None = None,
) -> Quantized:
    """Soft and hard approximation of x: Quantized(soft [N, D], hard [N, D], codes [N, M] int64); differentiable.

    >>> soft, hard, codes = quantize(x, codebook, scale, gamma=1.0)
    """
    codec = _codec("quantize", codebook, scale, offset, codebooks)
    checks.vectors("quantize", "x", x, codec.codebook.shape[1], codec.device)
    checks.gamma("quantize", gamma)
    column = _column_of_levels("quantize", x, codec, backend, gamma)
    return column.quantize(x, codec, gamma)


def distortion(
    x: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    gamma: float | Tensor,
    offset: Tensor | None = None,
    codebooks: int | Sequence[int] = 1,
    backend: str | None = None,
) -> Distortion:
    """Errors after each level: Distortion(hard [N, M], soft [N, M], joint [N, M], codes [N, M] int64); differentiable.

    hard and soft are L2 norms ||x - xhat_m|| and ||x - xsoft_m||, joint is ||xsoft_m - xhat_m||^2.

    >>> loss = distortion(x, codebook, scale, gamma=1.0).hard.sum(dim=1).mean()
    """
    codec = _codec("distortion", codebook, scale, offset, codebooks)
    checks.vectors("distortion", "x", x, codec.codebook.shape[1], codec.device)
    checks.gamma("distortion", gamma)
    column = _column_of_levels("distortion", x, codec, backend, gamma)
    return column.distortion(x, codec, gamma)


def loss(
    x: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    gamma: float | Tensor,
    offset: Tensor | None = None,
    codebooks: int | Sequence[int] = 1,
    weights: Sequence[float] = (1.0, 1.0, 1.0),
    level_weights: Sequence[float] | Tensor | None = None,
    joint: str = "gap",
    backend: str | None = None,
) -> Loss:
    """The quantization loss of a batch: Loss(loss scalar, codes [N, M] int64); differentiable once.

    weights: of the hard, the soft and the joint error of the paper, each summed over levels with level_weights [M] and
    averaged over the batch. joint "gap" is |E_h - E_s|, "mse" the squared distance of the two approximations.

    >>> loss(x, codebook, scale, gamma=1.0).loss.backward()
    """
    codec = _codec("loss", codebook, scale, offset, codebooks)
    checks.vectors("loss", "x", x, codec.codebook.shape[1], codec.device)
    checks.gamma("loss", gamma)
    checks.choice("loss", "joint", joint, ("gap", "mse"))
    terms = checks.weights("loss", weights)
    omega = _as_floats(checks.level_weights("loss", level_weights, len(scale)), x.device)
    column = _column_of_levels("loss", x, codec, backend, gamma)
    return column.loss(x, codec, gamma, terms, omega, joint)


def encode(
    x: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    codebooks: int | Sequence[int] = 1,
    beam: int = 1,
    level_weights: Sequence[float] | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Codes [N, M] of x, uint8 for K <= 256, else int32. A wider beam finds better codes and takes longer.

    level_weights [M]: how much the error after each level counts when a beam compares codes; `default_weights` if None.

    >>> codes = encode(x, codebook, scale, beam=16)
    """
    codec = _codec("encode", codebook, scale, offset, codebooks)
    checks.vectors("encode", "x", x, codec.codebook.shape[1], codec.device)
    beam, M = checks.beam("encode", beam), len(scale)
    omega = checks.level_weights("encode", level_weights, M) or default_weights(M)
    return encode_checked(x, codec, beam, omega, backend)


def encode_checked(
    x: Tensor, codec: Parameters, beam: int, omega: Sequence[float] | None, backend: str | None = None
) -> Tensor:
    """`encode` by arguments that are known to be right, with a codec whose tables may be there already."""
    K, M = codec.codewords, len(codec.scale)
    beam = min(beam, K ** min(M - 1, 8))  # there are no more paths than that
    unsupported = backends.cannot_encode(x, codec, beam)
    column = backends.choose("encode", x.device.type, backend, unsupported, _few_rows(x, codec) and beam > 1)
    return column.encode(x, codec, beam, _as_floats(omega, x.device))


def default_weights(levels: int) -> tuple[float, ...]:
    """How much each level counts in a beam and in `fit` where the user does not say: the full length most."""
    return (0.16, *[0.1] * (levels - 2), 1.0) if levels > 1 else (1.0,)


def decode(
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    codebooks: int | Sequence[int] = 1,
    levels: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """The vectors [N, D] that codes [N, M] stand for, from their first `levels` levels; differentiable.

    >>> x_hat = decode(codes, codebook, scale, levels=2)
    """
    codec = _codec("decode", codebook, scale, offset, codebooks)
    codes = checks.codes("decode", codes, codec.codewords, len(scale), codec.device)
    length = checks.levels("decode", levels, codes.shape[1])
    return decode_checked(codes[:, :length], codec, backend)


def decode_checked(
    codes: Tensor, codec: Parameters, backend: str | None = None, lengths: Tensor | None = None
) -> Tensor:
    """`decode` of all levels of codes that are known to be right: looking at them would synchronise a GPU.

    lengths [N]: the number of levels of each code, instead of all.
    """
    if lengths is not None:
        return backends.plain_torch.decode(codes, codec, lengths)
    unsupported = backends.cannot_differentiate(codec, registered=True)
    return backends.choose("decode", codec.codebook.device.type, backend, unsupported).decode(codes, codec)


def adc(
    query: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    codebooks: int | Sequence[int] = 1,
    metric: str = "l2",
    levels: int | None = None,
    norms: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Scores [Q, N] of all codes [N, M] for queries [Q, D] that are not quantized themselves; differentiable.

    "l2" is the squared distance (less is better), "ip" the inner product, "cosine" the cosine (more is better).
    norms [N]: ||xhat||^2 for l2, ||offset + xhat||^2 for cosine, at the requested length; computed where absent.

    >>> scores = adc(query, codes, codebook, scale, metric="ip", levels=2)
    """
    codec = _codec("adc", codebook, scale, offset, codebooks)
    codes = _check_search("adc", query, codes, codec, metric, levels, norms)
    unsupported = backends.cannot_search(query, codes, codec, norms)
    column = backends.choose("adc", query.device.type, backend, unsupported)
    return column.adc(query, codes, codec, metric, norms)


def scorer(query: Tensor, codes: Tensor, codec: Parameters, metric: str) -> Callable[[Tensor], Tensor]:
    """A function from queries [Q, D], of which `query` has some, to `adc` of codes that are known to be right.

    The norms, which need inner products of all codewords, are computed once. Threads may call it at the same time.
    """
    norms = None
    if metric != "ip":
        with modes.plain(codec.device):
            norms = backends.choose_for_norms(codec.device.type, codec).squared_norms(codes, codec, metric)
    column = backends.choose("adc", query.device.type, None, backends.cannot_search(query, codes, codec, norms))
    return lambda some: column.adc(some, codes, codec, metric, norms)


def search(
    query: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    k: int,
    offset: Tensor | None = None,
    codebooks: int | Sequence[int] = 1,
    metric: str = "l2",
    levels: int | None = None,
    norms: Tensor | None = None,
    keep: Tensor | None = None,
    threshold: float | Tensor | None = None,
    backend: str | None = None,
) -> SearchResult:
    """The k best of codes [N, M] for each query [Q, D]: SearchResult(scores [Q, k], positions [Q, k] int64).

    Order: (score, position), so equal scores come oldest first on every backend. keep [N] bool: the positions to look
    at. threshold: a score, or one per query [Q]; codes with a worse score are left out. Where fewer than k remain:
    position -1 and score +inf (l2) or -inf. Scores are differentiable in the query.

    >>> scores, positions = search(query, codes, codebook, scale, k=10)
    """
    codec = _codec("search", codebook, scale, offset, codebooks)
    codes = _check_search("search", query, codes, codec, metric, levels, norms)
    k = checks.integer("search", "k", k, 1)
    checks.mask("search", keep, len(codes), codebook.device)
    limits = checks.thresholds("search", threshold, len(query), codebook.device)
    unsupported = backends.cannot_search(query, codes, codec, norms)
    column = backends.choose("search", query.device.type, backend, unsupported)
    found = column.search(query, Database(codes, codec, metric, norms, keep), k, **pruning(column, limits))
    return found if limits is None else within(found.scores, found.positions, limits, metric)


def pruning(column: ModuleType, limits: Tensor | None) -> dict[str, Tensor]:
    """An argument for the search of a backend that can leave out worse scores early; `within` is needed still."""
    return {} if limits is None or column is not backends.native else {"limits": limits}


def within(scores: Tensor, positions: Tensor, limits: Tensor, metric: str) -> SearchResult:
    """Results [Q, k] without those that are worse than limits [Q], which position -1 and the worst score replace."""
    limits, worst = limits[:, None].to(scores.dtype), float("inf") if metric == "l2" else float("-inf")
    good = scores <= limits if metric == "l2" else scores >= limits
    return SearchResult(scores.where(good, worst), positions.where(good, -1))


def _codec(
    op: str, codebook: Tensor, scale: Tensor, offset: Tensor | None, codebooks: int | Sequence[int]
) -> Parameters:
    """The codec, once it is known to be right."""
    return Parameters(codebook, scale, offset, checks.codec(op, codebook, scale, offset, codebooks))


def _check_search(
    op: str,
    query: Tensor,
    codes: Tensor,
    codec: Parameters,
    metric: str,
    levels: int | None,
    norms: Tensor | None,
) -> Tensor:
    """The codes, cut to the requested levels."""
    checks.vectors(op, "query", query, codec.codebook.shape[1], codec.device)
    codes = checks.codes(op, codes, codec.codewords, len(codec.scale), codec.device)
    checks.choice(op, "metric", metric, checks.METRICS)
    checks.norms(op, norms, len(codes), codec.device)
    return codes[:, : checks.levels(op, levels, codes.shape[1])]


def _column_of_levels(
    op: str, x: Tensor, codec: Parameters, backend: str | None, gamma: float | Tensor = 1.0
) -> ModuleType:
    """The backend of an operation that goes through the levels."""
    unsupported = backends.cannot_quantize(x, codec, gamma)
    return backends.choose(op, x.device.type, backend, unsupported)


def _few_rows(x: Tensor, codec: Parameters) -> bool:
    """Whether C C^T would take longer on the CPU than all distances."""
    return x.device.type == "cpu" and 1024 <= len(codec.codebook) >= 4 * len(x) * len(codec.scale)


def _as_floats(values: Sequence[float] | None, device: torch.device) -> Tensor | None:
    return None if values is None else devices.tensor_of(tuple(values), torch.float32, device)
