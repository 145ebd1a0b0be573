"""Fitting a codec without labels, K=256, M=4: ours beside the training of other people's quantizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drq_fast import fit

K, M = 256, 4


def inputs(N: int, D: int) -> Tensor:
    """x [N, D]: clusters within clusters, so that there is something to find at every level."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator) / 4
    for size in (64, 512):
        x += torch.randn(size, D, generator=generator)[torch.randint(size, (N,), generator=generator)] / 2
    return x


def ours(N: int, D: int) -> Callable[[], fit.Codec]:
    x, omega = inputs(N, D), torch.tensor(fit.default_weights(M))
    return lambda: fit.fit(x, K, M, omega=omega, seed=0)


def quick_start(N: int, D: int) -> Callable[[], fit.Codec]:
    """What `layer.initialise` does."""
    x = inputs(N, D)
    return lambda: fit.fit(x, K, M, rounds=8, beam=1, noise=0.0, seed=0)


def faiss_quantizer(kind: str, N: int, D: int) -> Callable[[], Any]:
    array = inputs(N, D).numpy()
    import faiss  # after torch: each brings an OpenMP runtime, and crashes have depended on the order

    faiss.omp_set_num_threads(torch.get_num_threads())

    def train() -> Any:
        quantizer = getattr(faiss, kind)(D, M, 8)
        quantizer.train(array)
        return quantizer

    return train


def faiss_rq(N: int, D: int) -> Callable[[], Any]:
    """With its default beam of 5: four codebooks for codes of this one length."""
    return faiss_quantizer("ResidualQuantizer", N, D)


def faiss_pq(N: int, D: int) -> Callable[[], Any]:
    return faiss_quantizer("ProductQuantizer", N, D)


def agrees(codec: fit.Codec, N: int, D: int) -> bool:
    """The errors that ours reports are those of its codes in float64, and they fall from level to level."""
    x = inputs(N, D).double()
    codes = fit.encode(x.float(), codec.codebook, codec.scale, codec.offset, beam=16)
    codebook, scale = codec.codebook.double(), codec.scale.double()
    h = x - (0 if codec.offset is None else codec.offset.double())
    total, previous = h.square().sum(), 1.0
    for m, reported in enumerate(codec.errors):
        h = h - scale[m] * codebook[codes[:, m].long()]
        error = float(h.square().sum() / total)
        if abs(error - reported) > 1e-3 * reported or error > previous:
            return False
        previous = error
    return True


PEERS = {"the quick start": quick_start, "faiss RQ, beam 5": faiss_rq, "faiss PQ": faiss_pq}


def bench_fit(compare: Callable[..., None]) -> None:
    N, D = 10_000, 64
    compare(ours, PEERS, agrees, sizes={"N": N, "D": D}, work=N, unit="vectors", rounds=3)
