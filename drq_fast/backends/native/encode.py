"""Encoding on the CPU, in float32 and score space: one product with the codebook, then additions only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import torch as definition
from ..gradients import centred
from ..types import Parameters
from .extension import MAX_CODEWORDS, floats, instruction_set, native, pointer
from .products import product
from .threads import in_threads, single_threaded, tiles

if TYPE_CHECKING:
    from ... import _C

_TILE = 1 << 20  # floats of a tile that stays in cache
_PRODUCT = 1 << 26  # multiplications from which C C^T is worth threads
_TINY = 1 << 18  # entries of C C^T up to which torch's own threads are not used
_MANY = 1024  # codewords from which C C^T may cost more than it saves


class Levels:
    """A codec as the kernels of the levels take it: K padded to P, a multiple of 16, all in float32."""

    def __init__(self, codec: Parameters) -> None:
        self.K, self.D = codec.codebook.shape
        self.P = -(-self.K // 16) * 16
        self.M = len(codec.scale)
        self.scale = codec.scale.float().contiguous()
        self.codebook = _padded(codec.codebook, self.P)
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


def _padded(codebook: Tensor, P: int) -> Tensor:
    """[P, D] float32, zeros below the codewords."""
    dense = codebook.float().contiguous()
    return dense if len(dense) == P else torch.nn.functional.pad(dense, (0, 0, 0, P - len(dense)))


def gram(codebook: Tensor) -> Tensor:
    """C C^T [K, K]; a small one is computed without torch's threads."""
    if codebook.device.type == "cpu" and len(codebook) ** 2 <= _TINY:
        return single_threaded(lambda: codebook @ codebook.T)
    return codebook @ codebook.T


def _gram_in_threads(codebook: Tensor) -> Tensor:
    """C C^T [K, K]; threads of ours share out the rows where that pays."""
    K, D = codebook.shape
    if K * K > _TINY:
        return product(codebook, codebook.T)
    if K * K * D < _PRODUCT or K < 128:
        return gram(codebook)
    found = floats(K, K)

    def work(_: int, rows: slice) -> None:
        found[rows] = product(codebook[rows], codebook.T)

    in_threads(work, K)
    return found


class Words:
    """A codec as one level after the other takes it, without C C^T: K padded to P, a multiple of 16, in float32."""

    def __init__(self, codec: Parameters) -> None:
        self.K, self.D = codec.codebook.shape
        self.P = -(-self.K // 16) * 16
        self.scale = codec.scale.float().contiguous()
        self.codebook = _padded(codec.codebook, self.P)
        self.diagonal = self.codebook.square().sum(dim=1)
        self.bias = (self.scale * self.scale)[:, None] * self.diagonal
        self.bias[:, self.K :] = float("inf")
        self.jobs = [
            native.Levels(
                codebook=pointer(self.codebook),
                gram=0,
                diagonal=pointer(self.diagonal),
                bias=pointer(bias),
                scale=pointer(scale),
                K=self.K,
                P=self.P,
                D=self.D,
                M=1,
            )
            for bias, scale in zip(self.bias, self.scale, strict=True)
        ]


def by_products(N: int, K: int, M: int) -> bool:
    """Whether to multiply what is left with the codewords at every level: M products h C^T of N K D can be cheaper than
    x C^T and C C^T, N K D + K K D, and C C^T can be larger than memory should be. Training has the same ratio."""
    return K > MAX_CODEWORDS or (K >= _MANY and K > (M - 1) * N)


@torch.no_grad()
def encode(x: Tensor, codec: Parameters, beam: int, omega: Tensor | None) -> Tensor:
    """Codes [N, M] of x [N, D], uint8 for K <= 256, else int32: see `backends.torch.encode`."""
    with torch.autocast("cpu", enabled=False):
        if beam == 1 and by_products(len(x), len(codec.codebook), len(codec.scale)):
            return _encode_by_products(x, codec.table(Words), codec.offset)
        return _encode(x, codec.table(Levels), codec.offset, beam, omega)


def _encode_by_products(x: Tensor, words: Words, offset: Tensor | None) -> Tensor:
    """Greedy codes: each level multiplies what the levels before it left over with the codewords."""
    M = len(words.jobs)
    codes = torch.empty(len(x), M, dtype=definition.code_dtype(words.K), device="cpu")
    isa, step = instruction_set(), max(256, _TILE // max(words.P, words.D))

    def work(_: int, rows: slice) -> None:
        scratch = floats(min(step, rows.stop - rows.start), words.P)
        for here in tiles(rows, step):
            h = centred(x[here], offset)
            h = h.clone() if h.data_ptr() == x[here].data_ptr() else h
            chosen = codes.new_empty(len(h), 1)
            for m, levels in enumerate(words.jobs):
                scores = product(h, words.codebook.T, scratch[: len(h)])
                tile = native.Tile(levels=levels, x=pointer(h), scores=pointer(scores), N=len(h))
                job = native.Encode(
                    tile=tile, omega=0, still_to_come=0, codes=pointer(chosen), beam=1, wide=codes.dtype == torch.int32
                )
                native.encode_cpu(job, isa)
                codes[here, m] = chosen[:, 0]
                if m + 1 < M:
                    h.sub_(words.codebook[chosen[:, 0].long()] * words.scale[m])

    in_threads(work, len(x))
    return codes


def _encode(x: Tensor, levels: Levels, offset: Tensor | None, beam: int, omega: Tensor | None) -> Tensor:
    omega = floats(levels.M).fill_(1) if omega is None else omega.float()
    still_to_come = definition.still_to_come(omega)
    codes = torch.empty(len(x), levels.M, dtype=definition.code_dtype(levels.K), device="cpu")
    isa, step = instruction_set(), max(64, _TILE // max(levels.P, levels.D))

    def work(_: int, rows: slice) -> None:
        scratch = floats(min(step, rows.stop - rows.start), levels.P)
        for here in tiles(rows, step):
            tile = centred(x[here], offset)
            scores = product(tile, levels.codebook.T, scratch[: len(tile)])
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
