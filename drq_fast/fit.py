"""Fits a codec without labels: k-means++, then rounds of encoding and closed-form refits (docs/math.md, section 4)."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from . import functional
from .backends.native.threads import in_parallel
from .backends.torch import FLOOR
from .backends.types import Parameters
from .blocks import Blocks, Calls
from .constants import ROUNDS as ROUNDS
from .sampling import sample as sample
from .sampling import sample_rows as sample_rows
from .sampling import seeded as seeded
from .sampling import shuffled

_FEW = 4  # vectors per codeword below which a fit says little about other vectors
_TILE = 1 << 20  # floats of a [rows, K] or [rows, D] tile that stays in cache
_SOLVABLE = 4096  # codewords up to which the K x K system is formed and solved
_SEEDED = 4096  # codewords up to which k-means++ chooses them one by one
NOISE = 0.2  # standard deviation of the noise after the first round, relative to that of x
_STRIDE = 1.7  # over-relaxation: step 1.7 times the refit, because the next codes adapt
_EARLY = 0.6  # share of the rounds that use half of the vectors, where there are many
_COUNTED = 512  # codewords up to which the counts of pairs [K, K] are kept
BLOCK = 1 << 16  # vectors whose sums are added up before those of others; even


class Fitted(NamedTuple):
    """codebook [K, D], scale [M], offset [D] or None.

    errors [M]: squared error of the fitted data after each level, relative to that of the offset (or zero) alone.
    """

    codebook: Tensor
    scale: Tensor
    offset: Tensor | None
    errors: tuple[float, ...]


class _Statistics(NamedTuple):
    """The sums over all vectors x, given codes [N, M], that the refit needs."""

    energy: Tensor  # sum of ||x||^2
    inner: Tensor  # [M, M]  of <C[b_i], C[b_j]>
    cross: Tensor  # [M]     of <x, C[b_i]>
    sums: Tensor | None  # [M, K, D] of x by codeword; None where the codebook is not refitted
    pairs: dict[tuple[int, int], Tensor]  # level i >= j -> [K, K], how often two codewords meet; where K is small
    used: Tensor  # [K] bool: the codewords that occur

    def __add__(self, other: _Statistics) -> _Statistics:  # type: ignore[override]  # a tuple would append
        """The sums over the vectors of both."""
        sums = None if self.sums is None or other.sums is None else self.sums + other.sums
        pairs = {levels: counts + other.pairs[levels] for levels, counts in self.pairs.items()}
        energy, inner, cross = self.energy + other.energy, self.inner + other.inner, self.cross + other.cross
        return _Statistics(energy, inner, cross, sums, pairs, self.used | other.used)

    def errors(self, scale: Tensor) -> Tensor:
        """sum ||x - xhat_m||^2 [..., M] with scale [..., M]."""
        products = scale[..., :, None] * scale[..., None, :] * self.inner
        quadratic = products.cumsum(-1).cumsum(-2).diagonal(dim1=-2, dim2=-1)
        return self.energy - 2 * (scale * self.cross).cumsum(-1) + quadratic

    def double(self) -> _Statistics:
        """The same in float64, without sums."""
        return _Statistics(self.energy.double(), self.inner.double(), self.cross.double(), None, {}, self.used)


class Block:
    """Some vectors x [n, D] of a fit, and their codes in the round at hand; number: of the block, counted from 0.

    Every block but the last has `rows` vectors. A fit reads all vectors by the methods of their blocks, so that blocks
    may be in other processes. In part 0 of the vectors are all of them; in part 1 those with even numbers, in part 2
    those with odd ones.
    """

    def __init__(self, x: Tensor, number: int = 0, rows: int = BLOCK) -> None:
        self.x, self.number, self.rows = x, number, rows

    def moments(self) -> tuple[int, Tensor, Tensor]:
        """(n, mean [D], variance [D])."""
        return len(self.x), self.x.mean(dim=0), self.x.var(dim=0, correction=0)

    def centre(self, mean: Tensor) -> None:
        """Subtracts mean [D]."""
        self.x = self.x - mean

    def divide(self, many: bool) -> None:
        """Makes the parts: the first alone, unless there are many vectors."""
        halves = (self.x[0::2].contiguous(), self.x[1::2].contiguous()) if many else ()
        self.parts = [(part, part.square().sum()) for part in (self.x, *halves)]

    def statistics(
        self, part: int, codebook: Tensor, scale: Tensor, width: int, level_weights: tuple[float, ...]
    ) -> _Statistics:
        """Encodes a part with a beam of this width."""
        self.part, energy = self.parts[part]
        self.codes = functional.encode_checked(self.part, Parameters(codebook, scale, None), width, level_weights)
        return _collect(self.part, self.codes, codebook, energy)

    def count_pairs(self, i: int, j: int, K: int) -> Tensor:
        """How often codewords of levels i and j meet [K, K] in the codes of the part."""
        return _count_pairs(self.codes[:, i].long(), self.codes[:, j].long(), K)

    def errors(self, codebook: Tensor, scale: Tensor) -> Tensor:
        """The squared errors [n] of the part, decoded from its codes."""
        return _errors(self.part, self.codes, codebook, scale)

    def pick(self, rows: Tensor, part: int) -> tuple[Tensor, Tensor]:
        """(where they are in `rows`, the vectors) for those rows of a part, numbered over all blocks, that are here."""
        size = self.rows if part == 0 else self.rows // 2
        here = (rows // size == self.number).nonzero().squeeze(1)
        x = self.x if part == 0 else self.parts[part][0]
        return here, x[(rows[here] - size * self.number).to(x.device)]


def fit(
    x: Tensor,
    codewords: int,
    levels: int,
    *,
    offset: bool = True,
    omega: Tensor | None = None,
    free_scale: bool = False,
    rounds: int = ROUNDS,
    beam: int = 16,
    noise: float = NOISE,
    seed: int | None = None,
    interruptible: bool = True,
) -> Fitted:
    """Minimises sum_m omega[m] ||x - xhat_m||^2 for x [N, D] float32, N >= 1; returns the best codec of all rounds.

    omega [M]: equal weights if None. free_scale: one factor per level, else w**m. Each round encodes x (greedily, or in
    the last tenth with a beam), solves for scale and codebook, and adds noise that decreases to 0. With many rows, the
    first rounds use the even and the odd ones in turn. Deterministic given `seed`; without one a seed is drawn from
    torch's global generator. interruptible: on Ctrl-C it returns the best codec so far, if a round is complete.
    """
    data = Blocks([Block(part, number, BLOCK) for number, part in enumerate(x.split(BLOCK))])
    return fit_blocks(data, codewords, levels, offset, omega, free_scale, rounds, beam, noise, seed, interruptible)


def fit_blocks(
    data: Calls,
    codewords: int,
    levels: int,
    offset: bool = True,
    omega: Tensor | None = None,
    free_scale: bool = False,
    rounds: int = ROUNDS,
    beam: int = 16,
    noise: float = NOISE,
    seed: int | None = None,
    interruptible: bool = True,
) -> Fitted:
    """`fit` to the vectors of all blocks, each a Block. The same blocks give the same bits, wherever they are."""
    generator = seeded(seed)
    mean = _moments(data)[1] if offset else None
    if mean is not None:
        data.each("centre", mean)
    N, _, variance = _moments(data)
    weights = _counted(variance.new_ones(levels) if omega is None else omega.to(variance))
    spread = noise * variance.sqrt()
    if not codewords < N or codewords > _SOLVABLE:  # an exact fit exists, or no refit follows
        spread = torch.zeros_like(spread)
    level_weights = tuple(weights.tolist())
    codebook = _seeds(_pick(data, _start_rows(N, codewords, generator)), codewords, generator)
    scale = variance.new_tensor([0.7**m for m in range(levels)])
    best, best_cost = Fitted(codebook, scale, mean, (1.0,) * levels), float("inf")
    step, bar = 0, tqdm(range(rounds + 1), desc="fit", unit="round", delay=2, disable=None, leave=False)
    many = rounds >= 40 and 128 * codewords <= N
    late = math.ceil(_EARLY * rounds) if many else 0  # the first round with all vectors
    data.each("divide", many)
    try:
        for step in bar:
            part = 1 + step % 2 if step < late else 0
            count = N if part == 0 else (N + 2 - part) // 2
            statistics = data.total("statistics", part, codebook, scale, _width(step, rounds, beam), level_weights)
            errors = statistics.errors(scale)
            cost = float(errors @ weights) / count
            if cost < best_cost or step == late:  # costs of halves and of all vectors are not compared
                relative = tuple((errors.clamp_min(0) / statistics.energy.clamp_min(1e-30)).tolist())
                best, best_cost = Fitted(codebook, scale, mean, relative), cost
                bar.set_postfix(error=f"{best.errors[-1]:.4f}")
            if step < rounds:
                scale = _best_scale(statistics, weights, scale, free_scale)
                refit = functools.partial(_refit, statistics, data, codebook, scale, weights)
                refitted = _run_all([refit], scale.device)[0]
                codebook = refitted if step == 0 else codebook + _STRIDE * (refitted - codebook)
                codebook = _revived(data, part, statistics.used, codebook, scale, generator)
                shake = torch.randn(codebook.shape, dtype=torch.float32, device="cpu", generator=generator).to(scale)
                codebook = codebook + (1 - (step + 1) / rounds) * spread * shake
    except KeyboardInterrupt:
        if not interruptible or step == 0:
            raise
        said = f"fit: interrupted after {step} of {rounds} rounds; the best codec so far is kept."
        bar.write(said, file=sys.stderr)
    return best


def _moments(data: Calls) -> tuple[int, Tensor, Tensor]:
    """(N, mean [D], variance [D]) of all vectors."""
    blocks = data.each("moments")
    N = sum(n for n, _, _ in blocks)
    mean = functools.reduce(torch.add, [n / N * own for n, own, _ in blocks])
    parts = [n / N * (variance + (own - mean).square()) for n, own, variance in blocks]
    return N, mean, functools.reduce(torch.add, parts)


def _pick(data: Calls, rows: Tensor, part: int = 0) -> Tensor:
    """The rows [n] of a part, numbered over all blocks, as vectors [n, D]."""
    found = data.each("pick", rows, part)
    x = found[0][1].new_empty(len(rows), found[0][1].shape[1])
    for places, vectors in found:
        x[places.to(x.device)] = vectors
    return x


def _revived(
    data: Calls, part: int, used: Tensor, codebook: Tensor, scale: Tensor, generator: torch.Generator
) -> Tensor:
    """The codebook with badly approximated vectors of a part in place of unused codewords."""
    dead = (~used).nonzero().squeeze(1)
    if len(dead) == 0:
        return codebook
    errors = torch.cat(_run_all([functools.partial(data.each, "errors", codebook, scale)], scale.device)[0])
    codebook = codebook.clone()
    codebook[dead] = _pick(data, _bad_rows(errors, len(dead), generator), part)
    return codebook


def _width(step: int, rounds: int, beam: int) -> int:
    """The width of the beam in a round: greedy at first, then narrow, and full in the last twentieth."""
    return 1 if step < 0.9 * rounds else min(beam, 4) if step < 0.95 * rounds else beam


def sample_size(codewords: int) -> int:
    """How many vectors are drawn where the user does not say."""
    return max(1 << 16, 256 * codewords)


def warn_of_few(op: str, N: int, codewords: int, advice: str = "use") -> None:
    """Warns if N vectors are few to learn so many codewords from: the errors of others will be larger than theirs."""
    if _FEW * codewords > N:
        text = f"{op}: {N} vectors are few for {codewords} codewords; {advice} at least {_FEW * codewords}."
        warnings.warn(text, stacklevel=3)


def tiles(N: int, width: int) -> Iterator[slice]:
    """Slices of 0..N, each small enough that [rows, width] floats stay in cache."""
    rows = max(64, _TILE // max(width, 1))
    for first in range(0, N, rows):
        yield slice(first, min(first + rows, N))


def plus_plus(x: Tensor, codewords: int, generator: torch.Generator) -> Tensor:
    """k-means++: K rows of x [N, D], drawn with probability proportional to the squared distance to those before.

    Each step makes a few draws and keeps the one that leaves the smallest sum of distances. Draws come from a random
    subset of x; above _SEEDED codewords they are uniform. If x has fewer than K distinct vectors, the other codewords
    are zero, so that later levels can keep a vector that level 0 reproduces exactly.
    """
    return _seeds(x[_start_rows(len(x), codewords, generator).to(x.device)], codewords, generator)


def _start_rows(N: int, codewords: int, generator: torch.Generator) -> Tensor:
    """The random subset of N rows that k-means++ draws from."""
    if codewords > N:
        return torch.arange(N, device="cpu")
    return shuffled(N, generator)[: max(4 * codewords, 1 << 14)]


def _seeds(x: Tensor, codewords: int, generator: torch.Generator) -> Tensor:
    """What k-means++ draws from the subset x [n, D]."""
    zeros = x.new_zeros(codewords, x.shape[1])
    if len(x) < codewords:
        return torch.cat([x, zeros[len(x) :]])
    if codewords > _SEEDED:
        return x[:codewords].clone()
    norms, draws = x.square().sum(dim=1), 2 + int(math.log(codewords))
    nearest = torch.full((len(x),), float("inf"), dtype=x.dtype, device=x.device)
    chosen: list[int] = []
    rows = torch.randint(len(x), (1,), device="cpu", generator=generator)
    for _ in tqdm(range(codewords), desc="k-means++", delay=2, disable=None, leave=False):
        there = rows.to(x.device)
        products = (x @ x[there].T).T.contiguous()  # [draws, N]
        closer = torch.minimum(nearest, (norms - 2 * products + norms[there, None]).clamp_min_(0))
        best = int(closer.sum(dim=1).argmin())
        chosen.append(int(rows[best]))
        nearest = closer[best]
        if float(nearest.sum()) <= 1e-6 * float(norms.sum()):
            break
        rows = _draw(nearest, draws, generator)
    return torch.cat([x[chosen], zeros[len(chosen) :]])


def revive(
    x: Tensor,
    codes: Tensor,
    codebook: Tensor,
    scale: Tensor,
    generator: torch.Generator,
    unused: Tensor | None = None,
) -> Tensor:
    """Replaces unused codewords by badly approximated rows of x [N, D]; returns the new codebook.

    unused [K] bool: None are those that do not occur in the codes [N, M] of x.
    """
    if unused is None:
        unused = torch.ones(len(codebook), dtype=torch.bool, device=codebook.device)
        unused[codes.long().flatten()] = False
    dead = unused.nonzero().squeeze(1)
    if len(dead) == 0:
        return codebook
    rows = _bad_rows(_errors(x, codes, codebook, scale), len(dead), generator)
    codebook = codebook.clone()
    codebook[dead] = x[rows.to(x.device)]
    return codebook


def _errors(x: Tensor, codes: Tensor, codebook: Tensor, scale: Tensor) -> Tensor:
    """The squared errors [N] of x [N, D], decoded from codes [N, M]."""
    codec = Parameters(codebook, scale, None)
    return torch.cat(
        [(x[r] - functional.decode_checked(codes[r], codec)).square().sum(dim=1) for r in tiles(len(x), x.shape[1])]
    )


def _bad_rows(errors: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` rows drawn with probability proportional to their errors [N], each again only after all others."""
    # The largest values of log(u) / error are a sample without replacement with probability proportional to the error.
    draws = (
        torch.rand(len(errors), dtype=torch.float64, device="cpu", generator=generator).log() / errors.double().cpu()
    )
    return draws.argsort(descending=True, stable=True)[torch.arange(count, device="cpu") % len(errors)]


