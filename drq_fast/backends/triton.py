"""The operations in Triton, over `drq_fast.kernels`, with their autograd Functions: the names and arguments of
`backends.torch`. Importing this module imports triton."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import checks, devices, modes
from ..kernels import beam as beams
from ..kernels import decode as decoding
from ..kernels import distortion as kernels
from ..kernels import encode as encoding
from ..kernels import quantize as quantizing
from ..kernels import squared
from . import torch as definition
from .gradients import centred, like_inputs, refuse_second_derivatives
from .types import CodewordSums, Distortion, Loss, Parameters, Quantized, SquaredErrors


def quantize(x: Tensor, codec: Parameters, gamma: float | Tensor) -> Quantized:
    """Soft and hard approximation of x [N, D]: see `backends.torch.quantize`; differentiable once."""
    with _on(x):
        if not codec.shared:
            return definition.quantize(x, codec, gamma, _one_level(gamma, "quantize"))
        soft, hard, codes = _Quantize.apply(x, *codec.tensors(), _sharpness(gamma, x), _precision("quantize"))
        shift = 0 if codec.offset is None else codec.offset.float()
        return Quantized((soft + shift).to(x.dtype), (hard + shift).to(x.dtype), codes)


def distortion(x: Tensor, codec: Parameters, gamma: float | Tensor) -> Distortion:
    """The errors of x [N, D] after each of M levels: see `backends.torch.distortion`; differentiable once."""
    with _on(x):
        if not codec.shared:
            return definition.distortion(x, codec, gamma, _one_level(gamma, "distortion"))
        return Distortion(*_Distortion.apply(x, *codec.tensors(), _sharpness(gamma, x), _precision("distortion")))


def loss(
    x: Tensor,
    codec: Parameters,
    gamma: float | Tensor,
    weights: tuple[float, float, float],
    omega: Tensor | None,
    joint: str,
) -> Loss:
    """The loss of x [N, D] and its codes: see `backends.torch.loss`; differentiable once."""
    with modes.precise(x.device.type):
        if not any(weights[1:]):
            return definition.hard_loss(squared_errors(x, codec, 1.0), weights[0], omega)
        return definition.loss_of(distortion(x, codec, gamma), weights, omega, joint)


def squared_errors(x: Tensor, codec: Parameters, commitment: float) -> SquaredErrors:
    """The squared errors of x [N, D] after each level: see `backends.torch.squared_errors`; differentiable once."""
    with _on(x):
        settings = codec.groups, commitment, _precision("squared_errors")
        return SquaredErrors(*_SquaredErrors.apply(x, *codec.tensors(), *settings))


@torch.no_grad()
def codeword_sums(x: Tensor, codes: Tensor, codec: Parameters, weights: Tensor) -> CodewordSums:
    """What a step of k-means adds up for each codeword: see `backends.torch.codeword_sums`; not differentiable."""
    with _on(x):
        return CodewordSums(*squared.codeword_sums(x, *codec.tensors(), codec.rows(codes), weights))


@torch.no_grad()
def encode(x: Tensor, codec: Parameters, beam: int, omega: Tensor | None) -> Tensor:
    """Codes [N, M] of x [N, D], uint8 for K <= 256, else int32: see `backends.torch.encode`."""
    codebook, scale, offset = codec.tensors()
    with _on(x):
        if beam == 1:
            return _encode_greedy(x, codec, _precision("encode"))
        options = {"offset": offset, "groups": codec.groups, "precision": _precision("encode")}
        omega = devices.tensor_of((1.0,) * len(scale), torch.float32, x.device) if omega is None else omega
        later = definition.still_to_come(omega)
        return beams.encode_beam(x, codebook, scale, beam=beam, omega=omega, still_to_come=later, **options)


def _encode_greedy(x: Tensor, codec: Parameters, precision: str, dtype: torch.dtype | None = None) -> Tensor:
    codebook, scale, offset = codec.tensors()
    if codec.shared:
        return encoding.encode(x, codebook, scale, offset=offset, precision=precision, dtype=dtype)

    def encode_group(h: Tensor, group: Parameters) -> Tensor:
        return encoding.encode(h, group.codebook, group.scale, precision=precision, dtype=dtype)

    return definition.encode_by_groups(centred(x, offset), codec, encode_group)


def _one_level(gamma: float | Tensor, op: str) -> definition.OneLevel:
    """One level by the kernels of `quantize`, for levels that do not share their codewords."""

    def level(_: int, h: Tensor, codebook: Tensor, s: Tensor) -> definition.Level:
        soft, hard, codes = _Quantize.apply(h, codebook, s[None], None, _sharpness(gamma, h), _precision(op))
        return definition.Level(codes[:, 0], hard, soft)

    return level


def decode(codes: Tensor, codec: Parameters) -> Tensor:
    """The vectors [N, D] that codes [N, L] stand for: see `backends.torch.decode`; not differentiable."""
    with _on(codes):
        return decoding.decode(codes if codec.shared else codec.rows(codes), *codec.tensors())


@contextmanager
def _on(tensor: Tensor) -> Iterator[None]:
    """A context that launches kernels on the device of a tensor and multiplies in float32."""
    with torch.cuda.device_of(tensor), modes.precise(tensor.device.type):
        yield


def _sharpness(gamma: float | Tensor, x: Tensor) -> Tensor:
    if not isinstance(gamma, Tensor):
        gamma = devices.tensor_of(float(gamma), torch.float32, x.device)
    return gamma.to(x.device, torch.float32).reshape(1)


def _precision(op: str) -> str:
    """How products of float32 are computed: "tf32x3", or "ieee" with DRQ_FAST_PRECISION=exact."""
    wanted = os.environ.get("DRQ_FAST_PRECISION") or "fast"
    checks.choice(op, "DRQ_FAST_PRECISION", wanted, ("fast", "exact"))
    return "ieee" if wanted == "exact" else "tf32x3"


class _Distortion(torch.autograd.Function):
    """`backends.torch.distortion`; goes through the levels again for the gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None, gamma: Tensor, precision: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(hard, soft, joint, codes int64), [N, M] each; gamma [1]."""
        codec, h = kernels.codec_of(codebook, scale), centred(x, offset)
        scores = codec.scores(h)
        levels = kernels.distortion(h, codec, scores, gamma, precision)
        ctx.save_for_backward(x, codebook, scale, offset, gamma, scores, *levels)
        ctx.precision = precision
        ctx.mark_non_differentiable(levels.codes)
        roots = (levels.residuals.clamp_min(0).sqrt(), levels.soft.clamp_min(0).sqrt())
        return *roots, levels.joint.clamp_min(0), levels.codes

    @staticmethod
    def backward(ctx: Any, dhard: Tensor, dsoft: Tensor, djoint: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, codebook, scale and offset."""
        refuse_second_derivatives("distortion", "triton")
        x, codebook, scale, offset, gamma, scores, *columns = ctx.saved_tensors
        with _on(x):
            gradients = kernels.distortion_backward(
                centred(x, offset),
                kernels.codec_of(codebook, scale),
                scores,
                gamma,
                kernels.Levels(*columns),
                dhard,
                dsoft,
                djoint,
                ctx.precision,
            )
        return *like_inputs(gradients, x, codebook, scale, offset), None, None


