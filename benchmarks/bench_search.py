"""The k best of many codes: `Index.search`, from query to ids, beside other people's search at equal code size.

Codes are fitted to generated vectors ("clustered", "gaussian", "low rank"), uniform random ("random"), or all the same
("identical"). For fitted codes our layer and the peers are trained on the same 30,000 vectors and hold the same
1,000,000 others. Every call searches for queries that the calls before it did not have, until the pool is used up.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import drq_fast
from drq_fast import functional
from drq_fast.index import IndexResult

D = 64
TRAINED, FILLED = 30_000, 1_000_000
POOL = 256  # queries that take turns, at least; four batches if those are more
FITTED = ("clustered", "gaussian", "low rank")
Sizes = dict[str, Any]
Found = tuple[Tensor, IndexResult]  # a batch of queries and its result


def vectors(codes: str, N: int, seed: int) -> Tensor:
    """N vectors [N, D] of one of the distributions in FITTED; another seed draws others of the same one."""
    generator, shape = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(77)
    if codes == "clustered":
        centres = torch.randn(1000, D, generator=shape)
        return centres[torch.randint(1000, (N,), generator=generator)] + 0.5 * torch.randn(N, D, generator=generator)
    if codes == "low rank":
        directions = torch.randn(8, D, generator=shape)
        return torch.randn(N, 8, generator=generator) @ directions + 0.1 * torch.randn(N, D, generator=generator)
    return torch.randn(N, D, generator=generator)


def sample(codes: str) -> Tensor:
    """What ours and the peers are trained on."""
    return vectors(codes, TRAINED, seed=1)


def filling(codes: str, N: int = FILLED) -> Tensor:
    """What ours and the peers hold: the first N of all."""
    return vectors(codes, FILLED, seed=2)[:N]


def built(name: str) -> Path:
    """Where the processes of one run share what one of them has built."""
    return Path(os.environ["BENCH_FOLDER"]) / f"search {name}"


@functools.cache
def fitted(codes: str, M: int, codebooks: int) -> tuple[drq_fast.Codec, Tensor]:
    """A codec of K=256, fitted in few rounds, and the codes [FILLED, M] of all vectors."""
    path = built(f"{codes} ours {M} {codebooks}")
    if not path.exists():
        layer = drq_fast.RecurrentQuantizer(D, codewords=256, levels=M, codebooks=codebooks)
        layer.fit(sample(codes), rounds=20, beam=4, seed=0)
        torch.save((layer.codec(), layer.encode(filling(codes))), path)
    return torch.load(path, weights_only=False)


def inputs(N: int, codes: str, K: int, M: int, dim: int = D, codebooks: int = 1) -> tuple[drq_fast.Codec, Tensor]:
    """A codec and codes [N, M]."""
    if codes in FITTED:
        codec, rows = fitted(codes, M, codebooks)
        return codec, rows[:N]
    generator = torch.Generator().manual_seed(0)
    codec = drq_fast.Codec(torch.randn(K, dim, generator=generator), 0.7 ** torch.arange(M))
    dtype = torch.uint8 if K <= 256 else torch.int32
    if codes == "identical":
        return codec, torch.full((N, M), 3, dtype=dtype)
    return codec, torch.randint(K, (N, M), generator=generator, dtype=dtype)


def batches(codes: str, Q: int, dim: int = D) -> list[Tensor]:
    """Queries [Q, dim] for one call after the other."""
    count = max(POOL, 4 * Q)
    if codes in FITTED:
        pool = vectors(codes, count, seed=3)
    else:
        pool = torch.randn(count, dim, generator=torch.Generator().manual_seed(3))
    return list(pool.split(Q))


def ours(
    N: int, Q: int, metric: str, k: int, codes: str, device: str, dim: int = D, keep: float | None = None, **code: int
) -> Callable[[], Found]:
    """The search of an index that was made once and has been searched before, so that its norms are there."""
    codec, rows = inputs(N, codes, dim=dim, **code)
    index = drq_fast.Index(codec, metric=metric, device=device)
    index.add_codes(rows)
    mask = None if keep is None else kept(N, keep).to(device)
    queries = itertools.cycle(query.to(device) for query in batches(codes, Q, dim))
    index.search(next(queries), k=1)

    def run() -> Found:
        query = next(queries)
        return query, index.search(query, k=k, keep=mask)

    return run


def kept(N: int, share: float) -> Tensor:
    return torch.rand(N, generator=torch.Generator().manual_seed(4)) < share


def unfiltered(keep: float, **sizes: Any) -> Callable[[], Found]:
    return ours(**sizes)


def random_codes(**sizes: Any) -> Callable[[], Found]:
    return ours(**(sizes | {"codes": "random"}))


def imported_faiss(device: str) -> Any:
    import faiss  # after torch: each brings an OpenMP runtime, and crashes have depended on the order

    if device != "cpu":
        raise NotImplementedError("faiss-cpu runs on the CPU only")
    faiss.omp_set_num_threads(torch.get_num_threads())
    return faiss


def filled(faiss: Any, name: str, codes: str, make: Callable[[], Any]) -> Any:
    """The index that `make` returns, trained and filled; by the first process that asks for it."""
    path = built(f"{codes} {name}")
    if not path.exists():
        index = make()
        index.train(sample(codes).numpy())
        index.add(filling(codes).numpy())
        faiss.write_index(index, str(path))
    return faiss.read_index(str(path))


def index_pq(faiss: Any, N: int, codes: str, metric: str, levels: int, bits: int) -> Any:
    """A faiss.IndexPQ with N codes: of the same vectors as ours where those are fitted, else random like ours."""
    if codes in FITTED:
        index = filled(faiss, f"PQ{levels}x{bits}", codes, lambda: faiss.IndexPQ(D, levels, bits))
        rows = faiss.vector_to_array(index.codes)[: N * index.code_size]
    else:
        generator, index = torch.Generator().manual_seed(1), faiss.IndexPQ(D, levels, bits)
        centroids = torch.randn(levels * 2**bits * (D // levels), generator=generator)
        faiss.copy_array_to_vector(centroids.numpy(), index.pq.centroids)
        rows = torch.randint(256, (N * index.code_size,), generator=generator, dtype=torch.uint8).numpy()
        index.is_trained = True
    faiss.copy_array_to_vector(rows, index.codes)
    index.ntotal = N
    index.metric_type = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
    return index


def searched(index: Any, k: int, codes: str, Q: int) -> Callable[[], Any]:
    """The search of somebody else's index, which takes numpy arrays and has been searched before, as ours."""
    queries = itertools.cycle(query.numpy() for query in batches(codes, Q))
    index.search(next(queries), 1)
    return lambda: index.search(next(queries), k)


