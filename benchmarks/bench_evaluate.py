"""mAP@R of codes at every length: ours, which does not depend on the order of equal scores, beside a loop in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import drq_fast
from drq_fast import functional
from drq_fast.retrieval.evaluate import evaluate_codes

D, K, M, CLASSES = 64, 256, 4, 10


def inputs(N: int, Q: int) -> tuple[drq_fast.RecurrentQuantizer, Tensor, Tensor, Tensor, Tensor]:
    """layer, codes [N, M], labels [N, C], query [Q, D], query_labels [Q, C]: classes that spread widely."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (N + Q,), generator=generator)
    x = torch.randn(CLASSES, D, generator=generator)[labels] + 2 * torch.randn(N + Q, D, generator=generator)
    layer = drq_fast.RecurrentQuantizer(D, K, M)
    layer.initialise(x[:4096], seed=0)
    of_class = torch.nn.functional.one_hot(labels).bool()
    return layer, layer.encode(x[:N]), of_class[:N], x[N:], of_class[N:]


def relevance(labels: Tensor, query_labels: Tensor) -> np.ndarray:
    """[Q, N]: which have the query's label."""
    return (query_labels.float() @ labels.float().T > 0).numpy()


def ours(R: int, N: int, Q: int, device: str) -> Callable[[], list[float]]:
    layer, *data = inputs(N, Q)
    layer = layer.to(device)
    codes, labels, query, query_labels = (t.to(device) for t in data)

    def run() -> list[float]:
        return [f.mean_average_precision for f in evaluate_codes(layer, codes, labels, query, query_labels, R=R)]

    return run


def loop(R: int, N: int, Q: int, device: str) -> Callable[[], list[float]]:
    """numpy: distances to decoded vectors, then for each query argsort, cumsum and mean; ties as they fall."""
    if device != "cpu":
        raise NotImplementedError("numpy runs on the CPU only")
    layer, codes, labels, query, query_labels = inputs(N, Q)
    decoded = [layer.decode(codes, levels=L).detach().numpy() for L in range(1, M + 1)]
    queries, relevant = query.numpy(), relevance(labels, query_labels)

    def run() -> list[float]:
        return [textbook((v**2).sum(axis=1) - 2 * queries @ v.T, relevant, R) for v in decoded]

    return run


def textbook(costs: np.ndarray, relevant: np.ndarray, R: int) -> float:
    """mAP@R by its definition."""
    found = []
    for row, hits in zip(costs, relevant, strict=True):
        ranked = hits[np.argsort(row, kind="stable")[:R]]
        precisions = np.cumsum(ranked) / np.arange(1, len(ranked) + 1)
        found.append(precisions[ranked].mean() if ranked.any() else 0.0)
    return float(np.mean(found))


def agrees(found: list[float], R: int, N: int, Q: int, device: str) -> bool:
    """At the full length, where ties are rare, as defined on float64 distances; at 8 bits within what ties can do."""
    layer, codes, labels, query, query_labels = inputs(N, Q)
    relevant = relevance(labels, query_labels)
    codebook, scale, offset = (None if t is None else t.double() for t in layer.codec().tensors())
    for L, limit in ((1, 0.05), (M, 1e-3)):
        vectors = functional.decode(codes, codebook, scale, offset=offset, levels=L, backend="torch")
        exact = textbook(torch.cdist(query.double(), vectors).numpy(), relevant, R)
        if abs(found[L - 1] - exact) > limit * exact:
            return False
    return True


@pytest.mark.parametrize("R", [5000, pytest.param(54_000, marks=pytest.mark.quick)])
def bench_map(compare: Callable[..., None], R: int) -> None:
    N, Q = 54_000, 100
    sizes: dict[str, Any] = {"N": N, "Q": Q, "R": R}
    compare(ours, {"numpy, a query at a time": loop}, agrees, sizes=sizes, work=N * Q * M, unit="scores")