def _collect(x: Tensor, codes: Tensor, codebook: Tensor, energy: Tensor) -> _Statistics:
    (N, M), (K, D) = codes.shape, codebook.shape
    columns = [codes[:, m].long() for m in range(M)]
    used = torch.zeros(K, dtype=torch.bool, device=codebook.device)
    used[codes.long().flatten()] = True
    if K <= _SOLVABLE:
        gram, levels = codebook @ codebook.T, [(i, j) for i in range(M) for j in range(i + 1)]
        by_level = [functools.partial(_sums, x, column, K) for column in columns]
        by_pair = [functools.partial(_pair, columns[i], columns[j], gram) for i, j in levels]
        done: list[Any] = _run_all([*by_level, *by_pair], x.device)
        sums, inner = torch.stack(done[:M]), x.new_zeros(M, M)
        for (i, j), (_, product) in zip(levels, done[M:], strict=True):
            inner[i, j] = inner[j, i] = product
        pairs = {pair: counts for pair, (counts, _) in zip(levels, done[M:], strict=True) if counts is not None}
        return _Statistics(energy, inner, (sums * codebook).sum(dim=(1, 2)), sums, pairs, used)
    inner, cross = x.new_zeros(M, M), x.new_zeros(M)
    for rows in tiles(N, M * D):
        words = torch.stack([codebook[column[rows]].flatten() for column in columns])
        inner += words @ words.T
        cross += words @ x[rows].flatten()
    return _Statistics(energy, inner, cross, None, {}, used)


