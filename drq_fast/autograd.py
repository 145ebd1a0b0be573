"""torch.autograd.Functions around the compiled kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import _native, _training, reference


class QuantizationLoss(torch.autograd.Function):
    """`reference.loss` by the native kernels, which form the gradients in the forward pass; backward hands them out."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codebook: Tensor,
        scale: Tensor,
        offset: Tensor | None,
        gamma: float,
        weights: tuple[float, float, float],
        omega: Tensor,
        joint: str,
    ) -> tuple[Tensor, Tensor]:
        """(loss, codes [N, M] int64)."""
        ctx.save_for_backward(x, codebook, scale, offset, omega)
        ctx.settings = {"gamma": gamma, "weights": weights, "joint": joint, "gradients": any(ctx.needs_input_grad[:4])}
        value, codes, ctx.gradients = _training.loss(x, codebook, scale, offset=offset, omega=omega, **ctx.settings)
        ctx.mark_non_differentiable(codes)
        return value, codes

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, codebook, scale and offset; given away the first time, formed anew after that."""
        _refuse_second_derivatives("loss", "native")
        gradients, ctx.gradients = ctx.gradients, None
        x, codebook, scale, offset, omega = ctx.saved_tensors
        if gradients is None:
            with torch.autocast("cpu", enabled=False):
                gradients = _training.loss(x, codebook, scale, offset=offset, omega=omega, **ctx.settings)[2]
            assert gradients is not None
        if dloss != 1:
            for gradient in gradients:
                gradient.mul_(dloss)
        return *_like_inputs(gradients, x, codebook, scale, offset), *[None] * 4


class NativeDistortion(torch.autograd.Function):
    """`reference.distortion` by the native kernels, which go through the levels again for the gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None, gamma: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(hard, soft, joint, codes int64), [N, M] each."""
        ctx.gamma = gamma
        keep = any(ctx.needs_input_grad)
        errors, scores = _training.distortion(x, codebook, scale, gamma=gamma, offset=offset, keep=keep)
        ctx.save_for_backward(x, codebook, scale, offset, scores)
        ctx.mark_non_differentiable(errors.codes)
        return errors.hard, errors.soft, errors.joint, errors.codes

    @staticmethod
    def backward(ctx: Any, dhard: Tensor, dsoft: Tensor, djoint: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, codebook, scale and offset."""
        _refuse_second_derivatives("distortion", "native")
        x, codebook, scale, offset, scores = ctx.saved_tensors
        kept, upstream = {"gamma": ctx.gamma, "offset": offset, "scores": scores}, (dhard, dsoft, djoint)
        with torch.autocast("cpu", enabled=False):
            gradients = _training.distortion_backward(x, codebook, scale, **kept, upstream=upstream)
        return *_like_inputs(gradients, x, codebook, scale, offset), None


