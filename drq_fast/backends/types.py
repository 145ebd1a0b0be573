"""What every operation is given and what it returns, whichever backend computes it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import devices, modes

Table = TypeVar("Table")


class Tables:
    """Keeps tables that backends derive from an object's tensors; these must not change as long as it is used."""

    device: torch.device
    _tables: dict[Callable[[Any], Any], Any]

    def table(self, make: Callable[[Any], Table]) -> Table:
        """make(self), computed at the first call and kept. Threads that race compute it twice and share one result."""
        found = self._tables.get(make)
        if found is None:
            with modes.plain(self.device):
                found = self._tables.setdefault(make, make(self))
        return found


class Parameters(Tables):
    """codebook [G * K, D], scale [M], offset [D] or None, of any float dtype.

    groups [M]: level m chooses among the K codewords that begin in row groups[m] * K of the codebook. Groups ascend
    from 0 to G - 1; with G = 1, as in the paper, all levels share all codewords. `drq_fast.Codec` owns copies; the
    functions of `drq_fast.functional` make an object for each call.
    """

    codebook: Tensor
    scale: Tensor
    offset: Tensor | None
    groups: tuple[int, ...]
    codewords: int  # K
    requires_grad: bool  # of any of them
    double: bool  # any of them is float64

    def __init__(
        self, codebook: Tensor, scale: Tensor, offset: Tensor | None, groups: tuple[int, ...] | None = None
    ) -> None:
        given = [tensor for tensor in (codebook, scale, offset) if tensor is not None]
        groups = (0,) * scale.shape[0] if groups is None else groups
        self.__dict__.update(
            codebook=codebook,
            scale=scale,
            offset=offset,
            groups=groups,
            codewords=codebook.shape[0] // (groups[-1] + 1),
            device=codebook.device,
            requires_grad=any(tensor.requires_grad for tensor in given),
            double=any(tensor.dtype == torch.float64 for tensor in given),
            _tables={},
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Parameters, (*self.tensors(), self.groups)  # without tables

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(codebook, scale, offset), as autograd.Functions take them."""
        return self.codebook, self.scale, self.offset

    @property
    def shared(self) -> bool:
        """Whether all levels have the same codewords."""
        return self.groups[-1] == 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many levels each codebook serves."""
        return tuple(self.groups.count(group) for group in range(self.groups[-1] + 1))

    def words(self, m: int) -> Tensor:
        """The codewords of level m, [K, D]."""
        first = self.groups[m] * self.codewords
        return self.codebook if self.shared else self.codebook[first : first + self.codewords]

    def rows(self, codes: Tensor) -> Tensor:
        """The rows of the codebook that codes [..., L] choose, int64."""
        codes = codes.long()
        if self.shared:
            return codes
        bases = tuple(self.codewords * group for group in self.groups[: codes.shape[-1]])
        return codes + devices.tensor_of(bases, torch.int64, codes.device)

    def part(self, levels: slice, offset: bool = True) -> Parameters:
        """The same for some neighbouring levels alone; not a copy. offset: whether it has one."""
        groups = self.groups[levels]
        rows = slice(groups[0] * self.codewords, (groups[-1] + 1) * self.codewords)
        own = tuple(group - groups[0] for group in groups)
        return Parameters(self.codebook[rows], self.scale[levels], self.offset if offset else None, own)

    def apart(self) -> list[Parameters]:
        """The codecs of the groups of levels, without an offset; computed once."""
        return self.table(_groups_apart)


def powers_of(groups: tuple[int, ...]) -> tuple[int, ...]:
    """The number of each level [M] within its group."""
    return tuple(m - groups.index(group) for m, group in enumerate(groups))


def _groups_apart(codec: Parameters) -> list[Parameters]:
    firsts = [m for m in range(len(codec.groups)) if m == 0 or codec.groups[m] != codec.groups[m - 1]]
    bounds = itertools.pairwise([*firsts, len(codec.groups)])
    return [codec.part(slice(*levels), offset=False) for levels in bounds]


class Lists(Tables):
    """Inverted lists. List l has the codes in rows starts[l] .. starts[l + 1] - 1, and its own place in space:

        xhat_n = offset + centroids[l] + sum_m scale[m] C[b_nm]

    starts [L + 1] int64, from 0 to N, ascending; centroids [L, D] float32, relative to the offset of the codec. Tables
    are functions of the centroids alone.
    """

    def __init__(self, starts: Tensor, centroids: Tensor) -> None:
        self.starts, self.centroids, self.device = starts, centroids, starts.device
        self._tables = {}

    def __len__(self) -> int:
        return self.centroids.shape[0]

    def of(self, positions: Tensor) -> Tensor:
        """The list that each row belongs to; both of the same shape, int64."""
        return torch.searchsorted(self.starts, positions, right=True) - 1

    def rows(self, positions: Tensor) -> Lists:
        """The lists of the rows at these positions [n], which ascend, alone; it shares the tables."""
        some = Lists(torch.searchsorted(positions, self.starts), self.centroids)
        some._tables = self._tables
        return some


class Database(Tables):
    """Codes [N, L] to be searched by a metric, with norms [N] as `squared_norms` returns them (None: not computed
    yet, or not needed), keep [N] bool, the codes to look at (None: all), and the lists that the codes lie in (None: the
    codes stand for vectors by themselves)."""

    def __init__(
        self,
        codes: Tensor,
        codec: Parameters,
        metric: str,
        norms: Tensor | None = None,
        keep: Tensor | None = None,
        lists: Lists | None = None,
    ) -> None:
        self.codes, self.codec, self.metric, self.norms, self.keep, self.lists = (
            codes,
            codec,
            metric,
            norms,
            keep,
            lists,
        )
        self.device, self.requires_grad = (
            codes.device,
            codec.requires_grad or (norms is not None and norms.requires_grad),
        )
        self._tables = {}

    def rows(self, positions: Tensor) -> Database:
        """The codes at these positions [n], which ascend, alone, without a filter."""
        norms = None if self.norms is None else self.norms[positions]
        lists = None if self.lists is None else self.lists.rows(positions)
        return Database(self.codes[positions], self.codec, self.metric, norms, lists=lists)


class Stored(NamedTuple):
    """Vectors kept beside codes: values [N, D] float32, float16 or int8; steps [N] float32 are factors of int8 rows."""

    values: Tensor
    steps: Tensor | None = None

    def rows(self, positions: Tensor | slice) -> Stored:
        """Those at positions [n] alone."""
        return Stored(self.values[positions], None if self.steps is None else self.steps[positions])

    def floats(self, positions: Tensor | slice) -> Tensor:
        """The vectors at positions [...], as float32 [..., D]."""
        values = self.values[positions].float()
        return values if self.steps is None else values * self.steps[positions][..., None]


class Quantized(NamedTuple):
    """soft [N, D] and hard [N, D] approximations of x, codes [N, M] int64."""

    soft: Tensor
    hard: Tensor
    codes: Tensor


class Distortion(NamedTuple):
    """Errors after each level: hard [N, M] = ||x - xhat_m||, soft [N, M] = ||x - xsoft_m||,
    joint [N, M] = ||xsoft_m - xhat_m||^2; codes [N, M] int64."""

    hard: Tensor
    soft: Tensor
    joint: Tensor
    codes: Tensor


class Loss(NamedTuple):
    """loss, a scalar unless it was not reduced; codes [N, M] int64."""

    loss: Tensor
    codes: Tensor


class SquaredErrors(NamedTuple):
    """errors [N, M] = ||sg[x] - xhat_m||^2 + commitment * ||x - sg[xhat_m]||^2, sg: no gradient; codes [N, M] int64."""

    errors: Tensor
    codes: Tensor


class CodewordSums(NamedTuple):
    """sums [K, D] of weighted residuals and mass [K], their weights, by codeword."""

    sums: Tensor
    mass: Tensor


class SearchResult(NamedTuple):
    """scores [Q, k], best first, and positions [Q, k] int64: rows of the codes, -1 where there were fewer than k."""

    scores: Tensor
    positions: Tensor
