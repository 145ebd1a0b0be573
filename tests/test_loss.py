"""loss: by hand, against distortion, and the native kernels with their gradients against the float64 reference."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from drq_fast import BackendUnavailable, RecurrentQuantizer, functional
from drq_fast.backends.native import extension, training

needs_native = pytest.mark.skipif(extension.native is None, reason="the extension is not built")
ISAS = [] if extension.native is None else extension.supported_isas()
SHAPES = [(1, 1, 2, 1), (1000, 8, 16, 3), (37, 33, 19, 4), (200, 5, 257, 2), (60, 700, 300, 8), (20, 9, 40, 16)]
SHAPES += [(50, 9, 1100, 3), (40, 24, 9000, 3), (70, 5, 16384, 2)]  # by products at every level, see level.py
NAMES = ("x", "codebook", "scale", "offset")
ROOT = Path(__file__).parents[1]
FEATURES = Path(os.environ.get("DRQ_DATA", ROOT.parent / "shared" / "data")) / "cifar10_effnet_lite0.npz"


def test_by_hand():
    x, codebook, scale = torch.tensor([[3.0]]), torch.tensor([[0.0], [2.0]]), torch.tensor([1.0, 0.5])
    hard, soft = [1, 0], [3 - 8 / 5, 3 - 8 / 5 - 2 / 3]  # see test_quantize
    gap = sum(soft) - sum(hard)
    for backend in ("torch", None):
        options = {"gamma": math.log(2), "weights": (1, 10, 100), "backend": backend}
        value, codes = functional.loss(x, codebook, scale, **options)
        assert codes.tolist() == [[1, 1]]
        assert value.item() == pytest.approx(sum(hard) + 10 * sum(soft) + 100 * gap, rel=1e-5)
        value = functional.loss(x, codebook, scale, joint="mse", **options).loss
        assert value.item() == pytest.approx(sum(hard) + 10 * sum(soft) + 100 * soft[1] ** 2, rel=1e-5)
        value = functional.loss(x, codebook, scale, level_weights=(2, 3), **options).loss
        weighted = 2 * soft[0] + 3 * soft[1]
        assert value.item() == pytest.approx(2 + 10 * weighted + 100 * (weighted - 2), rel=1e-5)


def gradients(inputs, backend, dtype=torch.float32, upstream=1.0, **options):
    """(loss, codes, gradients of x, codebook, scale and offset)."""
    leaves = [t.detach().to(dtype).clone().requires_grad_() for t in inputs]
    value, codes = functional.loss(*leaves[:3], offset=leaves[3], backend=backend, **options)
    (upstream * value).backward()
    return value.detach(), codes, [leaf.grad for leaf in leaves]


def assert_agrees(inputs, limit=1e-5, **options):
    """Native float32 against the float64 reference, both with the same codes."""
    value, codes, native = gradients(inputs, "native", **options)
    truth, true_codes, exact = gradients(inputs, "torch", torch.float64, **options)
    assert torch.equal(codes, true_codes)
    assert value.item() == pytest.approx(truth.item(), rel=limit)
    for name, a, b in zip(NAMES, native, exact, strict=True):
        assert (a.double() - b).norm() <= limit * b.norm().clamp_min(1e-20), name


@needs_native
@pytest.mark.parametrize(("N", "D", "K", "M"), SHAPES)
@pytest.mark.parametrize(("joint", "weighted"), [("gap", False), ("mse", True)])
def test_native_gradients(codec, N, D, K, M, joint, weighted):
    omega = [0.5 + m % 3 for m in range(M)] if weighted else None
    assert_agrees(codec(N, D, K, M), gamma=1.5, weights=(1, 0.7, 0.3), level_weights=omega, joint=joint)


@needs_native
@pytest.mark.parametrize("gamma", [0.01, 1.0, 30.0])
def test_sharp_and_flat_assignments(codec, gamma):
    assert_agrees(codec(N=200, D=20, K=50, M=4), gamma=gamma)


@needs_native
@pytest.mark.parametrize("weights", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.1, 0.2, 3)])
def test_each_term_alone(codec, weights):
    assert_agrees(codec(N=100), gamma=1.0, weights=weights)
    assert_agrees(codec(N=100), gamma=1.0, weights=weights, joint="mse")


@needs_native
def test_small_residuals_are_rebased(codec):
    """Level 0 leaves 1 % of the vectors: ||x||^2 / r is 1e4, and score space alone would lose four digits."""
    noise, codebook, scale, offset = codec(N=300, D=32, K=64, M=4)
    scale = scale.abs() * torch.tensor([1.0, 0.01, 0.01, 0.01])
    x = codebook[torch.arange(300) % 64] + 0.01 * noise + offset
    assert_agrees((x, codebook, scale, offset), limit=1e-4, gamma=10.0)


@needs_native
def test_exact_hits_have_no_error_and_finite_gradients(codec):
    codebook = codec(K=8).codebook
    inputs = (codebook, codebook, torch.tensor([1.0, 0, 0]), torch.zeros(5))
    value, _, grads = gradients(inputs, "native", gamma=9.0)
    assert value.isfinite()
    assert all(g.isfinite().all() for g in grads)
    hard_only = functional.loss(codebook, codebook, torch.ones(1), gamma=1.0, weights=(1, 0, 0), backend="native")
    assert hard_only.loss == 0


@needs_native
def test_vectors_that_are_met_up_to_rounding_get_no_wild_gradient(codec):
    """The gradient of a norm has length 1 at most, however small the norm."""
    x, codebook, _, _ = codec(N=64, D=32, K=64, M=1)
    for distance in (1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 1e-2):
        near = 25 * codebook + distance * x
        inputs = (near, 25 * codebook, torch.tensor([1.0, 0.7]), torch.zeros(32))
        dx = gradients(inputs, "native", gamma=5.0, weights=(1, 0, 0))[2][0] * 64
        assert dx.norm(dim=1).max() < 2.5, distance  # two levels
        dx = gradients(inputs, "native", gamma=5.0)[2][0] * 64
        assert dx.norm(dim=1).max() < 15, distance


@needs_native
def test_every_instruction_set_gives_the_same_bits(codec, monkeypatch):
    inputs = codec(N=700, D=24, K=70, M=4)
    inputs.x[::5] = inputs.codebook[torch.arange(140) % 70] + inputs.offset + 1e-3 * inputs.x[::5]
    results = []
    for isa in ISAS:
        monkeypatch.setenv("DRQ_FAST_ISA", isa)
        value, codes, grads = gradients(inputs, "native", gamma=2.0)
        results.append([value, codes, *grads])
    assert ISAS[0] == "portable"
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@needs_native
def test_the_same_twice_and_upstream_gradients(codec):
    inputs = codec(N=2000, D=16, K=32, M=4)
    first, again = (gradients(inputs, "native", gamma=1.0)[2] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    scaled = gradients(inputs, "native", gamma=1.0, upstream=-3.0)[2]
    for a, b in zip(first, scaled, strict=True):
        torch.testing.assert_close(a * -3, b)


@needs_native
def test_some_inputs_without_gradient_and_none_at_all(codec):
    x, codebook, scale, offset = codec()
    alone = codebook.clone().requires_grad_()
    functional.loss(x, alone, scale, gamma=1.0, offset=offset, backend="native").loss.backward()
    torch.testing.assert_close(alone.grad, gradients((x, codebook, scale, offset), "native", gamma=1.0)[2][1])
    assert not functional.loss(x, codebook, scale, gamma=1.0, backend="native").loss.requires_grad
    empty = functional.loss(x[:0], alone, scale, gamma=1.0, backend="native")
    assert empty.loss == 0
    empty.loss.backward()
    assert empty.codes.shape == (0, 3)


@needs_native
def test_gradients_that_were_given_out_are_not_given_out_again(codec):
    x, codebook, scale, offset = (t.requires_grad_() for t in codec())
    loss = functional.loss(x.view(x.shape), codebook, scale, gamma=1.0, offset=offset, backend="native").loss
    for _ in range(3):  # a gradient that passes through a view is kept, not copied, as x.grad
        loss.backward(retain_graph=True)
    (once,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(x.grad, 3 * once)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes(codec, assert_close, dtype):
    inputs = [t.to(dtype) for t in codec(N=200, D=24, K=16, M=4)]
    _, codes, narrow = gradients(inputs, "native", dtype, gamma=1.0)
    _, true_codes, exact = gradients(inputs, "torch", torch.float64, gamma=1.0)
    assert torch.equal(codes, true_codes)
    for a, b in zip(narrow, exact, strict=True):
        assert a.dtype == dtype
        assert_close(a, b)


@needs_native
def test_autocast_changes_nothing(codec):
    x, codebook, scale, _ = codec(D=16)
    plain = functional.loss(x, codebook, scale, gamma=1.0, backend="native").loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(functional.loss(x, codebook, scale, gamma=1.0, backend="native").loss, plain)


@needs_native
def test_a_second_backward_under_autocast(codec):
    x, codebook, scale, offset = codec(N=30, D=8, K=600, M=2)
    x.requires_grad_()
    loss = functional.loss(x, codebook, scale, gamma=1.0, offset=offset, backend="native").loss
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


def test_refuses_what_it_cannot_do(codec):
    x, codebook, scale, _ = codec()
    with pytest.raises(BackendUnavailable, match="an input is float64"):
        functional.loss(x.double(), codebook, scale, gamma=1.0, backend="native")
    with pytest.raises(BackendUnavailable, match="it gives no gradient of gamma"):
        functional.loss(x, codebook, scale, gamma=torch.tensor(1.0, requires_grad=True), backend="native")


@needs_native
def test_tiles_change_nothing(codec, monkeypatch):
    inputs = codec(N=500, D=16, K=32, M=4)
    whole = gradients(inputs, "native", gamma=1.0)
    monkeypatch.setattr(training, "_TILE", 32 * 9 * 60)
    parts = gradients(inputs, "native", gamma=1.0)
    assert torch.equal(whole[1], parts[1])
    for a, b in zip(whole[2], parts[2], strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()


def assert_agrees_where_codes_do(inputs, sharpness, limit=1e-4):
    """The same on the rows where float32 and float64 choose the same codes; gamma is sharpness / mean d_0."""
    x, codebook, scale, offset = inputs
    gamma = sharpness / float(torch.cdist(x - offset, codebook).mean())
    options = {"gamma": gamma, "offset": offset}
    codes = functional.loss(x, codebook, scale, backend="native", **options).codes
    wide = functional.encode(*(t.double() for t in (x, codebook, scale)), offset=offset.double(), backend="torch")
    same = (codes == wide).all(dim=1)
    assert same.float().mean() > 0.9
    assert_agrees((x[same], codebook, scale, offset), limit, gamma=gamma)


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 10.0])
def test_native_gradients_of_long_vectors(codec, sharpness):
    assert_agrees_where_codes_do(codec(N=512, D=2048, K=256, M=8), sharpness)


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 10.0])
def test_native_gradients_of_long_vectors_with_small_residuals(codec, sharpness):
    """n/r is 1e4 after level 0. Where p is flat dcodebook nearly cancels: off by 3.6e-4, plain torch by 3.4e-4."""
    x, codebook, scale, offset = codec(N=512, D=2048, K=256, M=8)
    scale = scale * torch.tensor([1.0] + [0.01] * 7)
    x = codebook[torch.arange(512) % 256] + 0.01 * x + offset
    assert_agrees_where_codes_do((x, codebook, scale, offset), sharpness, limit=5e-4 if sharpness < 1 else 1e-4)


@pytest.mark.slow
@needs_native
@pytest.mark.skipif(not FEATURES.exists(), reason=f"{FEATURES} is not there; DRQ_DATA names its folder")
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 10.0])
def test_native_gradients_on_real_features(sharpness):
    with np.load(FEATURES) as file:
        x = torch.tensor(file["x"][:4096] * file["step"], dtype=torch.float32)
    layer = RecurrentQuantizer(x.shape[1], 256, 8)
    layer.fit(x, rounds=10, beam=1, seed=0)
    assert layer.offset is not None
    codec = (t.detach() for t in (layer.codebook, layer.scale, layer.offset))
    assert_agrees_where_codes_do((x[:512], *codec), sharpness)


JOB = """
import torch
from torch.autograd import forward_ad
import drq_fast