def faiss_pq(
    N: int, Q: int, K: int, M: int, metric: str, k: int, codes: str, device: str, **_: Any
) -> Callable[[], Any]:
    """M tables of K float entries: the same look-ups as ours."""
    index = index_pq(imported_faiss(device), N, codes, metric, M, (K - 1).bit_length())
    return searched(index, k, codes, Q)


def faiss_fast_scan(
    N: int, Q: int, K: int, M: int, metric: str, k: int, codes: str, device: str, **_: Any
) -> Callable[[], Any]:
    """Tables of 16 entries, rounded to 8 bits: as many bytes, coarser codebooks, approximate scores."""
    faiss = imported_faiss(device)
    exact = index_pq(faiss, N, codes, metric, M * (K - 1).bit_length() // 4, 4)
    return searched(faiss.IndexPQFastScan(exact), k, codes, Q)


def faiss_rq(
    N: int, Q: int, K: int, M: int, metric: str, k: int, codes: str, device: str, fast: bool = False
) -> Callable[[], Any]:
    """A faiss residual quantizer of as many bits, beam 1."""
    faiss = imported_faiss(device)
    kinds = faiss.AdditiveQuantizer
    norms = kinds.ST_LUT_nonorm if metric == "ip" else kinds.ST_norm_rq2x4 if fast else kinds.ST_norm_qint8
    measure = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT

    def make() -> Any:
        kind = faiss.IndexResidualQuantizerFastScan if fast else faiss.IndexResidualQuantizer
        bits = 4 if fast else 8
        index = kind(D, M * (K - 1).bit_length() // bits, bits, measure, norms)
        index.rq.train_type, index.rq.max_beam_size = faiss.ResidualQuantizer.Train_default, 1
        return index

    assert N == FILLED
    return searched(filled(faiss, f"RQ {metric} {fast}", codes, make), k, codes, Q)


def faiss_rq_fast_scan(**sizes: Any) -> Callable[[], Any]:
    return faiss_rq(**sizes, fast=True)


def turbovec(N: int, Q: int, k: int, codes: str, device: str, **_: Any) -> Callable[[], Any]:
    """TurboQuant at 4 bits per dimension: 36 bytes per vector (32 of code, a float factor), nine times 32 bits.

    It searches as many vectors of as many dimensions, but not in the same memory: it has no codes below 20 bytes.
    """
    if device != "cpu":
        raise NotImplementedError("turbovec runs on the CPU only")
    os.environ.setdefault("RAYON_NUM_THREADS", str(torch.get_num_threads()))  # read once, when its threads start
    from turbovec import TurboQuantIndex

    index = TurboQuantIndex(dim=D, bit_width=4)
    index.add(filling(codes, N).numpy())
    index.prepare()
    return searched(index, k, codes, Q)


def dense(N: int, Q: int, k: int, codes: str, dim: int, device: str, metric: str, **code: int) -> Callable[[], Any]:
    """numpy: the inner products of decoded vectors and queries, all of them sorted."""
    import numpy as np

    if device != "cpu":
        raise NotImplementedError("numpy runs on the CPU only")
    codec, rows = inputs(N, codes, dim=dim, **code)
    decoded, queries = codec.decode(rows).numpy(), itertools.cycle(query.numpy() for query in batches(codes, Q, dim))
    return lambda: np.argsort(-(next(queries) @ decoded.T), axis=1)[:, :k]


def agrees(
    found: Found,
    N: int,
    metric: str,
    k: int,
    codes: str,
    Q: int,
    device: str,
    dim: int = D,
    keep: float | None = None,
    **code: int,
) -> bool:
    """The scores of the ids are the best there are by the definition in float64, for the first 8 queries."""
    query, (values, ids) = found[0].cpu(), (t.cpu() for t in found[1])
    codec, rows = inputs(N, codes, dim=dim, **code)
    parts = [None if t is None else t.double() for t in codec.tensors()]
    settings: Any = {"codebooks": codec.codebooks, "metric": metric, "backend": "torch"}
    scores = functional.adc(query[:8].double(), rows, *parts[:2], offset=parts[2], **settings)
    if keep is not None:
        scores[:, ~kept(N, keep)] = float("inf") if metric == "l2" else float("-inf")
    best = scores.topk(k, dim=1, largest=metric != "l2").values
    right = scores.gather(1, ids[:8])
    distinct = all(len(set(row)) == k for row in ids.tolist())
    tolerance = 1e-4 * float(best.abs().max())
    return distinct and bool(((right - best).abs() < tolerance).all() and ((values[:8] - best).abs() < tolerance).all())


SCANS = {"faiss IndexPQFastScan": faiss_fast_scan, "faiss IndexPQ": faiss_pq}
ALL = SCANS | {"faiss RQ": faiss_rq, "faiss RQ FastScan": faiss_rq_fast_scan, "turbovec, 9 times the bytes": turbovec}
FAST_SCAN = {"faiss IndexPQFastScan": faiss_fast_scan}


def run(
    compare: Callable[..., None],
    peers: dict[str, Any],
    codes: str,
    N: int,
    Q: int,
    metric: str = "ip",
    k: int = 10,
    K: int = 256,
    M: int = 4,
    **more: Any,
) -> None:
    sizes = {"N": N, "Q": Q, "K": K, "M": M, "metric": metric, "k": k, "codes": codes, **more}
    compare(ours, peers, agrees, sizes=sizes, work=N * Q, unit="codes")


QUICK = [("clustered", "l2", 1_000_000, 1, 10), ("clustered", "l2", 1_000_000, 256, 10)]
FEW = [(1_000_000, 1, 10), (1_000_000, 16, 10), (1_000_000, 256, 10)]  # N, Q, k
MANY = [
    *FEW,
    *((1_000_000, Q, 100) for Q in (1, 256)),
    *((1_000_000, Q, 1000) for Q in (1, 64)),
    (100_000, 1, 10),
    *((10_000, Q, 10) for Q in (1, 256)),
]
ROWS = [
    pytest.param(*row, marks=pytest.mark.quick if row in QUICK else ())
    for codes in FITTED
    for sizes in (MANY if codes == "clustered" else FEW)
    for metric in ("ip", "l2")
    for row in [(codes, metric, *sizes)]
]


@pytest.mark.parametrize(("codes", "metric", "N", "Q", "k"), ROWS)
def bench_fitted(compare: Callable[..., None], codes: str, metric: str, N: int, Q: int, k: int) -> None:
    everybody = (codes, metric, N, Q, k) == ("clustered", "ip", 1_000_000, 16, 10)
    peers = ALL if everybody else SCANS if codes == "clustered" else FAST_SCAN
    run(compare, peers, codes, N, Q, metric, k)


@pytest.mark.parametrize(("N", "Q"), [(1_000_000, 1), (1_000_000, 256), (10_000_000, 1)])
def bench_random(compare: Callable[..., None], N: int, Q: int) -> None:
    run(compare, FAST_SCAN, "random", N, Q)


@pytest.mark.parametrize("Q", [1, 256])
def bench_64_bits(compare: Callable[..., None], Q: int) -> None:
    run(compare, FAST_SCAN, "random", 1_000_000, Q, M=8)


@pytest.mark.parametrize("Q", [1, 256])
@pytest.mark.parametrize(("M", "codebooks"), [(16, 1), (16, 16), (32, 32)])
def bench_long_codes(compare: Callable[..., None], M: int, codebooks: int, Q: int) -> None:
    run(compare, SCANS, "clustered", 1_000_000, Q, "l2", M=M, codebooks=codebooks)


@pytest.mark.parametrize(("K", "M"), [(16, 8), (512, 4), (4096, 4)])
def bench_other_codes(compare: Callable[..., None], K: int, M: int) -> None:
    run(compare, {"faiss IndexPQ": faiss_pq}, "random", 1_000_000, 64, K=K, M=M)


@pytest.mark.parametrize("Q", [1, 256])
def bench_filter(compare: Callable[..., None], Q: int) -> None:
    run(compare, {"without a filter": unfiltered}, "random", 1_000_000, Q, keep=0.1)


def bench_rankings(compare: Callable[..., None]) -> None:
    run(compare, {"numpy, dense and sorted": dense}, "random", 54_000, 200, k=5000, dim=2048)


@pytest.mark.parametrize("Q", [1, 256])
def bench_identical_codes(compare: Callable[..., None], Q: int) -> None:
    run(compare, {"random codes": random_codes}, "identical", 1_000_000, Q)
