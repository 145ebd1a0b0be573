"""The operations that go through the levels: encoding, decoding, errors and losses.

Symbols are the paper's: x [N, D] vectors, codebook [G * K, D], scale [M] one factor per level, gamma the sharpness of
the soft assignment, codes [N, M] in 0..K-1, offset [D] or None. Codes [N, L] with L < M are prefixes. Arguments are
taken as checked (see `functional`). 16-bit floats are computed in float32, autocast is off inside. docs/math.md has the
formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ... import devices, modes
from ..types import CodewordSums, Distortion, Loss, Parameters, Quantized, SquaredErrors

_MAX_SCORES = 1 << 22  # numbers that encoding holds at a time

FLOOR = 1e-3  # share of the sum of level weights that levels at the end count at least, above the rounding of float32


class Level(NamedTuple):
    """What one level adds: codes [N], hard [N, D], soft [N, D]."""

    codes: Tensor
    hard: Tensor
    soft: Tensor


OneLevel = Callable[[int, Tensor, Tensor, Tensor], Level]  # m, h [N, D], its codewords [K, D], scale[m] -> level m


def quantize(x: Tensor, codec: Parameters, gamma: float | Tensor, level: OneLevel | None = None) -> Quantized:
    """Soft and hard approximation of x [N, D] by M levels, and the codes; differentiable.

    level: another backend's, which computes the same.
    """
    with modes.precise(x.device.type):
        h, codec = _centred(x, codec)
        levels = list(_levels(h, codec, level or _level_with(gamma)))
        shift = 0 if codec.offset is None else codec.offset
        soft = sum((found.soft for found in levels), torch.zeros_like(h)) + shift
        hard = sum((found.hard for found in levels), torch.zeros_like(h)) + shift
        return Quantized(soft.to(x.dtype), hard.to(x.dtype), torch.stack([found.codes for found in levels], dim=1))


def distortion(x: Tensor, codec: Parameters, gamma: float | Tensor, level: OneLevel | None = None) -> Distortion:
    """The errors of x [N, D] after each of M levels, each [N, M], and the codes; differentiable.

    level: another backend's, which computes the same.
    """
    with modes.precise(x.device.type):
        h, codec = _centred(x, codec)
        hard_error, soft_error = h, h
        hard, soft, joint, codes = [], [], [], []
        for found in _levels(h, codec, level or _level_with(gamma)):
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
    with modes.precise(x.device.type):
        if not any(weights[1:]):
            return hard_loss(squared_errors(x, codec, 1.0), weights[0], omega)
        return loss_of(distortion(x, codec, gamma), weights, omega, joint)


def hard_loss(found: SquaredErrors, weight: float, omega: Tensor | None) -> Loss:
    """The loss where only E_h counts, given squared errors with commitment 1: no soft assignment is computed."""
    squared = found.errors - found.errors.detach() / 2  # ||x - xhat||^2, with its gradients by x and by the codec
    hard = root(squared)
    return loss_of(Distortion(hard, hard.detach(), hard.detach(), found.codes), (weight, 0.0, 0.0), omega, "mse")


def loss_of(errors: Distortion, weights: tuple[float, float, float], omega: Tensor | None, joint: str) -> Loss:
    """The loss, given the errors after each level."""
    N, M = errors.hard.shape
    hard = errors.hard
    omega = devices.tensor_of((1.0,) * M, hard.dtype, hard.device) if omega is None else omega.to(hard)
    e_hard, e_soft = errors.hard @ omega, errors.soft @ omega
    e_joint = (e_hard - e_soft).abs() if joint == "gap" else errors.joint[:, -1]
    total = weights[0] * e_hard + weights[1] * e_soft + weights[2] * e_joint
    return Loss(total.sum() / torch.sym_max(N, 1), errors.codes)


def squared_errors(x: Tensor, codec: Parameters, commitment: float) -> SquaredErrors:
    """The squared errors of x [N, D] after each of M greedy levels, and the codes; differentiable.

    The codec is drawn to x, and x to what its code stands for, `commitment` times as much.
    """
    with modes.precise(x.device.type):
        x, codec = _widened(x, codec)
        offset = codec.offset
        with torch.no_grad():
            codes = _encode_greedy(x if offset is None else x - offset, codec)
        x_hat, errors = torch.zeros_like(x) if offset is None else offset.expand(x.shape), []
        for m, s in enumerate(codec.scale.unbind()):
            x_hat = x_hat + s * codec.words(m)[codes[:, m]]
            of_codec = (x.detach() - x_hat).square().sum(dim=1)
            of_x = (x - x_hat.detach()).square().sum(dim=1)
            errors.append(of_codec + commitment * of_x)
        return SquaredErrors(torch.stack(errors, dim=1), codes)


@torch.no_grad()
def codeword_sums(x: Tensor, codes: Tensor, codec: Parameters, weights: Tensor) -> CodewordSums:
    """What a step of k-means adds up for each row of the codebook, over the places (n, m) of codes [N, M] that have it.

    sums[k] = sum of weights[n, m] scale[m] h_{m+1}, the residual after level m, and mass[k] = sum of weights[n, m]
    scale[m]^2: codebook + sums / mass minimises the weighted sum of ||h_m - scale[m] C[b_m]||^2, given h. Vectors of x
    [N, D] whose weights [N, M] are 0 may hold anything.
    """
    with modes.precise(x.device.type):
        rows = codec.rows(codes)
        x, codebook, scale, offset, weights = widened(x, *codec.tensors(), weights)
        h, sums = x if offset is None else x - offset, torch.zeros_like(codebook)
        for m, s in enumerate(scale.unbind()):
            h = h - s * codebook[rows[:, m]]
            pulls = (s * weights[:, m, None]) * h
            sums = sums.index_add(0, rows[:, m], torch.where(weights[:, m, None] == 0, 0, pulls))
        return CodewordSums(sums, codeword_mass(rows, scale, weights, len(codebook)))


def codeword_mass(rows: Tensor, scale: Tensor, weights: Tensor, count: int) -> Tensor:
    """[count]: weights[n, m] scale[m]^2 added up by rows [N, M] of the codebook."""
    mass = scale.new_zeros(count, dtype=torch.float64)
    return mass.index_add(0, rows.flatten(), (weights * scale.square()).flatten().double()).to(scale.dtype)


def encode(x: Tensor, codec: Parameters, beam: int, omega: Tensor | None) -> Tensor:
    """Codes [N, M] of x [N, D], uint8 for K <= 256, else int32; greedy, or the best path found by a beam.

    A path is judged by sum_m omega[m] * d_m^2, all levels alike if omega is None; `beam=1` is greedy.
    """
    with torch.no_grad(), modes.precise(x.device.type):
        h, codec = _centred(x, codec)
        K, D = codec.codewords, h.shape[1]
        rows = max(1, _MAX_SCORES // (beam * max(K, D)))  # of [rows, beam, K] or [rows, beam, D] at a time
        if beam == 1:
            parts = [_encode_greedy(part, codec) for part in h.split(rows)]
        else:
            parts = [_encode_beam(part, codec, beam, omega) for part in h.split(rows)]
        return torch.cat(parts).to(code_dtype(K))


def encode_by_groups(h: Tensor, codec: Parameters, encode_group: Callable[[Tensor, Parameters], Tensor]) -> Tensor:
    """Greedy codes [N, M] of centred h [N, D]: each group of levels encodes what the groups before it left over.

    encode_group: a backend's, for levels that share their codewords.
    """
    first, *others = codec.apart()
    before, codes = first, [encode_group(h, first)]
    for group in others:
        h = h - decode(codes[-1], before)
        codes.append(encode_group(h, group))
        before = group
    return torch.cat(codes, dim=1)


def code_dtype(K: int) -> torch.dtype:
    """What codes are returned in: torch's uint16 has neither indexing nor comparison."""
    return torch.uint8 if K <= 256 else torch.int32


