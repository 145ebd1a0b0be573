"""The errors after each level on the CPU, with their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import checks, modes
from .. import torch as definition
from ..gradients import graphless, like_inputs, refuse_second_derivatives
from ..types import Distortion, Parameters
from .extension import floats, native, pointer
from .level import level_for
from .training import Chosen, Gradients, Recursion, Totals


def distortion(x: Tensor, codec: Parameters, gamma: float | Tensor) -> Distortion:
    """The errors of x [N, D] after each of M levels: see `backends.torch.distortion`; differentiable once."""
    with modes.precise("cpu"):
        sharpness = checks.gamma_value("distortion", gamma)
        if level := level_for("distortion", x, codec, sharpness):
            return definition.distortion(x, codec, sharpness, level)
        return Distortion(*_Distortion.apply(*graphless(x, *codec.tensors()), sharpness))


class _Distortion(torch.autograd.Function):
    """Keeps the scores x C^T [N, P] and goes through the levels again for the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None, gamma: float) -> Any:
        """(hard, soft, joint, codes int64), [N, M] each."""
        ctx.gamma = gamma
        recursion = Recursion(x, Parameters(codebook, scale, offset), gamma)
        scores = floats(len(x), recursion.levels.P) if any(ctx.needs_input_grad) else None
        hard, soft, joint = (floats(len(x), recursion.levels.M) for _ in range(3))

        def evaluate(few: Chosen) -> None:
            few.job.hard_errors, few.job.soft_errors = pointer(hard[few.rows]), pointer(soft[few.rows])
            few.job.joint_errors = pointer(joint[few.rows])
            native.evaluate_cpu(few.job, recursion.isa)

        recursion.each(slice(0, len(x)), evaluate, scores=scores)
        ctx.save_for_backward(x, codebook, scale, offset, scores)
        ctx.mark_non_differentiable(recursion.codes)
        return hard, soft, joint, recursion.codes

    @staticmethod
    def backward(ctx: Any, dhard: Tensor, dsoft: Tensor, djoint: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, codebook, scale and offset."""
        refuse_second_derivatives("distortion", "native")
        x, codebook, scale, offset, scores = ctx.saved_tensors
        codec = Parameters(codebook, scale, offset)
        with modes.precise("cpu"):
            gradients = _backward(x, codec, ctx.gamma, scores, (dhard, dsoft, djoint))
        return *like_inputs(gradients, x, *codec.tensors()), None


def _backward(x: Tensor, codec: Parameters, gamma: float, scores: Tensor, upstream: tuple[Tensor, ...]) -> Gradients:
    """From the gradients of hard, soft and joint, [N, M] each: two products of N K D and 2 M of N K K."""
    recursion = Recursion(x, codec, gamma)
    totals, (dhard, dsoft, djoint) = Totals(recursion), (t.float().contiguous() for t in upstream)
    for block in recursion.blocks():
        dscores = torch.empty_like(scores[block])

        def back(few: Chosen, first: int = block.start, dscores: Tensor = dscores) -> None:
            rows = few.rows
            inside = slice(rows.start - first, rows.stop - first)
            totals.add(few, dscores[inside], derrors=(dhard[rows], dsoft[rows], djoint[rows]))

        recursion.each(block, back, scores=scores[block], known=True)
        totals.to_codebook(dscores, x[block], codec.offset)
    return totals.gradients()
