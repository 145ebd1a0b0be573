"""The quantization loss on the CPU, with all its gradients formed in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import checks, modes
from .. import torch as definition
from ..gradients import graphless, like_inputs, refuse_second_derivatives
from ..types import Loss, Parameters
from .extension import floats, native, pointer
from .level import level_for
from .squared import squared_errors
from .training import Chosen, Gradients, LossTerms, Recursion, Totals


def loss(
    x: Tensor,
    codec: Parameters,
    gamma: float | Tensor,
    weights: tuple[float, float, float],
    omega: Tensor | None,
    joint: str,
) -> Loss:
    """The loss of x [N, D] and its codes: see `backends.torch.loss`; differentiable once."""
    if not any(weights[1:]):
        return definition.hard_loss(squared_errors(x, codec, 1.0), weights[0], omega)
    omega = floats(len(codec.scale)).fill_(1) if omega is None else omega
    settings = (checks.gamma_value("loss", gamma), weights, omega, joint)
    with modes.precise("cpu"):
        if level := level_for("loss", x, codec, settings[0]):
            return definition.loss_of(definition.distortion(x, codec, settings[0], level), weights, omega, joint)
        return Loss(*_Loss.apply(*graphless(x, *codec.tensors()), *settings))


class _Loss(torch.autograd.Function):
    """Forms the gradients in the forward pass, where the weights of a scalar are known; backward returns them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None, *settings: Any) -> Any:
        """(loss, codes [N, M] int64); settings: gamma, weights, omega, joint."""
        ctx.save_for_backward(x, codebook, scale, offset, settings[2])
        ctx.settings = settings
        wanted = any(ctx.needs_input_grad[:4])
        value, codes, ctx.gradients = _compute(x, Parameters(codebook, scale, offset), *settings, gradients=wanted)
        ctx.mark_non_differentiable(codes)
        return value, codes

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, codebook, scale and offset; computed again if backward is called a second time."""
        refuse_second_derivatives("loss", "native")
        gradients, ctx.gradients = ctx.gradients, None
        x, codebook, scale, offset, _omega = ctx.saved_tensors
        codec = Parameters(codebook, scale, offset)
        if gradients is None:
            with modes.precise("cpu"):
                gradients = _compute(x, codec, *ctx.settings, gradients=True)[2]
        if dloss != 1:
            for gradient in gradients:
                gradient.mul_(dloss)
        return *like_inputs(gradients, x, *codec.tensors()), *[None] * 4


def _compute(
    x: Tensor,
    codec: Parameters,
    gamma: float,
    weights: tuple[float, float, float],
    omega: Tensor,
    joint: str,
    *,
    gradients: bool,
) -> tuple[Tensor, Tensor, Gradients | None]:
    """(loss, codes [N, M] int64, gradients if wanted): three products of N K D and 2 M of N K K."""
    of_hard, of_soft, of_joint = (weight / max(len(x), 1) for weight in weights)
    terms = LossTerms(omega, of_hard, of_soft, of_joint, joint == "gap")
    recursion = Recursion(x, codec, gamma, terms)
    if not gradients:
        values = torch.zeros(torch.get_num_threads(), dtype=torch.float64, device="cpu")

        def evaluate(few: Chosen) -> None:
            few.job.value = pointer(values[few.part])
            native.evaluate_cpu(few.job, recursion.isa)

        recursion.each(slice(0, len(x)), evaluate)
        return values.sum().float(), recursion.codes, None
    totals = Totals(recursion)
    scores = floats(max((b.stop - b.start for b in recursion.blocks()), default=0), recursion.levels.P)
    for block in recursion.blocks():
        S = scores[: block.stop - block.start]
        recursion.each(block, lambda few: totals.add(few, few.scores), scores=S)  # dS replaces S
        totals.to_codebook(S, x[block], codec.offset)
    value = torch.stack([part.value for part in totals.sums]).sum().float()
    return value, recursion.codes, totals.gradients()
