"""The losses of the layer: errors after each level, weighted and averaged over the vectors that count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import checks, functional
from .backends.types import Loss, Parameters

REDUCTIONS = ("mean", "row", "level")


class Batch(NamedTuple):
    """x [N, D], and what of it counts: lengths [N], the levels of each vector, and mask [N] bool; None is all."""

    x: Tensor
    lengths: Tensor | None = None
    mask: Tensor | None = None

    def whole(self) -> bool:
        """Whether everything counts."""
        return self.lengths is None and self.mask is None


def squared(batch: Batch, codec: Parameters, commitment: float, omega: Sequence[float] | None, reduction: str) -> Loss:
    """The mean of ||sg[x] - xhat_m||^2 / D + commitment * ||x - sg[xhat_m]||^2 / D over levels and vectors.

    omega [M] weighs the levels; None counts all alike. reduction: "mean" gives a scalar, "row" the loss of each vector
    [N], "level" that of each level [M], not weighted.
    """
    found = functional.squared_errors(batch.x, *codec.tensors()[:2], offset=codec.offset, commitment=commitment)
    errors = found.errors / batch.x.shape[1]
    if reduction == "level":
        return Loss(_mean(errors, _runs(batch, errors)), found.codes)
    weights = errors.new_ones(errors.shape[1]) if omega is None else errors.new_tensor(omega)
    if batch.lengths is not None:
        weights = weights * _runs(batch, errors)
    total = weights.sum(dim=-1)
    rows = (errors * weights).sum(dim=1) / torch.where(total > 0, total, 1)
    return Loss(rows if reduction == "row" else _mean(rows, batch.mask), found.codes)


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
    given = {"gamma": gamma, "offset": codec.offset}
    if reduction == "level":
        checks.fail("RecurrentQuantizer", "reduction", '"mean" or "row" with loss="paper"', repr(reduction))
    if reduction == "mean" and batch.whole():
        options = {"weights": weights, "level_weights": omega, "joint": joint}
        return functional.loss(batch.x, codec.codebook, codec.scale, **given, **options)  # type: ignore[arg-type]
    errors = functional.distortion(batch.x, codec.codebook, codec.scale, **given)  # type: ignore[arg-type]
    level_weights = errors.hard.new_ones(errors.hard.shape[1]) if omega is None else errors.hard.new_tensor(omega)
    level_weights = level_weights * _runs(batch, errors.hard)
    e_hard, e_soft = ((each * level_weights).sum(dim=1) for each in (errors.hard, errors.soft))
    lengths = batch.lengths
    last = errors.joint[:, -1] if lengths is None else errors.joint.gather(1, lengths[:, None] - 1).squeeze(1)
    e_joint = (e_hard - e_soft).abs() if joint == "gap" else last
    rows = weights[0] * e_hard + weights[1] * e_soft + weights[2] * e_joint
    return Loss(rows if reduction == "row" else _mean(rows, batch.mask), errors.codes)


def _runs(batch: Batch, errors: Tensor) -> Tensor:
    """[N, M] of 0 and 1: which levels of which vectors count."""
    runs = torch.ones_like(errors)
    if batch.lengths is not None:
        runs = runs * (torch.arange(errors.shape[1], device=errors.device) < batch.lengths[:, None])
    return runs if batch.mask is None else runs * batch.mask[:, None]


def _mean(values: Tensor, counts: Tensor | None) -> Tensor:
    """The mean of values [N] or [N, M] over the rows that count; 0 if there are none."""
    if counts is None:
        return values.sum(dim=0) / torch.sym_max(len(values), 1)
    counts = counts.to(values.dtype)
    return (values * counts).sum(dim=0) / counts.sum(dim=0).clamp_min(1)
