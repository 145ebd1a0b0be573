"""Codebook, scale and offset that follow x: sums by codeword on every backend, the change by hand, the layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drq_fast import RecurrentQuantizer, devices, ema, functional
from drq_fast.backends import native, plain_torch
from drq_fast.backends.native import extension
from drq_fast.backends.types import Parameters

needs_native = pytest.mark.skipif(extension.native is None, reason="the extension is not built")
D, K, M = 6, 16, 3


def data(N: int = 600, seed: int = 0) -> Tensor:
    mix = torch.randn(D, D, generator=torch.Generator().manual_seed(9))
    return torch.randn(N, D, generator=torch.Generator().manual_seed(seed)) @ mix + 3


def started(**options) -> RecurrentQuantizer:
    layer = RecurrentQuantizer(D, K, M, **options)
    layer.initialise(data(), seed=0)
    return layer


def by_hand() -> tuple[Tensor, Tensor, Parameters]:
    """x = 5, codewords 0 and 2, scales 1 and 1/2, offset 1: h is 4, 2, 1."""
    codec = Parameters(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0, 0.5]), torch.tensor([1.0]))
    return torch.tensor([[5.0]]), torch.tensor([[1, 1]]), codec


def test_sums_by_hand():
    x, codes, codec = by_hand()
    sums, mass = plain_torch.codeword_sums(x, codes, codec, torch.ones(1, 2))
    assert sums.tolist() == [[0.0], [1 * 2 + 0.5 * 1]]
    assert mass.tolist() == [0.0, 1 + 0.25]
    # 2 + 2.5 / 1.25 = 4 is what both levels would like: 1 * 4 = h_0 and 0.5 * 4 = h_1.


@needs_native
@pytest.mark.parametrize("isa", extension.supported_isas())
@pytest.mark.parametrize("shape", [(0, 3, 4, 2), (1, 1, 2, 1), (300, 17, 33, 4), (130, 64, 256, 9), (7, 40, 1100, 3)])
def test_native_sums_agree_with_the_definition(codec, monkeypatch, isa, shape):
    monkeypatch.setenv("DRQ_FAST_ISA", isa)
    monkeypatch.setattr(native.squared, "_BLOCK", 4000)  # several blocks
    x, *parameters = codec(*shape)
    parameters = Parameters(*parameters)
    codes = functional.encode_checked(x, parameters, 1, None).long()
    weights = torch.rand(codes.shape, generator=torch.Generator().manual_seed(1))
    weights[1::5] = 0
    x[1::5] = float("nan")
    found = native.codeword_sums(x, codes, parameters, weights)
    wide = Parameters(*(t.double() for t in parameters.tensors()))
    expected = plain_torch.codeword_sums(x.double(), codes, wide, weights.double())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@needs_native
def test_native_sums_depend_neither_on_the_instruction_set_nor_on_the_threads(codec, monkeypatch):
    x, *parameters = codec(500, 37, 20, 4)
    parameters, found, threads = Parameters(*parameters), [], torch.get_num_threads()
    codes = functional.encode_checked(x, parameters, 1, None).long()
    try:
        for isa in extension.supported_isas():
            for count in (1, 2, 3):
                monkeypatch.setenv("DRQ_FAST_ISA", isa)
                torch.set_num_threads(count)
                found.append(native.codeword_sums(x, codes, parameters, torch.ones(500, 4)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, found[0], strict=True))


def change_by_hand(mass: list[float], gain: list[float], left: float = 4.0) -> ema.Change:
    """After a batch of two codes of two codewords: rate 2 / (50 * 2) = 0.02."""
    x, codes, codec = by_hand()
    averages = ema.Averages(torch.tensor(mass), torch.tensor(gain))
    return ema.change(x, codes, torch.tensor([[left, 1.0]]), codec, torch.ones(1, 2), averages, torch.tensor(0))


def test_a_change_by_hand():
    """One batch has as many codes as there are codewords, so that its sums are their own averages."""
    found = change_by_hand([2.0, 10.0], [50.0, 50.0])
    mass = 0.98 * 10 + 0.02 * 1.25
    torch.testing.assert_close(found.averages.mass, torch.tensor([0.98 * 2, mass]))
    saved = (16 - 4) + (4 - 1)  # by level 0 and level 1
    torch.testing.assert_close(found.averages.gain, torch.tensor([0.98 * 50, 0.98 * 50 + 0.02 * saved]))
    torch.testing.assert_close(found.codebook, torch.tensor([[0.0], [0.02 * 2.5 / mass]]))
    torch.testing.assert_close(found.offset, torch.tensor([0.02 * 4]))
    torch.testing.assert_close(found.scale, torch.tensor([0.0, 0.0]))  # h_1 has half the size of h_0


def test_a_codeword_that_saves_less_than_a_new_one_would_becomes_a_vector():
    """The new one would save 2 / D = 2 times the error that is left, 1, per code: 1."""
    found = change_by_hand([2.0, 10.0], [0.9, 50.0])
    torch.testing.assert_close(found.codebook[0], torch.tensor([4.0]))
    torch.testing.assert_close(found.averages.mass[0], torch.tensor((0.98 * 2 + 0.98 * 10 + 0.02 * 1.25) / 2))
    assert found.averages.gain[0] > 10
    stays = change_by_hand([2.0, 10.0], [1.1, 50.0])
    assert stays.codebook[0] == 0


def test_the_first_batch_finds_all_codewords_alike():
    found = change_by_hand([0.0, 0.0], [0.0, 0.0])
    torch.testing.assert_close(found.averages.mass, torch.tensor([0.98 * 0.625, 0.98 * 0.625 + 0.02 * 1.25]))
    assert found.codebook[0] == 0


def test_scales_follow_the_size_of_the_residuals():
    found = change_by_hand([1.0, 1.0], [50.0, 50.0], left=16 * 0.09)  # h_1 has 0.3 of the size of h_0
    torch.testing.assert_close(found.scale, torch.tensor([0.0, 0.02 * (0.3 - 0.5)]))
    assert ema.shared_factor(torch.tensor([1.0, 0.5, 0.25]), (0, 1, 2)).item() == pytest.approx(0.5)
    assert ema.shared_factor(torch.tensor([1.0, -0.5, 0.25]), (0, 1, 2)).item() == pytest.approx(-0.5)
    assert ema.shared_factor(torch.tensor([1.0, 0.0]), (0, 1)).isfinite()


def growth(x: Tensor, levels: int, batch: int, steps: int) -> float:
    """The squared error of x after training steps on random batches of it, relative to that of the start."""
    layer = RecurrentQuantizer(x.shape[1], 256, levels)
    layer.initialise(x, seed=0)
    start = (x - layer.decode(layer.encode(x))).square().sum()
    for step in range(steps):
        layer(x[torch.randint(len(x), (batch,), generator=torch.Generator().manual_seed(step))])
    return float((x - layer.decode(layer.encode(x))).square().sum() / start)


def test_codewords_of_rare_long_vectors_stay():
    """Lengths that vary by orders of magnitude: few vectors use a codeword of long ones, which saves much."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20_000, 16, generator=generator) * torch.randn(20_000, 1, generator=generator).mul(1.5).exp()
    assert growth(x, levels=4, batch=1024, steps=100) < 1.8


