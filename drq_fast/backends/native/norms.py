"""Squared norms of codes on the CPU, added up from inner products of codewords."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import devices, modes
from ..torch import inverted
from ..types import Lists, Parameters
from .encode import gram
from .extension import floats, native, pointer


def bases_of(codec: Parameters) -> Tensor:
    """[M] int64: the row of the codebook where the codewords of each level begin."""
    bases = tuple(codec.codewords * group for group in codec.groups)
    return devices.tensor_of(bases, torch.int64, codec.device)


class Inner:
    """Inner products of codewords and offset, from which squared norms are added up."""

    def __init__(self, codec: Parameters) -> None:
        codebook, offset = codec.codebook.float(), None if codec.offset is None else codec.offset.float()
        self.gram, self.scale = gram(codebook), codec.scale.float().contiguous()
        self.bases = bases_of(codec)
        self.with_offset = None if offset is None else 2 * (codebook @ offset)
        self.of_offset = None if offset is None else (offset @ offset).reshape(1)


@torch.no_grad()
def squared_norms(codes: Tensor, codec: Parameters, metric: str, lists: Lists | None = None) -> Tensor:
    """The squared norms [N] of codes [N, L] on the CPU, float32: see `backends.torch.squared_norms`."""
    with modes.precise("cpu"):
        inner = codec.table(Inner)
    codes, norms = dense_rows(codes), floats(len(codes))
    if lists is None:
        shifted = metric == "cosine" and inner.with_offset is not None
        _add_norms(inner, codes, norms, inner.with_offset if shifted else None, inner.of_offset if shifted else None)
        return norms
    offset = None if codec.offset is None else codec.offset.float()
    wide = Parameters(codec.codebook.float(), codec.scale, offset)
    with modes.precise("cpu"):
        for part in inverted.shifts_of(wide, metric, lists):
            starts = lists.starts[part.first : part.first + len(part.constants) + 1] - part.begin
            rows = slice(part.begin, part.end)
            _add_norms(inner, codes[rows], norms[rows], part.inner, part.constants, starts)
    return norms


def _add_norms(
    table: Inner,
    codes: Tensor,
    norms: Tensor,
    inner: Tensor | None,
    constants: Tensor | None,
    starts: Tensor | None = None,
) -> None:
    """Fills norms [N] of codes [N, M]; inner [K] and constants [1], or [L, K] and [L] with starts [L + 1] of lists."""
    N, M = codes.shape
    job = native.Norms(
        gram=table.gram.data_ptr(),
        scale=table.scale.data_ptr(),
        bases=table.bases.data_ptr(),
        inner=pointer(inner),
        constants=pointer(constants),
        starts=pointer(starts),
        codes=codes.data_ptr(),
        norms=norms.data_ptr(),
        N=N,
        T=len(table.gram),
        M=M,
        stride=codes.stride(0) if N > 1 else M,
        wide=codes.dtype == torch.int16,
    )
    native.norms_cpu(job, torch.get_num_threads())


def dense_rows(codes: Tensor) -> Tensor:
    """codes [N, L] of any integer dtype as uint8, or as the bits of uint16 in int16; rows may lie apart."""
    if codes.dtype not in (torch.uint8, torch.int16):
        codes = codes.to(torch.int16)
    return codes if codes.stride(1) == 1 or codes.shape[1] == 1 else codes.contiguous()
