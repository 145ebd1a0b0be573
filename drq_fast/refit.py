"""The best scale and the best codebook for given codes: a least-squares problem (docs/math.md, section 4)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .backends.native.products import product
from .backends.native.threads import in_parallel
from .backends.types import Parameters, powers_of
from .blocks import Calls

_TILE = 1 << 20  # floats of a [rows, K] or [rows, D] tile that stays in cache
_COUNTED = 512  # codewords up to which the counts of pairs [K, K] are kept
_DIRECT = 1024  # rows of the codebook up to which the normal equations are solved directly
_DENSE = 8192  # rows up to which their matrix is formed
_STEPS = 8  # of conjugate gradients
_COLUMNS = 32  # dimensions that a thread solves for at a time
_PENALISED = 4  # levels that get the full penalty: with more, it is amplified by codes that adapt to it
_RIDGE = 1e-4  # relative to the mean of the diagonal

_Times: TypeAlias = Callable[[Tensor], Tensor]  # multiplies [T, d] by the matrix of the normal equations


class Statistics(NamedTuple):
    """The sums over all vectors x, given codes [N, M], that the refit needs."""

    energy: Tensor  # sum of ||x||^2
    inner: Tensor  # [M, M]  of <C_i[b_i], C_j[b_j]>
    cross: Tensor  # [M]     of <x, C_i[b_i]>
    sums: Tensor  # [M, K, D] of x by codeword
    pairs: dict[tuple[int, int], Tensor]  # level i >= j -> [K, K], how often two codewords meet; where K is small
    uses: Tensor  # [T] int64: how often each codeword occurs

    def __add__(self, other: Statistics) -> Statistics:  # type: ignore[override]  # a tuple would append
        """The sums over the vectors of both."""
        pairs = {levels: counts + other.pairs[levels] for levels, counts in self.pairs.items()}
        energy, inner, cross = self.energy + other.energy, self.inner + other.inner, self.cross + other.cross
        return Statistics(energy, inner, cross, self.sums + other.sums, pairs, self.uses + other.uses)

    def errors(self, scale: Tensor) -> Tensor:
        """sum ||x - xhat_m||^2 [..., M] with scale [..., M]."""
        products = scale[..., :, None] * scale[..., None, :] * self.inner
        quadratic = products.cumsum(-1).cumsum(-2).diagonal(dim1=-2, dim2=-1)
        return self.energy - 2 * (scale * self.cross).cumsum(-1) + quadratic

    def double(self) -> Statistics:
        """The same in float64, as far as `errors` needs it."""
        return self._replace(energy=self.energy.double(), inner=self.inner.double(), cross=self.cross.double())


def tiles(N: int, width: int) -> Iterator[slice]:
    """Slices of 0..N, each small enough that [rows, width] floats stay in cache."""
    rows = max(64, _TILE // max(width, 1))
    for first in range(0, N, rows):
        yield slice(first, min(first + rows, N))


def collect(x: Tensor, codes: Tensor, codec: Parameters, energy: Tensor) -> Statistics:
    """The sums over x [N, D] with codes [N, M]; energy: that of x."""
    codebook, K = codec.codebook, codec.codewords
    (N, M), D = codes.shape, codebook.shape[1]
    columns = [codes[:, m].long() for m in range(M)]
    by_level = [functools.partial(_sums, x, column, K) for column in columns]
    if len(codebook) > _DENSE:
        inner = x.new_zeros(M, M)
        for rows in tiles(N, M * D):
            words = torch.stack([codec.words(m)[column[rows]].flatten() for m, column in enumerate(columns)])
            inner += words @ words.T
        done, pairs = run_all(by_level, x.device), {}
    else:
        gram, levels = codebook @ codebook.T, [(i, j) for i in range(M) for j in range(i + 1)]
        own, inner = _own_rows(codec), x.new_zeros(M, M)
        by_pair = [functools.partial(_pair, columns[i], columns[j], gram[own[i], own[j]]) for i, j in levels]
        done = run_all([*by_level, *by_pair], x.device)
        for (i, j), (_, total) in zip(levels, done[M:], strict=True):
            inner[i, j] = inner[j, i] = total
        pairs = {pair: counts for pair, (counts, _) in zip(levels, done[M:], strict=True) if counts is not None}
    sums, uses = torch.stack(done[:M]), torch.bincount(codec.rows(codes).flatten(), minlength=len(codebook))
    cross = torch.stack([(sums[m] * codec.words(m)).sum() for m in range(M)])
    return Statistics(energy, inner, cross, sums, pairs, uses)


def run_all(tasks: Sequence[Callable[[], Any]], device: torch.device) -> list[Any]:
    """The results of all tasks: on the CPU in threads of ours, because torch's would go on spinning beside the next."""
    return in_parallel(tasks) if device.type == "cpu" else [task() for task in tasks]


