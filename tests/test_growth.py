"""Computing time grows linearly: doubling a size doubles it, plus what additional cache misses cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import drq_fast
from drq_fast import functional

pytestmark = pytest.mark.slow
ROUNDS = 9


def growth(job: Callable[..., Callable[[], Any]], small: dict[str, int], **large: int) -> float:
    """Median of time(large) / time(small) over alternating runs."""
    runs = job(**small), job(**(small | large))
    ratios = []
    for _ in range(ROUNDS + 2):
        seconds = [timed(run) for run in runs]
        ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios[2:])


def timed(run: Callable[[], Any]) -> float:
    """The shortest of three runs, which other processes disturb least."""
    found = []
    for _ in range(3):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


def encode(N: int, D: int) -> Callable[[], Any]:
    x, codebook = torch.randn(N, D), torch.randn(256, D)
    return lambda: functional.encode(x, codebook, 0.7 ** torch.arange(4))


def scan(N: int, Q: int) -> Callable[[], Any]:
    query, codebook = torch.randn(Q, 64), torch.randn(256, 64)
    codes = torch.randint(256, (N, 4), dtype=torch.uint8)
    return lambda: functional.search(query, codes, codebook, 0.7 ** torch.arange(4), k=10, metric="ip")


def add(N: int, D: int) -> Callable[[], Any]:
    layer = drq_fast.RecurrentQuantizer(D, offset=False, init="random", gamma=1.0)
    parts = torch.randn(N, D).split(1000)

    def run() -> None:
        index = drq_fast.Index(layer)
        for part in parts:
            index.add(part)

    return run


def training(N: int, D: int, M: int) -> Callable[[], Any]:
    leaves = torch.randn(N, D, requires_grad=True), torch.randn(256, D, requires_grad=True)
    scale = (0.8 ** torch.arange(M)).requires_grad_()
    return lambda: functional.loss(*leaves, scale, gamma=1.0).loss.backward()


def test_encode_of_twice_the_vectors() -> None:
    assert growth(encode, {"N": 16384, "D": 256}, N=32768) <= 2.6


def test_encode_of_twice_the_dimensions() -> None:
    assert growth(encode, {"N": 8192, "D": 512}, D=1024) <= 2.6


@pytest.mark.parametrize("Q", [1, 64])
def test_scan_of_twice_the_codes(Q: int) -> None:
    assert growth(scan, {"N": 2_000_000, "Q": Q}, N=4_000_000) <= 2.6


def test_add_of_twice_the_vectors() -> None:
    assert growth(add, {"N": 50_000, "D": 64}, N=100_000) <= 2.6


def test_training_with_twice_the_levels() -> None:
    assert growth(training, {"N": 2048, "D": 2048, "M": 4}, M=8) <= 1.5