def decode(codes: Tensor, codec: Parameters, lengths: Tensor | None = None) -> Tensor:
    """The vectors [N, D] that codes [N, L] stand for, or the first lengths [N] levels of each; differentiable."""
    with modes.precise(codec.codebook.device.type):
        codebook, scale, offset = widened(*codec.tensors())
        first, *others = codec.rows(codes).unbind(dim=1)
        x_hat = scale[0] * codebook[first]
        for m, column in enumerate(others, start=1):
            level = scale[m] * codebook[column]
            x_hat = x_hat + (level if lengths is None else torch.where((m < lengths)[:, None], level, 0))
        if offset is not None:
            x_hat = x_hat + offset
        return x_hat.to(codec.codebook.dtype)


def _levels(h: Tensor, codec: Parameters, level: OneLevel) -> Iterator[Level]:
    """The recurrence of the paper: each level quantizes what the hard choices before it left over."""
    for m, s in enumerate(codec.scale.unbind()):
        found = level(m, h, codec.words(m), s)
        yield found
        h = h - found.hard


def _level_with(gamma: float | Tensor) -> OneLevel:
    def level(_: int, h: Tensor, codebook: Tensor, s: Tensor) -> Level:
        key = _key(h, codebook, s)  # [N, K]
        distance = root(h.square().sum(dim=1, keepdim=True) + key)  # d_m [N, K]
        codes = key.detach().argmin(dim=1)
        soft = s * (torch.softmax(-gamma * distance, dim=1) @ codebook)
        return Level(codes, s * codebook[codes], soft)

    return level


