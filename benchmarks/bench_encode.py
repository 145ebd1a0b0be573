"""Encoding: ours beside the reference, the bare matrix product and other people's residual quantizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from drq_fast import fit, reference


def inputs(N: int, D: int, M: int, K: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """x [N, D], codebook [K, D], scale [M]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator)
    codebook = 0.3 * torch.randn(K, D, generator=generator)
    return x.to(device), codebook.to(device), (0.7 ** torch.arange(M)).to(device)


def ours(beam: int = 1, **sizes: Any) -> Callable[[], Tensor]:
    x, codebook, scale = inputs(**sizes)
    return lambda: fit.encode(x, codebook, scale, beam=beam)


def product_alone(**sizes: Any) -> Callable[[], Tensor]:
    """x C^T into memory that is there already: what no encoder can do without."""
    x, codebook, _ = inputs(**sizes)
    out = x.new_empty(len(x), len(codebook))
    return lambda: torch.mm(x, codebook.T, out=out)


def plain_torch(**sizes: Any) -> Callable[[], Tensor]:
    x, codebook, scale = inputs(**sizes)
    return lambda: reference.encode(x, codebook, scale)


def faiss_rq(N: int, D: int, M: int, K: int, device: str, use_beam_LUT: int = 0, beam: int = 1) -> Callable[[], Any]:
    """faiss with the same codewords at every level (not trained), so that it finds the same codes."""
    x, codebook, scale = inputs(N, D, M, K)
    import faiss  # after torch: each brings an OpenMP runtime, and crashes have depended on the order

    if device != "cpu":
        raise NotImplementedError("faiss has residual quantizers for the CPU only")
    faiss.omp_set_num_threads(torch.get_num_threads())
    quantizer: Any = faiss.ResidualQuantizer(D, M, (K - 1).bit_length())
    quantizer.max_beam_size = beam
    quantizer.use_beam_LUT = use_beam_LUT
    faiss.copy_array_to_vector((scale[:, None, None] * codebook).flatten().numpy(), quantizer.codebooks)
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
    x, codebook, _ = inputs(N, D, M, K, device)
    from vector_quantize_pytorch import ResidualVQ

    layer = ResidualVQ(dim=D, codebook_size=K, num_quantizers=M, shared_codebook=True).eval().to(device)
    layer.layers[0]._codebook.embed.data.copy_(codebook[None])
    return torch.no_grad()(lambda: layer(x[None])[1])


def agrees(codes: Tensor, N: int, M: int, K: int, **sizes: Any) -> bool:
    """At every level, given the codes before it, ours [N, M] is as near as what the float64 reference chooses."""
    codes, checked = codes.cpu(), 2048
    h, codebook, scale = (tensor.double() for tensor in inputs(N, M=M, K=K, **(sizes | {"device": "cpu"})))
    h = h[:checked]
    tolerance = 1e-6 * h.square().sum(dim=1)
    for m in range(M):
        best = reference.encode(h, codebook, scale[m : m + 1])[:, 0]
        best_error = (h - scale[m] * codebook[best.long()]).square().sum(dim=1)
        h = h - scale[m] * codebook[codes[:checked, m].long()]
        if bool((h.square().sum(dim=1) > best_error + tolerance).any()):
            return False
    return codes.shape == (N, M) and codes.dtype == (torch.uint8 if K <= 256 else torch.int32)


def is_no_worse_than_greedy(codes: Tensor, beam: int, M: int, device: str, **sizes: Any) -> bool:
    """The squared error summed over all prefixes and vectors, which is what a beam minimises."""
    x, codebook, scale = inputs(M=M, **sizes)

    def error(found: Tensor) -> float:
        decoded = (reference.decode(found, codebook, scale, levels=m) for m in range(1, M + 1))
        return sum(float((x - x_hat).square().sum()) for x_hat in decoded)

    return codes.shape == (len(x), M) and error(codes.cpu()) <= error(reference.encode(x, codebook, scale))


PEERS = {
    "the product alone": product_alone,
    "plain torch": plain_torch,
    "faiss RQ, beam 1": faiss_rq,
    "faiss RQ, beam 1, LUT": faiss_rq_lut,
    "vector-quantize-pytorch ResidualVQ": residual_vq,
}
SHAPES = [  # D, M, K: one of them changes at a time
    pytest.param(512, 4, 256, marks=pytest.mark.quick),
    *((D, 4, 256) for D in (64, 128, 1024, 2048)),
    *((512, M, 256) for M in (1, 2, 8, 16)),
    *((512, 4, K) for K in (16, 64, 1024)),
]


@pytest.mark.parametrize(("D", "M", "K"), SHAPES)
def bench_encode(compare: Callable[..., None], D: int, M: int, K: int) -> None:
    N = 16384
    compare(ours, PEERS, agrees, sizes={"N": N, "D": D, "M": M, "K": K}, work=N, unit="vectors")


def bench_beam(compare: Callable[..., None]) -> None:
    peers = {"faiss RQ, beam 5, LUT": faiss_rq_beam_5}
    sizes = {"N": 4096, "D": 2048, "M": 4, "K": 256, "beam": 16}
    compare(ours, peers, is_no_worse_than_greedy, sizes=sizes, work=4096, unit="vectors")
