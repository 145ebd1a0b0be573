"""Training on the CPU by native code: loss, errors after each level, both approximations, and all their gradients.

Threads share out the rows of x [N, D] and take a few at a time, from the scores S = x C^T to their gradients and dx,
with torch's products in between; then they share out the columns of C for its gradient. Nothing of size N K M or N D M
is ever stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _native, reference
from ._native import Codec, centred, floats, in_threads, tiles, training_of

_TILE = 1 << 20  # floats of a few rows that stay in cache
_BLOCK = 1 << 22  # floats of dS that are kept until they go into the codebook's gradient


class Gradients(NamedTuple):
    """dx [N, D], dcodebook [K, D], dscale [M], float32."""

    dx: Tensor
    dcodebook: Tensor
    dscale: Tensor


class _Few(NamedTuple):
    """A few rows whose codes have been chosen."""

    rows: slice  # of x
    part: int  # the thread
    x: Tensor  # [n, D], centred
    scores: Tensor  # [n, P]
    soft: Tensor  # [n * M, P], p - onehot
    product: Tensor  # [n * M, P], that times G, if errors are wanted
    job: dict[str, Any]  # what the kernels are told


class _Levels:
    """The levels of a codec for x [N, D]; settings: what the kernels are told for every row."""

    def __init__(self, x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None, **settings: Any) -> None:
        assert _native.extension is not None
        self.native, self.codec, self.x, self.offset = _native.extension, Codec(codebook, scale), x, offset
        self.settings = {"isa": _native.instruction_set(), **settings}
        self.codes = torch.empty(len(x), len(scale), dtype=torch.int64, device="cpu")

    def blocks(self) -> Iterator[slice]:
        """All rows, so many at a time that their scores may be kept."""
        step = max(16, _BLOCK // self.codec.P)
        return (slice(first, min(first + step, len(self.x))) for first in range(0, len(self.x), step))

    def each(
        self,
        block: slice,
        then: Callable[[_Few], None],
        *,
        errors: bool = True,
        scores: Tensor | None = None,
        known: bool = False,
    ) -> None:
        """then(a few rows), in threads, until all rows of the block have had their turn.

        scores [rows of the block, P] are filled in, if not known already; without them a thread uses its own memory.
        """
        codec, M, P = self.codec, self.codec.M, self.codec.P
        step = max(16, _TILE // max(codec.D, P * (2 * M + 1)))

        def work(part: int, share: slice) -> None:
            height = min(step, share.stop - share.start)
            own = floats(height if scores is None else 0, P)
            soft, product = floats(height * M, P), floats(height * M if errors else 0, P)
            buffers = _pointers(soft=soft, residuals=(r := floats(height, M)), squared_norms=(n := floats(height)))
            for here in tiles(share, step):
                rows = slice(block.start + here.start, block.start + here.stop)
                x = centred(self.x[rows], self.offset)
                S = own[: len(x)] if scores is None else scores[here]
                if not known:
                    torch.mm(x, codec.codebook.T, out=S)
                lines = len(x) * M
                job = self.settings | buffers | codec.told(x, S) | _pointers(codes=self.codes[rows])
                self.native.assign_cpu(*training_of(**job))
                if errors:
                    torch.mm(soft[:lines], codec.gram, out=product[:lines])
                    job |= _pointers(product=product)
                then(_Few(rows, part, x, S, soft[:lines], product[:lines], job))
            del r, n  # the kernels wrote to them

        in_threads(work, block.stop - block.start)


def _pointers(**tensors: Tensor) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


class _Sums:
    """What one thread adds up: the loss, and the gradients that all rows share."""

    def __init__(self, codec: Codec) -> None:
        self.value = torch.zeros((), dtype=torch.float64, device="cpu")
        self.dscale = torch.zeros(codec.M, dtype=torch.float64, device="cpu")
        self.dgram = floats(codec.P, codec.P).zero_()
        self.ddiagonal = floats(codec.P).zero_()


class _Totals:
    """The gradients of x [N, D], codebook and scale, added up by blocks and threads, always in the same order."""

    def __init__(self, levels: _Levels) -> None:
        self.levels, self.codec = levels, levels.codec
        self.sums = [_Sums(self.codec) for _ in range(_native.parts_of(len(levels.x)))]
        self.dx = floats(len(levels.x), self.codec.D)
        levels.native.large_pages(self.dx.data_ptr(), self.dx.nbytes)
        self.dcodebook = floats(self.codec.P, self.codec.D).zero_()
        self.dscale = torch.zeros(self.codec.M, dtype=torch.float64, device="cpu")

    def add(self, few: _Few, dscores: Tensor, **upstream: Tensor) -> None:
        """All that a few rows give but the share of dscores [n, P], filled in here, in the codebook's gradient."""
        sums, dnorms = self.sums[few.part], floats(len(few.x))
        told = _pointers(value=sums.value, dscale=sums.dscale, dgram=sums.dgram, ddiagonal=sums.ddiagonal)
        told |= _pointers(dscores=dscores, dsquared_norms=dnorms, **upstream)
        self.levels.native.backward_cpu(*training_of(**few.job, **told))
        _add_symmetric(sums.dgram, few.soft[: len(few.product)], few.product)
        dx = torch.mm(dscores, self.codec.codebook, out=self.dx[few.rows])
        dx.addcmul_(few.x, dnorms[:, None], value=2)

    def to_codebook(self, weights: Tensor, vectors: Tensor, offset: Tensor | None = None) -> None:
        """Adds weights [n, P]^T (vectors [n, D] - offset)."""
        step = max(16, _TILE // self.codec.D)

        def work(_: int, columns: slice) -> None:
            total, shift = self.dcodebook[:, columns], None if offset is None else offset[columns]
            plain = shift is None and vectors.dtype == torch.float32
            for left, right in zip(*(t.split(len(t) if plain else step) for t in (weights, vectors)), strict=True):
                total.addmm_(left.T, right[:, columns] if plain else centred(right[:, columns], shift))

        in_threads(work, self.codec.D)

    def gradients(self) -> Gradients:
        """All of them, once every row has been added."""
        dgram = torch.stack([part.dgram + part.ddiagonal.diag() for part in self.sums]).sum(dim=0)
        self.to_codebook(dgram + dgram.T, self.codec.codebook)
        dscale = torch.stack([self.dscale, *(part.dscale for part in self.sums)]).sum(dim=0)
        return Gradients(self.dx, self.dcodebook[: self.codec.K], dscale.float())


def _add_symmetric(total: Tensor, left: Tensor, right: Tensor, width: int = 64) -> None:
    """Adds left^T right [P, P], which is symmetric, so that total + total^T is right, which is all that counts."""
    for i in range(0, len(total) if len(left) else 0, width):
        own, others = slice(i, i + width), slice(i + width, None)
        total[own, own].addmm_(left[:, own].T, right[:, own])
        if i + width < len(total):
            total[own, others].addmm_(left[:, own].T, right[:, others], alpha=2)


def loss(
    x: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    gamma: float,
    offset: Tensor | None,
    weights: tuple[float, float, float],
    omega: Tensor,
    joint: str,
    gradients: bool,
) -> tuple[Tensor, Tensor, Gradients | None]:
    """(loss, codes [N, M] int64, gradients if wanted), formed in one pass: a scalar's weights are known at once.

    Three products of N K D and 2 M of N K K.
    """
    of_hard, of_soft, of_joint = (weight / max(len(x), 1) for weight in weights)
    settings = {"of_hard": of_hard, "of_soft": of_soft, "of_joint": of_joint, "gap": joint == "gap"}
    levels = _Levels(x, codebook, scale, offset, gamma=gamma, omega=omega.data_ptr(), **settings)
    if not gradients:
        values = torch.zeros(torch.get_num_threads(), dtype=torch.float64, device="cpu")
        evaluate = levels.native.evaluate_cpu
        levels.each(
            slice(0, len(x)), lambda few: evaluate(*training_of(**few.job, **_pointers(value=values[few.part])))
        )
        return values.sum().float(), levels.codes, None
    totals = _Totals(levels)
    scores = floats(max((b.stop - b.start for b in levels.blocks()), default=0), levels.codec.P)
    for block in levels.blocks():
        S = scores[: block.stop - block.start]
        levels.each(block, lambda few: totals.add(few, few.scores), scores=S)  # dS replaces S
        totals.to_codebook(S, x[block], offset)
    value = torch.stack([part.value for part in totals.sums]).sum().float()
    return value, levels.codes, totals.gradients()


def distortion(
    x: Tensor, codebook: Tensor, scale: Tensor, *, gamma: float, offset: Tensor | None, keep: bool
) -> tuple[reference.Distortion, Tensor | None]:
    """`reference.distortion` in float32, and the scores [N, P] that the backward pass wants, if they are to be kept."""
    levels = _Levels(x, codebook, scale, offset, gamma=gamma)
    hard, soft, joint = (floats(len(x), levels.codec.M) for _ in range(3))
    scores = floats(len(x), levels.codec.P) if keep else None

    def evaluate(few: _Few) -> None:
        errors = {"hard_errors": hard[few.rows], "soft_errors": soft[few.rows], "joint_errors": joint[few.rows]}
        levels.native.evaluate_cpu(*training_of(**few.job, **_pointers(**errors)))

    levels.each(slice(0, len(x)), evaluate, scores=scores)
    return reference.Distortion(hard, soft, joint, levels.codes), scores


def distortion_backward(
    x: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    gamma: float,
    offset: Tensor | None,
    scores: Tensor,
    upstream: tuple[Tensor, Tensor, Tensor],
) -> Gradients:
    """From the gradients of hard, soft and joint, [N, M] each: two products of N K D and 2 M of N K K."""
    levels = _Levels(x, codebook, scale, offset, gamma=gamma)
    totals, (dhard, dsoft, djoint) = _Totals(levels), (t.float().contiguous() for t in upstream)
    for block in levels.blocks():
        dscores = torch.empty_like(scores[block])

        def back(few: _Few, first: int = block.start, dscores: Tensor = dscores) -> None:
            rows = few.rows
            inside = slice(rows.start - first, rows.stop - first)
            totals.add(few, dscores[inside], dhard=dhard[rows], dsoft=dsoft[rows], djoint=djoint[rows])

        levels.each(block, back, scores=scores[block], known=True)
        totals.to_codebook(dscores, x[block], offset)
    return totals.gradients()


def quantize(
    x: Tensor, codebook: Tensor, scale: Tensor, *, gamma: float, offset: Tensor | None, keep: bool
) -> tuple[reference.Quantized, Tensor | None]:
    """`reference.quantize` by way of float32, and the scores [N, P] if they are to be kept; two products of N K D."""
    levels = _Levels(x, codebook, scale, offset, gamma=gamma)
    codec, shift = levels.codec, None if offset is None else offset.float()
    soft, hard = (torch.empty(x.shape, dtype=x.dtype, device="cpu") for _ in range(2))
    scores = floats(len(x), codec.P) if keep else None

    def approximate(few: _Few) -> None:
        delta = floats(len(few.x), codec.P)
        levels.native.mix_cpu(*training_of(**few.job, **_pointers(delta=delta)))
        chosen = reference.decode(levels.codes[few.rows], codec.codebook, codec.scale, offset=shift)
        hard[few.rows] = chosen
        soft[few.rows] = chosen.addmm_(delta, codec.codebook)

    levels.each(slice(0, len(x)), approximate, errors=False, scores=scores)
    return reference.Quantized(soft, hard, levels.codes), scores


def quantize_backward(
    x: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    gamma: float,
    offset: Tensor | None,
    scores: Tensor,
    dsoft: Tensor,
    dhard: Tensor | None,
) -> Gradients:
    """From the gradients of soft = hard + Delta C and of hard, [N, D] each: four products of N K D, six with dhard."""
    levels = _Levels(x, codebook, scale, offset, gamma=gamma)
    totals, codec = _Totals(levels), levels.codec
    for block in levels.blocks():
        dscores, delta, ddelta = (torch.empty_like(scores[block]) for _ in range(3))

        def back(
            few: _Few, first: int = block.start, dscores: Tensor = dscores, d: Tensor = delta, dd: Tensor = ddelta
        ) -> None:
            inside = slice(few.rows.start - first, few.rows.stop - first)
            levels.native.mix_cpu(*training_of(**few.job, **_pointers(delta=d[inside])))
            torch.mm(dsoft[few.rows].float(), codec.codebook.T, out=dd[inside])
            totals.add(few, dscores[inside], ddelta=dd[inside])

        levels.each(block, back, errors=False, scores=scores[block], known=True)
        totals.to_codebook(dscores, x[block], offset)
        codes = levels.codes[block]
        chosen = _scaled_choices(codec, codes)
        totals.to_codebook(delta.add_(chosen), dsoft[block])
        if dhard is not None:
            totals.to_codebook(chosen, dhard[block])
            ddelta.addmm_(dhard[block].float(), codec.codebook.T)
        totals.dscale += ddelta.gather(1, codes).sum(dim=0, dtype=torch.float64)
    return totals.gradients()


def _scaled_choices(codec: Codec, codes: Tensor) -> Tensor:
    """sum_m s_m onehot(b_m) [n, P]."""
    total = floats(len(codes), codec.P).zero_()
    return total.scatter_add_(1, codes, codec.scale.expand(codes.shape))
