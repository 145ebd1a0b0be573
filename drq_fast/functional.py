"""The operations without objects: check, choose a backend, compute. No arithmetic here.

x [N, D] vectors, codebook [K, D], scale [M], codes [N, M] of any integer dtype, offset [D] or None. Every function
takes `backend=None`: "torch", "native" or "triton" is used or raises BackendUnavailable; None takes the fastest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _native, checks, reference
from . import backend as _backend
from .autograd import NativeDistortion, NativeQuantize, QuantizationLoss, TritonDistortion, TritonQuantize, lookup
from .reference import Distortion, Loss, Quantized, SearchResult

__all__ = [
    "Distortion",
    "Loss",
    "Quantized",
    "SearchResult",
    "adc",
    "decode",
    "distortion",
    "encode",
    "loss",
    "quantize",
    "search",
]


def quantize(
    x: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    gamma: float | Tensor,
    offset: Tensor | None = None,
    backend: str | None = None,
) -> Quantized:
    """Soft and hard approximation of x: Quantized(soft [N, D], hard [N, D], codes [N, M] int64); differentiable.

    >>> soft, hard, codes = quantize(x, codebook, scale, gamma=1.0)
    """
    K, D, _ = checks.codec("quantize", codebook, scale, offset)
    checks.vectors("quantize", "x", x, D, codebook.device)
    checks.gamma("quantize", gamma)
    unsupported = _unsupported_training(K, gamma, x, codebook, scale, offset)
    taken = _backend.choose("quantize", x.device, backend, unsupported, _few(x, codebook, scale))
    compute: Callable[..., Quantized] = reference.quantize
    compute = {"native": _native_quantize, "triton": _triton_quantize}.get(taken, compute)
    return compute(x, codebook, scale, gamma=gamma, offset=offset)


def distortion(
    x: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    gamma: float | Tensor,
    offset: Tensor | None = None,
    backend: str | None = None,
) -> Distortion:
    """Errors after each level: Distortion(hard [N, M], soft [N, M], joint [N, M], codes [N, M] int64); differentiable.

    hard and soft are L2 norms ||x - xhat_m|| and ||x - xsoft_m||, joint is ||xsoft_m - xhat_m||^2.

    >>> loss = distortion(x, codebook, scale, gamma=1.0).hard.sum(dim=1).mean()
    """
    K, D, _ = checks.codec("distortion", codebook, scale, offset)
    checks.vectors("distortion", "x", x, D, codebook.device)
    checks.gamma("distortion", gamma)
    unsupported = _unsupported_training(K, gamma, x, codebook, scale, offset)
    taken = _backend.choose("distortion", x.device, backend, unsupported, _few(x, codebook, scale))
    compute: Callable[..., Distortion] = reference.distortion
    compute = {"native": _native_distortion, "triton": _triton_distortion}.get(taken, compute)
    return compute(x, codebook, scale, gamma=gamma, offset=offset)


def loss(
    x: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    gamma: float | Tensor,
    offset: Tensor | None = None,
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
    K, D, M = checks.codec("loss", codebook, scale, offset)
    checks.vectors("loss", "x", x, D, codebook.device)
    checks.gamma("loss", gamma)
    checks.choice("loss", "joint", joint, ("gap", "mse"))
    terms = checks.weights("loss", weights)
    omega = checks.level_weights("loss", level_weights, M)
    unsupported = _unsupported_training(K, gamma, x, codebook, scale, offset)
    per_level = None if omega is None else torch.tensor(omega, dtype=torch.float32, device=x.device)
    taken = _backend.choose("loss", x.device, backend, unsupported, _few(x, codebook, scale))
    if taken == "native":
        ones = _native.floats(M).fill_(1) if per_level is None else per_level
        with torch.autocast(x.device.type, enabled=False):
            inputs = _graphless(x, codebook, scale, offset)
            return Loss(*QuantizationLoss.apply(*inputs, checks.gamma_value("loss", gamma), terms, ones, joint))
    return reference.loss(
        x,
        codebook,
        scale,
        gamma=gamma,
        offset=offset,
        weights=terms,
        level_weights=per_level,
        joint=joint,
        distortion=_triton_distortion if taken == "triton" else reference.distortion,
    )


def encode(
    x: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    beam: int = 1,
    level_weights: Sequence[float] | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Codes [N, M] of x, uint8 for K <= 256, else int32. A wider beam finds better codes and takes longer.

    level_weights [M]: how much the error after each level counts when a beam compares codes; None counts all alike.

    >>> codes = encode(x, codebook, scale, beam=16)
    """
    K, D, M = checks.codec("encode", codebook, scale, offset)
    checks.vectors("encode", "x", x, D, codebook.device)
    beam = min(checks.beam("encode", beam), K ** min(M - 1, 8))  # there are no more paths than that
    weights = checks.level_weights("encode", level_weights, M)
    omega = None if weights is None else torch.tensor(weights, dtype=torch.float32, device=x.device)
    unsupported = _unsupported_levels(K, x, codebook, scale, offset)
    taken = _backend.choose("encode", x.device, backend, unsupported, _few(x, codebook, scale))
    compute: Callable[..., Tensor] = reference.encode
    compute = {"native": _native.encode, "triton": _triton_encode}.get(taken, compute)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        return compute(x, codebook, scale, offset=offset, beam=beam, level_weights=omega)