def _run_all(tasks: list[Callable[[], Any]], device: torch.device) -> list[Any]:
    """The results of all tasks: on the CPU in threads of ours, because torch's would go on spinning beside the next."""
    return in_parallel(tasks) if device.type == "cpu" else [task() for task in tasks]


def _pair(b_i: Tensor, b_j: Tensor, gram: Tensor) -> tuple[Tensor | None, Tensor]:
    """(how often two codewords meet [K, K], if K is small; the sum of their inner products) for codes b_i, b_j [N]."""
    K = len(gram)
    if K > _COUNTED:
        return None, gram[b_i, b_j].sum()
    counts = _count_pairs(b_i, b_j, K).to(gram)
    return counts, (counts * gram).sum()


def _count_pairs(b_i: Tensor, b_j: Tensor, K: int) -> Tensor:
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


def _refit(statistics: _Statistics, data: Calls, codebook: Tensor, scale: Tensor, omega: Tensor) -> Tensor:
    """The codebook [K, D] that minimises sum_m omega[m] ||x - xhat_m||^2 for given codes; keeps unused rows.

    Normal equations H C = R with H = sum_m omega_m A_m^T A_m, A_m[n] = sum_{i<=m} scale_i onehot(b_i): a pair of levels
    (i, j) appears in every prefix from max(i, j) on, so counting pairs of codewords gives H.
    """
    K, M = len(codebook), len(scale)
    if statistics.sums is None:
        return codebook
    remaining = _remaining(omega)
    later = _later(M, codebook.device)
    weight = scale[:, None] * scale * remaining[later]  # [M, M]
    H = codebook.new_zeros(K, K)
    for i in range(M):
        for j in range(i + 1):
            counts = statistics.pairs.get((i, j))
            if counts is None:
                counts = data.total("count_pairs", i, j, K)
            pairs = weight[i, j] * counts
            H += pairs if i == j else pairs + pairs.T
    R = ((scale * remaining)[:, None, None] * statistics.sums).sum(dim=0)
    ridge = 1e-4 * H.diagonal().mean() * torch.eye(K, dtype=H.dtype, device=H.device)
    return codebook + torch.linalg.solve(H + ridge, R - H @ codebook)


