"""A training step, K=256: the loss and its gradients by x, codebook and scale, beside what others need for the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drq_fast import functional

K = 256
GAMMA = 1.0


def inputs(N: int, D: int, M: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, D], codebook [K, D], scale [M], all with gradients."""
    generator = torch.Generator().manual_seed(0)
    x, codebook = torch.randn(N, D, generator=generator), 0.3 * torch.randn(K, D, generator=generator)
    return x.requires_grad_(), codebook.requires_grad_(), (0.8 ** torch.arange(M)).requires_grad_()


def step(leaves: tuple[Tensor, ...], backend: str | None) -> list[Tensor]:
    loss = functional.loss(*leaves, gamma=GAMMA, backend=backend).loss
    return list(torch.autograd.grad(loss, leaves))


def ours(N: int, D: int, M: int) -> Callable[[], list[Tensor]]:
    leaves = inputs(N, D, M)
    return lambda: step(leaves, None)


def plain_torch(N: int, D: int, M: int) -> Callable[[], list[Tensor]]:
    leaves = inputs(N, D, M)
    return lambda: step(leaves, "torch")


def products_alone(N: int, D: int, M: int) -> Callable[[], None]:
    """Three products of N K D and 2 M of N K K, into memory that is there already."""
    x, codebook, _ = (t.detach() for t in inputs(N, D, M))
    scores, dx, dcodebook = torch.empty(N, K), torch.empty(N, D), torch.empty(K, D)
    gram, dgram, rows = codebook @ codebook.T, torch.empty(K, K), 1024
    soft, product = torch.rand(rows, K), torch.empty(rows, K)

    def run() -> None:
        torch.mm(x, codebook.T, out=scores)
        torch.mm(scores, codebook, out=dx)
        torch.mm(scores.T, x, out=dcodebook)
        for _ in range(N * M // rows):
            torch.mm(soft, gram, out=product)
            torch.mm(soft.T, product, out=dgram)

    return run


def residual_vq(N: int, D: int, M: int) -> Callable[[], Tensor]:
    """ResidualVQ in training: forward with its EMA update, and backward of the commitment loss to x."""
    x, _, _ = inputs(N, D, M)
    from vector_quantize_pytorch import ResidualVQ

    layer = ResidualVQ(dim=D, codebook_size=K, num_quantizers=M, shared_codebook=True).train()
    return lambda: torch.autograd.grad(layer(x[None])[2].sum(), x)[0]


def agrees(gradients: list[Tensor], N: int, D: int, M: int) -> bool:
    """dx within 1e-4 of the float64 reference, in norm, on the rows where both chose the same codes."""
    leaves = inputs(N, D, M)
    wide = tuple(t.detach().double().requires_grad_() for t in leaves)
    codes = functional.loss(*leaves, gamma=GAMMA).codes
    exact = functional.loss(*wide, gamma=GAMMA, backend="torch")
    same = (codes == exact.codes).all(dim=1)
    dx, _, dscale = torch.autograd.grad(exact.loss, wide)
    close = (gradients[0][same] - dx[same]).norm() <= 1e-4 * dx.norm()
    return (
        bool(close)
        and float(same.float().mean()) > 0.99
        and bool((gradients[2] - dscale).norm() < 1e-2 * dscale.norm())
    )


PEERS = {
    "the products alone": products_alone,
    "plain torch": plain_torch,
    "vector-quantize-pytorch ResidualVQ": residual_vq,
}


@pytest.mark.parametrize(("N", "D", "M"), [(4096, 2048, 4), (4096, 2048, 8), (16384, 128, 4)])
def bench_loss(compare: Callable[..., None], N: int, D: int, M: int) -> None:
    compare(ours, PEERS, agrees, sizes={"N": N, "D": D, "M": M}, work=N, unit="vectors")
