"""Top 10 by inner product among a million random codes, D=64, 16 queries: the whole search, from query to positions."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drq_fast import functional, reference

K, M, D, TOP = 256, 4, 64, 10


def inputs(N: int, Q: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query [Q, D], codes [N, M] uint8, codebook [K, D], scale [M]."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(Q, D, generator=generator)
    codes = torch.randint(K, (N, M), generator=generator, dtype=torch.uint8)
    return query, codes, torch.randn(K, D, generator=generator), 0.7 ** torch.arange(M)


def ours(N: int, Q: int, backend: str | None = None) -> Callable[[], reference.SearchResult]:
    """4 bytes per vector, exact over the codes."""
    query, codes, codebook, scale = inputs(N, Q)
    return lambda: functional.search(query, codes, codebook, scale, k=TOP, metric="ip", backend=backend)


def torch_backend(N: int, Q: int) -> Callable[[], reference.SearchResult]:
    return ours(N, Q, backend="torch")


def index_pq(N: int, levels: int, bits: int) -> Any:
    """A faiss.IndexPQ of 4 bytes per vector with random centroids and random codes, neither trained nor encoded."""
    import faiss  # after torch: each brings an OpenMP runtime, and crashes have depended on the order

    faiss.omp_set_num_threads(torch.get_num_threads())
    generator = torch.Generator().manual_seed(1)
    centroids = torch.randn(levels * 2**bits * (D // levels), generator=generator)
    codes = torch.randint(256, (N * levels * bits // 8,), generator=generator, dtype=torch.uint8)
    index = faiss.IndexPQ(D, levels, bits, faiss.METRIC_INNER_PRODUCT)
    faiss.copy_array_to_vector(centroids.numpy(), index.pq.centroids)
    faiss.copy_array_to_vector(codes.numpy(), index.codes)
    index.is_trained, index.ntotal = True, N
    return index


def faiss_pq(N: int, Q: int) -> Callable[[], Any]:
    """4 tables of 256 float entries: the same look-ups as ours."""
    query = inputs(N, Q)[0].numpy()
    index = index_pq(N, levels=4, bits=8)
    return lambda: index.search(query, TOP)


def faiss_fast_scan(N: int, Q: int) -> Callable[[], Any]:
    """8 tables of 16 entries, rounded to 8 bits: as many bytes, coarser codebooks, approximate scores."""
    query = inputs(N, Q)[0].numpy()
    exact = index_pq(N, levels=8, bits=4)
    import faiss

    index = faiss.IndexPQFastScan(exact)
    return lambda: index.search(query, TOP)


def turbovec(N: int, Q: int) -> Callable[[], Any]:
    """TurboQuant at 4 bits per dimension: 36 bytes per vector (32 of code, a float factor), nine times ours.

    It scans one bit of each dimension, then scores a shortlist. Comparable as a search of as many vectors of as many
    dimensions, not at equal memory: it has no fewer than 2 bits per dimension, 20 bytes.
    """
    query, codes, codebook, scale = inputs(N, Q)
    os.environ.setdefault("RAYON_NUM_THREADS", str(torch.get_num_threads()))  # read once, when its threads start
    from turbovec import TurboQuantIndex

    index = TurboQuantIndex(dim=D, bit_width=4)
    index.add(reference.decode(codes, codebook, scale).numpy())
    index.prepare()
    array = query.numpy()
    return lambda: index.search(array, TOP)


def agrees(result: reference.SearchResult, N: int, Q: int) -> bool:
    """The positions [Q, TOP] have the best scores there are by the float64 reference, and ours says the same scores."""
    query, codes, codebook, scale = inputs(N, Q)
    exact = (query.double(), codes, codebook.double(), scale.double())
    best = reference.search(*exact, k=TOP, metric="ip").scores
    scores = reference.adc(*exact, metric="ip").gather(1, result.positions)
    distinct = all(len(set(row)) == TOP for row in result.positions.tolist())
    close = torch.allclose(scores, best, rtol=1e-5) and torch.allclose(result.scores.double(), best, rtol=1e-5)
    return distinct and close


PEERS = {
    "torch backend": torch_backend,
    "faiss IndexPQ 4x8": faiss_pq,
    "faiss IndexPQFastScan 8x4": faiss_fast_scan,
    "turbovec, 9 times the bytes": turbovec,
}


def bench_search(compare: Callable[..., None]) -> None:
    N, Q = 1_000_000, 16
    compare(ours, PEERS, agrees, sizes={"N": N, "Q": Q}, work=N * Q, unit="codes", rounds=15)
