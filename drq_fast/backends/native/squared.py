"""Decoding and squared errors on the CPU, in float32: codes in score space, errors and gradients in D dimensions.

Gradients of the codebook are added up codeword by codeword in the order of the rows, so that they do not depend on the
number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ... import modes
from .. import torch as definition
from ..gradients import centred, graphless, refuse_second_derivatives
from ..types import CodewordSums, Parameters, SquaredErrors
from .encode import encode
from .extension import floats, instruction_set, native, pointer
from .threads import in_threads

if TYPE_CHECKING:
    from ... import _C

_Dense: TypeAlias = tuple[Tensor, Tensor, Tensor | None]  # codebook, scale, offset
_Pull: TypeAlias = Callable[[slice, Tensor], None]  # writes pulls [n, M, D] of some rows

_BLOCK = 1 << 21  # floats of pulls [n, M, D] at a time: more would be new memory, and page faults, at every step


@torch.no_grad()
def decode(codes: Tensor, codec: Parameters) -> Tensor:
    """The vectors [N, D] that codes [N, L] stand for: see `backends.torch.decode`; not differentiable."""
    codebook, scale, offset = _dense(codec)
    chosen = codec.rows(codes).contiguous()
    decoded, isa = floats(len(codes), codebook.shape[1]), instruction_set()

    def work(_: int, rows: slice) -> None:
        job = _job(None, chosen[rows], codebook, scale, offset)
        job.decoded = pointer(decoded[rows])
        native.decode_cpu(job, isa)

    in_threads(work, len(codes))
    return decoded.to(codec.codebook.dtype)


def squared_errors(x: Tensor, codec: Parameters, commitment: float) -> SquaredErrors:
    """The squared errors of x [N, D] after each level: see `backends.torch.squared_errors`; differentiable once."""
    with modes.precise("cpu"):
        return SquaredErrors(*_SquaredErrors.apply(*graphless(x, *codec.tensors()), codec.groups, commitment))


class _SquaredErrors(torch.autograd.Function):
    """Keeps the codes and forms the residuals again for the gradients: M N D operations beside N K D for the codes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None, *settings: Any) -> Any:
        """(errors [N, M], codes [N, M] int64); settings: groups, commitment."""
        groups, ctx.commitment = settings
        codec = Parameters(codebook, scale, offset, groups)
        codes = encode(x, codec, 1, None).long()
        dense, isa, chosen = _dense(codec), instruction_set(), codec.rows(codes)
        errors = floats(*codes.shape)

        def work(_: int, rows: slice) -> None:
            h = centred(x[rows], offset)
            job = _job(h, chosen[rows], *dense)
            job.errors = pointer(errors[rows])
            native.squared_errors_cpu(job, isa)

        in_threads(work, len(x))
        ctx.save_for_backward(x, codebook, scale, offset, chosen)
        ctx.mark_non_differentiable(codes)
        return errors.mul_(1 + ctx.commitment), codes

    @staticmethod
    def backward(ctx: Any, derrors: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, codebook, scale and offset."""
        refuse_second_derivatives("squared_errors", "native")
        x, codebook, scale, offset, chosen = ctx.saved_tensors
        dense, isa = _dense(Parameters(codebook, scale, offset)), instruction_set()
        dx, dscale = floats(len(x), codebook.shape[1]), floats(*chosen.shape)
        derrors = derrors.float().contiguous()

        def pull(rows: slice, pulls: Tensor) -> None:
            h = centred(x[rows], offset)
            job = _job(h, chosen[rows], *dense)
            job.derrors, job.pulls, job.dscale = pointer(derrors[rows]), pointer(pulls), pointer(dscale[rows])
            native.pulls_cpu(job, isa)
            dx[rows] = pulls[:, 0]

        dcodebook = None
        if ctx.needs_input_grad[1]:
            dcodebook = _summed_by_codeword(chosen, dense, pull).to(codebook.dtype)
        else:
            list(_pulled(chosen, dense, pull))  # for dx and dscale alone
        doffset = None if offset is None else _column_sums(dx).to(offset.dtype)
        of_scale = dscale.sum(dim=0, dtype=torch.float64).to(scale.dtype)
        return dx.mul_(-ctx.commitment).to(x.dtype), dcodebook, of_scale, doffset, None, None


@torch.no_grad()
def codeword_sums(x: Tensor, codes: Tensor, codec: Parameters, weights: Tensor) -> CodewordSums:
    """What a step of k-means adds up for each codeword: see `backends.torch.codeword_sums`; not differentiable."""
    dense, isa = _dense(codec), instruction_set()
    chosen, weights = codec.rows(codes).contiguous(), weights.float().contiguous()

    def pull(rows: slice, pulls: Tensor) -> None:
        h = centred(x[rows], codec.offset)
        job = _job(h, chosen[rows], *dense)
        job.weights, job.pulls = pointer(weights[rows]), pointer(pulls)
        native.own_pulls_cpu(job, isa)

    sums = _summed_by_codeword(chosen, dense, pull)
    return CodewordSums(sums, definition.codeword_mass(chosen, dense[1], weights, len(sums)))


def _summed_by_codeword(chosen: Tensor, dense: _Dense, pull: _Pull) -> Tensor:
    """[K, D]: scale[m] pulls[n, m] added up by rows of the codebook, chosen [N, M], in the order of the vectors."""
    (K, D), isa = dense[0].shape, instruction_set()
    sums, starts = floats(K, D).zero_(), torch.empty(K + 1, dtype=torch.int64, device="cpu")
    for block, pulls in _pulled(chosen, dense, pull):
        job, places = _job(None, chosen[block], *dense), torch.empty_like(chosen[block])
        job.pulls, job.dcodebook = pointer(pulls), pointer(sums)

        def add(_: int, words: slice, job: _C.Squared = job, places: Tensor = places) -> None:
            native.add_pulls_cpu(job, pointer(starts), pointer(places), words.start, words.stop, isa)

        native.group_codes(job, pointer(starts), pointer(places))
        in_threads(add, K)
    return sums


def _pulled(chosen: Tensor, dense: _Dense, pull: _Pull) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of vectors and their pulls [n, M, D], in memory that all blocks share."""
    D, (N, M) = dense[0].shape[1], chosen.shape
    step = max(1, _BLOCK // (M * D))
    pulls = floats(min(step, N), M, D)
    native.large_pages(pointer(pulls), pulls.nbytes)
    for first in range(0, N, step):
        last = min(first + step, N)

        def work(_: int, rows: slice, first: int = first) -> None:
            pull(slice(first + rows.start, first + rows.stop), pulls[rows])

        in_threads(work, last - first)
        yield slice(first, last), pulls


def _column_sums(values: Tensor) -> Tensor:
    """[D] float64 of values [N, D]; by blocks, because torch converts all that it adds up first."""
    blocks = values.split(max(1, _BLOCK // values.shape[1]))
    return torch.stack([block.sum(dim=0, dtype=torch.float64) for block in blocks]).sum(dim=0)


def _dense(codec: Parameters) -> _Dense:
    """(codebook, scale, offset), float32 and contiguous."""
    codebook, scale, offset = codec.tensors()
    return (
        codebook.detach().float().contiguous(),
        scale.detach().float().contiguous(),
        None if offset is None else offset.detach().float().contiguous(),
    )


def _job(h: Tensor | None, chosen: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None) -> _C.Squared:
    """Of centred vectors h [n, D] and the rows of the codebook that they chose, [n, M]; the caller keeps all tensors
    alive."""
    (K, D), (N, M) = codebook.shape, chosen.shape
    addresses = {"x": pointer(h), "codebook": pointer(codebook), "scale": pointer(scale), "offset": pointer(offset)}
    return native.Squared(**addresses, codes=pointer(chosen), N=N, D=D, K=K, M=M)