def _own_rows(codec: Parameters) -> list[slice]:
    """The rows of the codebook that each level chooses from."""
    return [slice(group * codec.codewords, (group + 1) * codec.codewords) for group in codec.groups]


def _pair(b_i: Tensor, b_j: Tensor, gram: Tensor) -> tuple[Tensor | None, Tensor]:
    """(how often two codewords meet [K, K], if K is small; the sum of their inner products) for codes b_i, b_j [N]."""
    K = len(gram)
    if K > _COUNTED:
        return None, gram[b_i, b_j].sum()
    counts = count_pairs(b_i, b_j, K).to(gram)
    return counts, (counts * gram).sum()


def count_pairs(b_i: Tensor, b_j: Tensor, K: int) -> Tensor:
    """[K, K]: how often codeword b_i [N] of one level meets b_j [N] of another."""
    return torch.bincount(b_i * K + b_j, minlength=K * K).view(K, K)


def _sums(x: Tensor, column: Tensor, K: int) -> Tensor:
    """[K, D]: sums of the rows of x [N, D] by codeword, column [N]; in a fixed order."""
    if x.device.type == "cpu":
        ends = torch.bincount(column, minlength=K).cumsum(0)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        return torch.nn.functional.embedding_bag(column.argsort(stable=True), x, starts, mode="sum")
    sums = x.new_zeros(K, x.shape[1])
    return sums.index_put_((column,), x, accumulate=True)  # sorts first; index_add_ would not be deterministic on a GPU


def penalty_of(statistics: Statistics, codec: Parameters, omega: Tensor) -> Tensor:
    """[T]: factors of the squared norms of the codewords that `codebook_of` adds to the cost; 0 for unused ones.

    Ridge regression with the usual factor, noise / signal, less for more than 4 levels: the noise is the mean error of
    the full length, with the weights of the lengths in which a level takes part; the signal is the mean squared norm of
    the codewords of its group. The factor is at most half of what the vectors of a codeword weigh, so that small
    codewords do not vanish.
    """
    M, K, groups = len(omega), codec.codewords, range(codec.groups[-1] + 1)
    N, levels, remaining = statistics.uses.sum() / M, torch.tensor(codec.groups, device=omega.device), _remaining(omega)
    noise = min(1, _PENALISED / M) * remaining * statistics.errors(codec.scale)[-1].clamp_min(0) / N
    weight = N / K * codec.scale.square() * remaining
    signal = codec.codebook.square().sum(dim=1).view(-1, K).mean(dim=1)
    ratio = torch.stack([noise[levels == group].mean() for group in groups]) / signal
    most = torch.stack([weight[levels == group].sum() for group in groups]) / 2
    return torch.where(signal > 0, ratio.minimum(most), 0).repeat_interleave(K) * (statistics.uses > 0)


def codebook_of(
    statistics: Statistics, data: Calls, codec: Parameters, omega: Tensor, penalty: Tensor | None = None
) -> Tensor:
    """The codebook [T, D] that minimises sum_m omega[m] ||x - xhat_m||^2 for given codes; keeps unused rows.

    penalty [T]: sum_t penalty[t] ||C[t]||^2 is added to that sum.

    Normal equations H C = R with H = sum_m omega_m A_m^T A_m, A_m[n] = sum_{i<=m} scale_i onehot(b_i): a pair of levels
    (i, j) appears in every prefix from max(i, j) on, so counting pairs of codewords gives H. Large systems are solved
    approximately, by a few steps of conjugate gradients from the present codebook.
    """
    codebook, scale, _ = codec.tensors()
    penalty = codebook.new_zeros(len(codebook)) if penalty is None else penalty
    remaining = _remaining(omega)
    R = torch.zeros_like(codebook)
    for m, own in enumerate(_own_rows(codec)):
        R[own] += scale[m] * remaining[m] * statistics.sums[m]
    if len(codebook) <= _DENSE:
        H = _normal_matrix(statistics, data, codec, remaining)
        H.diagonal().add_(penalty)
        diagonal, times = H.diagonal(), functools.partial(_product, H)
    else:
        diagonal = statistics.uses * (scale.square() * remaining).mean() + penalty
        times = functools.partial(_penalised, functools.partial(data.total, "times", codec, remaining), penalty)
    ridge = _RIDGE * diagonal.mean()
    if len(codebook) <= _DIRECT:
        regular = H + ridge * torch.eye(len(H), dtype=H.dtype, device=H.device)
        return run_all([lambda: codebook + torch.linalg.solve(regular, R - H @ codebook)], codebook.device)[0]
    parts = zip(codebook.split(_COLUMNS, dim=1), R.split(_COLUMNS, dim=1), strict=True)
    tasks = [functools.partial(_by_gradients, times, diagonal, ridge, *part) for part in parts]
    return torch.cat(run_all(tasks, codebook.device), dim=1)


