"""Training, beside what others need for the same: the loss and its gradients by x, codebook and w; both
approximations, the errors after every level, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from drq_fast import functional

GAMMA = 1.0


def inputs(N: int, D: int, K: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """x [N, D], codebook [K, D] and w, all with gradients."""
    generator = torch.Generator().manual_seed(0)
    x, codebook = torch.randn(N, D, generator=generator), 0.3 * torch.randn(K, D, generator=generator)
    x, codebook, w = (t.to(device).requires_grad_() for t in (x, codebook, torch.tensor(0.8)))
    return x, codebook, w


def powers(w: Tensor, M: int) -> Tensor:
    return w ** torch.arange(M, device=w.device)


def loss(x: Tensor, codebook: Tensor, w: Tensor, M: int, backend: str | None = None) -> Tensor:
    return functional.loss(x, codebook, powers(w, M), gamma=GAMMA, backend=backend).loss


def approximations(x: Tensor, codebook: Tensor, w: Tensor, M: int, backend: str | None = None) -> Tensor:
    """A scalar with gradients to both approximations."""
    soft, hard, _ = functional.quantize(x, codebook, powers(w, M), gamma=GAMMA, backend=backend)
    return (soft * x).sum() + hard.sum()


def errors(x: Tensor, codebook: Tensor, w: Tensor, M: int, backend: str | None = None) -> Tensor:
    """A scalar whose gradients to the errors differ from row to row."""
    found = functional.distortion(x, codebook, powers(w, M), gamma=GAMMA, backend=backend)
    return (found.hard * found.soft).sum() + found.joint.sum()


OPERATIONS = {"loss": loss, "quantize": approximations, "distortion": errors}


def step(M: int, op: str = "loss", backend: str | None = None, **sizes: Any) -> Callable[[], list[Tensor]]:
    """Forward and backward to x, codebook and w."""
    leaves = inputs(**sizes)
    return lambda: list(torch.autograd.grad(OPERATIONS[op](*leaves, M, backend), leaves))


def ours(**sizes: Any) -> Callable[[], list[Tensor]]:
    return step(**sizes)


def plain_torch(**sizes: Any) -> Callable[[], list[Tensor]]:
    return step(**sizes, backend="torch")


def compiled_torch(M: int, op: str = "loss", **sizes: Any) -> Callable[[], list[Tensor]]:
    """torch.compile of the reference, which is what a compiled layer runs."""
    leaves, compiled = inputs(**sizes), torch.compile(OPERATIONS[op])
    return lambda: list(torch.autograd.grad(compiled(*leaves, M, "torch"), leaves))


def products_alone(N: int, D: int, M: int, K: int, device: str) -> Callable[[], None]:
    """Three products of N K D and 2 M of N K K, into memory that is there already."""
    x, codebook, _ = (t.detach() for t in inputs(N, D, K, device))
    scores, dx, dcodebook = x.new_empty(N, K), torch.empty_like(x), torch.empty_like(codebook)
    gram, dgram, rows = codebook @ codebook.T, x.new_empty(K, K), 1024
    soft, product = torch.rand(rows, K, device=device), x.new_empty(rows, K)

    def run() -> None:
        torch.mm(x, codebook.T, out=scores)
        torch.mm(scores, codebook, out=dx)
        torch.mm(scores.T, x, out=dcodebook)
        for _ in range(N * M // rows):
            torch.mm(soft, gram, out=product)
            torch.mm(soft.T, product, out=dgram)

    return run


def residual_vq(N: int, D: int, M: int, K: int, device: str) -> Callable[[], Tensor]:
    """ResidualVQ in training: forward with its EMA update, and backward of the commitment loss to x."""
    x, _, _ = inputs(N, D, K, device)
    from vector_quantize_pytorch import ResidualVQ

    layer = ResidualVQ(dim=D, codebook_size=K, num_quantizers=M, shared_codebook=True).train().to(device)
    return lambda: torch.autograd.grad(layer(x[None])[2].sum(), x)[0]


def agrees(gradients: list[Tensor], N: int, D: int, M: int, K: int, device: str, op: str = "loss") -> bool:
    """dx within 1e-4 of the float64 reference, in norm, on the rows where both chose the same codes; dw within 1e-2."""
    x, codebook, w = inputs(N, D, K)
    wide = tuple(t.detach().double().requires_grad_() for t in (x, codebook, w))
    codes, exact = (functional.encode(*t[:2], powers(t[2], M)) for t in ((x, codebook, w), wide))
    same = (codes == exact).all(dim=1)
    dx, _, dw = torch.autograd.grad(OPERATIONS[op](*wide, M, "torch"), wide)
    close = (gradients[0].cpu()[same] - dx[same]).norm() <= 1e-4 * dx.norm()
    near = (gradients[2].cpu() - dw).abs() <= 1e-2 * dw.abs()
    return bool(close) and bool(near) and float(same.float().mean()) > 0.99


PEERS: dict[str, Callable[..., Callable[[], object]]] = {
    "the products alone": products_alone,
    "plain torch": plain_torch,
    "vector-quantize-pytorch ResidualVQ": residual_vq,
}
COMPILED = {"plain torch": plain_torch, "torch.compile of it": compiled_torch}
SHAPES = [  # D, M, K: one of them changes at a time
    pytest.param(1024, 4, 256, marks=pytest.mark.quick),
    *((D, 4, 256) for D in (64, 128, 512, 2048)),
    *((1024, M, 256) for M in (1, 2, 8, 16)),
    *((1024, 4, K) for K in (16, 64, 1024)),
]


@pytest.mark.parametrize(("D", "M", "K"), SHAPES)
def bench_loss(compare: Callable[..., None], D: int, M: int, K: int) -> None:
    N = 2048
    compare(ours, PEERS, agrees, sizes={"N": N, "D": D, "M": M, "K": K}, work=N, unit="vectors")


@pytest.mark.parametrize("op", OPERATIONS)
def bench_compiled(compare: Callable[..., None], op: str) -> None:
    N = 2048
    sizes = {"N": N, "D": 1024, "M": 4, "K": 256, "op": op}
    compare(ours, COMPILED, agrees, sizes=sizes, work=N, unit="vectors")
