"""The layer under torch.compile, with fullgraph=True, beside the layer itself."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import pytest
import torch

from drq_fast import RecurrentQuantizer, functional, use_backend

OPTIONS = [{}, {"update": "gradient"}, {"loss": "paper"}, {"gradient": "soft", "scale": "per_level"}]


def data(N: int = 600, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, 6, generator=generator) @ torch.randn(6, 6, generator=generator) + 3


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", OPTIONS)
def test_compiles_without_graph_breaks(backend, options):
    compare(RecurrentQuantizer(6, 16, 3, **options), backend)


def compare(layer: RecurrentQuantizer, backend: str | Callable, device: str = "cpu") -> None:
    """Three steps of the layer compiled in one graph, beside the same layer without torch.compile."""
    torch._dynamo.reset()
    layer.initialise(data())
    layer.to(device)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    eager = copy.deepcopy(layer)
    for step in range(3):
        x, y = (data(40, seed=step).to(device).requires_grad_() for _ in range(2))
        a, b = compiled(x), eager(y)
        assert torch.equal(a.codes, b.codes)
        torch.testing.assert_close(a.quantized, b.quantized, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(a.loss, b.loss, rtol=1e-4, atol=1e-5)
        (a.loss + a.quantized.square().sum()).backward()
        (b.loss + b.quantized.square().sum()).backward()
        assert (x.grad - y.grad).norm() <= 1e-4 * y.grad.norm()
    for one, other in zip(layer.state_dict().values(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_compiled_forward_of_an_uninitialised_layer_says_what_to_do():
    torch._dynamo.reset()
    compiled = torch.compile(RecurrentQuantizer(6, 16, 3), fullgraph=True, backend="eager")
    said = r"^(RuntimeError: )?RecurrentQuantizer: call layer.initialise\(x\) before a compiled forward\."
    with pytest.raises(RuntimeError, match=said):
        compiled(data())


class Kept:
    """A compiler that runs graphs as they are, and keeps the names of this project's operations in them."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        found = [str(node.target) for node in module.graph.nodes]
        self.names += [name.split(".")[1] for name in found if name.startswith("drq_fast.")]
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)


@pytest.fixture
def device() -> str:
    """Where kernels run: on a GPU, or in the interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("on a CPU kernels run in the interpreter only")
    return "cpu"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["squared_errors", "codeword_sums", "decode"]),
        ({"update": "gradient"}, ["squared_errors", "decode"]),
        ({"loss": "paper"}, ["distortion", "decode"]),
        ({"update": "gradient", "gradient": "soft"}, ["squared_errors", "decode", "quantize"]),
        ({"update": "gradient", "codebooks": 3}, ["squared_errors", "decode"]),
        ({"loss": "paper", "codebooks": 3}, ["quantize", "quantize", "quantize", "decode"]),
    ],
)
def test_compiled_code_calls_the_kernels(device, options, expected):
    kept = Kept()
    with use_backend("triton"):
        compare(RecurrentQuantizer(6, 16, 3, **options), kept, device)
    assert kept.names[: len(expected)] == expected


@pytest.mark.parametrize("beam", [1, 4])
def test_compiled_encode_calls_the_kernels(device, beam):
    torch._dynamo.reset()
    kept, scale = Kept(), torch.tensor([1.0, 0.5, 0.3], device=device)
    x, codebook = data(20).to(device), data(16, seed=1).to(device)
    compiled = torch.compile(functional.encode, fullgraph=True, backend=kept)
    with use_backend("triton"):
        codes = compiled(x, codebook, scale, beam=beam)
    assert kept.names == ["encode"]
    assert torch.equal(codes, functional.encode(x, codebook, scale, beam=beam, backend="torch"))
