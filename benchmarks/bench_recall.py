"""Recall against speed of `Index.search`, on clustered unit vectors of falling variance, as embeddings are.

Ours is one index of 64-bit codes, searched at three lengths; the peers are trained for each length.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import drq_fast
from drq_fast import functional
from drq_fast.retrieval import evaluate

N, Q, D, TRAIN = 100_000, 1000, 64, 10_000


@functools.cache
def inputs() -> tuple[Tensor, Tensor]:
    """x [N, D], query [Q, D]."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(1000, D, generator=generator)
    vectors = centres[torch.randint(1000, (N + Q,), generator=generator)] + torch.randn(N + Q, D, generator=generator)
    rotation = torch.linalg.qr(torch.randn(D, D, generator=generator)).Q
    vectors = vectors * (torch.arange(1, D + 1) ** -0.5) @ rotation
    vectors = torch.nn.functional.normalize(vectors, dim=1)
    return vectors[:N], vectors[N:]


def built(name: str) -> Path:
    """Where the processes of one run share what one of them has built."""
    return Path(os.environ["BENCH_FOLDER"]) / name.replace(",", "-")


@functools.cache
def index(device: str) -> drq_fast.Index:
    x, _ = inputs()
    if built("ours").exists():
        return drq_fast.Index.load(built("ours"), device=device)
    layer = drq_fast.RecurrentQuantizer(D, codewords=256, levels=8)
    layer.fit(x[:TRAIN], seed=0)
    made = drq_fast.Index(layer, metric="l2", device=device)
    made.add(x, beam=16)
    made.save(built("ours"))
    return made


def ours(bits: int, k: int, device: str) -> Callable[[], Tensor]:
    filled, query = index(device), inputs()[1].to(device)
    return lambda: filled.search(query, k=k, levels=bits // 8).ids


def faiss_index(recipe: str, k: int, device: str) -> Callable[[], Tensor]:
    x, query = inputs()
    import faiss  # after torch: each brings an OpenMP runtime, and crashes have depended on the order

    if device != "cpu":
        raise NotImplementedError("faiss-cpu runs on the CPU only")
    faiss.omp_set_num_threads(torch.get_num_threads())
    if built(recipe).exists():
        made = faiss.read_index(str(built(recipe)))
    else:
        made = faiss.index_factory(D, recipe)
        made.train(x[:TRAIN].numpy())
        made.add(x.numpy())
        faiss.write_index(made, str(built(recipe)))
    queries = query.numpy()
    return lambda: torch.from_numpy(made.search(queries, k)[1])


def faiss_pq(bits: int, **rest: Any) -> Callable[[], Tensor]:
    return faiss_index(f"PQ{bits // 8}x8", **rest)


def faiss_opq_fast_scan(bits: int, **rest: Any) -> Callable[[], Tensor]:
    return faiss_index(f"OPQ{bits // 4},PQ{bits // 4}x4fs", **rest)


def faiss_rq(bits: int, **rest: Any) -> Callable[[], Tensor]:
    """Beside its code every vector has 8 bits for its norm."""
    return faiss_index(f"RQ{bits // 8}x8_Nqint8", **rest)


def turbovec(width: int, k: int, device: str, **_: Any) -> Callable[[], Tensor]:
    """`width` bits for each dimension, and a factor of 32."""
    x, query = inputs()
    if device != "cpu":
        raise NotImplementedError("turbovec runs on the CPU only")
    os.environ.setdefault("RAYON_NUM_THREADS", str(torch.get_num_threads()))  # read once, when its threads start
    from turbovec import TurboQuantIndex

    made = TurboQuantIndex(dim=D, bit_width=width)
    made.add(x.numpy())
    made.prepare()
    queries = query.numpy()
    return lambda: torch.from_numpy(made.search(queries, k)[1].astype("int64"))


def turbovec_2(**sizes: Any) -> Callable[[], Tensor]:
    return turbovec(2, **sizes)


def turbovec_4(**sizes: Any) -> Callable[[], Tensor]:
    return turbovec(4, **sizes)


@functools.cache
def truth() -> Tensor:
    """The nearest vector of each query [Q]."""
    x, query = inputs()
    return torch.cdist(query.double(), x.double()).argmin(dim=1)


def recall(ids: Tensor, **_: Any) -> dict[str, float]:
    """How often the nearest vector is among those found."""
    return {f"recall@{ids.shape[1]}": evaluate.recall(ids.cpu(), truth()[:, None])}


def agrees(ids: Tensor, bits: int, k: int, device: str) -> bool:
    """No vector that was left out is nearer, decoded in float64, than one that was found, for the first 20 queries."""
    made, query = index(device), inputs()[1][:20].double()
    L = bits // 8
    codebook, scale, offset = (t.cpu().double() for t in made.codec.tensors())
    decoded = functional.decode(made.codes.cpu(), codebook, scale, offset=offset, levels=L, backend="torch")
    distances = torch.cdist(query, decoded)
    found, best = distances.gather(1, ids[:20].cpu()), distances.topk(k, largest=False).values
    return bool((found - best).abs().max() < 1e-4 * best.max())


PEERS = {"faiss PQ": faiss_pq, "faiss OPQ, PQFastScan": faiss_opq_fast_scan, "faiss RQ": faiss_rq}
LONGER = {"turbovec, 160 bits": turbovec_2, "turbovec, 288 bits": turbovec_4}


@pytest.mark.parametrize("bits", [16, pytest.param(32, marks=pytest.mark.quick), 64])
def bench_recall(compare: Callable[..., None], bits: int) -> None:
    peers = PEERS | (LONGER if bits == 64 else {})
    compare(ours, peers, agrees, sizes={"bits": bits, "k": 10}, work=N * Q, unit="codes", quality=recall)
