"""The losses of the layer: errors after each level, weighted and averaged over the vectors that count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import devices, functional
from .backends.types import Loss, Parameters

REDUCTIONS = {"squared": ("mean", "row", "level"), "paper": ("mean", "row")}  # by loss


class Batch(NamedTuple):
    """x [N, D], and what of it counts: lengths [N], the levels of each vector, and mask [N] bool; None is all."""

    x: Tensor
    lengths: Tensor | None = None
    mask: Tensor | None = None

    def whole(self) -> bool:
        """Whether everything counts."""
        return self.lengths is None and self.mask is None


def squared(batch: Batch, errors: Tensor, omega: Sequence[float] | None, reduction: str) -> Tensor:
    """The mean of ||sg[x] - xhat_m||^2 / D + commitment * ||x - sg[xhat_m]||^2 / D over levels and vectors.

    errors [N, M] are those of `functional.squared_errors`, not divided by D. omega [M] weighs the levels; None counts
    all alike. reduction: "mean" gives a scalar, "row" the loss of each vector [N], "level" that of each level [M], not
    weighted.
    """
    D = batch.x.shape[1]
    if reduction == "level":
        counts = level_weights(batch, None, errors).expand_as(errors)
        return _sum(errors / D * counts) / _sum(counts).clamp_min(1)
    if batch.whole():  # then the share of each level is known here
        omega = (1.0,) * errors.shape[1] if omega is None else omega
        shares = tuple(weight / (sum(omega) * D) for weight in omega)
        shared = errors * devices.tensor_of(shares, errors.dtype, errors.device)
        if reduction == "row":
            return shared.sum(dim=1)
        return shared.sum(dtype=torch.float64).to(errors.dtype) / torch.sym_max(len(errors), 1)
    weights = level_weights(batch, omega, errors)
    total = weights.sum(dim=-1)
    return _reduced((errors / D * weights).sum(dim=1) / torch.where(total > 0, total, 1), batch, reduction)


def distance(batch: Batch, squares: Tensor, omega: Sequence[float] | None) -> Tensor:
    """sqrt(sum of ||x - sg[xhat_m]||^2), weighted over levels: how far all of x is from its codes.

    squares [N, M] = ||x - sg[xhat_m]||^2. The gradient by x has a length of at most 1, and is 0 at distance 0.
    """
    total = _sum(squared(batch, squares, omega, "row")) * batch.x.shape[1]
    return torch.where(total > 0, total, 1).sqrt() * (total > 0)


class Pulled(torch.autograd.Function):
    """hard [N, D] with the gradient of `through` [N, D], which also lowers `distance`: see docs/math.md on the pull."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hard: Tensor, through: Tensor, distance: Tensor, pull: float) -> Tensor:
        """The values of hard; not finite where `through` is not."""
        return torch.add(hard, through, alpha=0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: Tensor) -> None:
        """Keeps how strong the pull is, relative to the gradient."""
        ctx.pull, ctx.dtype = inputs[3], inputs[2].dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor, None]:
        """Gradients of `through` and `distance`."""
        length = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        return None, gradient, (ctx.pull * length).to(ctx.dtype), None


def paper(
    batch: Batch,
    codec: Parameters,
    gamma: Tensor,
    weights: tuple[float, float, float],
    omega: Sequence[float] | None,
    joint: str,
    reduction: str,
) -> Loss:
    """weights . (E_h, E_s, E_j) of the paper: sums over levels of unsquared errors, averaged over vectors."""
    given = {"gamma": gamma, "offset": codec.offset, "codebooks": codec.sizes}
    if reduction == "mean" and batch.whole():
        options = {"weights": weights, "level_weights": omega, "joint": joint}
        return functional.loss(batch.x, codec.codebook, codec.scale, **given, **options)  # type: ignore[arg-type]
    errors = functional.distortion(batch.x, codec.codebook, codec.scale, **given)  # type: ignore[arg-type]
    of_levels = level_weights(batch, omega, errors.hard)
    e_hard, e_soft = ((each * of_levels).sum(dim=1) for each in (errors.hard, errors.soft))
    lengths = batch.lengths
    last = errors.joint[:, -1] if lengths is None else errors.joint.gather(1, lengths[:, None] - 1).squeeze(1)
    e_joint = (e_hard - e_soft).abs() if joint == "gap" else last
    rows = weights[0] * e_hard + weights[1] * e_soft + weights[2] * e_joint
    return Loss(_reduced(rows, batch, reduction), errors.codes)


def level_weights(batch: Batch, omega: Sequence[float] | None, errors: Tensor) -> Tensor:
    """omega [M], or [N, M] with 0 for levels and vectors that do not count."""
    levels = (1.0,) * errors.shape[1] if omega is None else tuple(omega)
    weights = devices.tensor_of(levels, errors.dtype, errors.device)
    if batch.lengths is not None:
        weights = weights * (torch.arange(errors.shape[1], device=errors.device) < batch.lengths[:, None])
    return weights if batch.mask is None else weights * batch.mask[:, None]


def _reduced(rows: Tensor, batch: Batch, reduction: str) -> Tensor:
    """The losses of vectors [N], 0 where masked, or the mean of those that count, 0 if there are none."""
    rows = rows if batch.mask is None else rows * batch.mask
    if reduction == "row":
        return rows
    count = torch.sym_max(len(rows), 1) if batch.mask is None else batch.mask.sum().clamp_min(1)
    return _sum(rows) / count


def _sum(values: Tensor) -> Tensor:
    """Over vectors, in float64: the order of additions, which depends on the number of threads, changes no bit."""
    return values.sum(dim=0, dtype=torch.float64).to(values.dtype)
