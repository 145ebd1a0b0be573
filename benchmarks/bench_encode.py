"""Encoding by `Codec.encode`: beside the definition, the bare matrix product and other people's residual quantizers."""

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
from drq_fast.functional import default_weights

CHECKED = 2048  # vectors whose codes are compared with the definition


@functools.lru_cache(maxsize=1)
def vectors(N: int, D: int) -> Tensor:
    """x [N, D]: 1000 clusters."""
    generator = torch.Generator().manual_seed(0)
    x, centres = 0.5 * torch.randn(N, D, generator=generator), torch.randn(1000, D, generator=generator)
    for part in x.split(1 << 14):  # no second array of this size
        part += centres[torch.randint(1000, (len(part),), generator=generator)]
    return x


def trained(N: int, D: int, M: int, K: int, codebooks: int = 1) -> drq_fast.RecurrentQuantizer:
    """A layer without offset, since the peers have none, initialised with x."""
    path = Path(os.environ["BENCH_FOLDER"]) / f"encode {D} {M} {K} {codebooks}"  # the processes of one run share it
    if not path.exists():
        layer = drq_fast.RecurrentQuantizer(D, K, M, offset=False, codebooks=codebooks)
        layer.initialise(vectors(N, D)[: 1 << 14], seed=0)
        layer.save(path)
    return drq_fast.RecurrentQuantizer.load(path)