def test_vectors_that_cannot_be_squared_change_nothing():
    layer, x = started(), data()
    x[7] = 1e20
    layer(x)
    layer(data())
    layer(data())
    assert all(value.isfinite().all() for value in layer.state_dict().values())


def test_float16_layers_keep_their_averages_finite():
    layer = RecurrentQuantizer(8, 2, 4).half()
    x = 100 * torch.randn(40_000, 8)
    layer.initialise(x)
    for _ in range(20):
        layer(x)
    assert all(value.isfinite().all() for value in layer.state_dict().values())


def test_revived_codewords_are_not_moved_by_what_was_pending():
    layer = started()
    with torch.no_grad():
        layer.codebook[3] = 1e4
    while layer._codebook_change[3].norm() < 1e3:
        layer(data())
    layer.revive(data(), seed=0)
    layer(data())
    assert layer.codebook.abs().max() < 100


def test_an_eval_layer_can_be_exported():
    for update in ("ema", "gradient"):
        layer, x = started(update=update).eval(), data(20)
        program = torch.export.export(layer, (x,))
        assert torch.equal(program.module()(x).codes, layer(x).codes)


@pytest.mark.parametrize("scale", ["shared", "per_level"])
def test_a_change_takes_effect_at_the_next_batch(scale):
    layer = started(scale=scale)
    names = ("codebook", "offset", "w" if scale == "shared" else "free_scale")
    before = {name: getattr(layer, name).clone() for name in names}
    quantized, codes, _ = layer(1.3 * data(seed=1))
    assert all(torch.equal(getattr(layer, name), before[name]) for name in names)
    assert torch.equal(layer.decode(codes), quantized)
    layer.eval()(data(seed=2))
    assert all(torch.equal(getattr(layer, name), before[name]) for name in names)
    layer.train()(data(seed=2))
    assert all(not torch.equal(getattr(layer, name), before[name]) for name in names)
    assert list(layer.parameters()) == []


def test_the_codec_follows_data_that_move():
    """Vectors that become ten times as large and move away, as features do when a network starts to learn."""
    torch.manual_seed(0)
    layer = RecurrentQuantizer(D, K, M)
    for step in range(200):
        x = data(seed=step) * (1 + 9 * min(step, 100) / 100) + min(step, 100)
        layer(x)
    layer.eval()
    again = RecurrentQuantizer(D, K, M)
    again.fit(x, seed=0)
    relative = [float((x - q.decode(q.encode(x))).square().sum() / x.var(dim=0).sum() / len(x)) for q in (layer, again)]
    assert relative[0] < 1.5 * relative[1]
    assert bool((layer.usage(layer.encode(x)).sum(dim=0) > 0).all())


