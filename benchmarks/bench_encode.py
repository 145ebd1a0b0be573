"""Encoding, K=256, M=4: ours beside the reference, the bare matrix product and other people's residual quantizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from drq_fast import fit, reference

K, M = 256, 4


def inputs(N: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, D], codebook [K, D], scale [M]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator)
    codebook = 0.3 * torch.randn(K, D, generator=generator)
    return x, codebook, 0.7 ** torch.arange(M)


def ours(N: int, D: int) -> Callable[[], Tensor]:
    x, codebook, scale = inputs(N, D)
    return lambda: fit.encode(x, codebook, scale)


def ours_beam_16(N: int, D: int) -> Callable[[], Tensor]:
    x, codebook, scale = inputs(N, D)
    return lambda: fit.encode(x, codebook, scale, beam=16)


def product_alone(N: int, D: int) -> Callable[[], Tensor]:
    """x C^T into memory that is there already: what no encoder can do without."""
    x, codebook, _ = inputs(N, D)
    out = torch.empty(N, K)
    return lambda: torch.mm(x, codebook.T, out=out)


def plain_torch(N: int, D: int) -> Callable[[], Tensor]:
    x, codebook, scale = inputs(N, D)
    return lambda: reference.encode(x, codebook, scale)


def faiss_rq(N: int, D: int, use_beam_LUT: int = 0, beam: int = 1) -> Callable[[], Any]:
    """faiss with the same codewords at every level (not trained), so that it finds the same codes."""
    x, codebook, scale = inputs(N, D)
    import faiss  # after torch: each brings an OpenMP runtime, and crashes have depended on the order

    faiss.omp_set_num_threads(torch.get_num_threads())
    quantizer: Any = faiss.ResidualQuantizer(D, M, 8)
    quantizer.max_beam_size = beam
    quantizer.use_beam_LUT = use_beam_LUT
    faiss.copy_array_to_vector((scale[:, None, None] * codebook).flatten().numpy(), quantizer.codebooks)
    quantizer.is_trained = True
    quantizer.compute_codebook_tables()
    array = x.numpy()
    return lambda: quantizer.compute_codes(array)


def faiss_rq_lut(N: int, D: int) -> Callable[[], Any]:
    """faiss in score space: products with the codewords are taken once, then tables of codeword products."""
    return faiss_rq(N, D, use_beam_LUT=1)


def faiss_rq_beam_5(N: int, D: int) -> Callable[[], Any]:
    return faiss_rq(N, D, use_beam_LUT=1, beam=5)


def residual_vq(N: int, D: int) -> Callable[[], Tensor]:
    """The eval forward of ResidualVQ: it has no level scale, and no way to encode without the quantized vectors."""
    x, codebook, _ = inputs(N, D)
    from vector_quantize_pytorch import ResidualVQ

    layer = ResidualVQ(dim=D, codebook_size=K, num_quantizers=M, shared_codebook=True).eval()
    layer.layers[0]._codebook.embed.data.copy_(codebook[None])
    return torch.no_grad()(lambda: layer(x[None])[1])


def agrees(codes: Tensor, N: int, D: int) -> bool:
    """At every level, given the codes before it, ours [N, M] is as near as what the float64 reference chooses."""
    h, codebook, scale = (tensor.double() for tensor in inputs(N, D))
    tolerance = 1e-6 * h.square().sum(dim=1)
    for m in range(M):
        best = reference.encode(h, codebook, scale[m : m + 1])[:, 0]
        best_error = (h - scale[m] * codebook[best.long()]).square().sum(dim=1)
        h = h - scale[m] * codebook[codes[:, m].long()]
        if bool((h.square().sum(dim=1) > best_error + tolerance).any()):
            return False
    return codes.shape == (N, M) and codes.dtype == torch.uint8


def is_no_worse_than_greedy(codes: Tensor, N: int, D: int) -> bool:
    """The squared error summed over all prefixes and vectors, which is what a beam minimises."""
    x, codebook, scale = inputs(N, D)

    def error(found: Tensor) -> float:
        decoded = (reference.decode(found, codebook, scale, levels=m) for m in range(1, M + 1))
        return sum(float((x - x_hat).square().sum()) for x_hat in decoded)

    return codes.shape == (N, M) and error(codes) <= error(reference.encode(x, codebook, scale))


PEERS = {
    "the product alone": product_alone,
    "plain torch": plain_torch,
    "faiss RQ, beam 1": faiss_rq,
    "faiss RQ, beam 1, LUT": faiss_rq_lut,
    "vector-quantize-pytorch ResidualVQ": residual_vq,
}


@pytest.mark.parametrize(("N", "D"), [(32768, 128), (16384, 2048)])
def bench_encode(compare: Callable[..., None], N: int, D: int) -> None:
    compare(ours, PEERS, agrees, sizes={"N": N, "D": D}, work=N, unit="vectors")


def bench_encode_beam_16(compare: Callable[..., None]) -> None:
    peers = {"faiss RQ, beam 5, LUT": faiss_rq_beam_5}
    sizes = {"N": 4096, "D": 2048}
    compare(ours_beam_16, peers, is_no_worse_than_greedy, sizes=sizes, work=4096, unit="vectors")
