"""Sums over blocks of rows, and fits by them, have the same bits whoever computes them. test_ray.py has a cluster."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch

from drq_fast import fit
from drq_fast.blocks import Blocks, sum_of


class Workers(NamedTuple):
    """Consecutive blocks each, whose sums are added up here."""

    parts: list[Blocks]

    def each(self, method: str, *arguments: Any) -> list[Any]:
        return [value for part in self.parts for value in part.each(method, *arguments)]

    def total(self, method: str, *arguments: Any) -> Any:
        return sum_of({at: value for part in self.parts for at, value in part.nodes(method, *arguments).items()})


@pytest.mark.parametrize("bounds", [[0, 7], [0, 4, 7], [0, 1, 3, 7], [0, 3, 6, 7]])
def test_sums_over_blocks_do_not_depend_on_who_computes_them(bounds):
    values = [torch.randn(50, generator=torch.Generator().manual_seed(i)) * 10.0**i for i in range(7)]
    workers = [Blocks(values[a:b], a) for a, b in itertools.pairwise(bounds)]
    nodes = {at: value for worker in workers for at, value in worker.nodes("clone").items()}
    expected = ((values[0] + values[1]) + (values[2] + values[3])) + ((values[4] + values[5]) + values[6])
    assert torch.equal(sum_of(nodes), expected)


@pytest.mark.parametrize(("K", "codebooks"), [(8, 1), (8, 2), (8, [1, 3]), (600, 1)])
def test_a_fit_does_not_depend_on_who_has_which_blocks(K, codebooks):
    """Also with halves in early rounds, unused codewords (many rows are equal) and, for K = 600, counts by block."""
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(956, 6, generator=generator), torch.ones(94, 6)])
    parts = x.split(96)  # eleven blocks, of which the last is short

    def fitted(bounds):
        workers = [
            Blocks([fit.Block(part, number, 96) for number, part in enumerate(parts[a:b], a)], a)
            for a, b in itertools.pairwise(bounds)
        ]
        return fit.fit(Workers(workers), K, 4, codebooks=codebooks, rounds=40 if K == 8 else 3, seed=0)

    one = fitted([0, 11])
    for bounds in ([0, 5, 11], [0, 1, 2, 9, 11]):
        several = fitted(bounds)
        assert torch.equal(one.codebook, several.codebook)
        assert torch.equal(one.scale, several.scale)
        assert torch.equal(one.offset, several.offset)
        assert one.errors == several.errors
