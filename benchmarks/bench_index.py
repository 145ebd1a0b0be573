"""`Index.add`, `Index.remove` followed by `add`, and `Index.load`, beside other people's indexes.

Codes have 4 bytes (K=256, M=4); turbovec's 36 at 4 bits for each of 64 dimensions.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import drq_fast
from drq_fast import functional

D, K, M = 64, 256, 4
ADDED = 10_000  # vectors at a time


def inputs(N: int) -> Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(0))


def empty(device: str) -> drq_fast.Index:
    torch.manual_seed(0)
    layer = drq_fast.RecurrentQuantizer(D, K, M, offset=False, init="random", gamma=1.0)
    return drq_fast.Index(layer, metric="ip", device=device)


def empty_faiss(kind: str, device: str) -> Any:
    """With random codewords, not trained."""
    import faiss  # after torch: each brings an OpenMP runtime, and crashes have depended on the order

    if device != "cpu":
        raise NotImplementedError("faiss-cpu runs on the CPU only")
    faiss.omp_set_num_threads(torch.get_num_threads())
    generator = torch.Generator().manual_seed(1)
    if kind == "PQ":
        index: Any = faiss.IndexPQ(D, M, 8, faiss.METRIC_INNER_PRODUCT)
        faiss.copy_array_to_vector(torch.randn(K * D, generator=generator).numpy(), index.pq.centroids)
    else:
        plain = faiss.AdditiveQuantizer.ST_LUT_nonorm
        index = faiss.IndexResidualQuantizer(D, M, 8, faiss.METRIC_INNER_PRODUCT, plain)
        index.rq.max_beam_size = 1
        faiss.copy_array_to_vector(torch.randn(M * K * D, generator=generator).numpy(), index.rq.codebooks)
        index.rq.is_trained = True
        index.rq.compute_codebook_tables()
    index.is_trained = True
    return index


def empty_turbovec(device: str) -> Any:
    if device != "cpu":
        raise NotImplementedError("turbovec runs on the CPU only")
    os.environ.setdefault("RAYON_NUM_THREADS", str(torch.get_num_threads()))  # read once, when its threads start
    from turbovec import IdMapIndex

    return IdMapIndex(dim=D, bit_width=4)


def ours_add(N: int, device: str) -> Callable[[], drq_fast.Index]:
    x, index = inputs(N), empty(device)

    def run() -> drq_fast.Index:
        index.remove(index.ids)
        for part in x.split(ADDED):
            index.add(part)
        return index

    return run


def faiss_add(kind: str, N: int, device: str) -> Callable[[], None]:
    parts, index = [part.numpy() for part in inputs(N).split(ADDED)], empty_faiss(kind, device)

    def run() -> None:
        index.reset()
        for part in parts:
            index.add(part)

    return run


def faiss_pq_add(**sizes: Any) -> Callable[[], None]:
    return faiss_add("PQ", **sizes)


def faiss_rq_add(**sizes: Any) -> Callable[[], None]:
    return faiss_add("RQ", **sizes)


def turbovec_add(N: int, device: str) -> Callable[[], Any]:
    parts, ids = [part.numpy() for part in inputs(N).split(ADDED)], np.arange(N, dtype=np.uint64)

    def run() -> Any:
        index = empty_turbovec(device)
        for n, part in enumerate(parts):
            index.add_with_ids(part, ids[n * ADDED : n * ADDED + len(part)])
        return index

    empty_turbovec(device)
    return run


def defined_codes(x: Tensor, index: drq_fast.Index) -> Tensor:
    """The codes [N, M] of x by the definition."""
    return functional.encode(x, index.codec.codebook.cpu(), index.codec.scale.cpu(), backend="torch")


def holds_the_codes_of_x(index: drq_fast.Index, N: int, device: str) -> bool:
    """One row in 2,000 may differ: two codewords that rounding cannot tell apart."""
    codes = defined_codes(inputs(N), index)
    return len(index) == N and float((index.codes.cpu() == codes).all(dim=1).float().mean()) > 0.9995


def batches(N: int, count: int) -> Iterator[np.ndarray]:
    """Numbers in 0..N-1, `count` at a time, in an order in which every one comes once before one comes again."""
    parts = np.split(np.random.default_rng(0).permutation(N), N // count)
    return itertools.cycle(parts)


def ours_replace(N: int, count: int, own_ids: bool, device: str) -> Callable[[], drq_fast.Index]:
    """The ids that the index gives out, or always the same ones."""
    index, x, rows = empty(device), inputs(count), batches(N, count)
    ids = torch.arange(N)
    index.add_codes(torch.randint(K, (N, M), dtype=torch.uint8))

    def run() -> drq_fast.Index:
        some = torch.from_numpy(next(rows))
        index.remove(ids[some])
        ids[some] = index.add(x, ids=ids[some] if own_ids else None)
        return index

    return run


def faiss_pq_replace(N: int, count: int, own_ids: bool, device: str) -> Callable[[], None]:
    """It has no ids: the vectors behind a removed one move up."""
    index, x, positions = empty_faiss("PQ", device), inputs(count).numpy(), batches(N, count)
    import faiss

    faiss.copy_array_to_vector(np.random.default_rng(0).integers(0, 256, N * M, dtype=np.uint8), index.codes)
    index.ntotal = N

    def run() -> None:
        index.remove_ids(np.sort(next(positions)))
        index.add(x)

    return run


def turbovec_replace(N: int, count: int, own_ids: bool, device: str) -> Callable[[], None]:
    index, x, ids = empty_turbovec(device), inputs(count).numpy(), batches(N, count)
    index.add_with_ids(inputs(N).numpy(), np.arange(N, dtype=np.uint64))

    def run() -> None:
        some = next(ids).astype(np.uint64)
        for one in some.tolist():
            index.remove(one)
        index.add_with_ids(x, some)

    return run


def still_holds_all(index: drq_fast.Index, N: int, count: int, own_ids: bool, device: str) -> bool:
    """As many ids as before, and the newest vectors are the codes of what was added last."""
    newest = index.codes[-count:].cpu()
    codes = defined_codes(inputs(count), index)
    return len(index.ids.unique()) == N and float((newest == codes).all(dim=1).float().mean()) > 0.99


def ours_load(N: int, device: str, mmap: bool = False) -> Callable[[], drq_fast.Index]:
    """Verifies the checksums of what it reads."""
    folder = tempfile.TemporaryDirectory()
    path, index = Path(folder.name) / "index.drq", empty(device)
    index.add_codes(codes_of(N))
    index.save(path)
    return lambda folder=folder: drq_fast.Index.load(path, mmap=mmap, device=device)


def ours_mapped(**sizes: Any) -> Callable[[], drq_fast.Index]:
    return ours_load(**sizes, mmap=True)


def codes_of(N: int) -> Tensor:
    return torch.randint(K, (N, M), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def faiss_pq_load(N: int, device: str) -> Callable[[], Any]:
    index, folder = empty_faiss("PQ", device), tempfile.TemporaryDirectory()
    import faiss

    faiss.copy_array_to_vector(codes_of(N).flatten().numpy(), index.codes)
    index.ntotal, path = N, f"{folder.name}/index.faiss"
    faiss.write_index(index, path)
    return lambda folder=folder: faiss.read_index(path)


def turbovec_load(N: int, device: str) -> Callable[[], Any]:
    index, folder = empty_turbovec(device), tempfile.TemporaryDirectory()
    index.add_with_ids(inputs(N).numpy(), np.arange(N, dtype=np.uint64))
    path = f"{folder.name}/index.tvim"
    index.write(path)
    return lambda folder=folder: type(index).load(path)


def holds_the_codes_saved(index: drq_fast.Index, N: int, device: str) -> bool:
    return torch.equal(index.codes.cpu(), codes_of(N))


ADD = {"faiss IndexPQ": faiss_pq_add, "faiss RQ, beam 1": faiss_rq_add, "turbovec": turbovec_add}
REPLACE = {"faiss IndexPQ": faiss_pq_replace, "turbovec": turbovec_replace}
LOAD = {"ours, mmap=True": ours_mapped, "faiss IndexPQ": faiss_pq_load, "turbovec": turbovec_load}


@pytest.mark.quick
def bench_add(compare: Callable[..., None]) -> None:
    N = 100_000
    compare(ours_add, ADD, holds_the_codes_of_x, sizes={"N": N}, work=N, unit="vectors")


@pytest.mark.parametrize("own_ids", [pytest.param(False, marks=pytest.mark.quick), True])
def bench_remove_and_add(compare: Callable[..., None], own_ids: bool) -> None:
    sizes = {"N": 1_000_000, "count": 1000, "own_ids": own_ids}
    compare(ours_replace, REPLACE, still_holds_all, sizes=sizes, work=1000, unit="vectors")


@pytest.mark.quick
def bench_load(compare: Callable[..., None]) -> None:
    N = 1_000_000
    compare(ours_load, LOAD, holds_the_codes_saved, sizes={"N": N}, work=N, unit="vectors")
