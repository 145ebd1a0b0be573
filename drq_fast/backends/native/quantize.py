"""Soft and hard approximations on the CPU, with their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import checks, modes
from .. import torch as definition
from ..gradients import graphless, like_inputs, refuse_second_derivatives
from ..types import Parameters, Quantized
from .encode import Levels
from .extension import floats, native, pointer
from .level import level_for
from .products import product
from .training import Chosen, Gradients, Recursion, Totals


def quantize(x: Tensor, codec: Parameters, gamma: float | Tensor) -> Quantized:
    """Soft and hard approximation of x [N, D]: see `backends.torch.quantize`; differentiable once."""
    with modes.precise("cpu"):
        sharpness = checks.gamma_value("quantize", gamma)
        if level := level_for("quantize", x, codec, sharpness):
            return definition.quantize(x, codec, sharpness, level)
        return Quantized(*_Quantize.apply(*graphless(x, *codec.tensors()), sharpness))


class _Quantize(torch.autograd.Function):
    """Keeps the scores x C^T [N, P] and goes through the levels again for the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None, gamma: float) -> Any:
        """(soft [N, D], hard [N, D], codes [N, M] int64): two products of N K D."""
        ctx.gamma = gamma
        recursion = Recursion(x, Parameters(codebook, scale, offset), gamma)
        levels, shift = recursion.levels, None if offset is None else offset.float()
        soft, hard = (torch.empty(x.shape, dtype=x.dtype, device="cpu") for _ in range(2))
        scores = floats(len(x), levels.P) if any(ctx.needs_input_grad) else None

        def approximate(few: Chosen) -> None:
            delta = floats(len(few.x), levels.P)
            few.job.delta = pointer(delta)
            native.mix_cpu(few.job, recursion.isa)
            codec = Parameters(levels.codebook, levels.scale, shift)
            chosen = definition.decode(recursion.codes[few.rows], codec)
            hard[few.rows] = chosen
            soft[few.rows] = chosen + product(delta, levels.codebook)

        recursion.each(slice(0, len(x)), approximate, errors=False, scores=scores)
        ctx.save_for_backward(x, codebook, scale, offset, scores)
        ctx.mark_non_differentiable(recursion.codes)
        ctx.set_materialize_grads(False)
        return soft, hard, recursion.codes

    @staticmethod
    def backward(ctx: Any, dsoft: Tensor | None, dhard: Tensor | None, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, codebook, scale and offset."""
        refuse_second_derivatives("quantize", "native")
        x, codebook, scale, offset, scores = ctx.saved_tensors
        codec = Parameters(codebook, scale, offset)
        dsoft = torch.zeros_like(x) if dsoft is None else dsoft
        with modes.precise("cpu"):
            gradients = _backward(x, codec, ctx.gamma, scores, dsoft, dhard)
        others = like_inputs(gradients, x, codebook, scale, None)[:3]
        if offset is None:
            return *others, None, None
        doffset = dsoft.sum(dim=0, dtype=torch.float32) - gradients.dx.sum(dim=0)  # it is added to both results, too
        if dhard is not None:
            doffset += dhard.sum(dim=0, dtype=torch.float32)
        return *others, doffset.to(offset.dtype), None


def _backward(
    x: Tensor, codec: Parameters, gamma: float, scores: Tensor, dsoft: Tensor, dhard: Tensor | None
) -> Gradients:
    """From the gradients of soft = hard + Delta C and of hard, [N, D] each: four products of N K D, six with dhard."""
    recursion = Recursion(x, codec, gamma)
    totals, levels = Totals(recursion), recursion.levels
    for block in recursion.blocks():
        dscores, delta, ddelta = (torch.empty_like(scores[block]) for _ in range(3))

        def back(
            few: Chosen, first: int = block.start, dscores: Tensor = dscores, d: Tensor = delta, dd: Tensor = ddelta
        ) -> None:
            inside = slice(few.rows.start - first, few.rows.stop - first)
            few.job.delta = pointer(d[inside])
            native.mix_cpu(few.job, recursion.isa)
            dd[inside] = product(dsoft[few.rows].float(), levels.codebook.T)
            totals.add(few, dscores[inside], ddelta=dd[inside])

        recursion.each(block, back, errors=False, scores=scores[block], known=True)
        totals.to_codebook(dscores, x[block], codec.offset)
        codes = recursion.codes[block]
        chosen = _scaled_choices(levels, codes)
        totals.to_codebook(delta.add_(chosen), dsoft[block])
        if dhard is not None:
            totals.to_codebook(chosen, dhard[block])
            ddelta += product(dhard[block].float(), levels.codebook.T)
        totals.dscale += ddelta.gather(1, codes).sum(dim=0, dtype=torch.float64)
    return totals.gradients()


def _scaled_choices(levels: Levels, codes: Tensor) -> Tensor:
    """sum_m s_m onehot(b_m) [n, P]."""
    total = floats(len(codes), levels.P).zero_()
    return total.scatter_add_(1, codes, levels.scale.expand(codes.shape))