class NativeQuantize(torch.autograd.Function):
    """`reference.quantize` by the native kernels, which go through the levels again for the gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None, gamma: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(soft [N, D], hard [N, D], codes [N, M] int64)."""
        ctx.gamma = gamma
        keep = any(ctx.needs_input_grad)
        found, scores = _training.quantize(x, codebook, scale, gamma=gamma, offset=offset, keep=keep)
        ctx.save_for_backward(x, codebook, scale, offset, scores)
        ctx.mark_non_differentiable(found.codes)
        ctx.set_materialize_grads(False)
        return found.soft, found.hard, found.codes

    @staticmethod
    def backward(ctx: Any, dsoft: Tensor | None, dhard: Tensor | None, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, codebook, scale and offset."""
        _refuse_second_derivatives("quantize", "native")
        x, codebook, scale, offset, scores = ctx.saved_tensors
        kept = {"gamma": ctx.gamma, "offset": offset, "scores": scores}
        dsoft = torch.zeros_like(x) if dsoft is None else dsoft
        with torch.autocast("cpu", enabled=False):
            gradients = _training.quantize_backward(x, codebook, scale, **kept, dsoft=dsoft, dhard=dhard)
        others = _like_inputs(gradients, x, codebook, scale, None)[:3]
        if offset is None:
            return *others, None, None
        doffset = dsoft.sum(dim=0, dtype=torch.float32) - gradients.dx.sum(dim=0)  # it is added to both results, too
        if dhard is not None:
            doffset += dhard.sum(dim=0, dtype=torch.float32)
        return *others, doffset.to(offset.dtype), None


class Lookup(torch.autograd.Function):
    """`reference.lookup` by compiled code; the gradients are added up in a fixed order."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        """sums [Q, N] of table [Q, K], codes [N, M] or [Q, N, M], scale [M]."""
        ctx.save_for_backward(table, codes, scale)
        return _native.lookup(table, codes, scale) if codes.ndim == 2 else reference.lookup(table, codes, scale)

    @staticmethod
    def backward(ctx: Any, dsums: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of table and scale."""
        _refuse_second_derivatives("adc", "native")
        table, codes, scale = ctx.saved_tensors
        dtable, dscale = torch.zeros_like(table), torch.zeros_like(scale)
        for m in range(codes.shape[-1]):
            by_codeword = _sums_by_codeword(dsums, codes[..., m].long(), table.shape[1])
            dtable += scale[m] * by_codeword
            dscale[m] = (table * by_codeword).sum()
        return dtable, None, dscale


def lookup(table: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """`reference.lookup` by compiled code; differentiable once."""
    sums: Tensor = Lookup.apply(table, codes, scale)
    return sums


def _sums_by_codeword(values: Tensor, codes: Tensor, K: int) -> Tensor:
    """[Q, K]: the values [Q, N] summed by their codes [N] or [Q, N]; by one-hot products where adding has no order."""
    if values.device.type == "cpu":
        if codes.ndim == 1:
            return values.new_zeros(K, len(values)).index_add_(0, codes, values.T).T
        return values.new_zeros(len(values), K).scatter_add_(1, codes, values)
    total = values.new_zeros(len(values), K)
    for part, columns in zip(values.split(4096, dim=1), codes.split(4096, dim=-1), strict=True):
        total += (part[:, None] @ torch.nn.functional.one_hot(columns, K).to(values)).squeeze(1)
    return total


class TritonDistortion(torch.autograd.Function):
    """`reference.distortion` by the Triton kernels, which go through the levels again for the gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None, gamma: Tensor, precision: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(hard, soft, joint, codes int64), [N, M] each; gamma [1]."""
        from .kernels import distortion as kernels

        codec, h = kernels.codec_of(codebook, scale), _centred(x, offset)
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
        _refuse_second_derivatives("distortion")
        from .kernels import distortion as kernels

        x, codebook, scale, offset, gamma, scores, *columns = ctx.saved_tensors
        with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
            gradients = kernels.distortion_backward(
                _centred(x, offset),
                kernels.codec_of(codebook, scale),
                scores,
                gamma,
                kernels.Levels(*columns),
                dhard,
                dsoft,
                djoint,
                ctx.precision,
            )
        return *_like_inputs(gradients, x, codebook, scale, offset), None, None


class TritonQuantize(torch.autograd.Function):
    """`reference.quantize` by the Triton kernels, without the offset added back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None, gamma: Tensor, precision: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(soft [N, D], hard [N, D], codes [N, M] int64); gamma [1]."""
        from .kernels import distortion, quantize

        codec, h = distortion.codec_of(codebook, scale), _centred(x, offset)
        scores = codec.scores(h)
        choices = quantize.choose(h, codec, scores, gamma, precision)
        ctx.save_for_backward(x, codebook, scale, offset, gamma, scores, *choices)
        ctx.precision = precision
        ctx.mark_non_differentiable(choices.codes)
        return *quantize.approximations(codec, choices), choices.codes

    @staticmethod
    def backward(ctx: Any, dsoft: Tensor, dhard: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, codebook, scale and offset."""
        _refuse_second_derivatives("quantize")
        from .kernels import distortion, quantize

        x, codebook, scale, offset, gamma, scores, *columns = ctx.saved_tensors
        with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
            codec, choices = distortion.codec_of(codebook, scale), quantize.Choices(*columns)
            inputs = (_centred(x, offset), codec, scores, gamma, choices)
            gradients = quantize.quantize_backward(*inputs, dsoft, dhard, ctx.precision)
        return *_like_inputs(gradients, x, codebook, scale, offset), None, None


def _like_inputs(
    gradients: Iterable[Tensor], x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None
) -> tuple[Tensor | None, ...]:
    """dx, dcodebook, dscale, and of the offset in x - offset, in the dtypes of the inputs."""
    dx, dcodebook, dscale = gradients
    doffset = None if offset is None else -dx.sum(dim=0).to(offset.dtype)
    return dx.to(x.dtype), dcodebook.to(codebook.dtype), dscale.to(scale.dtype), doffset


def _centred(x: Tensor, offset: Tensor | None) -> Tensor:
    return (x.float() if offset is None else x.float() - offset.float()).contiguous()


def _refuse_second_derivatives(op: str, backend: str = "triton") -> None:
    if torch.is_grad_enabled():  # create_graph=True: a silent zero would be wrong
        raise RuntimeError(f'{op}: the {backend} backend has no second derivatives; backend="torch" has.')