class _Quantize(torch.autograd.Function):
    """`backends.torch.quantize` without the offset added back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None, gamma: Tensor, precision: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(soft [N, D], hard [N, D], codes [N, M] int64); gamma [1]."""
        codec, h = kernels.codec_of(codebook, scale), centred(x, offset)
        scores = codec.scores(h)
        choices = quantizing.choose(h, codec, scores, gamma, precision)
        ctx.save_for_backward(x, codebook, scale, offset, gamma, scores, *choices)
        ctx.precision = precision
        ctx.mark_non_differentiable(choices.codes)
        return *quantizing.approximations(codec, choices), choices.codes

    @staticmethod
    def backward(ctx: Any, dsoft: Tensor, dhard: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, codebook, scale and offset."""
        refuse_second_derivatives("quantize", "triton")
        x, codebook, scale, offset, gamma, scores, *columns = ctx.saved_tensors
        with _on(x):
            codec, choices = kernels.codec_of(codebook, scale), quantizing.Choices(*columns)
            inputs = (centred(x, offset), codec, scores, gamma, choices)
            gradients = quantizing.quantize_backward(*inputs, dsoft, dhard, ctx.precision)
        return *like_inputs(gradients, x, codebook, scale, offset), None, None


class _SquaredErrors(torch.autograd.Function):
    """`backends.torch.squared_errors`; keeps the codes and forms the residuals again for the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codebook: Tensor,
        scale: Tensor,
        offset: Tensor | None,
        groups: tuple[int, ...],
        commitment: float,
        precision: str,
    ) -> tuple[Tensor, Tensor]:
        """(errors [N, M], codes [N, M] int64)."""
        codec = Parameters(codebook, scale, offset, groups)
        codes = _encode_greedy(x, codec, precision, torch.int64)
        chosen = codec.rows(codes)
        errors = squared.squared_errors(x, codebook, scale, offset, chosen)
        ctx.save_for_backward(x, codebook, scale, offset, chosen)
        ctx.commitment = commitment
        ctx.mark_non_differentiable(codes)
        ctx.set_materialize_grads(False)  # no zeros for the codes
        return errors.mul_(1 + commitment), codes

    @staticmethod
    def backward(ctx: Any, derrors: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of x, codebook, scale and offset."""
        refuse_second_derivatives("squared_errors", "triton")
        if derrors is None:
            return (None,) * 7
        x, codebook, scale, offset, chosen = ctx.saved_tensors
        with _on(x):
            by_row, dcodebook, dscale = squared.squared_errors_backward(x, codebook, scale, offset, chosen, derrors)
            doffset = None if offset is None else by_row.sum(dim=0).to(offset.dtype)
            dx = by_row.mul_(-ctx.commitment).to(x.dtype)
        return dx, dcodebook.to(codebook.dtype), dscale.to(scale.dtype), doffset, None, None, None
