"""How codebook, scale and offset follow x during training: running averages, whatever the optimiser's rate is.

Each codeword moves to the running mean of the residuals that it stands for, as in online k-means. Its mass is the
running sum of the weights scale[m]^2 of its uses. A codeword whose mass is far below the average is replaced by a
vector of the batch. The scale of a level follows the size of its residuals relative to x, so that all levels use the
same codewords. docs/math.md has the formulas, docs/design.md says why.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import functional, ranks
from .backends.types import Parameters

DECAY = 0.9  # of the averages per batch, at least
_USES = 20  # per codeword and on average, that the mass remembers: with fewer, chance leaves codewords without any
_DEAD = 0.05  # share of the average mass below which a codeword is replaced
_REPLACED = 16  # one of so many codewords may be replaced per batch


class Change(NamedTuple):
    """What is to be added to codebook [K, D], scale [L] and offset [D], and the new mass [K]."""

    codebook: Tensor
    scale: Tensor
    offset: Tensor | None
    mass: Tensor


@torch.no_grad()
def change(
    x: Tensor, codes: Tensor, residuals: Tensor, codec: Parameters, weights: Tensor, mass: Tensor, batch: Tensor
) -> Change:
    """What x [N, D] changes, given codes [N, L], residuals [N, L] = ||x - xhat_m||^2 and weights [N, L] of its levels.

    batch: its number. Vectors of weight 0, and those that are not finite, count nowhere. Under torch.distributed sums
    are those of all ranks, and replaced codewords become vectors of rank 0, so that all ranks compute the same.
    """
    K = len(codec.codebook)
    weights = torch.where(x.isfinite().all(dim=1, keepdim=True), weights, 0)
    counts = weights != 0
    h = torch.where(counts.any(dim=1, keepdim=True), x if codec.offset is None else x - codec.offset, 0).float()
    sizes = torch.cat([h.square().sum(dim=1, keepdim=True), residuals[:, :-1].float()], dim=1)  # ||h_m||^2 [N, L]
    of_x, of_levels = (torch.where(counts, each, 0).sum(dim=0) for each in (sizes[:, :1], sizes))
    uses = torch.stack([counts.any(dim=1).sum(), counts.sum()])
    sums, added = functional.codeword_sums_checked(x, codes, codec, weights)
    spare = _vectors(h, counts.any(dim=1), -(-K // _REPLACED), batch)
    sums, added, total, of_x, of_levels, uses, spare = ranks.summed(
        sums, added, h.sum(dim=0), of_x, of_levels, uses.to(sums.dtype), of_rank_zero=spare
    )

    decay = (1 - uses[1] / (_USES * K)).clamp_min(DECAY)
    start = added.sum() / (K * (1 - decay)).clamp_min(1e-9)  # the average that the mass tends to
    mass = decay * torch.where(mass.sum() == 0, start, mass.to(sums.dtype)) + added
    moved = sums / torch.where(mass > 0, mass, 1)[:, None]
    least, which = mass.topk(len(spare), largest=False)
    dead = least < _DEAD * mass.mean()
    replaced = torch.where(dead[:, None], spare - codec.codebook[which].to(sums.dtype), moved[which])
    mass = mass.index_copy(0, which, torch.where(dead, mass.mean(), least))

    known = (of_x > 0) & (of_levels > 0)
    relative = (of_levels / torch.where(known, of_x, 1)).sqrt()
    scale = torch.where(known, torch.copysign(relative, codec.scale) - codec.scale, 0)
    rate = 1 - decay
    shift = None if codec.offset is None else rate * total / uses[0].clamp_min(1)
    return Change(moved.index_copy(0, which, replaced), rate * scale, shift, mass)


def shared_factor(scale: Tensor) -> Tensor:
    """The w whose powers w**m are nearest to scale [L], L > 1, in the logarithm; w has the sign of scale[1]."""
    m = torch.arange(len(scale), device=scale.device)
    logs = scale.abs().clamp_min(torch.finfo(scale.dtype).tiny).log()
    return torch.copysign(torch.exp((m * logs).sum() / m.square().sum()), scale[1])


def _vectors(h: Tensor, counted: Tensor, count: int, batch: Tensor) -> Tensor:
    """`count` of the vectors h [N, D] that are counted, other ones for every batch; zeros if there are none."""
    if len(h) == 0:
        return h.new_zeros(count, h.shape[1])
    order = counted.to(torch.int8).argsort(descending=True, stable=True)  # those that count come first
    place = (torch.arange(count, device=h.device) + batch * count) * 7919 % counted.sum().clamp_min(1)
    return h[order[place]]
