"""Training, K=256, beside what others need for the same: the loss and its gradients by x, codebook and w; both
approximations, the errors after every level, and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drq_fast import functional

K = 256
GAMMA = 1.0


def inputs(N: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, D], codebook [K, D] and w, all with gradients."""
    generator = torch.Generator().manual_seed(0)
    x, codebook = torch.randn(N, D, generator=generator), 0.3 * torch.randn(K, D, generator=generator)
    return x.requires_grad_(), codebook.requires_grad_(), torch.tensor(0.8, requires_grad=True)


def loss(x: Tensor, codebook: Tensor, w: Tensor, M: int, backend: str | None = None) -> Tensor:
    return functional.loss(x, codebook, w ** torch.arange(M), gamma=GAMMA, backend=backend).loss


def approximations(x: Tensor, codebook: Tensor, w: Tensor, M: int, backend: str | None = None) -> Tensor:
    """A scalar with gradients to both approximations."""
    soft, hard, _ = functional.quantize(x, codebook, w ** torch.arange(M), gamma=GAMMA, backend=backend)
    return (soft * x).sum() + hard.sum()


def errors(x: Tensor, codebook: Tensor, w: Tensor, M: int, backend: str | None = None) -> Tensor:
    """A scalar whose gradients to the errors differ from row to row."""
    found = functional.distortion(x, codebook, w ** torch.arange(M), gamma=GAMMA, backend=backend)
    return (found.hard * found.soft).sum() + found.joint.sum()


OPERATIONS = {"loss": loss, "quantize": approximations, "distortion": errors}


def step(op: Callable[..., Tensor], N: int, D: int, M: int, backend: str | None = None) -> Callable[[], list[Tensor]]:
    """Forward and backward to x, codebook and w."""
    leaves = inputs(N, D)
    return lambda: list(torch.autograd.grad(op(*leaves, M, backend), leaves))


def ours(N: int, D: int, M: int, op: str = "loss") -> Callable[[], list[Tensor]]:
    return step(OPERATIONS[op], N, D, M)


def plain_torch(N: int, D: int, M: int, op: str = "loss") -> Callable[[], list[Tensor]]:
    return step(OPERATIONS[op], N, D, M, "torch")


def compiled_torch(N: int, D: int, M: int, op: str = "loss") -> Callable[[], list[Tensor]]:
    """torch.compile of the reference, which is what a compiled layer runs."""
    return step(torch.compile(OPERATIONS[op]), N, D, M, "torch")


def products_alone(N: int, D: int, M: int) -> Callable[[], None]:
    """Three products of N K D and 2 M of N K K, into memory that is there already."""
    x, codebook, _ = (t.detach() for t in inputs(N, D))
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
    x, _, _ = inputs(N, D)
    from vector_quantize_pytorch import ResidualVQ

    layer = ResidualVQ(dim=D, codebook_size=K, num_quantizers=M, shared_codebook=True).train()
    return lambda: torch.autograd.grad(layer(x[None])[2].sum(), x)[0]


def agrees(gradients: list[Tensor], N: int, D: int, M: int, op: str = "loss") -> bool:
    """dx within 1e-4 of the float64 reference, in norm, on the rows where both chose the same codes; dw within 1e-2."""
    x, codebook, w = inputs(N, D)
    wide = tuple(t.detach().double().requires_grad_() for t in (x, codebook, w))
    codes, exact = (functional.encode(*t[:2], t[2] ** torch.arange(M)) for t in ((x, codebook, w), wide))
    same = (codes == exact).all(dim=1)
    dx, _, dw = torch.autograd.grad(OPERATIONS[op](*wide, M, "torch"), wide)
    close = (gradients[0][same] - dx[same]).norm() <= 1e-4 * dx.norm()
    near = (gradients[2] - dw).abs() <= 1e-2 * dw.abs()
    return bool(close) and bool(near) and float(same.float().mean()) > 0.99


PEERS: dict[str, Callable[..., Callable[[], object]]] = {
    "the products alone": products_alone,
    "plain torch": plain_torch,
    "torch.compile of it": compiled_torch,
    "vector-quantize-pytorch ResidualVQ": residual_vq,
}


@pytest.mark.parametrize(("N", "D", "M"), [(4096, 2048, 4), (4096, 2048, 8), (16384, 128, 4)])
def bench_loss(compare: Callable[..., None], N: int, D: int, M: int) -> None:
    compare(ours, PEERS, agrees, sizes={"N": N, "D": D, "M": M}, work=N, unit="vectors")


@pytest.mark.parametrize("op", ["quantize", "distortion"])
@pytest.mark.parametrize(("N", "D"), [(4096, 2048), (16384, 128)])
def bench_parts(compare: Callable[..., None], N: int, D: int, op: str) -> None:
    peers = {"plain torch": plain_torch, "torch.compile of it": compiled_torch}
    compare(ours, peers, agrees, sizes={"N": N, "D": D, "M": 4, "op": op}, work=N, unit="vectors")
