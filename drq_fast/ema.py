"""How codebook, scale and offset follow x during training: running averages, whatever the optimiser's rate is.

Each codeword moves to the running mean of the residuals that it stands for, as in online k-means. A codeword that saves
less squared error than a new one would is replaced by a vector of the batch. The scale of a level follows the size of
its residuals relative to x, so that all levels use the same codewords. docs/math.md has the formulas, docs/design.md
says why.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import devices, functional, ranks
from .backends.types import Parameters, powers_of

_RATE = 0.1  # of a batch in the averages, at most
_USES = 50  # per codeword and on average, that the averages remember: with fewer, chance leaves codewords without any
_LITTLE = 0.05  # of the average mass and gain: codewords with less of both are replaced
_REPLACED = 16  # one of so many codewords may be replaced per batch
_PATIENCE = 10  # times the limit that a new codeword is taken to save, at least, so that it has time to be used


class Averages(NamedTuple):
    """By row of the codebook [T]: mass, the weight of its uses, and gain, the squared error that they save; all 0 at
    first."""

    mass: Tensor
    gain: Tensor


class Change(NamedTuple):
    """What is to be added to codebook [T, D], scale [L] and offset [D], and the new averages."""

    codebook: Tensor
    scale: Tensor
    offset: Tensor | None
    averages: Averages


class _Batch(NamedTuple):
    """Sums over the vectors of all ranks that count."""

    sums: Tensor  # [T, D]: weighted residuals by codeword
    mass: Tensor  # [T]: their weights
    total: Tensor  # [D]: of x - offset
    sizes: Tensor  # [L]: lengths ||h_m||
    sizes_before: Tensor  # [L]: those at the first level of the group, of the vectors that have level m
    left: Tensor  # []: ||h_L||^2
    vectors: Tensor  # []
    codes: Tensor  # []
    spare: Tensor  # [G, n, D]: what the groups of levels quantize of some vectors of rank 0


@torch.no_grad()
def change(
    x: Tensor, codes: Tensor, residuals: Tensor, codec: Parameters, weights: Tensor, averages: Averages, batch: Tensor
) -> Change:
    """What x [N, D] changes, given codes [N, L], residuals [N, L] = ||x - xhat_m||^2 and weights [N, L] of its levels.

    batch: its number. Vectors of weight 0, and those that are not finite or cannot be squared, count nowhere. Under
    torch.distributed sums are those of all ranks, and new codewords are vectors of rank 0, so that all ranks compute
    the same.
    """
    found = _summed(x, codes, residuals, codec, weights, batch)
    rate = (found.codes / (_USES * len(codec.codebook))).clamp_max(_RATE)
    codebook, averages = _moved(found, codec, averages, rate)
    known = (found.sizes_before > 0) & (found.sizes > 0)
    relative = torch.where(known, found.sizes / torch.where(known, found.sizes_before, 1), codec.scale.abs())
    scale = rate * (torch.copysign(relative, codec.scale) - codec.scale)
    offset = None if codec.offset is None else rate * found.total / found.vectors.clamp_min(1)
    return Change(codebook, scale, offset, averages)


def _summed(x: Tensor, codes: Tensor, residuals: Tensor, codec: Parameters, weights: Tensor, batch: Tensor) -> _Batch:
    h = (x if codec.offset is None else x - codec.offset).float()
    squares = torch.cat([h.square().sum(dim=1, keepdim=True), residuals.float()], dim=1)  # ||h_m||^2 [N, L + 1]
    weights = torch.where(squares.isfinite().all(dim=1, keepdim=True), weights, 0)
    counts = weights != 0
    alive = counts.any(dim=1, keepdim=True)
    h, lengths = torch.where(alive, h, 0), torch.where(counts, squares[:, :-1].sqrt(), 0)
    firsts = [m - power for m, power in enumerate(powers_of(codec.groups))]
    starts = devices.tensor_of(tuple(firsts), torch.int64, x.device)  # a list would be copied from the host
    before = torch.where(counts, squares.index_select(1, starts).sqrt(), 0)
    sums, mass = functional.codeword_sums_checked(x, codes, codec, weights)
    numbers = torch.stack([torch.where(alive[:, 0], squares[:, -1], 0).sum(), alive.sum(), counts.sum()])
    spare = _quantized_by_groups(h, codes, codec, alive[:, 0], -(-len(mass) // _REPLACED), batch)
    parts = (sums, mass, h.sum(dim=0), lengths.sum(dim=0), before.sum(dim=0), numbers.to(sums.dtype))
    sums, mass, total, sizes, before, numbers, spare = ranks.summed(*parts, of_rank_zero=spare)
    left, vectors, count = numbers.unbind()
    return _Batch(sums, mass, total, sizes, before, left, vectors, count, spare)


def _moved(found: _Batch, codec: Parameters, averages: Averages, rate: Tensor) -> tuple[Tensor, Averages]:
    """What is to be added to the codebook [T, D], and the new averages."""
    codebook = codec.codebook.to(found.sums.dtype)
    T, D = codebook.shape
    share = T / found.codes.clamp_min(1)  # averages are of so many codes as there are codewords
    # ||h_m||^2 - ||h_{m+1}||^2 = 2 scale[m] <C, h_{m+1}> + scale[m]^2 ||C||^2 is what a use saves.
    gain = 2 * (codebook * found.sums).sum(dim=1) + found.mass * codebook.square().sum(dim=1)
    mass, gain = (
        _average(before.to(new.dtype), share * new, rate)
        for before, new in zip(averages, (found.mass, gain), strict=True)
    )
    moved = rate * share * found.sums / torch.where(mass > 0, mass, 1)[:, None]
    # Errors fall about as K**(-2 / D): one codeword more would save 2 / D of the average error per codeword.
    limit = 2 / D * found.left / found.codes.clamp_min(1)
    usual_mass, usual_gain = (_mean_of_groups(each, codec.codewords) for each in (mass, gain))
    unused = (gain < limit) | ((mass < _LITTLE * usual_mass) & (gain < _LITTLE * usual_gain))
    unused &= found.vectors > 0
    count = found.spare.shape[1]
    which = torch.where(unused, gain, torch.inf).topk(count, largest=False).indices
    new, others = unused[which], found.spare[which // codec.codewords, torch.arange(count, device=which.device)]
    moved = moved.index_copy(0, which, torch.where(new[:, None], others - codebook[which], moved[which]))
    patience = torch.maximum(_PATIENCE * limit, usual_gain[which] / 2)
    gain = gain.index_copy(0, which, torch.where(new, patience, gain[which]))
    return moved, Averages(mass.index_copy(0, which, torch.where(new, usual_mass[which], mass[which])), gain)


def _mean_of_groups(values: Tensor, K: int) -> Tensor:
    """[T]: the mean of the K values of the same group."""
    return values.view(-1, K).mean(dim=1, keepdim=True).expand(-1, K).flatten()


def _average(before: Tensor, new: Tensor, rate: Tensor) -> Tensor:
    """The running average [T] after a batch; at the first one all codewords are taken to be alike."""
    return torch.where(before.abs().sum() == 0, new.mean(), before).lerp(new, rate)


def shared_factor(scale: Tensor, powers: tuple[int, ...]) -> Tensor:
    """The w whose powers [L], not all 0, are nearest to scale [L] in the logarithm; w has the sign of a factor w**1."""
    p = devices.tensor_of(powers, torch.int64, scale.device)
    logs = scale.abs().clamp_min(torch.finfo(scale.dtype).tiny).log()
    return torch.copysign(torch.exp((p * logs).sum() / p.square().sum()), scale[powers.index(1)])


def _quantized_by_groups(
    h: Tensor, codes: Tensor, codec: Parameters, counted: Tensor, count: int, batch: Tensor
) -> Tensor:
    """[G, count, D]: what the groups of levels quantize of `count` vectors h [N, D] with codes [N, L] that are counted,
    other ones for every batch; zeros if there are none."""
    groups = codec.apart()
    if len(h) == 0:
        return h.new_zeros(len(groups), count, h.shape[1])
    order = counted.to(torch.int8).argsort(descending=True, stable=True)  # those that count come first
    place = (torch.arange(count, device=h.device) + batch * count) * 7919 % counted.sum().clamp_min(1)
    rows = order[place]
    codes, left = codes[rows], [h[rows]]
    for group in groups[:-1]:
        own, codes = codes[:, : len(group.scale)], codes[:, len(group.scale) :]
        left.append(left[-1] - functional.decode_checked(own, group))
    return torch.stack(left)