def test_rare_codewords_of_small_batches_are_not_replaced():
    """Eight vectors a batch use few of 256 codewords; those that wait for their turn stay."""
    x = torch.randn(4096, 4, generator=torch.Generator().manual_seed(0))
    assert growth(x, levels=2, batch=8, steps=500) < 1.3


def test_vectors_that_do_not_count_change_nothing():
    x, mask = data(60), torch.arange(60) < 40
    layers = [started() for _ in range(3)]
    x[50:] = float("nan")
    layers[0](x, mask=mask)
    layers[1](x[:40])
    bad = x[:42].clone()
    bad[40:] = torch.tensor([[float("inf")], [float("nan")]])
    layers[2](bad)
    for other in layers[1:]:
        for name in ("_codebook_change", "_offset_change", "_w_change", "_mass", "_gain"):
            torch.testing.assert_close(getattr(layers[0], name), getattr(other, name))
    layer = started()
    layer(x, mask=torch.zeros(60, dtype=torch.bool))
    layer(x[:0])
    layer(data(40))
    assert all(value.isfinite().all() for value in layer.state_dict().values())


def test_levels_by_vector_count_their_own_levels():
    x, one, other = data(40), started(), started()
    one(x, levels=torch.full((40,), 2))
    other(x, levels=2)
    for name in ("_codebook_change", "_offset_change", "_mass"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name))
    third = started(scale="per_level")
    before = third.free_scale.clone()
    third(2 * x, levels=2)
    third(x)
    assert third.free_scale[0] != before[0]
    assert third.free_scale[1] == before[1]


def test_a_stored_state_goes_on_to_the_bit():
    def run(layer: RecurrentQuantizer, steps: range) -> RecurrentQuantizer:
        for step in steps:
            layer(data(100, seed=step))
        return layer

    whole = run(started(), range(10))
    half = run(started(), range(5))
    other = RecurrentQuantizer(D, K, M)
    other.load_state_dict(half.state_dict())
    for layer in (run(other, range(5, 10)), run(copy.deepcopy(half), range(5, 10))):
        for name, value in whole.state_dict().items():
            assert torch.equal(layer.state_dict()[name], value), name


def test_checkpointing_computes_the_same_and_follows_once():
    plain, again = started(), started()
    linear = nn.Linear(D, D)
    twin = copy.deepcopy(linear)
    for step in range(3):
        x = data(50, seed=step)
        a = plain(linear(x))
        b = checkpoint(lambda v: again(twin(v)), x, use_reentrant=False)
        for out, module in ((a, linear), (b, twin)):
            module.zero_grad()
            (out.quantized.square().sum() + out.loss).backward()
        assert torch.equal(linear.weight.grad, twin.weight.grad)
    for name, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_two_forwards_before_a_backward():
    layer, x, y = started(), data(50).requires_grad_(), data(50, seed=1).requires_grad_()
    total = layer(x).loss + layer(y).loss
    total.backward()
    assert bool(x.grad.isfinite().all())


def test_a_fit_forgets_what_is_pending():
    layer = started()
    layer(data())
    layer.fit(data(), rounds=2, seed=0)
    fitted = layer.codebook.clone()
    layer(data())
    assert torch.equal(layer.codebook, fitted)


def test_triton_sums_agree_with_the_definition(codec):
    pytest.importorskip("triton")
    triton = pytest.importorskip("drq_fast.backends.triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for shape in [(0, 3, 4, 2), (37, 33, 19, 4), (17, 131, 130, 2)]:
        x, *parameters = (t.to(device) for t in codec(*shape))
        parameters = Parameters(*parameters)
        codes = plain_torch.encode(x, parameters, 1, None).long()
        weights = torch.rand(codes.shape, generator=torch.Generator().manual_seed(1)).to(device)
        weights[1::5] = 0
        x[1::5] = float("nan")
        found = triton.codeword_sums(x, codes, parameters, weights)
        for a, b in zip(found, plain_torch.codeword_sums(x, codes, parameters, weights), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"scale": "per_level"}, {"codebooks": 3}], ids=str)
@pytest.mark.parametrize("levels", [None, 2])
def test_while_a_cuda_graph_is_captured_averages_stay_in_place(monkeypatch, options, levels):
    """So that each replay, which repeats the operations on the same memory, goes on from the one before."""
    layer = started(**options)
    captured = copy.deepcopy(layer)
    places = {name: buffer.data_ptr() for name, buffer in captured.named_buffers()}

    def run(layer: RecurrentQuantizer, seed: int) -> list[Tensor]:
        x = data(50, seed).requires_grad_()
        out = layer(x, levels=levels)
        (out.loss + out.quantized.square().sum()).backward()
        return [out.quantized, out.loss, x.grad, *layer.state_dict().values()]

    for seed in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(devices, "captures", lambda _: True)
            found = run(captured, seed)
        for a, b in zip(found, run(layer, seed), strict=True):
            assert torch.equal(a, b)
    assert places == {name: buffer.data_ptr() for name, buffer in captured.named_buffers()}
    assert captured._batches == 3