def _key(h: Tensor, codebook: Tensor, s: Tensor) -> Tensor:
    """d^2 without ||h||^2, [..., K]: what the argmin looks at, ties to the smaller index."""
    return s * s * codebook.square().sum(dim=1) - 2 * s * (h @ codebook.T)


def _encode_greedy(h: Tensor, codec: Parameters) -> Tensor:
    codes = []
    for m, s in enumerate(codec.scale.unbind()):
        codes.append(_key(h, codec.words(m), s).argmin(dim=1))
        h = h - s * codec.words(m)[codes[-1]]
    return torch.stack(codes, dim=1)


def _encode_beam(h: Tensor, codec: Parameters, beam: int, omega: Tensor | None) -> Tensor:
    """Keeps the `beam` best paths [N, B] after each level, sorted by code, so that ties go to the smaller code."""
    N, K, M = len(h), codec.codewords, len(codec.scale)
    omega = torch.ones(M, dtype=h.dtype, device=h.device) if omega is None else omega.to(h)
    tail = still_to_come(omega)
    residual = h[:, None]  # [N, B, D]
    paid = h.new_zeros(N, 1)  # [N, B]
    codes = torch.empty(N, 1, 0, dtype=torch.int64, device=h.device)
    for m, s in enumerate(codec.scale.unbind()):
        words = codec.words(m)
        error = residual.square().sum(dim=2, keepdim=True) + _key(residual, words, s)  # d^2 [N, B, K]
        key = (paid[:, :, None] + error * tail[m]).flatten(1)
        width = 1 if m == M - 1 else beam
        chosen = key.sort(dim=1, stable=True).indices[:, :width].sort(dim=1).values  # [N, B'], in order of the code
        parent, codeword = chosen // K, chosen % K
        paid = paid.gather(1, parent) + omega[m] * error.flatten(1).gather(1, chosen)
        rows = torch.arange(N, device=h.device)[:, None]
        codes = torch.cat([codes[rows, parent], codeword[:, :, None]], dim=2)
        residual = residual[rows, parent] - s * words[codeword]
    return codes[:, 0]


def still_to_come(omega: Tensor) -> Tensor:
    """[M]: a path in a beam pays what its finished levels cost, plus its present error times this."""
    return torch.maximum(omega.flip(0).cumsum(0).flip(0), FLOOR * omega.sum())


def _centred(x: Tensor, codec: Parameters) -> tuple[Tensor, Parameters]:
    """(x - offset, codec) in one dtype."""
    x, codec = _widened(x, codec)
    return (x if codec.offset is None else x - codec.offset), codec


def _widened(x: Tensor, codec: Parameters) -> tuple[Tensor, Parameters]:
    x, codebook, scale, offset = widened(x, *codec.tensors())
    return x, Parameters(codebook, scale, offset, codec.groups)


def widened(*tensors: Tensor | None) -> tuple:  # type: ignore[type-arg]  # as many tensors as came in
    """All tensors in one dtype: the widest among them, at least float32."""
    dtype = reduce(torch.promote_types, (t.dtype for t in tensors if t is not None), torch.float32)
    return tuple(None if t is None else t.to(dtype) for t in tensors)


def _norm(v: Tensor) -> Tensor:
    return root(v.square().sum(dim=1))


def root(squared: Tensor) -> Tensor:
    """The square root; value and gradient are 0 where rounding, or an exact hit, left nothing above 0."""
    nothing = squared <= 0
    return torch.where(nothing, 0, torch.where(nothing, 1, squared).sqrt())
