"""Inverted lists: which list a vector belongs to, its code within it, and what a search of lists reads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from .. import checks, functional
from ..backends.torch import code_dtype
from ..backends.types import Lists, Parameters
from ..codec import Codec, directions
from .rows import Content, Rows

_TAIL = 8  # one of so many rows may be out of order before all rows are put in the order of their lists
_SHORT = 1 << 14  # rows that may be out of order in any case
_ROUNDS = 10  # of k-means
_PER_LIST = 64  # vectors that k-means looks at
_BLOCK = 1 << 24  # numbers of the vectors that are encoded at a time


class Coarse:
    """centroids [L, D] of lists, relative to the offset of a codec, which encodes what they leave of a vector."""

    def __init__(self, centroids: Tensor, codec: Codec) -> None:
        self.centroids, self.codec = centroids, codec
        self.as_codewords = _as_codewords(centroids)
        self.residual = Parameters(codec.codebook, codec.scale, None, codec.groups)
        self.dtype = list_dtype(len(centroids))

    def __len__(self) -> int:
        return len(self.centroids)

    def __reduce__(self) -> tuple[type[Coarse], tuple[Tensor, Codec]]:
        return Coarse, (self.centroids, self.codec)

    def __deepcopy__(self, memo: dict[int, object]) -> Coarse:
        return self

    def encode(self, x: Tensor, beam: int) -> Content:
        """The list and the code of vectors x [N, D]."""
        codec, parts, beam = self.codec, [], checks.beam("encode", beam)
        omega = codec.level_weights or functional.default_weights(codec.levels)
        for some in x.split(max(1, _BLOCK // (codec.dim * beam))):
            h = centred(some.to(codec.device, torch.float32), codec)
            lists = _nearest(h, self.as_codewords)
            codes = functional.encode_checked(h - self.centroids[lists], self.residual, beam, omega)
            parts.append((codes, lists.to(self.dtype)))
        if not parts:
            codes = torch.empty(0, codec.levels, dtype=code_dtype(codec.codewords), device=codec.device)
            return Content(codes, torch.empty(0, dtype=self.dtype, device=codec.device))
        codes, lists = (torch.cat(each) for each in zip(*parts, strict=True))
        return Content(codes, lists)

    def lists_of(self, numbers: Tensor) -> Lists:
        """The lists of rows that have these numbers [n], in ascending order."""
        bounds = torch.arange(len(self) + 1, device=numbers.device, dtype=torch.int32)
        return Lists(torch.searchsorted(numbers.to(torch.int32), bounds), self.centroids)


def list_dtype(lists: int) -> torch.dtype:
    """How the numbers of lists are stored."""
    return torch.int16 if lists <= 1 << 15 else torch.int32


class Tail(NamedTuple):
    """Rows that are not in the order of their lists: copies in that order, and where they are [n]."""

    content: Content
    rows: Tensor


def tail_of(rows: Rows) -> Tail | None:
    """What `used` rows have behind the ordered ones."""
    if rows.ordered == rows.size:
        return None
    content = Content(rows.content.codes, rows.content.lists).map(lambda tensor: tensor[rows.ordered :])
    assert content.lists is not None
    order = content.lists.argsort(stable=True)
    return Tail(content.map(lambda tensor: tensor[order]), order + rows.ordered)


def is_late(rows: Rows) -> bool:
    """Whether so many rows are out of order that all should be put in order."""
    return rows.size - rows.ordered > max(_SHORT, rows.size // _TAIL)


def default_probes(lists: int) -> int:
    """How many lists a search looks at where nobody says."""
    return min(lists, max(16, lists // 16))


def default_lists(N: int) -> int | None:
    """How many lists N vectors get where nobody says: the power of 2 next to 2 sqrt(N), none where a scan is fast."""
    return None if N < 50_000 else 1 << round(0.5 * torch.tensor(4.0 * N).log2().item())


def centred(x: Tensor, codec: Codec) -> Tensor:
    """What a codec quantizes of x [n, D]."""
    x = directions(x) if codec.unit else x
    return x if codec.offset is None else x - codec.offset


def sample_size(lists: int) -> int:
    """How many vectors `centroids_of` needs."""
    return _PER_LIST * lists


def residuals(h: Tensor, centroids: Tensor) -> Tensor:
    """What the nearest of centroids [L, D] leave of h [n, D]."""
    return h - centroids[_nearest(h, _as_codewords(centroids))]


def _as_codewords(centroids: Tensor) -> Parameters:
    """A codec of one level, whose codes are the numbers of the nearest centroids."""
    return Parameters(centroids, centroids.new_ones(1), None)


def _nearest(h: Tensor, as_codewords: Parameters) -> Tensor:
    """The number [n] of the nearest centroid of h [n, D]."""
    return functional.encode_checked(h, as_codewords, 1, None)[:, 0].long()


def centroids_of(h: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` centroids [L, D] of vectors h [n, D] by k-means; lists that nobody belongs to start anew elsewhere."""
    centroids = h[torch.randperm(len(h), generator=generator, device="cpu")[:count].to(h.device)].clone()
    for _ in tqdm(range(_ROUNDS), desc="lists", unit="round", delay=2, disable=None, leave=False):
        lists = _nearest(h, _as_codewords(centroids))
        sizes = torch.bincount(lists, minlength=count)
        centroids = torch.zeros_like(centroids).index_add_(0, lists, h) / sizes.clamp_min(1)[:, None]
        empty = (sizes == 0).nonzero().squeeze(1)
        drawn = torch.randint(len(h), (len(empty),), generator=generator, device="cpu")
        centroids[empty] = h[drawn.to(h.device)]
    return centroids