def _product(H: Tensor, P: Tensor) -> Tensor:
    return product(H, P) if H.device.type == "cpu" else H @ P


def _penalised(times: _Times, penalty: Tensor, P: Tensor) -> Tensor:
    return times(P) + penalty[:, None] * P


def _normal_matrix(statistics: Statistics, data: Calls, codec: Parameters, remaining: Tensor) -> Tensor:
    """H [T, T], its rows in parallel."""
    K, M, scale, own = codec.codewords, len(codec.scale), codec.scale, _own_rows(codec)
    weight = scale[:, None] * scale * remaining[_later(M, scale.device)]  # [M, M]
    H = scale.new_zeros(len(codec.codebook), len(codec.codebook))

    def counts_of(i: int, j: int) -> Tensor:
        known = statistics.pairs.get((max(i, j), min(i, j)))
        if known is None:
            known = data.total("count_pairs", max(i, j), min(i, j), K)
        return known if i >= j else known.T

    def fill(group: int) -> None:
        for i in (m for m in range(M) if codec.groups[m] == group):
            for j in range(M):
                H[own[i], own[j]] += weight[i, j] * counts_of(i, j)

    run_all([functools.partial(fill, group) for group in range(codec.groups[-1] + 1)], H.device)
    return H


def times_by_codes(codes: Tensor, codec: Parameters, remaining: Tensor, P: Tensor) -> Tensor:
    """H P [T, d] without H: what codes [N, M] make of P [T, d], added up by codeword."""
    chosen, scale, M = codec.rows(codes), codec.scale, len(codec.scale)
    total = torch.zeros_like(P)
    for rows in tiles(len(codes), M * P.shape[1]):
        words = P[chosen[rows]] * scale[:, None]  # [n, M, d]
        later = (words * remaining[:, None]).flip(1).cumsum(1).flip(1)  # sum over j >= i
        pulls = remaining[:, None] * (words.cumsum(1) - words) + later
        total.index_add_(0, chosen[rows].flatten(), (pulls * scale[:, None]).flatten(0, 1))
    return total


def _by_gradients(times: _Times, diagonal: Tensor, ridge: Tensor, start: Tensor, R: Tensor) -> Tensor:
    """The solution [T, d] of (H + ridge) X = R + ridge start after some steps of conjugate gradients from `start`."""
    inverse = 1 / (diagonal + ridge)[:, None]
    X, r = start, R - times(start)
    z = p = inverse * r
    rz = (r * z).sum(dim=0)
    for _ in range(_STEPS):
        q = times(p) + ridge * p
        step = rz / (p * q).sum(dim=0).clamp_min(1e-30)
        X, r = X + step * p, r - step * q
        z, before = inverse * r, rz
        rz = (r * z).sum(dim=0)
        p = z + rz / before.clamp_min(1e-30) * p
    return X


def scale_of(statistics: Statistics, omega: Tensor, codec: Parameters, free: bool) -> Tensor:
    """The best scale [M] for given codes: w**power with w on a grid, or free factors, 1 at the first level of a group.

    The scale is kept if level 0 leaves almost no error to fit it to, as with fewer vectors than codewords. Computed in
    float64, so that levels with tiny weights are fitted as well.
    """
    M, scale, powers = len(omega), codec.scale, powers_of(codec.groups)
    if not any(powers) or statistics.errors(scale)[0] <= 1e-4 * statistics.energy:
        return scale
    wide, omega, power = statistics.double(), omega.double(), torch.tensor(powers, device=omega.device)
    if not free:
        grid = torch.arange(1, 601, dtype=omega.dtype, device=omega.device) / 400
        scales = grid[:, None] ** power  # [grid, M]
        return scales[(wide.errors(scales) @ omega).argmin()].to(scale)
    remaining, first = _remaining(omega), power == 0
    A, b = remaining[_later(M, omega.device)] * wide.inner, remaining * wide.cross
    own, found = A[~first][:, ~first], torch.ones_like(omega)
    ridge = (1e-6 * own.diagonal()).diag()
    found[~first] = torch.linalg.solve(own + ridge, b[~first] - A[~first][:, first].sum(dim=1))
    return found.to(scale)


def _later(M: int, device: torch.device) -> Tensor:
    """[M, M]: max(i, j)."""
    levels = torch.arange(M, device=device)
    return torch.maximum(levels[:, None], levels)


def _remaining(omega: Tensor) -> Tensor:
    """[M]: the sum of omega from level m on."""
    return omega.flip(0).cumsum(0).flip(0)
