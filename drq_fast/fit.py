"""Fits a codec without labels: k-means++, then rounds of encoding and closed-form refits (docs/math.md, section 4)."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from . import checks, functional, refit
from .backends.torch import FLOOR
from .backends.types import Parameters
from .constants import ROUNDS as ROUNDS
from .ema import powers_of

_FEW = 4  # vectors per codeword below which a fit says little about other vectors
_SEEDED = 4096  # codewords up to which k-means++ chooses them one by one
NOISE = 0.2  # standard deviation of the noise after the first round, relative to that of x
_STRIDE = 1.7  # over-relaxation: step 1.7 times the refit, because the next codes adapt
_EARLY = 0.6  # share of the rounds that use half of the vectors, where there are many


class Fitted(NamedTuple):
    """codebook [G * K, D], scale [M], offset [D] or None.

    errors [M]: squared error of the fitted data after each level, relative to that of the offset (or zero) alone.
    """

    codebook: Tensor
    scale: Tensor
    offset: Tensor | None
    errors: tuple[float, ...]


def fit(
    x: Tensor,
    codewords: int,
    levels: int,
    *,
    codebooks: int = 1,
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
    generator = seeded(seed)
    mean = x.mean(dim=0) if offset else None
    x = x if mean is None else x - mean
    weights = _counted(x.new_ones(levels) if omega is None else omega.to(x))
    spread = noise * x.var(dim=0, correction=0).sqrt()
    if not codewords < len(x):  # an exact fit exists
        spread = torch.zeros_like(spread)
    level_weights, groups = tuple(weights.tolist()), checks.groups("fit", codebooks, levels)
    scale = x.new_tensor([0.7**power for power in powers_of(groups)])
    codebook = _start(x, codewords, groups, scale, generator)
    best, best_cost = Fitted(codebook, scale, mean, (1.0,) * levels), float("inf")
    step, bar = 0, tqdm(range(rounds + 1), desc="fit", unit="round", delay=2, disable=None, leave=False)
    many = rounds >= 40 and len(x) >= 128 * codewords
    late = math.ceil(_EARLY * rounds) if many else 0  # the first round with all vectors
    whole, *halves = [
        (part, part.square().sum()) for part in (x, *((x[0::2].contiguous(), x[1::2].contiguous()) if many else ()))
    ]
    try:
        for step in bar:
            part, energy = halves[step % 2] if step < late else whole
            codec, width = Parameters(codebook, scale, None, groups), _width(step, rounds, beam)
            codes = functional.encode_checked(part, codec, width, level_weights)
            statistics = refit.collect(part, codes, codec, energy)
            errors = statistics.errors(scale)
            cost = float(errors @ weights) / len(part)
            if cost < best_cost or step == late:  # costs of halves and of all vectors are not compared
                relative = tuple((errors.clamp_min(0) / statistics.energy.clamp_min(1e-30)).tolist())
                best, best_cost = Fitted(codebook, scale, mean, relative), cost
                bar.set_postfix(error=f"{best.errors[-1]:.4f}")
            if step < rounds:
                codec = Parameters(codebook, refit.scale_of(statistics, weights, codec, free_scale), None, groups)
                refitted, scale = refit.codebook_of(statistics, codes, codec, weights), codec.scale
                codebook = refitted if step == 0 else codebook + _STRIDE * (refitted - codebook)
                codec = Parameters(codebook, scale, None, groups)
                codebook = refit.run_all([functools.partial(revive, part, codes, codec, generator)], x.device)[0]
                shake = torch.randn(codebook.shape, dtype=torch.float32, device="cpu", generator=generator).to(x)
                sizes = _sizes(errors / statistics.energy.clamp_min(1e-30), codec)
                codebook = codebook + (1 - (step + 1) / rounds) * spread * sizes[:, None] * shake
    except KeyboardInterrupt:
        if not interruptible or step == 0:
            raise
        said = f"fit: interrupted after {step} of {rounds} rounds; the best codec so far is kept."
        bar.write(said, file=sys.stderr)
    return best


def _sizes(errors: Tensor, codec: Parameters) -> Tensor:
    """[G * K]: the size of what each row of the codebook quantizes, relative to x, given relative errors [M]."""
    before = torch.cat([errors.new_ones(1), errors.clamp(0, 1).sqrt()])
    firsts = [codec.groups.index(group) for group in range(codec.groups[-1] + 1)]
    return before[firsts].repeat_interleave(codec.codewords)


def _width(step: int, rounds: int, beam: int) -> int:
    """The width of the beam in a round: greedy at first, then narrow, and full in the last twentieth."""
    return 1 if step < 0.9 * rounds else min(beam, 4) if step < 0.95 * rounds else beam


def seeded(seed: int | None) -> torch.Generator:
    """A generator with this seed, or with a seed drawn from torch's global generator."""
    return torch.Generator("cpu").manual_seed(int(torch.randint(2**62, (), device="cpu")) if seed is None else seed)


