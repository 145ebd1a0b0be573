"""RecurrentQuantizer as its users meet it."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from drq_fast import FileError, Index, RecurrentQuantizer, files, functional, use_backend


def data(N: int = 600, D: int = 6, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, D, generator=generator) @ torch.randn(D, D, generator=generator) + 3


OPTIONS = {"ema": {}, "gradient": {"update": "gradient"}, "paper": {"loss": "paper"}}


@pytest.fixture(params=OPTIONS)
def layer(request) -> RecurrentQuantizer:
    return make(**OPTIONS[request.param])


@pytest.fixture(params=["gradient", "paper"])
def trained_layer(request) -> RecurrentQuantizer:
    """One whose parameters an optimiser trains."""
    return make(**OPTIONS[request.param])


def make(**options) -> RecurrentQuantizer:
    torch.manual_seed(0)
    layer = RecurrentQuantizer(6, codewords=16, levels=3, **options)
    layer.initialise(data())
    return layer


@pytest.mark.parametrize("shape", [(6,), (0, 6), (1, 6), (7, 6), (2, 3, 6), (2, 0, 3, 6)])
def test_any_leading_shape(layer, shape):
    x = torch.randn(shape).requires_grad_()
    quantized, codes, loss = layer(x)
    assert quantized.shape == x.shape
    assert codes.shape == (*shape[:-1], 3)
    assert codes.dtype == torch.int64
    assert loss.shape == ()
    assert loss.isfinite()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in (x, *layer.parameters()))
    layer(x)
    assert all(value.isfinite().all() for value in layer.state_dict().values())


def test_quantized_has_the_values_of_the_decoded_codes(layer):
    for gradient in ("straight_through", "soft"):
        layer.gradient = gradient
        for levels in (1, 2, 3):
            quantized, codes, _ = layer(data(), levels=levels)
            assert torch.equal(quantized, layer.decode(codes))
            assert torch.equal(quantized, layer.decode(layer.encode(data()), levels=levels))


def test_loss_by_hand():
    layer = RecurrentQuantizer(
        1, 2, 2, offset=False, init="random", gamma=math.log(2), loss="paper", weights=(1, 10, 100)
    )
    with torch.no_grad():
        layer.codebook.copy_(torch.tensor([[0.0], [2.0]]))
        layer.w.fill_(0.5)
    hard, soft = [1, 0], [3 - 8 / 5, 3 - 8 / 5 - 2 / 3]  # see test_quantize
    gap = sum(soft) - sum(hard)
    assert layer(torch.tensor([[3.0]])).loss.item() == pytest.approx(sum(hard) + 10 * sum(soft) + 100 * gap)
    layer.level_weights = (2.0, 3.0)
    expected = 2 + 10 * (2 * soft[0] + 3 * soft[1]) + 100 * (2 * soft[0] + 3 * soft[1] - 2)
    assert layer(torch.tensor([[3.0]])).loss.item() == pytest.approx(expected)
    layer.level_weights, layer.joint = None, "mse"
    assert layer(torch.tensor([[3.0]])).loss.item() == pytest.approx(1 + 10 * sum(soft) + 100 * soft[1] ** 2)
    assert layer.eval()(torch.tensor([[3.0]])).loss.item() == pytest.approx(1 + 10 * sum(soft) + 100 * soft[1] ** 2)


def test_straight_through_gradient_is_the_identity(layer):
    layer.initialise(data())
    x, layer = data().requires_grad_(), layer.eval()
    layer(x).quantized.backward(torch.arange(6.0).expand_as(x))
    assert torch.equal(x.grad, torch.arange(6.0).expand_as(x))
    assert layer.codebook.grad is None


def test_soft_gradient_is_that_of_the_soft_approximation(trained_layer):
    layer = trained_layer
    layer.gradient = "soft"
    x, weight = data(50).requires_grad_(), data(50, seed=1)
    layer(x).quantized.backward(weight)
    grads = [x.grad, layer.codebook.grad, layer.w.grad, layer.offset.grad]
    leaves = [t.detach().clone().requires_grad_() for t in (x, layer.codebook, layer.scale, layer.offset)]
    functional.quantize(*leaves[:3], gamma=layer.gamma, offset=leaves[3]).soft.backward(weight)
    torch.testing.assert_close(grads[0], leaves[0].grad)
    torch.testing.assert_close(grads[1], leaves[1].grad)
    torch.testing.assert_close(grads[3], leaves[3].grad)
    assert grads[2].isfinite()


def test_without_reconstruction(layer):
    layer.eval()
    whole, cheap = layer(data()), layer(data(), reconstruct=False)
    assert cheap.quantized is None
    assert torch.equal(whole.codes, cheap.codes)
    assert torch.equal(whole.loss, cheap.loss)


@pytest.mark.parametrize("scale", ["shared", "per_level"])
def test_fewer_levels_leave_zero_gradients_not_none(scale):
    layer = RecurrentQuantizer(6, 16, 3, scale=scale, update="gradient")
    layer.initialise(data())
    layer(data(), levels=1).loss.backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
    assert (layer.w if scale == "shared" else layer.free_scale).grad.abs().sum() == 0


def test_one_level_trains():
    layer = RecurrentQuantizer(6, 16, 1, update="gradient")
    layer(data()).loss.backward()
    assert layer.w.grad == 0


@pytest.mark.parametrize("options", [{"update": "gradient"}, {"loss": "paper"}])
def test_forward_initialises_once_in_training_and_changes_no_buffer_after(options):
    layer = RecurrentQuantizer(6, 16, 3, **options)
    with pytest.raises(RuntimeError, match=r"forward: the layer has not seen data yet; call layer.initialise\(x\)"):
        layer.eval()(data())
    layer.train()(data())
    assert layer.initialised
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    layer(data(seed=5))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_the_paper_to_the_letter_needs_no_data():
    layer = RecurrentQuantizer(6, 16, 3, offset=False, init="random", gamma=1.0)
    assert layer.initialised
    assert layer.eval()(data()).quantized.shape == (600, 6)


def test_random_start_still_takes_offset_and_gamma_from_the_data():
    layer = RecurrentQuantizer(6, 16, 3, init="random")
    before = layer.codebook.detach().clone()
    layer.initialise(data())
    assert torch.equal(layer.codebook, before)
    torch.testing.assert_close(layer.offset, data().mean(0))


def test_start_is_better_than_chance_at_every_level_and_deterministic():
    x, held_out = data(4500, 16).split([4000, 500])
    layers = [RecurrentQuantizer(16, 64, 4) for _ in range(2)]
    for layer in layers:
        layer.initialise(x, seed=7)
    first, second = (layer.state_dict() for layer in layers)
    assert all(torch.equal(first[name], second[name]) for name in first)
    variance = (held_out - x.mean(0)).square().sum()
    codes = layers[0].encode(held_out)
    errors = [float((held_out - layers[0].decode(codes, levels=m)).square().sum() / variance) for m in (1, 2, 3, 4)]
    assert errors[0] < 0.5
    assert errors == sorted(errors, reverse=True)
    assert errors[3] < 0.5 * errors[0]
    assert (layers[0].usage(layers[0].encode(x)).sum(0) > 0).all()


@pytest.mark.parametrize("N", [1, 5, 15])
@pytest.mark.parametrize("copies", [1, 4])
def test_fewer_vectors_than_codewords_are_met_whatever_the_seed(N, copies):
    x = data(N).repeat(copies, 1)
    for seed in range(20):
        layer = RecurrentQuantizer(6, 16, 2)
        layer.initialise(x, seed=seed)
        torch.testing.assert_close(layer.decode(layer.encode(x)), x, atol=1e-3, rtol=0)
        assert layer.gamma.isfinite()


@pytest.mark.parametrize("update", ["ema", "gradient"])
def test_all_vectors_equal(update):
    layer = RecurrentQuantizer(6, 16, 2, update=update)
    layer.initialise(torch.ones(40, 6))
    for _ in range(3):
        layer(torch.ones(40, 6, requires_grad=True)).loss.backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert all(value.isfinite().all() for value in layer.state_dict().values())


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    layer = RecurrentQuantizer(6, 16, 3, init="random", update="gradient")
    layer.initialise(data())
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(150):
        loss = layer(data(), reconstruct=False).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_usage_and_revive(layer):
    layer.eval()
    with torch.no_grad():
        layer.codebook[3] = 1e4
        layer.codebook[9] = -1e4
    usage = layer.usage(layer(data()).codes)
    assert usage.shape == (3, 16)
    assert (usage.sum(dim=1) == 600).all()
    dead = (usage.sum(dim=0) == 0).nonzero().flatten().tolist()
    assert {3, 9} <= set(dead)
    assert layer.revive(data(), seed=1) == len(dead)
    assert (layer.usage(layer(data()).codes).sum(dim=0) > 0)[dead].all()
    assert layer.revive(data()) == 0


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_encode_and_decode_answer_in_kind(layer, kind):
    x = data(20).reshape(4, 5, 6)
    codes = layer.encode(x if kind == "torch" else x.numpy())
    assert isinstance(codes, torch.Tensor if kind == "torch" else np.ndarray)
    assert codes.shape == (4, 5, 3)
    assert str(codes.dtype).endswith("uint8")
    decoded = layer.decode(codes, levels=2)
    assert type(decoded) is type(codes)
    assert decoded.shape == (4, 5, 6)
    assert torch.equal(torch.as_tensor(codes).long(), layer(x).codes)


def test_encode_takes_float64_arrays_and_read_only_ones(layer):
    x = data(20).double().numpy()
    x.flags.writeable = False
    assert (layer.encode(x) == layer.encode(data(20)).numpy()).all()
    assert (layer.decode(layer.encode(x).astype(np.uint16)) == layer.decode(layer.encode(x))).all()


def test_numpy_everywhere():
    layer, x = RecurrentQuantizer(6, 16, 3), data(100).numpy()
    layer.initialise(x[::-1], seed=0)
    codes = layer.encode(x)
    assert layer.usage(codes).sum() == 300
    assert layer.revive(x) >= 0
    assert (layer.encode(x[::-1])[::-1] == layer.encode(x)).all()
    assert (layer.encode(x.astype(">f4")) == layer.encode(x)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_default_dtypes_do_not_matter(layer, dtype):
    x, _ = data(), layer.eval()
    expected = layer(x)
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(layer(x).loss, expected.loss)
        assert torch.equal(layer.encode(x, beam=1).long(), expected.codes)
        RecurrentQuantizer(6, 16, 3).float().initialise(x)
        index = Index(layer)
        index.add(x, beam=2)
        assert index.search(x[:3]).scores.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_default_device_does_not_matter(layer):
    x, fresh, _ = data(), RecurrentQuantizer(6, 16, 3), layer.eval()
    with torch.device("meta"):
        loss, codes = layer(x).loss, layer.encode(x, beam=4)
        functional.encode(x, layer.codebook, layer.scale)
        unweighted = functional.loss(x, layer.codebook, layer.scale, gamma=1.0).loss
        fresh(x)
        errors = fresh.fit([x, x], rounds=3, seed=1)
        fresh.revive(x)
    assert torch.equal(loss, layer(x).loss)
    assert torch.equal(codes, layer.encode(x, beam=4))
    assert torch.equal(unweighted, functional.loss(x, layer.codebook, layer.scale, gamma=1.0).loss)
    assert errors == RecurrentQuantizer(6, 16, 3).fit([x, x], rounds=3, seed=1)


def test_bits():
    assert RecurrentQuantizer(4).bits == 32
    assert RecurrentQuantizer(4, codewords=4096).bits == 48
    assert RecurrentQuantizer(4, codewords=5, levels=3).bits == 9


def test_state_dict_deepcopy_pickle_keep_everything(layer):
    others = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), RecurrentQuantizer(**layer._config())]
    others[2].load_state_dict(layer.state_dict())
    expected = [layer(data()) for _ in range(2)]
    for other in others:
        assert other.initialised
        for each in expected:  # the second batch after the changes of the first
            found = other(data())
            assert torch.equal(found.codes, each.codes)
            assert torch.equal(found.loss, each.loss)
    fresh = RecurrentQuantizer(6, 16, 3)
    layer.load_state_dict(fresh.state_dict())
    assert not layer.initialised


def test_inside_a_model_the_state_dict_restores_initialised(layer):
    model, other = nn.Sequential(nn.Linear(6, 6), layer), nn.Sequential(nn.Linear(6, 6), RecurrentQuantizer(6, 16, 3))
    other.load_state_dict(model.state_dict())
    assert other[1].initialised


def test_to_float64_and_back(layer):
    codes = layer.eval()(data()).codes
    wide = layer.to(torch.float64)
    assert wide(data().double()).quantized.dtype == torch.float64
    assert (wide(data().double()).codes == codes).float().mean() > 0.999


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_inputs_and_narrow_layers(layer, dtype):
    x = data().to(dtype).requires_grad_()
    layer.eval()
    quantized, codes, loss = layer(x)
    assert quantized.dtype == dtype
    assert loss.dtype == torch.float32
    assert torch.equal(codes, layer(x.detach().float()).codes)
    (quantized.float().square().mean() + loss).backward()
    assert x.grad.isfinite().all()
    narrow = copy.deepcopy(layer).train().to(dtype)
    for _ in range(3):
        narrow(x).loss.backward()
    assert all(value.isfinite().all() for value in narrow.state_dict().values())
    assert narrow.codebook.dtype == dtype
    if layer.update == "gradient":
        assert narrow.codebook.grad.dtype == dtype
        assert narrow.codebook.grad.isfinite().all()


def test_a_narrow_layer_keeps_within_its_range():
    layer = RecurrentQuantizer(6, 16, 3).half()
    layer.initialise(1e-5 * data())
    assert layer.gamma.isfinite()
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(
        ValueError, match=r"^fit: the codec fitted to x must be finite in torch.float16, got NaN or infinity"
    ):
        layer.fit(1e6 * data(), rounds=2)
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


def test_autocast(layer):
    linear, _ = nn.Linear(6, 6), layer.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = linear(data())
        assert h.dtype == torch.bfloat16
        inside = layer(h)
    assert inside.quantized.dtype == torch.bfloat16
    assert torch.equal(inside.codes, layer(h.float()).codes)
    inside.loss.backward()
    assert linear.weight.grad.isfinite().all()


@pytest.mark.parametrize("start", ["initialise", "fit", "forward", "revive"])
def test_autocast_gives_the_same_start(start):
    x, layers = data(), []
    for cast in (False, True):
        torch.manual_seed(0)
        layer = RecurrentQuantizer(6, 16, 3)
        if start == "revive":
            layer.initialise(x, seed=0)
            layer.codebook.data[3] = 1e4
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            (layer if start == "forward" else getattr(layer, start))(x)
        layers.append(layer.state_dict())
    assert all(torch.equal(layers[0][name], layers[1][name]) for name in layers[0])


def test_a_layer_started_in_inference_mode_can_be_trained():
    layer = RecurrentQuantizer(6, 16, 3)
    with torch.inference_mode():
        layer.initialise(data() + 1)
        layer.fit(iter([data() + 1]), rounds=1)
        layer.revive(data() + 1)
        layer(data())
    for _ in range(2):
        layer(data().requires_grad_()).loss.backward()
    layer = RecurrentQuantizer(6, 16, 3, update="gradient")
    with torch.inference_mode():
        layer.initialise(data() + 1)
    layer(data()).loss.backward()
    assert layer.codebook.grad.isfinite().all()


def test_a_layer_loaded_in_inference_mode_can_be_trained(tmp_path, trained_layer):
    layer = trained_layer
    layer.save(tmp_path / "a.drq")
    with torch.inference_mode():
        other = RecurrentQuantizer.load(tmp_path / "a.drq")
    other.train()(data()).loss.backward()
    assert torch.equal(other.codebook.grad, torch.autograd.grad(layer(data()).loss, layer.codebook)[0])


def test_numpy_has_no_bfloat16(layer):
    codes = layer.encode(data(20).numpy())
    decoded = copy.deepcopy(layer).bfloat16().decode(codes)
    assert decoded.dtype == np.float32
    np.testing.assert_allclose(decoded, layer.decode(codes), atol=0.2)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_numbers_repeat_to_the_bit(options):
    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        layer, linear = RecurrentQuantizer(6, 16, 3, **options), nn.Linear(6, 6)
        optimiser = torch.optim.Adam([*layer.parameters(), *linear.parameters()], lr=0.01)
        for step in range(20):
            optimiser.zero_grad()
            layer(linear(data(seed=step))).loss.backward()
            optimiser.step()
        return [*layer.state_dict().values(), *linear.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"commitment": 0.25},
        {"loss": "paper", "scale": "per_level", "offset": False, "level_weights": (1, 2, 3), "joint": "mse"},
    ],
)
def test_save_and_load(tmp_path, options):
    layer = RecurrentQuantizer(6, 16, 3, **options)
    layer.initialise(data())
    layer.save(tmp_path / "layer.drq")
    other = RecurrentQuantizer.load(tmp_path / "layer.drq")
    assert repr(other) == repr(layer)
    assert not other.training
    assert all(torch.equal(a, b) for a, b in zip(layer.state_dict().values(), other.state_dict().values(), strict=True))
    assert list(tmp_path.iterdir()) == [tmp_path / "layer.drq"]


def test_load_refuses_an_index_or_nonsense(tmp_path, layer):
    path = tmp_path / "file"
    path.write_bytes(b"not a file of ours")
    with pytest.raises(FileError, match="is not a complete safetensors file"):
        RecurrentQuantizer.load(path)
    with torch.no_grad():
        layer.codebook[0, 0] = float("nan")
    with pytest.raises(ValueError, match="save: codebook must be finite, got NaN or infinity in row 0"):
        layer.save(path)
    files.write(path, "quantizer", dict(layer.state_dict()), layer._config())
    with pytest.raises(FileError, match=r"does not describe a quantizer \(load: codebook must be finite"):
        RecurrentQuantizer.load(path)


def test_load_keeps_the_dtype(tmp_path, layer):
    layer.double().save(tmp_path / "layer.drq")
    assert RecurrentQuantizer.load(tmp_path / "layer.drq").codebook.dtype == torch.float64


def test_a_fixed_gamma_follows_the_state_dict(layer):
    other = RecurrentQuantizer(6, 16, 3, gamma=7.0)
    other.load_state_dict(layer.state_dict())
    assert other.fixed_gamma == other.gamma == layer.gamma


def test_forward_reads_no_value_of_a_tensor(layer):
    """On a GPU every `item()` would wait for it; `gamma` on the CPU is the one exception."""

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function is torch.ops.aten._local_scalar_dense.default
            return function(*args, **(kwargs or {}))

    with use_backend("torch"), Reads() as reads:
        layer(data())
    assert reads.count == 0
