"""Fitting without labels by `layer.fit`: beside the training of other people's quantizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import drq_fast

Fitted = tuple[drq_fast.RecurrentQuantizer, tuple[float, ...]]  # a layer, and the errors that its fit returned


def inputs(N: int, D: int, **_: Any) -> Tensor:
    """x [N, D]: clusters within clusters, so that there is something to find at every level."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator) / 4
    for size in (64, 512):
        x += torch.randn(size, D, generator=generator)[torch.randint(size, (N,), generator=generator)] / 2
    return x


def ours(N: int, D: int, K: int, M: int, device: str, codebooks: int = 1) -> Callable[[], Fitted]:
    x, layer = inputs(N, D).to(device), drq_fast.RecurrentQuantizer(D, K, M, codebooks=codebooks).to(device)
    return lambda: (layer, layer.fit(x, seed=0))


def quick_start(N: int, D: int, K: int, M: int, device: str, codebooks: int = 1) -> Callable[[], None]:
    """`layer.initialise`, which the first training step calls."""
    x, layer = inputs(N, D).to(device), drq_fast.RecurrentQuantizer(D, K, M, codebooks=codebooks).to(device)
    return lambda: layer.initialise(x, seed=0)


def faiss_quantizer(kind: str, K: int, M: int, device: str, codebooks: int = 1, **sizes: Any) -> Callable[[], Any]:
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


def agrees(fitted: Fitted, **sizes: Any) -> bool:
    """The errors that ours reports are those of its codes in float64, and they fall from level to level."""
    layer, errors = fitted
    x = inputs(**sizes)
    codec, codes = layer.codec().to("cpu"), layer.encode(x, beam=16).cpu().long()
    assert codec.offset is not None
    h, previous = x.double() - codec.offset.double(), 1.0
    total = h.square().sum()
    for m, reported in enumerate(errors):
        h = h - codec.scale[m].double() * codec.words(m)[codes[:, m]].double()
        error = float(h.square().sum() / total)
        if abs(error - reported) > 1e-3 * reported or error > previous:
            return False
        previous = error
    return True


PEERS = {"ours, the quick start": quick_start, "faiss RQ, beam 5": faiss_rq, "faiss PQ": faiss_pq}


@pytest.mark.parametrize(("N", "K"), [pytest.param(4096, 64, marks=pytest.mark.quick), (65_536, 256)])
def bench_fit(compare: Callable[..., None], N: int, K: int) -> None:
    rounds = 1 if N > 10_000 else None
    compare(ours, PEERS, agrees, sizes={"N": N, "D": 64, "K": K, "M": 4}, work=N, unit="vectors", rounds=rounds)


@pytest.mark.parametrize("M", [8, 16])
@pytest.mark.parametrize("D", [64, 128])
def bench_levels_apart(compare: Callable[..., None], D: int, M: int) -> None:
    """A codebook for each level."""
    N, peers = 20_000, {"faiss RQ, beam 5": faiss_rq}
    sizes = {"N": N, "D": D, "K": 256, "M": M, "codebooks": M}
    compare(ours, peers, agrees, sizes=sizes, work=N, unit="vectors", rounds=1)
