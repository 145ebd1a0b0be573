"""A training step of the layer, `layer(x)` and `loss.backward()`, beside what others need for the same.

The gradients are those of x, as in a network, and of all parameters of the layer. `bench_step` has the default loss,
whose step changes the running averages of the codebook; the others have loss="paper".
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import drq_fast

Gradients = dict[str, Tensor]


def inputs(N: int, D: int, device: str = "cpu") -> Tensor:
    """x [N, D], 1000 clusters, with a gradient."""
    generator = torch.Generator().manual_seed(0)
    x, centres = 0.5 * torch.randn(N, D, generator=generator), torch.randn(1000, D, generator=generator)
    x += centres[torch.randint(1000, (N,), generator=generator)]
    return x.to(device).requires_grad_()


def initialised(
    N: int, D: int, M: int, K: int, device: str = "cpu", gradient: str = "straight_through", loss: str = "paper"
) -> drq_fast.RecurrentQuantizer:
    """A layer initialised with x, in training mode."""
    path = (
        Path(os.environ["BENCH_FOLDER"]) / f"quantize {D} {M} {K} {gradient} {loss}"
    )  # the processes of one run share it
    if not path.exists():
        layer = drq_fast.RecurrentQuantizer(D, K, M, gradient=gradient, loss=loss)
        layer.initialise(inputs(N, D).detach(), seed=0)
        layer.save(path)
    return drq_fast.RecurrentQuantizer.load(path, device=device).train()


def step(forward: Callable[..., Any], layer: drq_fast.RecurrentQuantizer, x: Tensor) -> Gradients:
    """One step without an optimiser. With the soft gradient the rest of the network has a gradient for `quantized`."""
    x.grad = None
    layer.zero_grad()
    output = forward(x)
    loss = output.loss if layer.gradient != "soft" else output.loss + (output.quantized * x.detach()).sum()
    loss.backward()
    return {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters() if p.grad is not None}}


def ours(N: int, D: int, device: str, **sizes: Any) -> Callable[[], Gradients]:
    x, layer = inputs(N, D, device), initialised(N, D, device=device, **sizes)
    return lambda: step(layer, layer, x)


def plain_torch(**sizes: Any) -> Callable[[], Gradients]:
    """The same layer with the definition in torch for a backend."""
    return drq_fast.use_backend("torch")(ours(**sizes))


def compiled_torch(N: int, D: int, device: str, **sizes: Any) -> Callable[[], Gradients]:
    """torch.compile of the layer, which then runs the definition in torch."""
    x, layer = inputs(N, D, device), initialised(N, D, device=device, **sizes)
    compiled = torch.compile(layer)
    return lambda: step(compiled, layer, x)


def products_alone(N: int, D: int, M: int, K: int, device: str, loss: str = "paper") -> Callable[[], object]:
    """Three products of N K D and 2 M of N K K, or one of N K D for "squared", into memory that is there already."""
    x, codebook = inputs(N, D, device).detach(), torch.randn(K, D, device=device)
    scores, dx, dcodebook = x.new_empty(N, K), torch.empty_like(x), torch.empty_like(codebook)
    if loss == "squared":
        return lambda: torch.mm(x, codebook.T, out=scores)
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


def residual_vq(N: int, D: int, M: int, K: int, device: str, loss: str = "paper") -> Callable[[], Tensor]:
    """ResidualVQ in training: forward with its EMA update, and backward of the commitment loss to x."""
    x = inputs(N, D, device)
    from vector_quantize_pytorch import ResidualVQ

    layer = ResidualVQ(dim=D, codebook_size=K, num_quantizers=M, shared_codebook=True).train().to(device)
    return lambda: torch.autograd.grad(layer(x[None])[2].sum(), x)[0]


def agrees(gradients: Gradients, N: int, device: str, **sizes: Any) -> bool:
    """dx is that of the definition in float64 within 1e-4, in norm, without one row in 1000; dw, if any, within 1e-2.

    The rows that differ most may have a codeword or a sign of |E_h - E_s| that rounding decides.
    """
    x, layer = inputs(N, sizes["D"]), initialised(N, **sizes)
    layer, x = layer.double(), x.detach().double().requires_grad_()
    with drq_fast.use_backend("torch"):
        exact = step(layer, layer, x)
    errors = (gradients["x"].cpu() - exact["x"]).norm(dim=1).sort().values[: N - N // 1000]
    near = "w" not in exact or bool((gradients["w"].cpu() - exact["w"]).abs() <= 1e-2 * exact["w"].abs())
    return bool(errors.norm() <= 1e-4 * exact["x"].norm()) and near


PEERS: dict[str, Callable[..., Callable[[], object]]] = {
    "the products alone": products_alone,
    "plain torch": plain_torch,
    "vector-quantize-pytorch ResidualVQ": residual_vq,
}
COMPILED = {"plain torch": plain_torch, "torch.compile of it": compiled_torch}
SHAPES = [  # D, M, K: one of them changes at a time
    (1024, 4, 256),
    *((D, 4, 256) for D in (64, 128, 2048)),
    *((1024, M, 256) for M in (1, 8)),
    *((1024, 4, K) for K in (16, 1024)),
]


@pytest.mark.quick
def bench_step(compare: Callable[..., None]) -> None:
    N = 2048
    sizes = {"N": N, "D": 1024, "M": 4, "K": 256, "loss": "squared"}
    compare(ours, PEERS, agrees, sizes=sizes, work=N, unit="vectors")


@pytest.mark.parametrize(("D", "M", "K"), SHAPES)
def bench_paper_loss(compare: Callable[..., None], D: int, M: int, K: int) -> None:
    N = 2048
    compare(ours, PEERS, agrees, sizes={"N": N, "D": D, "M": M, "K": K}, work=N, unit="vectors")


@pytest.mark.parametrize("gradient", ["straight_through", "soft"])
def bench_compiled(compare: Callable[..., None], gradient: str) -> None:
    N = 2048
    sizes = {"N": N, "D": 1024, "M": 4, "K": 256, "gradient": gradient}
    compare(ours, COMPILED, agrees, sizes=sizes, work=N, unit="vectors")
