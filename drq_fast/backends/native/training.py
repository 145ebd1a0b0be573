"""Training on the CPU by native code: the recursion over the levels and its gradients, shared by all three operations.

Threads share out the rows of x [N, D] and take a few at a time, from the scores S = x C^T to their gradients and dx,
with torch's products in between; then they share out the columns of C for its gradient. Nothing of size N K M or N D M
is ever stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..gradients import centred
from ..types import Parameters
from .encode import Levels
from .extension import floats, instruction_set, native, pointer
from .products import add_product, product
from .threads import in_threads, parts_of, tiles

if TYPE_CHECKING:
    from ... import _C

_TILE = 1 << 20  # floats of a few rows that stay in cache
_BLOCK = 1 << 22  # floats of dS that are kept until they go into the codebook's gradient


class Gradients(NamedTuple):
    """dx [N, D], dcodebook [K, D], dscale [M], float32."""

    dx: Tensor
    dcodebook: Tensor
    dscale: Tensor


class Chosen(NamedTuple):
    """A few rows whose codes have been chosen."""

    rows: slice  # of x
    part: int  # the thread
    x: Tensor  # [n, D], centred
    scores: Tensor  # [n, P]
    soft: Tensor  # [n * M, P], p - onehot
    vectors: Tensor | None  # [n * M, D], that times C, if errors are wanted by way of it
    job: _C.Training


class LossTerms(NamedTuple):
    """How errors add up to a loss: omega [M] of the levels, weights of E_h, E_s, E_j per vector, which E_j."""

    omega: Tensor
    of_hard: float
    of_soft: float
    of_joint: float
    gap: bool


class Recursion:
    """The recursion over the levels for x [N, D]."""

    def __init__(self, x: Tensor, codec: Parameters, gamma: float, terms: LossTerms | None = None) -> None:
        self.levels, self.x, self.offset = codec.table(Levels), x, codec.offset
        self.gamma, self.terms, self.isa = gamma, terms, instruction_set()
        # Sums Delta_m of soft choices enter the errors as Delta G Delta^T. Per level and row, Delta G and the gradient
        # of G take 1.5 K K multiplications; through Delta C, in D dimensions, they take 3 K D.
        self.through_vectors = 3 * self.levels.D < 1.5 * self.levels.P
        self.codes = torch.empty(len(x), self.levels.M, dtype=torch.int64, device="cpu")

    def blocks(self) -> Iterator[slice]:
        """All rows, so many at a time that their scores may be kept."""
        step = max(16, _BLOCK // self.levels.P)
        return (slice(first, min(first + step, len(self.x))) for first in range(0, len(self.x), step))

    def each(
        self,
        block: slice,
        then: Callable[[Chosen], None],
        *,
        errors: bool = True,
        scores: Tensor | None = None,
        known: bool = False,
    ) -> None:
        """then(a few rows), in threads, until all rows of the block have had their turn.

        scores [rows of the block, P] are filled in, if not known already; without them a thread uses its own memory.
        """
        levels, M, P = self.levels, self.levels.M, self.levels.P
        step = max(16, _TILE // max(levels.D, P * (2 * M + 1)))

        def work(part: int, share: slice) -> None:
            height = min(step, share.stop - share.start)
            own = floats(height if scores is None else 0, P)
            soft, scratch = floats(height * M, P), floats(height * M if errors else 0, P)
            residuals, squared_norms = floats(height, M), floats(height)
            for here in tiles(share, step):
                rows = slice(block.start + here.start, block.start + here.stop)
                x = centred(self.x[rows], self.offset)
                S = own[: len(x)] if scores is None else scores[here]
                if not known:
                    found = product(x, levels.codebook.T, S)
                    if found is not S:
                        S.copy_(found)
                job = native.Training(
                    tile=levels.tile(x, S),
                    gamma=self.gamma,
                    codes=pointer(self.codes[rows]),
                    squared_norms=pointer(squared_norms),
                    residuals=pointer(residuals),
                    soft=pointer(soft),
                )
                if self.terms is not None:
                    omega, job.of_hard, job.of_soft, job.of_joint, job.gap = self.terms
                    job.omega = pointer(omega)
                native.assign_cpu(job, self.isa)
                p, vectors = soft[: len(x) * M], None
                if errors:
                    vectors, times_gram = self._times_gram(p, scratch[: len(p)])
                    job.product = pointer(times_gram)
                then(Chosen(rows, part, x, S, p, vectors, job))

        in_threads(work, block.stop - block.start)

    def _times_gram(self, soft: Tensor, scratch: Tensor) -> tuple[Tensor | None, Tensor]:
        """(soft [n M, P] times C, if that is on the way; soft times C C^T)."""
        if not self.through_vectors:
            return None, product(soft, self.levels.gram, scratch)
        vectors = product(soft, self.levels.codebook)
        return vectors, product(vectors, self.levels.codebook.T, scratch)


class _Sums:
    """What one thread adds up: the loss, and the gradients that all rows share."""

    def __init__(self, codec: Levels) -> None:
        self.dcodebook = floats(codec.D, codec.P).zero_()  # transposed; from soft choices, if not by way of dgram
        self.value = torch.zeros((), dtype=torch.float64, device="cpu")
        self.dscale = torch.zeros(codec.M, dtype=torch.float64, device="cpu")
        self.dgram = floats(codec.P, codec.P).zero_()
        self.ddiagonal = floats(codec.P).zero_()


class Totals:
    """The gradients of x [N, D], codebook and scale, added up by blocks and threads, always in the same order."""

    def __init__(self, recursion: Recursion) -> None:
        self.recursion, self.levels = recursion, recursion.levels
        N, levels = len(recursion.x), recursion.levels
        self.sums = [_Sums(levels) for _ in range(parts_of(N))]
        self.dx = floats(N, levels.D)
        native.large_pages(pointer(self.dx), self.dx.nbytes)
        self.dcodebook = floats(levels.D, levels.P).zero_()  # transposed
        self.dscale = torch.zeros(levels.M, dtype=torch.float64, device="cpu")

    def add(
        self,
        few: Chosen,
        dscores: Tensor,
        *,
        derrors: tuple[Tensor, Tensor, Tensor] | None = None,
        ddelta: Tensor | None = None,
    ) -> None:
        """All that a few rows give but the share of dscores [n, P], filled in here, in the codebook's gradient.

        From the gradients of the hard, soft and joint errors [n, M], of Delta [n, P], or of the loss if both are None.
        """
        sums, levels, job = self.sums[few.part], self.levels, few.job
        dnorms, kappa = floats(len(few.x)), floats(len(few.x), levels.M)
        job.value, job.dscale = pointer(sums.value), pointer(sums.dscale)
        job.dgram, job.ddiagonal = pointer(sums.dgram), pointer(sums.ddiagonal)
        job.dscores, job.dsquared_norms, job.kappa = pointer(dscores), pointer(dnorms), pointer(kappa)
        if derrors is not None:
            job.dhard, job.dsoft, job.djoint = map(pointer, derrors)
        job.ddelta = pointer(ddelta)
        native.backward_cpu(job, self.recursion.isa)
        if few.vectors is not None:  # soft is Delta now
            of_levels = few.vectors.view(-1, levels.M, levels.D) * levels.scale[:, None]
            pulls = of_levels.cumsum(dim=1) * (2 * kappa[:, :, None])  # 2 kappa Delta C
            add_product(sums.dcodebook, pulls.flatten(0, 1), few.soft)
        elif ddelta is None:
            _add_symmetric(sums.dgram, few.soft, few.soft * kappa.view(-1, 1))
        torch.addcmul(product(dscores, levels.codebook), few.x, dnorms[:, None], value=2, out=self.dx[few.rows])

    def to_codebook(self, weights: Tensor, vectors: Tensor, offset: Tensor | None = None) -> None:
        """Adds weights [n, P]^T (vectors [n, D] - offset)."""
        step = max(16, _TILE // self.levels.D)  # centred and add_product copy what they are given

        def work(_: int, columns: slice) -> None:
            shift = None if offset is None else offset[columns]
            plain = shift is None and vectors.dtype == torch.float32
            for left, right in zip(weights.split(step), vectors.split(step), strict=True):
                some = right[:, columns] if plain else centred(right[:, columns], shift)
                add_product(self.dcodebook[columns], some, left)

        in_threads(work, self.levels.D)

    def gradients(self) -> Gradients:
        """All of them, once every row has been added."""
        dgram = torch.stack([part.dgram + part.ddiagonal.diag() for part in self.sums]).sum(dim=0)
        self.to_codebook(dgram + dgram.T, self.levels.codebook)
        self.dcodebook += torch.stack([part.dcodebook for part in self.sums]).sum(dim=0)
        dscale = torch.stack([self.dscale, *(part.dscale for part in self.sums)]).sum(dim=0)
        return Gradients(self.dx, self.dcodebook.T[: self.levels.K].contiguous(), dscale.float())


def _add_symmetric(total: Tensor, left: Tensor, right: Tensor, width: int = 64) -> None:
    """Adds left^T right [P, P], which is symmetric, so that total + total^T is right, which is all that counts."""
    for i in range(0, len(total) if len(left) else 0, width):
        own, others = slice(i, i + width), slice(i + width, None)
        total[own, own].addmm_(left[:, own].T, right[:, own])
        if i + width < len(total):
            total[own, others].addmm_(left[:, own].T, right[:, others], alpha=2)
