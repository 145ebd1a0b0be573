"""The operations in Triton, over `drq_fast.kernels`, with their autograd Functions: the names and arguments of
`backends.torch`. Importing this module imports triton."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from .. import checks, devices, modes
from . import compiled, passes
from . import torch as definition
from .gradients import refuse_second_derivatives
from .types import CodewordSums, Distortion, Loss, Parameters, Quantized, SquaredErrors


def quantize(x: Tensor, codec: Parameters, gamma: float | Tensor) -> Quantized:
    """Soft and hard approximation of x [N, D]: see `backends.torch.quantize`; differentiable once."""
    if not codec.shared:
        return definition.quantize(x, codec, gamma, _one_level(gamma, "quantize"))
    soft, hard, codes = _quantize(x, *codec.tensors(), _sharpness(gamma, x), _precision("quantize"))
    shift = 0 if codec.offset is None else codec.offset.float()
    return Quantized((soft + shift).to(x.dtype), (hard + shift).to(x.dtype), codes)


def distortion(x: Tensor, codec: Parameters, gamma: float | Tensor) -> Distortion:
    """The errors of x [N, D] after each of M levels: see `backends.torch.distortion`; differentiable once."""
    if not codec.shared:
        return definition.distortion(x, codec, gamma, _one_level(gamma, "distortion"))
    apply = compiled.distortion if torch.compiler.is_compiling() else _Distortion.apply
    return Distortion(*apply(x, *codec.tensors(), _sharpness(gamma, x), _precision("distortion"))[:4])


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
    apply = compiled.squared_errors if torch.compiler.is_compiling() else _SquaredErrors.apply
    return SquaredErrors(*apply(x, *codec.tensors(), codec.groups, commitment, _precision("squared_errors")))


@torch.no_grad()
def codeword_sums(x: Tensor, codes: Tensor, codec: Parameters, weights: Tensor) -> CodewordSums:
    """What a step of k-means adds up for each codeword: see `backends.torch.codeword_sums`; not differentiable."""
    if torch.compiler.is_compiling():
        return CodewordSums(*compiled.codeword_sums(x, codes, *codec.tensors(), codec.groups, weights))
    return passes.codeword_sums(x, codes, codec, weights)


@torch.no_grad()
def encode(x: Tensor, codec: Parameters, beam: int, omega: Tensor | None) -> Tensor:
    """Codes [N, M] of x [N, D], uint8 for K <= 256, else int32: see `backends.torch.encode`."""
    if torch.compiler.is_compiling():
        return compiled.encode(x, *codec.tensors(), codec.groups, beam, omega, _precision("encode"))
    return passes.encode(x, codec, beam, omega, _precision("encode"))


def decode(codes: Tensor, codec: Parameters) -> Tensor:
    """The vectors [N, D] that codes [N, L] stand for: see `backends.torch.decode`; not differentiable."""
    if torch.compiler.is_compiling():
        L = codes.shape[1]
        return compiled.decode(codes, codec.codebook, codec.scale, codec.offset, codec.groups[:L])
    return passes.decode(codes, codec)


def _one_level(gamma: float | Tensor, op: str) -> definition.OneLevel:
    """One level by the kernels of `quantize`, for levels that do not share their codewords."""

    def level(_: int, h: Tensor, codebook: Tensor, s: Tensor) -> definition.Level:
        soft, hard, codes = _quantize(h, codebook, s[None], None, _sharpness(gamma, h), _precision(op))
        return definition.Level(codes[:, 0], hard, soft)

    return level


def _quantize(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    apply = compiled.quantize if torch.compiler.is_compiling() else _Quantize.apply
    soft, hard, codes, *_ = apply(*inputs)
    return soft, hard, codes


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
    ) -> tuple[Tensor, ...]:
        """(hard, soft, joint, codes int64), [N, M] each; gamma [1]."""
        found = passes.distortion(x, Parameters(codebook, scale, offset), gamma, precision)
        ctx.save_for_backward(x, codebook, scale, offset, gamma, *found[3:])
        ctx.precision = precision
        ctx.mark_non_differentiable(found[3])
        return found[:4]

    @staticmethod
    def backward(ctx: Any, dhard: Tensor, dsoft: Tensor, djoint: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, codebook, scale and offset."""
        refuse_second_derivatives("distortion", "triton")
        x, codebook, scale, offset, gamma, *kept = ctx.saved_tensors
        inputs = x, Parameters(codebook, scale, offset), gamma, ctx.precision, tuple(kept)
        return *passes.distortion_backward(*inputs, (dhard, dsoft, djoint)), None, None


class _Quantize(torch.autograd.Function):
    """`backends.torch.quantize` without the offset added back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None, gamma: Tensor, precision: str
    ) -> tuple[Tensor, ...]:
        """(soft [N, D], hard [N, D], codes [N, M] int64); gamma [1]."""
        found = passes.quantize(x, Parameters(codebook, scale, offset), gamma, precision)
        ctx.save_for_backward(x, codebook, scale, offset, gamma, *found[2:])
        ctx.precision = precision
        ctx.mark_non_differentiable(found[2])
        return found[:3]

    @staticmethod
    def backward(ctx: Any, dsoft: Tensor, dhard: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, codebook, scale and offset."""
        refuse_second_derivatives("quantize", "triton")
        x, codebook, scale, offset, gamma, *kept = ctx.saved_tensors
        inputs = x, Parameters(codebook, scale, offset), gamma, ctx.precision, tuple(kept)
        return *passes.quantize_backward(*inputs, (dsoft, dhard)), None, None


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
        errors, codes = passes.squared_errors(x, Parameters(codebook, scale, offset, groups), commitment, precision)
        ctx.save_for_backward(x, codebook, scale, offset, codes)
        ctx.groups, ctx.commitment = groups, commitment
        ctx.mark_non_differentiable(codes)
        ctx.set_materialize_grads(False)  # no zeros for the codes
        return errors, codes

    @staticmethod
    def backward(ctx: Any, derrors: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of x, codebook, scale and offset."""
        refuse_second_derivatives("squared_errors", "triton")
        if derrors is None:
            return (None,) * 7
        x, codebook, scale, offset, codes = ctx.saved_tensors
        codec = Parameters(codebook, scale, offset, ctx.groups)
        return *passes.squared_errors_backward(x, codec, ctx.commitment, codes, derrors), None, None, None
