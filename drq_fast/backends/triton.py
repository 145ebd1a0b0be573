"""The operations in Triton, over `drq_fast.kernels`, with their autograd Functions: the names and arguments of
`backends.torch`. Importing this module imports triton."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from .. import checks
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
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        soft, hard, codes = _Quantize.apply(x, *codec.tensors(), _sharpness(gamma, x), _precision("quantize"))
        shift = 0 if codec.offset is None else codec.offset.float()
        return Quantized((soft + shift).to(x.dtype), (hard + shift).to(x.dtype), codes)


def distortion(x: Tensor, codec: Parameters, gamma: float | Tensor) -> Distortion:
    """The errors of x [N, D] after each of M levels: see `backends.torch.distortion`; differentiable once."""
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
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
    with torch.autocast(x.device.type, enabled=False):
        if not any(weights[1:]):
            return definition.hard_loss(squared_errors(x, codec, 1.0), weights[0], omega)
        return definition.loss_of(distortion(x, codec, gamma), weights, omega, joint)


def squared_errors(x: Tensor, codec: Parameters, commitment: float) -> SquaredErrors:
    """The squared errors of x [N, D] after each level: see `backends.torch.squared_errors`; differentiable once."""
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        return SquaredErrors(*_SquaredErrors.apply(x, *codec.tensors(), commitment, _precision("squared_errors")))


@torch.no_grad()
def codeword_sums(x: Tensor, codes: Tensor, codec: Parameters, weights: Tensor) -> CodewordSums:
    """What a step of k-means adds up for each codeword: see `backends.torch.codeword_sums`; not differentiable."""
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        return CodewordSums(*squared.codeword_sums(x, *codec.tensors(), codes, weights))


@torch.no_grad()
def encode(x: Tensor, codec: Parameters, beam: int, omega: Tensor | None) -> Tensor:
    """Codes [N, M] of x [N, D], uint8 for K <= 256, else int32: see `backends.torch.encode`."""
    codebook, scale, offset = codec.tensors()
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        options = {"offset": offset, "precision": _precision("encode")}
        if beam == 1:
            return encoding.encode(x, codebook, scale, **options)
        omega = torch.ones(len(scale), device=x.device) if omega is None else omega
        later = definition.still_to_come(omega)
        return beams.encode_beam(x, codebook, scale, beam=beam, omega=omega, still_to_come=later, **options)


def decode(codes: Tensor, codec: Parameters) -> Tensor:
    """The vectors [N, D] that codes [N, L] stand for: see `backends.torch.decode`; not differentiable."""
    with torch.cuda.device_of(codes):
        return decoding.decode(codes, *codec.tensors())


def _sharpness(gamma: float | Tensor, x: Tensor) -> Tensor:
    return torch.as_tensor(gamma, dtype=torch.float32, device=x.device).reshape(1)


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
        with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
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
        with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
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
        commitment: float,
        precision: str,
    ) -> tuple[Tensor, Tensor]:
        """(errors [N, M], codes [N, M] int64)."""
        codes = encoding.encode(x, codebook, scale, offset=offset, precision=precision).long()
        errors = squared.squared_errors(x, codebook, scale, offset, codes)
        ctx.save_for_backward(x, codebook, scale, offset, codes)
        ctx.commitment = commitment
        ctx.mark_non_differentiable(codes)
        return errors.mul_(1 + commitment), codes

    @staticmethod
    def backward(ctx: Any, derrors: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, codebook, scale and offset."""
        refuse_second_derivatives("squared_errors", "triton")
        x, codebook, scale, offset, codes = ctx.saved_tensors
        with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
            by_row, dcodebook, dscale = squared.squared_errors_backward(x, codebook, scale, offset, codes, derrors)
            doffset = None if offset is None else by_row.sum(dim=0).to(offset.dtype)
            dx = by_row.mul_(-ctx.commitment).to(x.dtype)
        return dx, dcodebook.to(codebook.dtype), dscale.to(scale.dtype), doffset, None, None
