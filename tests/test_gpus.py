"""What only a GPU can show: passes that are captured in a CUDA graph, and a second GPU beside the current one."""

from __future__ import annotations

import copy

import pytest
import torch

import drq_fast

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two CUDA devices")
SETTINGS = [{}, {"codebooks": 3}, {"update": "gradient"}, {"loss": "paper"}, {"gradient": "soft"}]


def started(device: str, **options: object) -> drq_fast.RecurrentQuantizer:
    layer = drq_fast.RecurrentQuantizer(16, 64, 3, **options)
    layer.initialise(torch.randn(600, 16, generator=torch.Generator().manual_seed(0)), seed=0)
    return layer.to(device)


def step(layer: drq_fast.RecurrentQuantizer, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Results and gradients of a forward and a backward pass."""
    out = layer(x)
    inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]
    return out.quantized, out.codes, out.loss, *torch.autograd.grad(out.loss + out.quantized.square().sum(), inputs)


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_a_step_is_captured_in_a_graph_and_replayed(options):
    batches = torch.randn(6, 50, 16, generator=torch.Generator().manual_seed(1)).cuda()
    layer, x = started("cuda", **options), batches[0].clone().requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(layer, x)
    torch.cuda.current_stream().wait_stream(side)
    eager, graph = copy.deepcopy(layer), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(layer, x)
    for batch in batches[1:]:
        with torch.no_grad():
            x.copy_(batch)
        graph.replay()
        expected = step(eager, batch.clone().requires_grad_())
        for a, b in zip([*found, *layer.buffers()], [*expected, *eager.buffers()], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@two
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_a_layer_on_another_device_than_the_current_one(options):
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(1))
    assert torch.cuda.current_device() == 0
    results = [step(started(device, **options), x.to(device).requires_grad_()) for device in ("cuda:0", "cuda:1")]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-5, atol=1e-6)


@two
def test_indexes_of_two_devices_equal_one():
    x = torch.randn(5000, 16, generator=torch.Generator().manual_seed(2))
    codec = started("cpu").codec()
    whole = drq_fast.Index(codec, device="cuda:0")
    whole.add(x)
    results = []
    for part in range(2):
        index = drq_fast.Index(codec, device=f"cuda:{part}")
        index.add(x[part::2], ids=torch.arange(part, 5000, 2))
        results.append(index.search(x[:20], k=30))
    merged, expected = drq_fast.merge(results, k=30), whole.search(x[:20], k=30)
    assert torch.equal(merged.ids.cpu(), expected.ids.cpu())
    assert torch.equal(merged.scores.cpu(), expected.scores.cpu())