def decode(
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    levels: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """The vectors [N, D] that codes [N, M] stand for, from their first `levels` levels; differentiable.

    >>> x_hat = decode(codes, codebook, scale, levels=2)
    """
    K, _, M = checks.codec("decode", codebook, scale, offset)
    codes = checks.codes("decode", codes, K, M, codebook.device)
    length = checks.levels("decode", levels, codes.shape[1])
    return decode_unchecked(codes[:, :length], codebook, scale, offset, backend)


def decode_unchecked(
    codes: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None, backend: str | None = None
) -> Tensor:
    """`decode` of all levels of codes that are known to be right: looking at them would synchronise a GPU."""
    if _backend.choose("decode", codebook.device, backend, _unsupported(codebook, scale, offset)) == "triton":
        from .kernels.decode import decode as decode_triton

        return decode_triton(codes, codebook, scale, offset)
    return reference.decode(codes, codebook, scale, offset=offset)


def adc(
    query: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
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
    codes, length = _check_search("adc", query, codes, codebook, scale, offset, metric, levels, norms)
    inputs = (query, codebook, scale, offset, norms)
    native = _backend.choose("adc", query.device, backend, _unsupported_at_all(*inputs)) == "native"
    return reference.adc(
        query,
        codes,
        codebook,
        scale,
        offset=offset,
        metric=metric,
        levels=length,
        norms=norms,
        lookup=lookup if native else reference.lookup,
    )


def search(
    query: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    k: int,
    offset: Tensor | None = None,
    metric: str = "l2",
    levels: int | None = None,
    norms: Tensor | None = None,
    keep: Tensor | None = None,
    backend: str | None = None,
) -> SearchResult:
    """The k best of codes [N, M] for each query [Q, D]: SearchResult(scores [Q, k], positions [Q, k] int64).

    Order: (score, position), so equal scores come oldest first on every backend. keep [N] bool: the positions to look
    at. Where fewer than k remain: position -1 and score +inf (l2) or -inf. Scores are differentiable in the query.

    >>> scores, positions = search(query, codes, codebook, scale, k=10)
    """
    codes, length = _check_search("search", query, codes, codebook, scale, offset, metric, levels, norms)
    checks.integer("search", "k", k, 1)
    checks.mask("search", keep, len(codes), codebook.device)
    codes, scale = codes[:, :length], scale[:length]
    return search_unchecked(query, codes, codebook, scale, k, offset, metric, norms, keep, backend)


def search_unchecked(
    query: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    k: int,
    offset: Tensor | None,
    metric: str,
    norms: Tensor | None,
    keep: Tensor | None,
    backend: str | None = None,
) -> SearchResult:
    """`search` in all levels of codes that are known to be right; int16 stands for two-byte codes bit by bit."""
    inputs = (query, codebook, scale, offset, norms)
    unsupported = "it counts positions in 32 bits" if len(codes) >= 1 << 32 else _unsupported_at_all(*inputs)
    if _backend.choose("search", query.device, backend, unsupported) == "torch":
        codes = two_bytes(codes)
        return reference.search(
            query, codes, codebook, scale, k=k, offset=offset, metric=metric, norms=norms, keep=keep
        )
    given = norms
    if metric != "ip" and norms is None:
        norms = squared_norms(codes, codebook, scale, offset if metric == "cosine" else None)
    with torch.no_grad(), _no_autocast(query.device.type):
        scores, positions = _native.search(
            query, codes, codebook, scale, k=k, offset=offset, metric=metric, norms=norms, keep=keep
        )
    if not _wants_gradient(*inputs) or len(codes) == 0:
        return SearchResult(scores, positions)
    # The same scores once more, for what was found: this time with a gradient.
    rows = positions.clamp_min(0)
    exact = reference.adc(
        query,
        two_bytes(codes)[rows],
        codebook,
        scale,
        offset=offset,
        metric=metric,
        norms=None if given is None else given[rows],
        lookup=lookup,
    )
    return SearchResult(torch.where(positions >= 0, exact, scores), positions)


def two_bytes(codes: Tensor) -> Tensor:
    """Codes as numbers: two-byte codes, which an index keeps bit by bit in int16, as int32; others as they are."""
    return codes.to(torch.int32) & 0xFFFF if codes.dtype == torch.int16 else codes


def squared_norms(codes: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """||offset + xhat||^2 [N] in float32 or better, of codes that are known to be right."""
    parts = (codebook, scale, offset)
    with torch.autocast(codebook.device.type, enabled=False):
        small = len(codebook) <= _native.MAX_CODEWORDS and not _wants_gradient(*parts)
        if small and codebook.device.type == "cpu" and _native.extension and not _unsupported_at_all(*parts):
            return _native.squared_norms(codes, codebook, scale, offset)
        return reference.squared_norms(two_bytes(codes), codebook, scale, offset)


def _native_distortion(
    x: Tensor, codebook: Tensor, scale: Tensor, *, gamma: float | Tensor, offset: Tensor | None
) -> Distortion:
    with torch.autocast(x.device.type, enabled=False):
        sharpness = checks.gamma_value("distortion", gamma)
        return Distortion(*NativeDistortion.apply(*_graphless(x, codebook, scale, offset), sharpness))


def _native_quantize(
    x: Tensor, codebook: Tensor, scale: Tensor, *, gamma: float | Tensor, offset: Tensor | None
) -> Quantized:
    with torch.autocast(x.device.type, enabled=False):
        sharpness = checks.gamma_value("quantize", gamma)
        return Quantized(*NativeQuantize.apply(*_graphless(x, codebook, scale, offset), sharpness))


def _triton_encode(
    x: Tensor, codebook: Tensor, scale: Tensor, *, offset: Tensor | None, beam: int, level_weights: Tensor | None
) -> Tensor:
    from .kernels.beam import encode_beam
    from .kernels.encode import encode as encode_greedy

    precision = _backend.precision("encode")
    with torch.cuda.device_of(x):
        if beam == 1:
            return encode_greedy(x, codebook, scale, offset=offset, precision=precision)
        omega = torch.ones(len(scale), device=x.device) if level_weights is None else level_weights
        weights = {"omega": omega, "still_to_come": reference.still_to_come(omega)}
        return encode_beam(x, codebook, scale, offset=offset, beam=beam, precision=precision, **weights)


def _triton_distortion(
    x: Tensor, codebook: Tensor, scale: Tensor, *, gamma: float | Tensor, offset: Tensor | None
) -> Distortion:
    sharpness = torch.as_tensor(gamma, dtype=torch.float32, device=x.device).reshape(1)
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        precision = _backend.precision("distortion")
        return Distortion(*TritonDistortion.apply(x, codebook, scale, offset, sharpness, precision))


def _triton_quantize(
    x: Tensor, codebook: Tensor, scale: Tensor, *, gamma: float | Tensor, offset: Tensor | None
) -> Quantized:
    sharpness = torch.as_tensor(gamma, dtype=torch.float32, device=x.device).reshape(1)
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        precision = _backend.precision("quantize")
        soft, hard, codes = TritonQuantize.apply(x, codebook, scale, offset, sharpness, precision)
        shift = 0 if offset is None else offset.float()
        return Quantized((soft + shift).to(x.dtype), (hard + shift).to(x.dtype), codes)


def _check_search(
    op: str,
    query: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    metric: str,
    levels: int | None,
    norms: Tensor | None,
) -> tuple[Tensor, int]:
    K, D, M = checks.codec(op, codebook, scale, offset)
    checks.vectors(op, "query", query, D, codebook.device)
    codes = checks.codes(op, codes, K, M, codebook.device)
    checks.choice(op, "metric", metric, checks.METRICS)
    checks.norms(op, norms, len(codes), codebook.device)
    return codes, checks.levels(op, levels, codes.shape[1])


def _few(x: Tensor, codebook: Tensor, scale: Tensor) -> bool:
    """Whether x on the CPU has so few rows that C C^T takes longer than all distances."""
    return x.device.type == "cpu" and 1024 <= len(codebook) >= 4 * len(x) * len(scale)


def _no_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """What the context costs, a short search would notice."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def _graphless(*inputs: Tensor | None) -> tuple[Tensor | None, ...]:
    """The inputs, without a graph where gradients are switched off: an autograd.Function would prepare them still."""
    return inputs if torch.is_grad_enabled() else tuple(None if t is None else t.detach() for t in inputs)


def _wants_gradient(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)


def _unsupported(*inputs: Tensor | None) -> str | None:
    """Why no kernel without a gradient may be used for these inputs, if so."""
    if _wants_gradient(*inputs):
        return "it gives no gradient, and an input requires one"
    return _unsupported_at_all(*inputs)


def _unsupported_levels(K: int, *inputs: Tensor | None) -> str | None:
    """Why the level kernels may not be used, if so."""
    if K > _native.MAX_CODEWORDS:
        return f"it forms K x K inner products, and K is above {_native.MAX_CODEWORDS}"
    return _unsupported_at_all(*inputs)


def _unsupported_training(K: int, gamma: float | Tensor, *inputs: Tensor | None) -> str | None:
    if isinstance(gamma, Tensor) and gamma.requires_grad:
        return "it gives no gradient of gamma"
    return _unsupported_levels(K, *inputs)


def _unsupported_at_all(*inputs: Tensor | None) -> str | None:
    if torch.compiler.is_compiling():
        return "torch.compile cannot trace it"
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return "torch.func and forward-mode derivatives cannot see through it"
    if any(t is not None and t.dtype == torch.float64 for t in inputs):
        return "it computes in float32, and an input is float64"
    return None
