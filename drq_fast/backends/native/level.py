"""One level on the CPU without C C^T, for codebooks so large that the products at every level are cheaper.

The operations themselves are those of `backends.torch`, in D dimensions, which are few beside K.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import torch as definition
from ..gradients import graphless, refuse_second_derivatives
from ..types import Parameters
from .encode import Words, by_products
from .extension import floats, instruction_set, native, pointer
from .products import product
from .threads import in_threads, parts_of, tiles

_TILE = 1 << 22  # floats of the scores of a few rows
_COLUMNS = 512  # codewords whose gradients are transposed at a time, in cache


def level_for(op: str, x: Tensor, codec: Parameters, gamma: float) -> definition.OneLevel | None:
    """The level of an operation on x [N, D]; None where C C^T of codewords that all share is cheaper."""
    if codec.shared and not by_products(len(x), len(codec.codebook), len(codec.scale)):
        return None
    places = codec.table(_places)

    def level(m: int, h: Tensor, codebook: Tensor, s: Tensor) -> definition.Level:
        return definition.Level(*_Level.apply(*graphless(h, codebook, s), *places[m], gamma, op))

    return level


def _places(codec: Parameters) -> list[tuple[Words, int]]:
    """The codewords of every level, and its number among the levels that share them."""
    return [(group.table(Words), m) for group in codec.apart() for m in range(len(group.scale))]


class _Level(torch.autograd.Function):
    """Keeps the scores h C^T [N, P] and forms the probabilities p again for the gradients."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, codebook: Tensor, s: Tensor, words: Words, m: int, gamma: float, op: str) -> Any:
        """(codes [N] int64, hard [N, D], soft [N, D]): two products of N K D."""
        ctx.words, ctx.m, ctx.gamma, ctx.op, ctx.scores = words, m, gamma, op, {}
        wanted, step = any(ctx.needs_input_grad), _rows(words)
        codes, soft = torch.empty(len(h), dtype=torch.int64, device="cpu"), floats(*h.shape)

        def work(_: int, rows: slice) -> None:
            p = _scratch(min(step, rows.stop - rows.start), words.P)
            for here in tiles(rows, step):
                some = _Rows(ctx, h[here], product(h[here], words.codebook.T), codes[here], p)
                soft[here] = product(some.p, words.codebook)
                if wanted:
                    ctx.scores[here.start, here.stop] = some.scores

        in_threads(work, len(h))
        hard = s * codebook[codes]
        ctx.save_for_backward(h, codebook, s, codes)
        ctx.mark_non_differentiable(codes)
        return codes, hard, soft.mul_(s).add_(hard)

    @staticmethod
    def backward(ctx: Any, _: Tensor, dhard: Tensor, dsoft: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of h, codebook and s: four products of N K D."""
        refuse_second_derivatives(ctx.op, "native")
        h, codebook, s, codes = ctx.saved_tensors
        words, step, isa = ctx.words, _rows(ctx.words), instruction_set()
        dh, parts = floats(*h.shape), parts_of(len(h))
        dcodebook: list[Tensor | None] = [None] * parts  # [D, P] each
        ddiagonal = floats(parts, words.P).zero_()
        dscale = torch.zeros(parts, dtype=torch.float64, device="cpu")

        def work(part: int, rows: slice) -> None:
            height = min(step, rows.stop - rows.start)
            both, dnorms = _scratch(2 * height, words.P), floats(height)  # dscores, then p
            for here in tiles(rows, step):
                n = here.stop - here.start
                scores = ctx.scores.get((here.start, here.stop))
                if scores is None:  # the number of threads has changed since
                    scores = product(h[here], words.codebook.T)
                some = _Rows(ctx, h[here], scores, codes[here], both[n:])
                ddelta = product(dsoft[here], words.codebook.T)
                job = some.job
                job.ddelta, job.dscores, job.dsquared_norms = pointer(ddelta), pointer(both), pointer(dnorms)
                job.ddiagonal, job.dscale = pointer(ddiagonal[part]), pointer(dscale[part])
                native.backward_cpu(job, isa)
                dh[here] = torch.addcmul(product(both[:n], words.codebook), some.h, dnorms[:n, None], value=2)
                found = product(torch.cat([some.h, s * dsoft[here]]).T.contiguous(), both[: 2 * n])
                before = dcodebook[part]
                dcodebook[part] = found if before is None else before.add_(found)

        in_threads(work, len(h))
        of_parts = [part for part in dcodebook if part is not None]
        total = _transposed(of_parts, 2 * ddiagonal.sum(dim=0), words)
        dchosen = dhard + dsoft  # soft is hard + s (p - onehot) C
        total.index_add_(0, codes, s * dchosen)
        ds = dscale.sum() + (dchosen * codebook[codes]).sum(dtype=torch.float64)
        return dh, total[: words.K], ds.to(s.dtype), None, None, None, None


def _transposed(parts: list[Tensor], factors: Tensor, words: Words) -> Tensor:
    """[P, D]: the sum of the parts [D, P], transposed, plus factors [P] times the codewords; zeros without parts."""
    total = _scratch(words.P, words.D)

    def work(_: int, columns: slice) -> None:
        for here in tiles(columns, _COLUMNS):
            first, *others = (part[:, here] for part in parts)
            torch.addcmul(sum(others, first).T, words.codebook[here], factors[here, None], out=total[here])

    if not parts:
        return total.zero_()
    in_threads(work, words.P)
    return total


def _scratch(rows: int, width: int) -> Tensor:
    """[rows, width], uninitialised, in large pages, which spares most page faults."""
    found = floats(rows, width)
    native.large_pages(pointer(found), found.nbytes)
    return found


def _rows(words: Words) -> int:
    return max(16, _TILE // max(words.P, words.D))


class _Rows:
    """A few rows h [n, D] with their scores [n, P]; finds their codes [n] and p - onehot [n, P], the start of `p`."""

    def __init__(self, ctx: Any, h: Tensor, scores: Tensor, codes: Tensor, p: Tensor) -> None:
        self.h, self.scores, self.p, self.norms = h.contiguous(), scores, p[: len(h)], floats(2, len(h))
        tile = native.Tile(levels=ctx.words.jobs[ctx.m], x=pointer(self.h), scores=pointer(scores), N=len(h))
        self.job = native.Training(
            tile=tile,
            gamma=ctx.gamma,
            codes=pointer(codes),
            squared_norms=pointer(self.norms[0]),
            residuals=pointer(self.norms[1]),
            soft=pointer(self.p),
        )
        native.assign_cpu(self.job, instruction_set())
