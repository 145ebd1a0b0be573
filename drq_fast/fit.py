"""Fits a codec without labels: k-means++, then rounds of encoding and closed-form refits (docs/math.md, section 4)."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from . import checks, functional, refit
from .backends.torch import FLOOR
from .backends.types import Parameters, powers_of
from .blocks import Blocks, Calls
from .constants import ROUNDS, ROUNDS_APART, ROUNDS_LARGE
from .sampling import sample as sample
from .sampling import sample_rows as sample_rows
from .sampling import seeded as seeded
from .sampling import shuffled

_FEW = 4  # vectors per codeword below which a fit says little about other vectors
_SEEDED = 4096  # codewords up to which k-means++ chooses them one by one
NOISE = 0.2  # standard deviation of the noise after the first round, relative to that of x
_STRIDE = 1.7  # over-relaxation: step 1.7 times the refit, because the next codes adapt
_EARLY = 0.6  # share of the rounds that use half of the vectors, where there are many
BLOCK = 1 << 16  # vectors whose sums are added up before those of others; even


class Fitted(NamedTuple):
    """codebook [G * K, D], scale [M], offset [D] or None.

    errors [M]: squared error of the fitted data after each level, relative to that of the offset (or zero) alone.
    """

    codebook: Tensor
    scale: Tensor
    offset: Tensor | None
    errors: tuple[float, ...]


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
        self, part: int, codec: Parameters, width: int, level_weights: tuple[float, ...]
    ) -> refit.Statistics:
        """Encodes a part with a beam of this width."""
        self.part, energy = self.parts[part]
        self.codes = functional.encode_checked(self.part, codec, width, level_weights)
        return refit.collect(self.part, self.codes, codec, energy)

    def count_pairs(self, i: int, j: int, K: int) -> Tensor:
        """How often codewords of levels i and j meet [K, K] in the codes of the part."""
        return refit.count_pairs(self.codes[:, i].long(), self.codes[:, j].long(), K)

    def times(self, codec: Parameters, remaining: Tensor, P: Tensor) -> Tensor:
        """The share of the part in the product of the normal equations' matrix and P [T, d]."""
        return refit.times_by_codes(self.codes, codec, remaining, P)

    def errors(self, codec: Parameters) -> Tensor:
        """The squared errors [n] of the part, decoded from its codes."""
        return _errors(self.part, self.codes, codec)

    def pick(self, rows: Tensor, part: int, before: Parameters | None = None) -> tuple[Tensor, Tensor]:
        """(where they are in `rows`, the vectors) for those rows of a part, numbered over all blocks, that are here.

        before: the vectors are given less what these first levels of their codes stand for.
        """
        size = self.rows if part == 0 else self.rows // 2
        here = (rows // size == self.number).nonzero().squeeze(1)
        x = self.x if part == 0 else self.parts[part][0]
        own = (rows[here] - size * self.number).to(x.device)
        if before is None:
            return here, x[own]
        return here, x[own] - functional.decode_checked(self.codes[own, : len(before.scale)], before)


def fit(
    x: Tensor | Calls,
    codewords: int,
    levels: int,
    *,
    codebooks: int | Sequence[int] = 1,
    offset: bool = True,
    omega: Tensor | None = None,
    free_scale: bool = False,
    rounds: int | None = None,
    beam: int = 16,
    noise: float = NOISE,
    seed: int | None = None,
    interruptible: bool = True,
) -> Fitted:
    """Minimises sum_m omega[m] ||x - xhat_m||^2 for x [N, D] float32, N >= 1; returns the best codec of all rounds.

    x: a tensor, or blocks of rows wherever they are, each a Block; the same blocks give the same bits. omega [M]: equal
    weights if None. free_scale: one factor per level, else w**m. Each round encodes x (greedily, or in the last tenth
    with a beam), solves for scale and codebook, and adds noise that decreases to 0. With many rows, the first rounds
    use the even and the odd ones in turn. Deterministic given `seed`; without one a seed is drawn from torch's global
    generator. interruptible: on Ctrl-C it returns the best codec so far, if a round is complete.
    """
    data = Blocks([Block(part, n, BLOCK) for n, part in enumerate(x.split(BLOCK))]) if isinstance(x, Tensor) else x
    generator = seeded(seed)
    mean = _moments(data)[1] if offset else None
    if mean is not None:
        data.each("centre", mean)
    N, _, variance = _moments(data)
    weights = _counted(variance.new_ones(levels) if omega is None else omega.to(variance))
    spread = noise * variance.sqrt()
    if not codewords < N:  # an exact fit exists
        spread = torch.zeros_like(spread)
    level_weights, groups = tuple(weights.tolist()), checks.groups("fit", codebooks, levels)
    rounds = default_rounds(codewords, groups[-1] + 1) if rounds is None else rounds
    scale = variance.new_tensor([0.7**power for power in powers_of(groups)])
    codebook = _start(data, N, codewords, groups, scale, generator)
    best, best_cost = Fitted(codebook, scale, mean, (1.0,) * levels), float("inf")
    step, bar = 0, tqdm(range(rounds + 1), desc="fit", unit="round", delay=2, disable=None, leave=False)
    many = rounds >= 40 and 128 * codewords <= N
    late = math.ceil(_EARLY * rounds) if many else 0  # the first round with all vectors
    data.each("divide", many)
    try:
        for step in bar:
            part = 1 + step % 2 if step < late else 0
            count = N if part == 0 else (N + 2 - part) // 2
            codec = Parameters(codebook, scale, None, groups)
            statistics = data.total("statistics", part, codec, _width(step, rounds, beam), level_weights)
            errors = statistics.errors(scale)
            cost = float(errors @ weights) / count
            if cost < best_cost or step == late:  # costs of halves and of all vectors are not compared
                relative = tuple((errors.clamp_min(0) / statistics.energy.clamp_min(1e-30)).tolist())
                best, best_cost = Fitted(codebook, scale, mean, relative), cost
                bar.set_postfix(error=f"{best.errors[-1]:.4f}")
            if step < rounds:
                codec = Parameters(codebook, refit.scale_of(statistics, weights, codec, free_scale), None, groups)
                penalty = refit.penalty_of(statistics, codec, weights)
                refitted, scale = refit.codebook_of(statistics, data, codec, weights, penalty), codec.scale
                codebook = refitted if step == 0 else codebook + _STRIDE * (refitted - codebook)
                codec = Parameters(codebook, scale, None, groups)
                codebook = _revived(data, part, statistics.uses == 0, codec, generator)
                shake = torch.randn(codebook.shape, dtype=torch.float32, device="cpu", generator=generator).to(scale)
                sizes = _sizes(errors / statistics.energy.clamp_min(1e-30), codec)
                codebook = codebook + (1 - (step + 1) / rounds) * spread * sizes[:, None] * shake
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


def _start(
    data: Calls, N: int, codewords: int, groups: tuple[int, ...], scale: Tensor, generator: torch.Generator
) -> Tensor:
    """The first codebook [G * K, D]: k-means++ for each group, of what greedy levels before it leave of some rows."""
    parts: list[Tensor] = []
    for _ in range(groups[-1] + 1):
        x = _pick(data, _start_rows(N, codewords, generator))
        for earlier, words in enumerate(parts):
            before = Parameters(words, scale[groups.index(earlier) : groups.index(earlier + 1)], None)
            x = x - functional.decode_checked(functional.encode_checked(x, before, 1, None), before)
        parts.append(_seeds(x, codewords, generator))
    return torch.cat(parts)


def _pick(data: Calls, rows: Tensor, part: int = 0, before: Parameters | None = None) -> Tensor:
    """The rows [n] of a part, numbered over all blocks, as vectors [n, D]; before: see `Block.pick`."""
    found = data.each("pick", rows, part, before)
    x = found[0][1].new_empty(len(rows), found[0][1].shape[1])
    for places, vectors in found:
        x[places.to(x.device)] = vectors
    return x


def _revived(data: Calls, part: int, unused: Tensor, codec: Parameters, generator: torch.Generator) -> Tensor:
    """The codebook with what their levels quantize of badly approximated vectors of a part in place of unused rows."""
    dead = unused.nonzero().squeeze(1)
    if len(dead) == 0:
        return codec.codebook
    errors = torch.cat(refit.run_all([functools.partial(data.each, "errors", codec)], codec.device)[0])
    rows = _bad_rows(errors, len(dead), generator)
    return _replaced(codec, dead, lambda own, before: _pick(data, rows[own.cpu()], part, before))


def _replaced(codec: Parameters, dead: Tensor, vectors: Callable[[Tensor, Parameters | None], Tensor]) -> Tensor:
    """The codebook with other rows in place of the dead ones [n]: vectors(which of these [n] bool, levels before)."""
    codebook = codec.codebook.clone()
    for group in range(codec.groups[-1] + 1):
        own, first = dead // codec.codewords == group, codec.groups.index(group)
        if bool(own.any()):
            codebook[dead[own]] = vectors(own, codec.part(slice(0, first)) if first else None)
    return codebook


def _sizes(errors: Tensor, codec: Parameters) -> Tensor:
    """[G * K]: the size of what each row of the codebook quantizes, relative to x, given relative errors [M]."""
    before = torch.cat([errors.new_ones(1), errors.clamp(0, 1).sqrt()])
    firsts = [codec.groups.index(group) for group in range(codec.groups[-1] + 1)]
    return before[firsts].repeat_interleave(codec.codewords)


def _width(step: int, rounds: int, beam: int) -> int:
    """The width of the beam in a round: greedy at first, then narrow, and full in the last twentieth."""
    return 1 if step < 0.9 * rounds else min(beam, 4) if step < 0.95 * rounds else beam


def default_rounds(codewords: int, codebooks: int) -> int:
    """How many rounds a fit has where the user does not say."""
    if codewords > 8192:
        return ROUNDS_LARGE
    return ROUNDS if codebooks == 1 else ROUNDS_APART


def sample_size(codewords: int) -> int:
    """How many vectors are drawn where the user does not say."""
    return max(1 << 16, 256 * codewords)


def warn_of_few(op: str, N: int, codewords: int, advice: str = "use") -> None:
    """Warns if N vectors are few to learn so many codewords from: the errors of others will be larger than theirs."""
    if _FEW * codewords > N:
        vectors = "1 vector is" if N == 1 else f"{N} vectors are"
        text = f"{op}: {vectors} few for {codewords} codewords; {advice} at least {_FEW * codewords}."
        warnings.warn(text, stacklevel=3)


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
    x: Tensor, codes: Tensor, codec: Parameters, generator: torch.Generator, unused: Tensor | None = None
) -> Tensor:
    """Replaces unused codewords by what their levels quantize of badly approximated rows of x [N, D]; returns the new
    codebook [G * K, D].

    unused [G * K] bool: None are those that do not occur in the codes [N, M] of x.
    """
    if unused is None:
        unused = torch.ones(len(codec.codebook), dtype=torch.bool, device=codec.device)
        unused[codec.rows(codes).flatten()] = False
    dead = unused.nonzero().squeeze(1)
    if len(dead) == 0:
        return codec.codebook
    rows = _bad_rows(_errors(x, codes, codec), len(dead), generator).to(x.device)

    def vectors(own: Tensor, before: Parameters | None) -> Tensor:
        some = rows[own]
        if before is None:
            return x[some]
        return x[some] - functional.decode_checked(codes[some, : len(before.scale)], before)

    return _replaced(codec, dead, vectors)


