"""A codebook without labels: k-means++ start, then rounds of encoding and closed-form refitting (docs/math.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from . import functional

_TILE = 1 << 20  # floats of a [rows, K] or [rows, D] block that stays in cache
_SOLVABLE = 4096  # codewords up to which the K x K system is formed and solved


class Codec(NamedTuple):
    """codebook [K, D], w (level m is scaled by w**m), offset [D] or None."""

    codebook: Tensor
    w: float
    offset: Tensor | None


def tiles(N: int, width: int) -> Iterator[slice]:
    """0..N in slices of so many rows that [rows, width] floats stay in cache."""
    rows = max(64, _TILE // max(width, 1))
    for first in range(0, N, rows):
        yield slice(first, min(first + rows, N))


def start(
    x: Tensor,
    codewords: int,
    levels: int,
    *,
    offset: bool = True,
    omega: Tensor | None = None,
    rounds: int = 8,
    seed: int | None = None,
) -> Codec:
    """A codec for x [N, D] float32: k-means for one level, its recurrent form for more; any N >= 1.

    omega [M]: weight of the squared error after each level, all alike if None. Deterministic given `seed`; without
    one the seed is drawn from torch's global generator.
    """
    generator = torch.Generator()
    generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
    mean = x.mean(dim=0) if offset else None
    x = _sample(x, max(64 * codewords, 1 << 14), generator)
    x = x if mean is None else x - mean
    weights = x.new_ones(levels) if omega is None else omega.to(x)
    codebook, w = plus_plus(x, codewords, generator), 0.7
    for _ in tqdm(range(rounds), desc="k-means start", delay=2, disable=None, leave=False):
        scale = x.new_tensor([w**m for m in range(levels)])
        codes = encode(x, codebook, scale)
        w = best_w(x, codes, codebook, weights)
        scale = x.new_tensor([w**m for m in range(levels)])
        codebook = refit_codebook(x, codes, codebook, scale, weights)
        codebook = revive(x, codes, codebook, scale, generator)
    return Codec(codebook, w, mean)


def encode(
    x: Tensor,
    codebook: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    beam: int = 1,
    level_weights: tuple[float, ...] | None = None,
) -> Tensor:
    """functional.encode in tiles, with a progress bar where it takes long: codes [N, M], never N x K in memory."""
    K, D = codebook.shape
    code_dtype = torch.uint8 if K <= 256 else torch.int32
    float_dtype = torch.promote_types(codebook.dtype, torch.float32)
    codes = torch.empty(len(x), len(scale), dtype=code_dtype, device=codebook.device)
    with tqdm(total=len(x), desc="encode", unit="vectors", delay=2, disable=None, leave=False) as bar:
        for rows in tiles(len(x), beam * max(K, D)):
            tile = x[rows].to(codebook.device, float_dtype)
            codes[rows] = functional.encode(
                tile, codebook, scale, offset=offset, beam=beam, level_weights=level_weights
            )
            bar.update(len(tile))
    return codes


def plus_plus(x: Tensor, codewords: int, generator: torch.Generator) -> Tensor:
    """k-means++: K rows of x [N, D], each drawn with probability proportional to its squared distance to the others."""
    nearest = torch.full((len(x),), float("inf"), dtype=x.dtype, device=x.device)
    norms = x.square().sum(dim=1)
    chosen = [int(torch.randint(len(x), (), generator=generator))]
    for _ in range(codewords - 1):
        last = x[chosen[-1]]
        nearest = torch.minimum(nearest, (norms - 2 * (x @ last) + last @ last).clamp_min(0))
        chosen.append(_draw(nearest, generator))
    return x[chosen].clone()


def refit_codebook(x: Tensor, codes: Tensor, codebook: Tensor, scale: Tensor, omega: Tensor) -> Tensor:
    """The codebook [K, D] that minimises sum_m omega[m] ||x - xhat_m||^2 for given codes [N, M]; unused rows stay.

    Normal equations H C = R with H = sum_m omega_m A_m^T A_m, A_m[n] = sum_{i<=m} scale_i onehot(b_i): a pair of levels
    (i, j) appears in every prefix from max(i, j) on, so counting pairs of codewords gives H.
    """
    (K, D), M = codebook.shape, len(scale)
    if K > _SOLVABLE:
        return codebook
    remaining = omega.flip(0).cumsum(0).flip(0)  # sum of omega from level i on
    R = torch.zeros_like(codebook)
    for rows in tiles(len(x), max(K, D)):
        for i in range(M):
            onehot = torch.nn.functional.one_hot(codes[rows, i].long(), K).to(x)
            R += scale[i] * remaining[i] * (onehot.T @ x[rows])
    H = torch.zeros(K, K, dtype=x.dtype, device=x.device)
    for i in range(M):
        for j in range(M):
            pairs = torch.bincount(codes[:, i].long() * K + codes[:, j].long(), minlength=K * K).view(K, K)
            H += scale[i] * scale[j] * remaining[max(i, j)] * pairs
    ridge = 1e-4 * H.diagonal().mean() * torch.eye(K, dtype=x.dtype, device=x.device)
    return codebook + torch.linalg.solve(H + ridge, R - H @ codebook)


def best_w(x: Tensor, codes: Tensor, codebook: Tensor, omega: Tensor) -> float:
    """The shared factor w that minimises sum_m omega[m] ||x - xhat_m||^2 for given codes, on a grid of 1/200."""
    M = codes.shape[1]
    if M == 1:
        return 1.0
    words = [codebook[codes[:, m].long()] for m in range(M)]
    inner = x.new_tensor([[float((a * b).sum()) for b in words] for a in words])
    cross = x.new_tensor([float((x * a).sum()) for a in words])
    grid = torch.arange(1, 301, dtype=x.dtype, device=x.device) / 200
    powers = grid[:, None] ** torch.arange(M, device=x.device)  # [grid, M]
    error = torch.zeros_like(grid)
    for m in range(M):
        head = powers[:, : m + 1]
        squared = ((head @ inner[: m + 1, : m + 1]) * head).sum(dim=1)
        error += omega[m] * (squared - 2 * head @ cross[: m + 1])
    return float(grid[error.argmin()])


def revive(x: Tensor, codes: Tensor, codebook: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
    """The codebook with every codeword that no code uses replaced by a row of x [N, D] that is badly approximated."""
    used = torch.zeros(len(codebook), dtype=torch.bool, device=codebook.device)
    used[codes.long().flatten()] = True
    dead = (~used).nonzero().squeeze(1)
    if len(dead) == 0:
        return codebook
    error = torch.cat(
        [(x[r] - functional.decode(codes[r], codebook, scale)).square().sum(dim=1) for r in tiles(len(x), x.shape[1])]
    )
    codebook = codebook.clone()
    for k in dead.tolist():
        row = _draw(error, generator)
        codebook[k], error[row] = x[row], 0
    return codebook


def _draw(weights: Tensor, generator: torch.Generator) -> int:
    """One index, with probability proportional to its weight; any index where all weights are 0."""
    cumulative = weights.double().cumsum(0).cpu()
    if not float(cumulative[-1]) > 0:
        return int(torch.randint(len(weights), (), generator=generator))
    target = torch.rand((), dtype=torch.float64, generator=generator) * cumulative[-1]
    return min(int(torch.searchsorted(cumulative, target, right=True)), len(weights) - 1)


def _sample(x: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    if len(x) <= rows:
        return x
    return x[torch.randperm(len(x), generator=generator)[:rows].sort().values.to(x.device)]
