"""Encoding on the CPU, in float32 and score space: one product with the codebook, then additions only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import torch as definition
from ..gradients import centred
from ..types import Parameters
from .extension import floats, instruction_set, native, pointer
from .threads import in_threads, single_threaded, tiles

if TYPE_CHECKING:
    from ... import _C

_TILE = 1 << 20  # floats of a tile that stays in cache
_PRODUCT = 1 << 26  # multiplications from which C C^T is worth threads
_TINY = 1 << 18  # entries of C C^T up to which torch's own threads are not used


class Levels:
    """A codec as the kernels of the levels take it: K padded to P, a multiple of 16, all in float32."""

    def __init__(self, codec: Parameters) -> None:
        self.K, self.D = codec.codebook.shape
        self.P = -(-self.K // 16) * 16
        self.M = len(codec.scale)
        self.scale = codec.scale.float().contiguous()
        self.codebook = codec.codebook.float().contiguous()
        if self.P > self.K:
            self.codebook = torch.nn.functional.pad(self.codebook, (0, 0, 0, self.P - self.K))
        self.gram = _gram_in_threads(self.codebook)
        self.diagonal = self.gram.diagonal().contiguous()
        self.bias = (self.scale * self.scale)[:, None] * self.diagonal
        self.bias[:, self.K :] = float("inf")
        self.job = native.Levels(
            codebook=pointer(self.codebook),
            gram=pointer(self.gram),
            diagonal=pointer(self.diagonal),
            bias=pointer(self.bias),
            scale=pointer(self.scale),
            K=self.K,
            P=self.P,
            D=self.D,
            M=self.M,
        )

    def tile(self, x: Tensor, scores: Tensor) -> _C.Tile:
        """Centred x [n, D] with its products with the codewords, scores [n, P], for the kernels."""
        return native.Tile(levels=self.job, x=pointer(x), scores=pointer(scores), N=len(x))


def gram(codebook: Tensor) -> Tensor:
    """C C^T [K, K]; a small one is computed without torch's threads."""
    if codebook.device.type == "cpu" and len(codebook) ** 2 <= _TINY:
        return single_threaded(lambda: codebook @ codebook.T)
    return codebook @ codebook.T


def _gram_in_threads(codebook: Tensor) -> Tensor:
    """C C^T [K, K]; threads of ours share out the rows where that pays."""
    K, D = codebook.shape
    if K * K > _TINY or K * K * D < _PRODUCT or K < 128:
        return gram(codebook)
    product = floats(K, K)

    def work(_: int, rows: slice) -> None:
        torch.mm(codebook[rows], codebook.T, out=product[rows])

    in_threads(work, K)
    return product


@torch.no_grad()
def encode(x: Tensor, codec: Parameters, beam: int, omega: Tensor | None) -> Tensor:
    """Codes [N, M] of x [N, D], uint8 for K <= 256, else int32: see `backends.torch.encode`."""
    with torch.autocast("cpu", enabled=False):
        return _encode(x, codec.table(Levels), codec.offset, beam, omega)


def _encode(x: Tensor, levels: Levels, offset: Tensor | None, beam: int, omega: Tensor | None) -> Tensor:
    omega = floats(levels.M).fill_(1) if omega is None else omega.float()
    still_to_come = definition.still_to_come(omega)
    codes = torch.empty(len(x), levels.M, dtype=definition.code_dtype(levels.K), device="cpu")
    isa, step = instruction_set(), max(64, _TILE // max(levels.P, levels.D))

    def work(_: int, rows: slice) -> None:
        scores = floats(min(step, rows.stop - rows.start), levels.P)
        for here in tiles(rows, step):
            tile = centred(x[here], offset)
            torch.mm(tile, levels.codebook.T, out=scores[: len(tile)])
            job = native.Encode(
                tile=levels.tile(tile, scores),
                omega=pointer(omega),
                still_to_come=pointer(still_to_come),
                codes=pointer(codes[here]),
                beam=beam,
                wide=codes.dtype == torch.int32,
            )
            native.encode_cpu(job, isa)

    in_threads(work, len(x))
    return codes