def _errors(x: Tensor, codes: Tensor, codec: Parameters) -> Tensor:
    """The squared errors [N] of x [N, D], decoded from codes [N, M]."""
    parts = refit.tiles(len(x), x.shape[1])
    return torch.cat([(x[r] - functional.decode_checked(codes[r], codec)).square().sum(dim=1) for r in parts])


def _bad_rows(errors: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` rows drawn with probability proportional to their errors [N], each again only after all others."""
    # The largest values of log(u) / error are a sample without replacement with probability proportional to the error.
    draws = (
        torch.rand(len(errors), dtype=torch.float64, device="cpu", generator=generator).log() / errors.double().cpu()
    )
    return draws.argsort(descending=True, stable=True)[torch.arange(count, device="cpu") % len(errors)]


def _counted(omega: Tensor) -> Tensor:
    """omega [M] with the last weight at least FLOOR of the sum; otherwise trailing levels of weight 0 would tie."""
    last = torch.maximum(omega[-1:], FLOOR * omega.sum())
    return torch.cat([omega[:-1], last])


def _draw(weights: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """[draws] indices with probability proportional to their weights, of which at least one is above 0."""
    cumulative = weights.double().cumsum(0).cpu()
    targets = torch.rand(draws, dtype=torch.float64, device="cpu", generator=generator) * cumulative[-1]
    return torch.searchsorted(cumulative, targets, right=True).clamp_max(len(weights) - 1)
