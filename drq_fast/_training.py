"""Training on the CPU by native code: the loss, the errors after each level, the approximations, and their gradients.

x [N, D] goes by in blocks of rows. Products with the codebook are torch's; all that lies between the scores S = x C^T
and their gradient runs in threads, a few rows at a time, so that nothing of size N K M or N D M is ever stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _native, reference
from ._native import Codec, centred, floats, in_threads

_TILE = 1 << 20  # floats of a few rows that stay in cache
_BLOCK = 1 << 22  # floats of scores in a block
_COPY = 1 << 21  # floats of x in a block, where they have to be copied


class Gradients(NamedTuple):
    """dx [N, D], dcodebook [K, D], dscale [M], float32."""

    dx: Tensor
    dcodebook: Tensor
    dscale: Tensor


class _Block(NamedTuple):
    here: slice  # its rows of x
    x: Tensor  # [n, D], centred
    scores: Tensor  # [n, P]


class _Few(NamedTuple):
    """A few rows of a block, n with codes: soft [n * M, P] has p - onehot, product [n * M, P] is free."""

    job: dict[str, Any]  # what the kernels are told
    soft: Tensor
    product: Tensor
    part: int  # the thread


class _Levels:
    """The levels of a codec for x [N, D]; settings: what the kernels are told for every row."""

    def __init__(self, x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None, **settings: Any) -> None:
        assert _native.extension is not None
        self.native, self.codec, self.x, self.offset = _native.extension, Codec(codebook, scale), x, offset
        self.settings = {"isa": _native.instruction_set(), **settings}
        self.codes = torch.empty(len(x), len(scale), dtype=torch.int64, device="cpu")

    def blocks(self, scores: Tensor | None = None, known: bool = False) -> Iterator[_Block]:
        """x by blocks. Their scores are filled into [N, P], or known already, or in memory that is used again."""
        step = max(16, _BLOCK // self.codec.P)
        if self.offset is not None or self.x.dtype != torch.float32 or not self.x.is_contiguous():
            step = max(16, min(step, _COPY // self.codec.D))
        memory = floats(min(step, len(self.x)), self.codec.P) if scores is None else scores
        for first in range(0, len(self.x), step):
            here = slice(first, min(first + step, len(self.x)))
            x = centred(self.x[here], self.offset)
            S = memory[: len(x)] if scores is None else scores[here]
            yield _Block(here, x, S if known else torch.mm(x, self.codec.codebook.T, out=S))

    def each(
        self, block: _Block, columns: dict[str, Tensor], then: Callable[[_Few], None], errors: bool = True
    ) -> None:
        """then(a few rows), in threads, for all rows of a block; without `errors` they have no product.

        columns [n, ...]: what the kernels are told of each row beside x, its scores and codes.
        """
        M, P = self.codec.M, self.codec.P
        columns = columns | {"codes": self.codes[block.here]}

        def work(part: int, rows: slice) -> None:
            step = max(16, _TILE // (P * (2 * M + 1)))
            height = min(step, rows.stop - rows.start)
            soft, product = floats(height * M, P), floats(height * M if errors else 0, P)
            buffers = {"soft": soft, "residuals": floats(height, M), "squared_norms": floats(height)}
            buffers |= {"product": product} if errors else {}
            for first in range(rows.start, rows.stop, step):
                here = slice(first, min(first + step, rows.stop))
                n = here.stop - here.start
                told = {name: column[here].data_ptr() for name, column in columns.items()}
                told |= {name: buffer.data_ptr() for name, buffer in buffers.items()}
                job = self.settings | told | self.codec.told(block.x[here], block.scores[here])
                self.native.assign_cpu(**job)
                then(_Few(job, soft[: n * M], product[: n * M], part))

        in_threads(work, len(block.x))


class _Sums:
    """What one thread adds up: the loss, and the gradients that all rows share."""

    def __init__(self, codec: Codec) -> None:
        self.value = torch.zeros((), dtype=torch.float64, device="cpu")
        self.dscale = torch.zeros(codec.M, dtype=torch.float64, device="cpu")
        self.dgram = floats(codec.P, codec.P).zero_()
        self.ddiagonal = floats(codec.P).zero_()
        self.told = {name: getattr(self, name).data_ptr() for name in ("value", "dscale", "dgram", "ddiagonal")}


class _Totals:
    """The gradients of x [N, D], codebook and scale, added up by blocks and threads, always in the same order."""

    def __init__(self, levels: _Levels) -> None:
        self.levels = levels
        codec = levels.codec
        self.sums = [_Sums(codec) for _ in range(torch.get_num_threads())]
        self.dx = floats(len(levels.x), codec.D)
        self.dcodebook = floats(codec.P, codec.D).zero_()
        self.dscale = torch.zeros(codec.M, dtype=torch.float64, device="cpu")

    def of_errors(self, few: _Few) -> None:
        """From the gradients of the errors, or of the loss."""
        torch.mm(few.soft, self.levels.codec.gram, out=few.product)
        self.of_delta(few)
        self.sums[few.part].dgram.addmm_(few.soft.T, few.product)

    def of_delta(self, few: _Few) -> None:
        """From the gradients of what soft and hard approximation differ by."""
        self.levels.native.backward_cpu(**few.job, **self.sums[few.part].told)

    def add(self, block: _Block, dscores: Tensor, dnorms: Tensor) -> None:
        """From the gradients of scores [n, P] and squared norms [n]."""
        dx = torch.mm(dscores, self.levels.codec.codebook, out=self.dx[block.here])
        dx.addcmul_(block.x, dnorms[:, None], value=2)
        self.dcodebook.addmm_(dscores.T, block.x)

    def gradients(self) -> Gradients:
        """All of them, once every block has been added."""
        dgram = torch.stack([part.dgram + part.ddiagonal.diag() for part in self.sums]).sum(dim=0)
        self.dcodebook.addmm_(dgram + dgram.T, self.levels.codec.codebook)
        dscale = torch.stack([self.dscale, *(part.dscale for part in self.sums)]).sum(dim=0)
        return Gradients(self.dx, self.dcodebook[: self.levels.codec.K], dscale.float())


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
    totals = _Totals(levels) if gradients else None
    values = torch.zeros(torch.get_num_threads(), dtype=torch.float64, device="cpu")

    def evaluate(few: _Few) -> None:
        torch.mm(few.soft, levels.codec.gram, out=few.product)
        levels.native.evaluate_cpu(**few.job, value=values[few.part].data_ptr())

    for block in levels.blocks():
        if totals is None:
            levels.each(block, {}, evaluate)
        else:
            dnorms = floats(len(block.x))
            levels.each(block, {"dscores": block.scores, "dsquared_norms": dnorms}, totals.of_errors)
            totals.add(block, block.scores, dnorms)
    if totals is None:
        return values.sum().float(), levels.codes, None
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
        torch.mm(few.soft, levels.codec.gram, out=few.product)
        levels.native.evaluate_cpu(**few.job)

    for block in levels.blocks(scores):
        errors = {"hard_errors": hard, "soft_errors": soft, "joint_errors": joint}
        levels.each(block, {name: error[block.here] for name, error in errors.items()}, evaluate)
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
    totals = _Totals(levels)
    given = dict(zip(("dhard", "dsoft", "djoint"), (t.float().contiguous() for t in upstream), strict=True))
    for block in levels.blocks(scores, known=True):
        dscores, dnorms = torch.empty_like(block.scores), floats(len(block.x))
        columns = {name: t[block.here] for name, t in given.items()} | {"dscores": dscores, "dsquared_norms": dnorms}
        levels.each(block, columns, totals.of_errors)
        totals.add(block, dscores, dnorms)
    return totals.gradients()


def quantize(
    x: Tensor, codebook: Tensor, scale: Tensor, *, gamma: float, offset: Tensor | None, keep: bool
) -> tuple[reference.Quantized, Tensor | None]:
    """`reference.quantize` by way of float32, and the scores [N, P] if they are to be kept; two products of N K D."""
    levels = _Levels(x, codebook, scale, offset, gamma=gamma)
    codec, shift = levels.codec, None if offset is None else offset.float()
    soft, hard = (torch.empty(x.shape, dtype=x.dtype, device="cpu") for _ in range(2))
    scores = floats(len(x), codec.P) if keep else None
    for block in levels.blocks(scores):
        delta = torch.empty_like(block.scores)
        levels.each(block, {"delta": delta}, lambda few: levels.native.mix_cpu(**few.job), errors=False)
        chosen = reference.decode(levels.codes[block.here], codec.codebook, codec.scale, offset=shift)
        hard[block.here] = chosen
        soft[block.here] = chosen.addmm_(delta, codec.codebook)
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

    def mix_and_back(few: _Few) -> None:
        levels.native.mix_cpu(**few.job)
        totals.of_delta(few)

    for block in levels.blocks(scores, known=True):
        delta, dscores, dnorms = torch.empty_like(block.scores), torch.empty_like(block.scores), floats(len(block.x))
        upstream = dsoft[block.here].float()
        ddelta = torch.mm(upstream, codec.codebook.T)
        columns = {"delta": delta, "ddelta": ddelta, "dscores": dscores, "dsquared_norms": dnorms}
        levels.each(block, columns, mix_and_back, errors=False)
        totals.add(block, dscores, dnorms)
        codes = levels.codes[block.here]
        chosen = _scaled_choices(codec, codes)
        totals.dcodebook.addmm_(delta.add_(chosen).T, upstream)
        if dhard is not None:
            upstream = dhard[block.here].float()
            totals.dcodebook.addmm_(chosen.T, upstream)
            ddelta.addmm_(upstream, codec.codebook.T)
        totals.dscale += ddelta.gather(1, codes).sum(dim=0, dtype=torch.float64)
    return totals.gradients()


def _scaled_choices(codec: Codec, codes: Tensor) -> Tensor:
    """sum_m s_m onehot(b_m) [n, P]."""
    total = floats(len(codes), codec.P).zero_()
    return total.scatter_add_(1, codes, codec.scale.expand(codes.shape))
