"""Random rows of vectors, reproducible by a seed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from . import checks


def seeded(seed: int | None) -> torch.Generator:
    """A generator with this seed, or with a seed drawn from torch's global generator."""
    return torch.Generator("cpu").manual_seed(int(torch.randint(2**62, (), device="cpu")) if seed is None else seed)


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
    return shuffled(N, generator)[:rows].sort().values


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


def shuffled(N: int, generator: torch.Generator) -> Tensor:
    """The numbers below N in random order."""
    return torch.randperm(N, device="cpu", generator=generator)