def sample_size(codewords: int) -> int:
    """How many vectors are drawn where the user does not say."""
    return max(1 << 16, 256 * codewords)


def warn_of_few(op: str, N: int, codewords: int, advice: str = "use") -> None:
    """Warns if N vectors are few to learn so many codewords from: the errors of others will be larger than theirs."""
    if _FEW * codewords > N:
        text = f"{op}: {N} vectors are few for {codewords} codewords; {advice} at least {_FEW * codewords}."
        warnings.warn(text, stacklevel=3)


def sample(x: Any, rows: int, D: int, generator: torch.Generator, op: str = "fit") -> Tensor:
    """Draws up to `rows` vectors [n, D] float32 from a tensor, an array or memory map, or an iterable of batches.

    An iterable is read once; at most twice the sample plus one batch is held in memory. The order of the data is kept.
    ValueError, with the number of the row in x, if a vector that was drawn is not finite.
    """
    if isinstance(x, Iterable) and not isinstance(x, Tensor) and not hasattr(x, "dtype"):
        return _reservoir(op, x, rows, D, generator)
    values, drawn = checks.rows(op, "x", checks.array(op, "x", x), D), None
    if len(values) > rows:
        drawn = sample_rows(len(values), rows, generator)
        values = values[drawn.to(values.device)]
    checks.finite(op, "x", values, torch.float32, drawn)
    return values.float()


def sample_rows(N: int, rows: int, generator: torch.Generator) -> Tensor:
    """`rows` distinct random numbers below N in ascending order, or all N if there are no more."""
    return _shuffled(N, generator)[:rows].sort().values


def _reservoir(op: str, batches: Iterable[Any], rows: int, D: int, generator: torch.Generator) -> Tensor:
    """Reservoir sampling: every vector draws a random number, and those with the largest numbers are kept."""
    kept = [torch.empty(0, D, dtype=torch.float32, device="cpu")]
    draws = [torch.empty(0, dtype=torch.float64, device="cpu")]
    places = [torch.empty(0, dtype=torch.int64, device="cpu")]  # the numbers of the rows, counted over all batches
    held = read = 0

    def cut() -> None:
        values, numbers, at = torch.cat(kept), torch.cat(draws), torch.cat(places)
        stay = numbers.topk(min(rows, len(numbers))).indices.sort().values
        kept[:], draws[:], places[:] = [values[stay]], [numbers[stay]], [at[stay]]

    for batch in tqdm(batches, desc="read", unit="batch", delay=2, disable=None, leave=False):
        values = checks.rows(op, "x", checks.array(op, "every batch of x", batch), D)
        kept.append(values.to("cpu", torch.float32, copy=True))  # a copy, because the iterable may reuse its buffer
        draws.append(torch.rand(len(values), dtype=torch.float64, device="cpu", generator=generator))
        places.append(torch.arange(read, read + len(values), device="cpu"))
        read += len(values)
        held += len(values)
        if held > 2 * rows:
            cut()
            held = rows
    cut()
    checks.finite(op, "x", kept[0], rows=places[0])
    return kept[0]


