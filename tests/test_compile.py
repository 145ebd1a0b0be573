"""The layer under torch.compile, with fullgraph=True, beside the layer itself."""

from __future__ import annotations

import copy

import pytest
import torch

from drq_fast import RecurrentQuantizer

OPTIONS = [{}, {"update": "gradient"}, {"loss": "paper"}, {"gradient": "soft", "scale": "per_level"}]


def data(N: int = 600, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, 6, generator=generator) @ torch.randn(6, 6, generator=generator) + 3


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", OPTIONS)
def test_compiles_without_graph_breaks(backend, options):
    torch._dynamo.reset()
    layer = RecurrentQuantizer(6, 16, 3, **options)
    layer.initialise(data())
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    eager = copy.deepcopy(layer)
    for step in range(3):
        x, y = data(40, seed=step).requires_grad_(), data(40, seed=step).requires_grad_()
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
