"""Fitting a codec without labels, M=4: ours beside the training of other people's quantizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from drq_fast import fit

M = 4


def inputs(N: int, D: int, **_: Any) -> Tensor:
    """x [N, D]: clusters within clusters, so that there is something to find at every level."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator) / 4
    for size in (64, 512):
        x += torch.randn(size, D, generator=generator)[torch.randint(size, (N,), generator=generator)] / 2
    return x


def ours(K: int, device: str, **sizes: Any) -> Callable[[], fit.Codec]:
    x, omega = inputs(**sizes).to(device), torch.tensor(fit.default_weights(M), device=device)
    return lambda: fit.fit(x, K, M, omega=omega, seed=0)


def quick_start(K: int, device: str, **sizes: Any) -> Callable[[], fit.Codec]:
    """What `layer.initialise` does."""
    x = inputs(**sizes).to(device)
    return lambda: fit.fit(x, K, M, rounds=8, beam=1, noise=0.0, seed=0)


def faiss_quantizer(kind: str, K: int, device: str, **sizes: Any) -> Callable[[], Any]:
    array = inputs(**sizes).numpy()
    import faiss  # after torch: each brings an OpenMP runtime, and crashes have depended on the order

    if device != "cpu":
        raise NotImplementedError("faiss-cpu runs on the CPU only")
    faiss.omp_set_num_threads(torch.get_num_threads())

    def train() -> Any:
        quantizer = getattr(faiss, kind)(array.shape[1], M, (K - 1).bit_length())
        quantizer.train(array)
        return quantizer

    return train


def faiss_rq(**sizes: Any) -> Callable[[], Any]:
    """With its default beam of 5: four codebooks for codes of this one length."""
    return faiss_quantizer("ResidualQuantizer", **sizes)


def faiss_pq(**sizes: Any) -> Callable[[], Any]:
    return faiss_quantizer("ProductQuantizer", **sizes)


def agrees(codec: fit.Codec, **sizes: Any) -> bool:
    """The errors that ours reports are those of its codes in float64, and they fall from level to level."""
    x = inputs(**sizes).double()
    codec = codec._replace(codebook=codec.codebook.cpu(), scale=codec.scale.cpu(), offset=codec.offset.cpu())
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


PEERS = {"ours, the quick start": quick_start, "faiss RQ, beam 5": faiss_rq, "faiss PQ": faiss_pq}


@pytest.mark.parametrize(("N", "K"), [pytest.param(4096, 64, marks=pytest.mark.quick), (10_000, 256)])
def bench_fit(compare: Callable[..., None], N: int, K: int) -> None:
    compare(ours, PEERS, agrees, sizes={"N": N, "D": 64, "K": K}, work=N, unit="vectors")