def plus_plus(x: Tensor, codewords: int, generator: torch.Generator) -> Tensor:
    """k-means++: K rows of x [N, D], drawn with probability proportional to the squared distance to those before.

    Each step makes a few draws and keeps the one that leaves the smallest sum of distances. Draws come from a random
    subset of x; above _SEEDED codewords they are uniform. If x has fewer than K distinct vectors, the other codewords
    are zero, so that later levels can keep a vector that level 0 reproduces exactly.
    """
    zeros = x.new_zeros(codewords, x.shape[1])
    if len(x) < codewords:
        return torch.cat([x, zeros[len(x) :]])
    x = x[_shuffled(len(x), generator)[: max(4 * codewords, 1 << 14)].to(x.device)]
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


def _start(x: Tensor, codewords: int, groups: tuple[int, ...], scale: Tensor, generator: torch.Generator) -> Tensor:
    """The first codebook [G * K, D]: k-means++ for each group, of what greedy levels before it leave of x [N, D]."""
    parts: list[Tensor] = []
    for group in range(groups[-1] + 1):
        if parts:
            levels = slice(groups.index(group - 1), groups.index(group))
            before = Parameters(parts[-1], scale[levels], None)
            x = x - functional.decode_checked(functional.encode_checked(x, before, 1, None), before)
        parts.append(plus_plus(x, codewords, generator))
    return torch.cat(parts)


def revive(
    x: Tensor, codes: Tensor, codec: Parameters, generator: torch.Generator, unused: Tensor | None = None
) -> Tensor:
    """Replaces unused codewords by what their levels quantize of badly approximated rows of x [N, D]; returns the new
    codebook [G * K, D].

    unused [G * K] bool: None are those that do not occur in the codes [N, M] of x.
    """
    codebook = codec.codebook
    if unused is None:
        unused = torch.ones(len(codebook), dtype=torch.bool, device=codebook.device)
        unused[codec.rows(codes).flatten()] = False
    dead = unused.nonzero().squeeze(1)
    if len(dead) == 0:
        return codebook
    error = torch.cat(
        [
            (x[r] - functional.decode_checked(codes[r], codec)).square().sum(dim=1)
            for r in refit.tiles(len(x), x.shape[1])
        ]
    )
    # The largest values of log(u) / error are a sample without replacement with probability proportional to the error.
    draws = torch.rand(len(x), dtype=torch.float64, device="cpu", generator=generator).log() / error.double().cpu()
    rows = draws.argsort(descending=True, stable=True)[torch.arange(len(dead), device="cpu") % len(x)]
    rows, revived = rows.to(x.device), codebook.clone()
    revived[dead] = x[rows]
    for group in range(1, codec.groups[-1] + 1):  # of which earlier groups leave less
        own, first = dead // codec.codewords == group, codec.groups.index(group)
        revived[dead[own]] -= functional.decode_checked(codes[rows[own], :first], codec.part(slice(0, first)))
    return revived


def _counted(omega: Tensor) -> Tensor:
    """omega [M] with the last weight at least FLOOR of the sum; otherwise trailing levels of weight 0 would tie."""
    last = torch.maximum(omega[-1:], FLOOR * omega.sum())
    return torch.cat([omega[:-1], last])


def _shuffled(N: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(N, device="cpu", generator=generator)


def _draw(weights: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """[draws] indices with probability proportional to their weights, of which at least one is above 0."""
    cumulative = weights.double().cumsum(0).cpu()
    targets = torch.rand(draws, dtype=torch.float64, device="cpu", generator=generator) * cumulative[-1]
    return torch.searchsorted(cumulative, targets, right=True).clamp_max(len(weights) - 1)
