"""Encoding on the CPU, in float32 and score space: one product with the codebook, then additions only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ... import modes
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
    """A codec as the kernels of the levels take it: K padded to P, a multiple of 16, all in float32.

    The G groups of codewords begin in rows 0, P, 2 P, .. of the T = G P rows.
    """

    def __init__(self, codec: Parameters) -> None:
        self.K, self.D, self.M = codec.codewords, codec.codebook.shape[1], len(codec.scale)
        self.P = -(-self.K // 16) * 16
        self.scale = codec.scale.float().contiguous()
        self.codebook = _padded(codec.codebook, self.K, self.P)
        self.T = len(self.codebook)
        self.gram = _gram_in_threads(self.codebook)
        if not codec.shared:
            self.gram = _apart(self.gram)
        self.diagonal = self.gram.diagonal().contiguous()
        self.bases = self.P * torch.tensor(codec.groups, device="cpu")
        self.bias = self.diagonal.view(-1, self.P)[list(codec.groups)] * (self.scale * self.scale)[:, None]
        self.bias[:, self.K :] = float("inf")
        self.job = native.Levels(
            codebook=pointer(self.codebook),
            gram=pointer(self.gram),
            diagonal=pointer(self.diagonal),
            bias=pointer(self.bias),
            scale=pointer(self.scale),
            bases=pointer(self.bases),
            K=self.K,
            P=self.P,
            T=self.T,
            D=self.D,
            M=self.M,
            pitch=self.gram.stride(0),
        )

    def tile(self, x: Tensor, scores: Tensor) -> _C.Tile:
        """Centred x [n, D] with its products with the codewords, scores [n, T], for the kernels."""
        return native.Tile(levels=self.job, x=pointer(x), scores=pointer(scores), N=len(x))


def _padded(codebook: Tensor, K: int, P: int) -> Tensor:
    """[G * P, D] float32 of codebook [G * K, D], zeros below the codewords of each group."""
    dense = codebook.float().contiguous()
    return dense if K == P else torch.nn.functional.pad(dense.unflatten(0, (-1, K)), (0, 0, 0, P - K)).flatten(0, 1)


def _apart(gram: Tensor) -> Tensor:
    """The same with a cache line between its rows: those of a large power of 2 would share few places in caches."""
    spread = floats(len(gram), len(gram) + 16)
    native.large_pages(pointer(spread), spread.nbytes)
    return spread[:, : len(gram)].copy_(gram)


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
    """A codec whose levels share all codewords, as one level after the other takes it, without C C^T: K padded to P, a
    multiple of 16, in float32."""

    def __init__(self, codec: Parameters) -> None:
        self.K, self.D = codec.codebook.shape
        self.P = -(-self.K // 16) * 16
        self.scale = codec.scale.float().contiguous()
        self.codebook = _padded(codec.codebook, self.K, self.P)
        self.diagonal = self.codebook.square().sum(dim=1)
        self.base = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.bias = (self.scale * self.scale)[:, None] * self.diagonal
        self.bias[:, self.K :] = float("inf")
        self.jobs = [
            native.Levels(
                codebook=pointer(self.codebook),
                gram=0,
                diagonal=pointer(self.diagonal),
                bias=pointer(bias),
                scale=pointer(scale),
                bases=pointer(self.base),
                K=self.K,
                P=self.P,
                T=self.P,
                D=self.D,
                M=1,
                pitch=0,
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
    with modes.precise("cpu"):
        if beam == 1 and not codec.shared:
            return _encode_by_groups(x, codec)
        if beam == 1 and by_products(len(x), len(codec.codebook), len(codec.scale)):
            return _encode_by_products(x, codec.table(Words), codec.offset)
        if beam > 1 and not codec.shared:
            return _encode_groups_by_beam(x, codec, beam, omega)
        return _encode(x, codec.table(Levels), codec.offset, beam, omega)


def _encode_by_groups(x: Tensor, codec: Parameters) -> Tensor:
    """Greedy codes: the products of all groups together are x C^T, and inner products of codewords of two groups are
    not needed."""
    K, D = codec.codewords, codec.codebook.shape[1]
    codes = torch.empty(len(x), len(codec.scale), dtype=definition.code_dtype(K), device="cpu")
    step = max(256, _TILE // max(K, D))

    def encode_group(h: Tensor, group: Parameters) -> Tensor:
        return encode(h, group, 1, None)

    def work(_: int, rows: slice) -> None:
        for here in tiles(rows, step):
            codes[here] = definition.encode_by_groups(centred(x[here], codec.offset), codec, encode_group)

    in_threads(work, len(x))
    return codes


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
    weights = _weights(omega, levels.M)
    codes = torch.empty(len(x), levels.M, dtype=definition.code_dtype(levels.K), device="cpu")
    isa, step = instruction_set(), max(64, _TILE // max(levels.T, levels.D))

    def work(_: int, rows: slice) -> None:
        scratch = floats(min(step, rows.stop - rows.start), levels.T)
        for here in tiles(rows, step):
            tile = centred(x[here], offset)
            scores = product(tile, levels.codebook.T, scratch[: len(tile)])
            native.encode_cpu(_job(levels.tile(tile, scores), weights, codes[here], beam), isa)

    in_threads(work, len(x))
    return codes


def _weights(omega: Tensor | None, M: int) -> tuple[Tensor, Tensor]:
    """(omega [M], the weight of the present error at each level [M]) of a beam."""
    omega = floats(M).fill_(1) if omega is None else omega.float()
    return omega, definition.still_to_come(omega)


def _job(tile: _C.Tile, weights: tuple[Tensor, Tensor], codes: Tensor, beam: int) -> _C.Encode:
    """Writes codes [n, M]."""
    omega, still_to_come = map(pointer, weights)
    wide = codes.dtype == torch.int32
    return native.Encode(
        tile=tile, omega=omega, still_to_come=still_to_come, codes=pointer(codes), beam=beam, wide=wide
    )


class _Paths:
    """The paths of a beam for up to n vectors between two groups of levels: see csrc/levels.h."""

    def __init__(self, n: int, beam: int, levels: Levels) -> None:
        self.pitch = -(-levels.M // 16) * 16
        self.counts, self.shared = torch.empty(2, n, dtype=torch.int64, device="cpu")
        self.squares, self.residuals = floats(n), floats(n, levels.D)
        self.errors, self.costs = floats(2, n, beam)
        self.codes = torch.zeros(n, beam, self.pitch, dtype=torch.int32, device="cpu")

    def start(self, x: Tensor) -> None:
        """Gives each of the vectors x [n, D] one path without levels."""
        n = len(x)
        self.counts[:n], self.shared[:n], self.costs[:n] = 1, 0, 0
        self.residuals[:n] = x
        self.squares[:n] = self.errors[:n, 0] = x.square().sum(dim=1)

    def beam(self, encode: _C.Encode, first: int, last: int) -> _C.Beam:
        """The job of the levels from first to last - 1."""
        return native.Beam(
            encode=encode,
            first=first,
            last=last,
            counts=pointer(self.counts),
            shared=pointer(self.shared),
            squares=pointer(self.squares),
            residuals=pointer(self.residuals),
            errors=pointer(self.errors),
            costs=pointer(self.costs),
            codes=pointer(self.codes),
            pitch=self.pitch,
        )


def _encode_groups_by_beam(x: Tensor, codec: Parameters, beam: int, omega: Tensor | None) -> Tensor:
    """Codes by a beam where groups of levels have codewords of their own. Only levels that the paths of a vector do not
    share need inner products of codewords: what the others leave over is multiplied with the next group."""
    levels = codec.table(Levels)
    K, P, D, M = levels.K, levels.P, levels.D, levels.M
    weights = _weights(omega, M)
    codes = torch.empty(len(x), M, dtype=definition.code_dtype(K), device="cpu")
    isa, step = instruction_set(), max(64, _TILE // (P + D + beam * M))

    def work(_: int, rows: slice) -> None:
        most = min(step, rows.stop - rows.start)
        paths, scratch = _Paths(most, beam, levels), floats(most, P)
        for here in tiles(rows, step):
            tile, last = centred(x[here], codec.offset), 0
            paths.start(tile)
            for group, size in enumerate(codec.sizes):
                words = levels.codebook[group * P : (group + 1) * P]
                scores = product(paths.residuals[: len(tile)], words.T, scratch[: len(tile)])
                encode = _job(levels.tile(tile, scores), weights, codes[here], beam)
                first, last = last, last + size
                native.beam_cpu(paths.beam(encode, first, last), isa)

    in_threads(work, len(x))
    return codes