def inputs(N: int, D: int, M: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, D], codebook [K, D], scale [M]."""
    codec = trained(N, D, M, K).codec()
    return vectors(N, D), codec.codebook, codec.scale


def ours(device: str, beam: int = 1, **sizes: int) -> Callable[[], Tensor]:
    codec, x = trained(**sizes).codec().to(device), vectors(sizes["N"], sizes["D"]).to(device)
    return lambda: codec.encode(x, beam=beam)


def ours_by_the_layer(device: str, **sizes: int) -> Callable[[], Tensor]:
    """`layer.encode`, which cannot keep C C^T because its parameters may change."""
    layer, x = trained(**sizes).to(device), vectors(sizes["N"], sizes["D"]).to(device)
    return lambda: layer.encode(x)


def product_alone(device: str, **sizes: int) -> Callable[[], Tensor]:
    """x C^T into memory that is there already: what no encoder can do without."""
    x, codebook, _ = (t.to(device) for t in inputs(**sizes))
    out = x.new_empty(len(x), len(codebook))
    return lambda: torch.mm(x, codebook.T, out=out)


def product_in_tiles(device: str, **sizes: int) -> Callable[[], None]:
    """The same with as many rows at a time as ours takes, so that the products stay in cache."""
    x, codebook, _ = (t.to(device) for t in inputs(**sizes))
    rows = (1 << 20) // max(codebook.shape)
    out = x.new_empty(rows, len(codebook))

    def run() -> None:
        for part in x.split(rows):
            torch.mm(part, codebook.T, out=out[: len(part)])

    return run


def plain_torch(device: str, **sizes: int) -> Callable[[], Tensor]:
    x, codebook, scale = (t.to(device) for t in inputs(**sizes))
    return lambda: functional.encode(x, codebook, scale, backend="torch")


def faiss_rq(
    N: int, D: int, M: int, K: int, device: str, use_beam_LUT: int = 0, beam: int = 1, codebooks: int = 1
) -> Callable[[], Any]:
    """faiss with the same codewords at every level (not trained), so that it finds the same codes."""
    x, codec = vectors(N, D), trained(N, D, M, K, codebooks).codec()
    words = torch.cat([scale * codec.words(m) for m, scale in enumerate(codec.scale)])
    import faiss  # after torch: each brings an OpenMP runtime, and crashes have depended on the order

    if device != "cpu":
        raise NotImplementedError("faiss has residual quantizers for the CPU only")
    faiss.omp_set_num_threads(torch.get_num_threads())
    quantizer: Any = faiss.ResidualQuantizer(D, M, (K - 1).bit_length())
    quantizer.max_beam_size = beam
    quantizer.use_beam_LUT = use_beam_LUT
    faiss.copy_array_to_vector(words.flatten().numpy(), quantizer.codebooks)
    quantizer.is_trained = True
    quantizer.compute_codebook_tables()
    array = x.numpy()
    return lambda: quantizer.compute_codes(array)


def faiss_rq_lut(**sizes: Any) -> Callable[[], Any]:
    """faiss in score space: products with the codewords are taken once, then tables of codeword products."""
    return faiss_rq(**sizes, use_beam_LUT=1)


def faiss_rq_beam_5(**sizes: Any) -> Callable[[], Any]:
    return faiss_rq(**(sizes | {"beam": 5}), use_beam_LUT=1)


def residual_vq(N: int, D: int, M: int, K: int, device: str) -> Callable[[], Tensor]:
    """The eval forward of ResidualVQ: it has no level scale, and no way to encode without the quantized vectors."""
    x, codebook, _ = (t.to(device) for t in inputs(N, D, M, K))
    from vector_quantize_pytorch import ResidualVQ

    layer = ResidualVQ(dim=D, codebook_size=K, num_quantizers=M, shared_codebook=True).eval().to(device)
    layer.layers[0]._codebook.embed.data.copy_(codebook[None])
    return torch.no_grad()(lambda: layer(x[None])[1])


def agrees(codes: Tensor, M: int, K: int, device: str, **sizes: int) -> bool:
    """At every level, given the codes before it, ours [N, M] is as near as what the definition chooses in float64."""
    x, *codec = inputs(M=M, K=K, **sizes)
    h, codebook, scale = x[:CHECKED].double(), *(t.double() for t in codec)
    chosen = codes[:CHECKED].cpu().long()
    tolerance = 1e-6 * h.square().sum(dim=1)
    for m in range(M):
        best = functional.encode(h, codebook, scale[m : m + 1], backend="torch")[:, 0]
        best_error = (h - scale[m] * codebook[best.long()]).square().sum(dim=1)
        h = h - scale[m] * codebook[chosen[:, m]]
        if bool((h.square().sum(dim=1) > best_error + tolerance).any()):
            return False
    return codes.shape == (len(x), M) and codes.dtype == (torch.uint8 if K <= 256 else torch.int32)


def is_no_worse_than_greedy(codes: Tensor, beam: int, device: str, **sizes: int) -> bool:
    """The squared errors of all prefixes, weighted as in a beam, added up over the vectors."""
    x, codec = vectors(sizes["N"], sizes["D"]), trained(**sizes).codec()

    def error(found: Tensor) -> float:
        prefixes = enumerate(default_weights(codec.levels), start=1)
        return sum(w * float((x - codec.decode(found, levels=m)).square().sum()) for m, w in prefixes)

    greedy = codec.encode(x)
    return codes.shape == greedy.shape and error(codes.cpu()) <= error(greedy)


PEERS = {
    "the product alone": product_alone,
    "plain torch": plain_torch,
    "faiss RQ, beam 1": faiss_rq,
    "faiss RQ, beam 1, LUT": faiss_rq_lut,
    "vector-quantize-pytorch ResidualVQ": residual_vq,
}
SHAPES = [  # D, M, K: one of them changes at a time
    pytest.param(512, 4, 256, marks=pytest.mark.quick),
    *((D, 4, 256) for D in (64, 128, 2048)),
    *((512, M, 256) for M in (1, 16)),
    *((512, 4, K) for K in (16, 1024)),
]


@pytest.mark.parametrize(("D", "M", "K"), SHAPES)
def bench_encode(compare: Callable[..., None], D: int, M: int, K: int) -> None:
    N = 16384
    own = {"ours, layer.encode": ours_by_the_layer} if (D, M, K) == (512, 4, 256) else {}
    compare(ours, own | PEERS, agrees, sizes={"N": N, "D": D, "M": M, "K": K}, work=N, unit="vectors")


def bench_million(compare: Callable[..., None]) -> None:
    N = 1_000_000
    peers = {"the product alone, in tiles": product_in_tiles}
    compare(ours, peers, agrees, sizes={"N": N, "D": 512, "M": 4, "K": 256}, work=N, unit="vectors")


@pytest.mark.parametrize(
    ("N", "D", "M", "codebooks"), [(4096, 2048, 4, 1), *((16384, 128, 16, codebooks) for codebooks in (1, 2, 16))]
)
def bench_beam(compare: Callable[..., None], N: int, D: int, M: int, codebooks: int) -> None:
    peers = {"faiss RQ, beam 5, LUT": faiss_rq_beam_5}
    sizes = {"N": N, "D": D, "M": M, "K": 256, "beam": 16} | ({"codebooks": codebooks} if codebooks > 1 else {})
    compare(ours, peers, is_no_worse_than_greedy, sizes=sizes, work=N, unit="vectors")