def _best_scale(statistics: _Statistics, omega: Tensor, scale: Tensor, free: bool) -> Tensor:
    """The best scale [M] for given codes: w**m with w on a grid, or free factors with scale[0] = 1.

    The scale is kept if level 0 leaves almost no error to fit it to, as with fewer vectors than codewords. Computed in
    float64, so that levels with tiny weights are fitted as well.
    """
    M = len(omega)
    if M == 1 or statistics.errors(scale)[0] <= 1e-4 * statistics.energy:
        return scale
    wide, omega = statistics.double(), omega.double()
    if not free:
        grid = torch.arange(1, 601, dtype=omega.dtype, device=omega.device) / 400
        scales = grid[:, None] ** torch.arange(M, device=omega.device)  # [grid, M]
        return scales[(wide.errors(scales) @ omega).argmin()].to(scale)
    remaining = _remaining(omega)
    later = _later(M, omega.device)
    A, b = remaining[later] * wide.inner, remaining * wide.cross
    ridge = (1e-6 * A.diagonal()[1:]).diag()
    return torch.cat([torch.ones_like(omega[:1]), torch.linalg.solve(A[1:, 1:] + ridge, b[1:] - A[1:, 0])]).to(scale)


def _counted(omega: Tensor) -> Tensor:
    """omega [M] with the last weight at least FLOOR of the sum; otherwise trailing levels of weight 0 would tie."""
    last = torch.maximum(omega[-1:], FLOOR * omega.sum())
    return torch.cat([omega[:-1], last])


def _later(M: int, device: torch.device) -> Tensor:
    """[M, M]: max(i, j)."""
    levels = torch.arange(M, device=device)
    return torch.maximum(levels[:, None], levels)


def _remaining(omega: Tensor) -> Tensor:
    """[M]: the sum of omega from level m on."""
    return omega.flip(0).cumsum(0).flip(0)


def _draw(weights: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """[draws] indices with probability proportional to their weights, of which at least one is above 0."""
    cumulative = weights.double().cumsum(0).cpu()
    targets = torch.rand(draws, dtype=torch.float64, device="cpu", generator=generator) * cumulative[-1]
    return torch.searchsorted(cumulative, targets, right=True).clamp_max(len(weights) - 1)
