"""The k best of many codes: the whole search, from query to positions, beside other people's at equal code size.

Codes are uniform random ("random") or few different ones, unevenly often ("fitted", as codes of real data are).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from drq_fast import functional, reference

D = 64
Sizes = dict[str, Any]


def inputs(
    N: int, Q: int, K: int, M: int, codes: str = "random", dim: int = D, device: str = "cpu", **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query [Q, D], codes [N, M] uint8 or int16, codebook [K, D], scale [M]."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(Q, dim, generator=generator)
    dtype = torch.uint8 if K <= 256 else torch.int16
    if codes == "alike":
        rows = torch.full((N, M), 3, dtype=dtype)
    elif codes == "random":
        rows = torch.randint(K, (N, M), generator=generator, dtype=dtype)
    else:
        distinct = torch.randint(K, (N // 50, M), generator=generator, dtype=dtype)
        rows = distinct[(torch.rand(N, generator=generator) ** 3 * len(distinct)).long()]
    codebook, scale = torch.randn(K, dim, generator=generator), 0.7 ** torch.arange(M)
    return query.to(device), rows.to(device), codebook.to(device), scale.to(device)


def on_cpu(sizes: Sizes, peer: str) -> Sizes:
    """The sizes without a device, which has to be the CPU."""
    if sizes["device"] != "cpu":
        raise NotImplementedError(f"{peer} runs on the CPU only")
    return {name: size for name, size in sizes.items() if name != "device"}


def ours(metric: str, k: int, backend: str | None = None, keep: float | None = None, **sizes: Any) -> Callable[[], Any]:
    """Exact over the codes; squared norms for l2 are 4 bytes a code, made once as an index makes them."""
    query, codes, codebook, scale = inputs(**sizes)
    norms = None if metric == "ip" else functional.squared_norms(codes, codebook, scale, None)
    mask = None if keep is None else kept(len(codes), keep).to(codes.device)
    rest = (k, None, metric, norms, mask, backend)
    return lambda: functional.search_unchecked(query, codes, codebook, scale, *rest)


def kept(N: int, share: float) -> Tensor:
    return torch.rand(N, generator=torch.Generator().manual_seed(3)) < share


def unfiltered(keep: float, **sizes: Any) -> Callable[[], Any]:
    return ours(**sizes)


def index_pq(N: int, levels: int, bits: int, metric: str) -> Any:
    """A faiss.IndexPQ with random centroids and random codes, neither trained nor encoded."""
    import faiss  # after torch: each brings an OpenMP runtime, and crashes have depended on the order

    faiss.omp_set_num_threads(torch.get_num_threads())
    generator = torch.Generator().manual_seed(1)
    centroids = torch.randn(levels * 2**bits * (D // levels), generator=generator)
    codes = torch.randint(256, (N * ((levels * bits + 7) // 8),), generator=generator, dtype=torch.uint8)
    measure = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
    index = faiss.IndexPQ(D, levels, bits, measure)
    faiss.copy_array_to_vector(centroids.numpy(), index.pq.centroids)
    faiss.copy_array_to_vector(codes.numpy(), index.codes)
    index.is_trained, index.ntotal = True, N
    return index


def faiss_pq(K: int, M: int, metric: str, k: int, **sizes: Any) -> Callable[[], Any]:
    """M tables of K float entries: the same look-ups as ours."""
    query = inputs(K=K, M=M, **on_cpu(sizes, "faiss-cpu"))[0].numpy()
    index = index_pq(sizes["N"], M, (K - 1).bit_length(), metric)
    return lambda: index.search(query, k)


def faiss_fast_scan(K: int, M: int, metric: str, k: int, **sizes: Any) -> Callable[[], Any]:
    """Tables of 16 entries, rounded to 8 bits: as many bytes, coarser codebooks, approximate scores."""
    query = inputs(K=K, M=M, **on_cpu(sizes, "faiss-cpu"))[0].numpy()
    exact = index_pq(sizes["N"], M * (K - 1).bit_length() // 4, 4, metric)
    import faiss

    index = faiss.IndexPQFastScan(exact)
    return lambda: index.search(query, k)


def residual_index(kind: str, bits: int, N: int, Q: int, K: int, M: int, k: int, metric: str, **_: Any) -> Any:
    """A faiss residual quantizer of as many bits, trained a little and filled with random vectors."""
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    query = inputs(N=1, Q=Q, K=K, M=M)[0].numpy()
    measure = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
    levels = M * (K - 1).bit_length() // bits
    search_type = {
        "plain": faiss.AdditiveQuantizer.ST_LUT_nonorm if metric == "ip" else faiss.AdditiveQuantizer.ST_norm_qint8,
        "fast": faiss.AdditiveQuantizer.ST_LUT_nonorm if metric == "ip" else faiss.AdditiveQuantizer.ST_norm_rq2x4,
    }[kind]
    make = faiss.IndexResidualQuantizer if kind == "plain" else faiss.IndexResidualQuantizerFastScan
    index: Any = make(D, levels, bits, measure, search_type)
    index.rq.train_type = faiss.ResidualQuantizer.Train_default
    index.rq.max_beam_size = 1
    sample = torch.randn(4096, D, generator=torch.Generator().manual_seed(1)).numpy()
    index.train(sample)
    for first in range(0, N, 1 << 17):
        index.add(torch.randn(min(1 << 17, N - first), D, generator=torch.Generator().manual_seed(first)).numpy())
    return lambda: index.search(query, k)


def faiss_rq(**sizes: Any) -> Callable[[], Any]:
    return residual_index("plain", bits=8, **on_cpu(sizes, "faiss-cpu"))


def faiss_rq_fast_scan(**sizes: Any) -> Callable[[], Any]:
    return residual_index("fast", bits=4, **on_cpu(sizes, "faiss-cpu"))


def turbovec(metric: str, k: int, **sizes: Any) -> Callable[[], Any]:
    """TurboQuant at 4 bits per dimension: 36 bytes per vector (32 of code, a float factor), nine times 32 bits.

    Comparable as a search of as many vectors of as many dimensions, not at equal memory: it has no fewer than 2 bits
    per dimension, 20 bytes.
    """
    query, codes, codebook, scale = inputs(**on_cpu(sizes, "turbovec"))
    os.environ.setdefault("RAYON_NUM_THREADS", str(torch.get_num_threads()))  # read once, when its threads start
    from turbovec import TurboQuantIndex

    index = TurboQuantIndex(dim=D, bit_width=4)
    index.add(reference.decode(codes, codebook, scale).numpy())
    index.prepare()
    array = query.numpy()
    return lambda: index.search(array, k)


def dense(k: int, dim: int = D, **sizes: Any) -> Callable[[], Any]:
    """numpy: the inner products of decoded vectors and queries, all of them sorted."""
    import numpy as np

    query, codes, codebook, scale = inputs(**on_cpu(sizes, "numpy"), dim=dim)
    vectors, queries = reference.decode(codes, codebook, scale).numpy(), query.numpy()
    return lambda: np.argsort(-(queries @ vectors.T), axis=1)[:, :k]


def random_codes(**sizes: Any) -> Callable[[], Any]:
    return ours(**(sizes | {"codes": "random"}))


def agrees(result: reference.SearchResult, metric: str, k: int, keep: float | None = None, **sizes: Any) -> bool:
    """The scores of the positions are the best there are by the float64 reference, for the first 8 queries."""
    query, codes, codebook, scale = inputs(**(sizes | {"device": "cpu"}))
    codes, positions, values = functional.two_bytes(codes), result.positions.cpu(), result.scores.cpu()
    exact = (query[:8].double(), codes, codebook.double(), scale.double())
    scores = reference.adc(*exact, metric=metric)
    if keep is not None:
        scores[:, ~kept(len(codes), keep)] = float("inf") if metric == "l2" else float("-inf")
    best = scores.topk(k, dim=1, largest=metric != "l2").values
    found = scores.gather(1, positions[:8])
    distinct = all(len(set(row)) == k for row in positions.tolist())
    tolerance = 1e-4 * float(best.abs().max())
    return distinct and bool(((found - best).abs() < tolerance).all() and ((values[:8] - best).abs() < tolerance).all())


SCANS = {"faiss IndexPQFastScan": faiss_fast_scan, "faiss IndexPQ": faiss_pq}
ALL = SCANS | {"faiss RQ": faiss_rq, "faiss RQ FastScan": faiss_rq_fast_scan, "turbovec, 9 times the bytes": turbovec}


def case(N: int, Q: int, metric: str, k: int = 10, K: int = 256, M: int = 4, **more: Any) -> Sizes:
    return {"N": N, "Q": Q, "K": K, "M": M, "metric": metric, "k": k, **more}


def run(compare: Callable[..., None], peers: dict[str, Any], sizes: Sizes) -> None:
    compare(ours, peers, agrees, sizes=sizes, work=sizes["N"] * sizes["Q"], unit="codes")


BATCHES = [  # N, Q: one of them changes at a time
    pytest.param(1_000_000, 256, marks=pytest.mark.quick),
    *((1_000_000, Q) for Q in (4, 16, 64, 1024)),
    *((N, 256) for N in (10_000, 100_000, 10_000_000)),
]


@pytest.mark.parametrize(("N", "Q"), BATCHES)
def bench_batch(compare: Callable[..., None], N: int, Q: int) -> None:
    run(compare, ALL if Q == 64 else SCANS, case(N, Q, "ip"))


@pytest.mark.parametrize("N", [10_000, 100_000, pytest.param(1_000_000, marks=pytest.mark.quick), 10_000_000])
def bench_one_query(compare: Callable[..., None], N: int) -> None:
    run(compare, SCANS, case(N, 1, "ip"))


@pytest.mark.parametrize("Q", [1, 256])
def bench_l2(compare: Callable[..., None], Q: int) -> None:
    run(compare, SCANS, case(1_000_000, Q, "l2"))


@pytest.mark.parametrize("k", [100, pytest.param(1000, marks=pytest.mark.quick)])
def bench_large_k(compare: Callable[..., None], k: int) -> None:
    run(compare, SCANS, case(1_000_000, 64, "ip", k=k))


def bench_duplicates(compare: Callable[..., None]) -> None:
    run(compare, SCANS, case(1_000_000, 256, "ip", codes="fitted"))


@pytest.mark.parametrize("Q", [1, 256])
def bench_64_bits(compare: Callable[..., None], Q: int) -> None:
    run(compare, SCANS, case(1_000_000, Q, "ip", M=8))


@pytest.mark.parametrize(("K", "M"), [(16, 8), (64, 4), (512, 4), (4096, 4)])
def bench_other_codes(compare: Callable[..., None], K: int, M: int) -> None:
    run(compare, {"faiss IndexPQ": faiss_pq}, case(1_000_000, 64, "ip", K=K, M=M))


@pytest.mark.parametrize("Q", [1, 256])
def bench_filter(compare: Callable[..., None], Q: int) -> None:
    run(compare, {"without a filter": unfiltered}, case(1_000_000, Q, "ip", keep=0.1))


@pytest.mark.parametrize("k", [5000, 54000])
def bench_rankings(compare: Callable[..., None], k: int) -> None:
    run(compare, {"numpy, dense and sorted": dense}, case(54_000, 200, "ip", k=k, dim=2048))


@pytest.mark.parametrize("Q", [1, 256])
def bench_identical_codes(compare: Callable[..., None], Q: int) -> None:
    run(compare, {"random codes": random_codes}, case(1_000_000, Q, "ip", codes="alike"))