def step(N, D, K, M, **options):
    torch.manual_seed(0)
    layer = drq_fast.RecurrentQuantizer(D, K, M, init="random", gamma=1.0, **options)
    layer.initialised = True
    x = torch.randn(N, D, requires_grad=True)
    return lambda: layer(x, reconstruct=False).loss.backward()
"""


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("loss", ["paper", "squared"])
@pytest.mark.parametrize(("N", "D", "K", "M"), [(16384, 512, 256, 8), (8192, 2048, 256, 4), (8192, 256, 1024, 4)])
def test_memory_of_a_training_step(tmp_path, N, D, K, M, loss, offset):
    """Nothing of size N K M or N D M. With running averages: x - offset and, of that, the rows that count."""
    (tmp_path / "job.py").write_text(JOB)
    sizes = json.dumps({"N": N, "D": D, "K": K, "M": M, "loss": loss, "offset": offset})
    command = [sys.executable, str(ROOT / "benchmarks" / "memory.py"), str(tmp_path / "job.py"), "step", sizes]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(child.stdout)
    if report["peak_mib"] is None:
        pytest.skip(report["no_peak"])
    copies = 2 if loss == "squared" and offset else 1  # of x; dx, in the backward pass, counts as one
    beyond = report["peak_mib"] * 2**20 / 4 - copies * N * D - K * D  # floats beside these and dcodebook
    tiles = 4 * torch.get_num_threads() * training._TILE
    assert beyond <= 4 * N * K + 4 * (K * D + K * K) + tiles, f"{beyond / (N * K):.2f} N*K"


@pytest.mark.slow
@needs_native
def test_a_thousand_steps_repeat_to_the_bit():
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = RecurrentQuantizer(32, 64, 4)
        optimiser = torch.optim.Adam(layer.parameters(), lr=0.01)
        for _ in range(1000):
            optimiser.zero_grad()
            layer(torch.randn(128, 32)).loss.backward()
            optimiser.step()
        return list(layer.parameters())

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@needs_native
def test_torch_func_and_forward_mode_take_torch(codec):
    x, codebook, scale, _ = codec(N=10, D=5, K=8, M=2)

    def loss(x, backend=None):
        return functional.loss(x, codebook, scale, gamma=1.0, backend=backend).loss

    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf, "torch"), leaf)
    assert torch.equal(torch.func.grad(loss)(x), expected)
    direction = torch.ones_like(x)
    assert torch.allclose(torch.func.jvp(loss, (x,), (direction,))[1], expected.sum())
    with forward_ad.dual_level():
        assert torch.allclose(forward_ad.unpack_dual(loss(forward_ad.make_dual(x, direction))).tangent, expected.sum())
    with pytest.raises(BackendUnavailable, match=r"torch\.func"):
        torch.func.grad(loss)(x, "native")


def test_reference_loss_is_made_of_distortion(codec):
    x, codebook, scale, offset = codec(dtype=torch.float64)
    errors = functional.distortion(x, codebook, scale, gamma=1.0, offset=offset, backend="torch")
    value = functional.loss(x, codebook, scale, gamma=1.0, offset=offset, backend="torch").loss
    hard, soft = errors.hard.sum(1), errors.soft.sum(1)
    torch.testing.assert_close(value, (hard + soft + (hard - soft).abs()).mean())
