"""distortion and loss on Triton, in the interpreter or on a GPU, with gradients against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from drq_fast import BackendUnavailable, functional

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("x", "codebook", "scale", "offset")
SHAPES = [(1, 1, 2, 1), (37, 33, 19, 4), (9, 16, 50, 3), (9, 3, 8, 16), (17, 40, 130, 2), (9, 5, 257, 2)]


def run(inputs, backend, dtype=torch.float32, seed=0, **options):
    """(errors [N, M] three times, codes, gradients of x, codebook, scale and offset), random gradients upstream."""
    leaves = [t.detach().to(DEVICE, dtype).clone().requires_grad_() for t in inputs]
    found = functional.distortion(*leaves[:3], offset=leaves[3], backend=backend, **options)
    generator = torch.Generator().manual_seed(seed)
    upstream = [torch.randn(e.shape, dtype=torch.float64, generator=generator).to(e) for e in found[:3]]
    torch.autograd.backward(found[:3], upstream)
    return [e.detach() for e in found[:3]], found.codes, [leaf.grad for leaf in leaves]


def assert_agrees(inputs, limit=2e-5, **options):
    """Triton in float32 against the float64 reference, both with the same codes."""
    errors, codes, gradients = run(inputs, "triton", **options)
    true_errors, true_codes, true_gradients = run(inputs, "torch", torch.float64, **options)
    assert torch.equal(codes, true_codes)
    for a, b in zip(errors, true_errors, strict=True):
        assert a.dtype == torch.float32
        assert (a.double() - b).norm() <= limit * b.norm().clamp_min(1e-20)
    for name, a, b in zip(NAMES, gradients, true_gradients, strict=True):
        assert (a.double() - b).norm() <= limit * b.norm().clamp_min(1e-20), name


@pytest.mark.parametrize(("N", "D", "K", "M"), SHAPES)
def test_errors_and_gradients(codec, N, D, K, M):
    assert_agrees(codec(N, D, K, M), gamma=1.5)


@pytest.mark.parametrize("D", [16, 33])
def test_large_tiles_of_many_lines(codec, monkeypatch, D):
    from drq_fast.kernels import joint

    monkeypatch.setattr(joint, "_MANY_LINES", 1)
    assert_agrees(codec(N=37, D=D, K=50, M=4), gamma=1.5)


@pytest.mark.slow
@pytest.mark.parametrize(("N", "D", "K", "M"), [(33, 700, 256, 8), (18, 9, 40, 16), (17, 20, 1000, 4), (3, 3, 4096, 2)])
def test_errors_and_gradients_of_larger_codebooks(codec, N, D, K, M):
    # The offset's gradient is the sum of x's, which cancel where there are three rows of three numbers.
    assert_agrees(codec(N, D, K, M), limit=5e-5 if N == 3 else 2e-5, gamma=1.5)


@pytest.mark.parametrize("gamma", [0.01, 30.0])
def test_sharp_and_flat_assignments(codec, gamma):
    assert_agrees(codec(N=40, D=20, K=50, M=4), gamma=gamma)


@pytest.mark.parametrize("K", [32, 260])
def test_small_residuals_are_rebased(codec, K):
    """Level 0 leaves 1 % of the vectors: ||x||^2 / r is 1e4, and score space alone would lose four digits."""
    noise, codebook, scale, offset = codec(N=20, D=32, K=K, M=3)
    scale = scale.abs() * torch.tensor([1.0, 0.01, 0.01])
    x = codebook[:20] + 0.01 * noise + offset
    assert_agrees((x, codebook, scale, offset), limit=1e-4, gamma=10.0)


@pytest.mark.parametrize("K", [8, pytest.param(260, marks=pytest.mark.slow)])
def test_exact_hits_have_no_error_and_finite_gradients(codec, K):
    codebook = codec(K=K).codebook
    inputs = (codebook[:8], codebook, torch.tensor([1.0, 0, 0]), torch.zeros(5))
    errors, _, gradients = run(inputs, "triton", gamma=9.0)
    assert errors[0].abs().max() == 0
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("K", [32, 260])
def test_codes_that_rounding_has_made_the_second_best_have_finite_gradients(codec, K):
    from drq_fast.kernels import distortion as kernels

    x, codebook, scale, _ = (value.to(DEVICE) for value in codec(N=20, D=8, K=K, M=2))
    scored, gamma = kernels.codec_of(codebook, scale), torch.tensor([1e3], device=DEVICE)
    scores = torch.zeros(20, scored.P, device=DEVICE)
    scores[:, :K] = x @ codebook.T
    levels = kernels.distortion(x, scored, scores, gamma)
    levels = levels._replace(codes=(levels.codes + 1) % K)
    ones = torch.ones_like(levels.soft)
    found = kernels.distortion_backward(x, scored, scores, gamma, levels, ones, ones, ones)
    assert all(gradient.isfinite().all() for gradient in found)


def test_vectors_that_are_met_up_to_rounding_get_no_wild_gradient(codec):
    """The gradient of a norm has length 1 at most, however small the norm."""
    x, codebook, _, _ = codec(N=32, D=32, K=32)
    for distance in (1e-8, 1e-5, 1e-2):
        leaf = (25 * codebook + distance * x).to(DEVICE).requires_grad_()
        scale = torch.tensor([1.0, 0.7], device=DEVICE)
        functional.distortion(leaf, 25 * codebook.to(DEVICE), scale, gamma=5.0, backend="triton").hard.sum().backward()
        assert leaf.grad.norm(dim=1).max() < 2.5, distance


@pytest.mark.parametrize("K", [19, pytest.param(260, marks=pytest.mark.slow)])
def test_the_same_twice_and_in_parts(codec, monkeypatch, K):
    from drq_fast.kernels import distortion

    inputs = codec(N=33 if K < 256 else 20, K=K)
    first, again = (run(inputs, "triton", gamma=1.0) for _ in range(2))
    for a, b in zip(first[0] + first[2], again[0] + again[2], strict=True):
        assert torch.equal(a, b)
    monkeypatch.setattr(distortion, "MAX_SCORES", 1)  # 16 rows at a time
    parts = run(inputs, "triton", gamma=1.0)
    assert torch.equal(first[0][0], parts[0][0])
    for a, b in zip(first[0][1:] + first[2], parts[0][1:] + parts[2], strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()  # numpy's products depend on the place of a row


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes(codec, assert_close, dtype):
    inputs = [t.to(dtype) for t in codec(N=40, D=24, K=16, M=4)]
    _, codes, narrow = run(inputs, "triton", dtype, gamma=1.0)
    _, true_codes, exact = run(inputs, "torch", torch.float64, gamma=1.0)
    assert torch.equal(codes, true_codes)
    for a, b in zip(narrow, exact, strict=True):
        assert a.dtype == dtype
        assert_close(a, b)


@pytest.mark.parametrize("joint", ["gap", "mse"])
def test_loss(codec, joint):
    results = []
    for backend, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        leaves = [t.to(DEVICE, dtype).requires_grad_() for t in codec(N=30)]
        options = {"gamma": 1.5, "weights": (1, 0.7, 0.3), "level_weights": (0.5, 1, 2), "joint": joint}
        value, codes = functional.loss(*leaves[:3], offset=leaves[3], backend=backend, **options)
        value.backward()
        results.append([value.detach(), codes, *(leaf.grad for leaf in leaves)])
    for a, b in zip(*results, strict=True):
        assert (a.double() - b.double()).norm() <= 1e-5 * b.double().norm()


def test_autocast_precision_and_gamma_as_a_tensor_change_nothing(codec, monkeypatch):
    x, codebook, scale, _ = (t.to(DEVICE) for t in codec(D=16))

    def loss(gamma):
        return functional.loss(x, codebook, scale, gamma=gamma, backend="triton").loss

    plain = loss(1.5)
    assert torch.equal(loss(torch.tensor(1.5, device=DEVICE)), plain)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.equal(loss(1.5), plain)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(loss(1.5), plain)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    monkeypatch.setenv("DRQ_FAST_PRECISION", "exact")
    torch.testing.assert_close(loss(1.5), plain)


@pytest.mark.parametrize("K", [8, pytest.param(260, marks=pytest.mark.slow)])
def test_empty_batches_and_inputs_without_gradient(codec, K):
    x, codebook, scale, offset = (t.to(DEVICE) for t in codec(N=6, K=K))
    leaf = codebook.clone().requires_grad_()
    empty = functional.loss(x[:0], leaf, scale, gamma=1.0, offset=offset, backend="triton")
    empty.loss.backward()
    assert empty.loss == 0
    assert empty.codes.shape == (0, 3)
    assert not leaf.grad.any()
    assert not functional.distortion(x, codebook, scale, gamma=1.0, backend="triton").hard.requires_grad
    only_hard = functional.distortion(x, leaf, scale, gamma=1.0, backend="triton").hard.sum()
    (gradient,) = torch.autograd.grad(only_hard, leaf)
    wide = leaf.detach().double().requires_grad_()
    functional.distortion(x.double(), wide, scale.double(), gamma=1.0, backend="torch").hard.sum().backward()
    torch.testing.assert_close(gradient, wide.grad.float())


def test_refuses_what_it_cannot_do(codec):
    x, codebook, scale, _ = (t.to(DEVICE) for t in codec())
    with pytest.raises(BackendUnavailable, match="an input is float64"):
        functional.distortion(x.double(), codebook, scale, gamma=1.0, backend="triton")
    with pytest.raises(BackendUnavailable, match="it gives no gradient of gamma"):
        functional.loss(x, codebook, scale, gamma=torch.tensor(1.0, requires_grad=True), backend="triton")
    leaf = codebook.clone().requires_grad_()
    value = functional.loss(x, leaf, scale, gamma=1.0, backend="triton").loss
    with pytest.raises(
        RuntimeError, match=r'distortion: the triton backend has no second derivatives; backend="torch"'
    ):
        torch.autograd.grad(value, leaf, create_graph=True)


@pytest.mark.parametrize(("op", "K"), [("distortion", 40), ("distortion", 300), ("quantize", 40)])
def test_gradients_are_as_accurate_as_those_of_the_native_backend(codec, op, K):
    """Also where x is nearly a codeword: s G[b, b] - t[b] and r would lose most of their digits."""
    random, codebook, scale, offset = codec(N=12, D=12, K=K, M=2)
    x = codebook[torch.arange(12)] + 0.003 * random + offset
    found = {}
    for backend, dtype in (("triton", torch.float32), ("native", torch.float32), ("torch", torch.float64)):
        place = DEVICE if backend == "triton" else "cpu"
        leaves = [
            t.to(place, dtype).requires_grad_() for t in (x, codebook, scale.abs() * torch.tensor([1, 0.01]), offset)
        ]
        values = getattr(functional, op)(*leaves[:3], gamma=3.0, offset=leaves[3], backend=backend)
        values = values[:3] if op == "distortion" else values[:2]
        upstream = [torch.cos(torch.arange(v.numel() * 1.0) + i).view(v.shape).to(v) for i, v in enumerate(values)]
        found[backend] = [g.double().cpu() for g in torch.autograd.grad(values, leaves, upstream)]
    for name, ours, native, true in zip(NAMES, *(found[b] for b in ("triton", "native", "torch")), strict=True):
        limit = 3 * (native - true).norm() + 2e-7 * true.norm()
        assert (ours - true).norm() <= limit, name
