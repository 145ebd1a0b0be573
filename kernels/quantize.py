"""Quantize: the soft and the hard approximation, by the kernels of the training pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .distortion import NOISE, gradients, joined, parts, run_levels
from .distortion_tiled import gradients_tiled, levels_tiled
from .levels import MAX_ON_CHIP, Levels, Scored
from .totals import Gradients, Totals


class Choices(NamedTuple):
    """codes [N, M] int64, residuals r_{m+1} [N, M], delta [N, P] with soft - hard = delta C."""

    codes: Tensor
    residuals: Tensor
    delta: Tensor


def choose(h: Tensor, codec: Scored, scores: Tensor, gamma: Tensor, precision: str = "tf32x3") -> Choices:
    """All levels of centred h [N, D] from scores [N, P] and gamma [1]."""
    norms = h.square().sum(dim=1)
    compute = run_levels if codec.P <= MAX_ON_CHIP else levels_tiled
    found = [compute(h[r], codec, scores[r], norms[r], gamma, precision, errors=False) for r in parts(len(h), codec.P)]
    columns = zip(*((levels.codes, levels.residuals, delta) for levels, delta in found), strict=True)
    return Choices(*(joined(column) for column in columns))


def approximations(codec: Scored, choices: Choices) -> tuple[Tensor, Tensor]:
    """(soft [N, D], hard [N, D]), without the offset."""
    hard = _scaled_choices(codec, choices.codes) @ codec.codebook
    return torch.addmm(hard, choices.delta, codec.codebook), hard


def quantize_backward(
    h: Tensor,
    codec: Scored,
    scores: Tensor,
    gamma: Tensor,
    choices: Choices,
    dsoft: Tensor,
    dhard: Tensor,
    precision: str = "tf32x3",
) -> Gradients:
    """Gradients from those of soft = xhat + Delta C and hard = xhat, [N, D] each."""
    norms, M = h.square().sum(dim=1), len(codec.scale)
    ddelta, dhard_scores = dsoft @ codec.codebook.T, dhard @ codec.codebook.T  # [N, P]
    totals = Totals(h, codec)
    for rows in parts(len(h), M * codec.P):
        inputs = (h[rows], codec, scores[rows], norms[rows], gamma)
        codes, residuals = choices.codes[rows], choices.residuals[rows]
        if codec.P <= MAX_ON_CHIP:
            levels = Levels(codes, residuals, residuals, residuals)  # the errors are not used
            found = gradients(*inputs, levels, ddelta[rows], precision)
        else:
            none = torch.zeros_like(residuals)
            found = gradients_tiled(*inputs, codes, none, none, none, NOISE, precision, ddelta[rows])
        totals.add(rows, found)
    chosen = _scaled_choices(codec, choices.codes)
    totals.dcodebook.addmm_((choices.delta + chosen).T, dsoft).addmm_(chosen.T, dhard)
    totals.dscale += (ddelta + dhard_scores).gather(1, choices.codes).sum(dim=0, dtype=torch.float64)
    return totals.gradients()


def _scaled_choices(codec: Scored, codes: Tensor) -> Tensor:
    """sum_m s_m onehot(b_m) [N, P]; levels are added in order, so that the result is deterministic."""
    total = codec.scale.new_zeros(len(codes), codec.P)
    for s, column in zip(codec.scale, codes.unbind(dim=1), strict=True):
        total.scatter_(1, column[:, None], total.gather(1, column[:, None]) + s)
    return total
