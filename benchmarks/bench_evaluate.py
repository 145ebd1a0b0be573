"""mAP of a ranking by codes: ours, in which equal scores cannot bend it, beside the loop that everybody writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drq_fast import functional, reference
from drq_fast.retrieval.evaluate import average_precision

D, K, M, CLASSES = 64, 256, 4, 10


def inputs(N: int, Q: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """query [Q, D], codes [N, M], codebook [K, D], scale [M], relevant [Q, N]."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(Q, D, generator=generator)
    codes = torch.randint(K, (N, M), generator=generator, dtype=torch.uint8)
    codebook = torch.randn(K, D, generator=generator)
    labels, of_queries = (torch.randint(CLASSES, (n,), generator=generator) for n in (N, Q))
    tensors = (query, codes, codebook, 0.7 ** torch.arange(M), of_queries[:, None] == labels)
    return tuple(t.to(device) for t in tensors)  # type: ignore[return-value]


def ours(R: int, **sizes: Any) -> Callable[[], Tensor]:
    """All scores, then their average precision."""
    *search, relevant = inputs(**sizes)
    return lambda: average_precision(functional.adc(*search, metric="ip"), relevant, R, largest=True)


def loop(R: int, N: int, Q: int, device: str) -> Callable[[], np.ndarray]:
    """numpy: products with decoded vectors, then for each query argsort, cumsum and mean; ties as they fall."""
    if device != "cpu":
        raise NotImplementedError("numpy runs on the CPU only")
    query, codes, codebook, scale, hits = inputs(N, Q)
    queries, relevant = query.numpy(), hits.numpy()
    vectors = reference.decode(codes, codebook, scale).numpy()
    return lambda: textbook(queries @ vectors.T, relevant, R)


def textbook(scores: np.ndarray, relevant: np.ndarray, R: int) -> np.ndarray:
    """AP@R [Q] by its definition."""
    found = []
    for row, hits in zip(scores, relevant, strict=True):
        ranked = hits[np.argsort(-row, kind="stable")[:R]]
        precisions = np.cumsum(ranked) / np.arange(1, len(ranked) + 1)
        found.append(precisions[ranked].mean() if ranked.any() else 0.0)
    return np.array(found)


def agrees(precisions: Tensor, R: int, **sizes: Any) -> bool:
    """As defined, on float64 scores, where hardly any two are equal: within what a swap of neighbours can do."""
    *search, relevant = inputs(**(sizes | {"device": "cpu"}))
    query, codes, codebook, scale = search
    exact = reference.adc(query.double(), codes, codebook.double(), scale.double(), metric="ip")
    return bool(np.abs(precisions.cpu().numpy() - textbook(exact.numpy(), relevant.numpy(), R)).max() < 1e-4)


@pytest.mark.parametrize("R", [5000, pytest.param(54_000, marks=pytest.mark.quick)])
def bench_map(compare: Callable[..., None], R: int) -> None:
    N, Q = 54_000, 100
    sizes = {"N": N, "Q": Q, "R": R}
    compare(ours, {"numpy, a query at a time": loop}, agrees, sizes=sizes, work=N * Q, unit="scores")
