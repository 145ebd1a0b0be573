"""distortion and quantize by native code, with gradients against the float64 reference; test_loss.py has the loss."""

from __future__ import annotations

import pytest
import torch

from drq_fast import BackendUnavailable, RecurrentQuantizer, functional
from drq_fast.backends.native import extension, training

pytestmark = pytest.mark.skipif(extension.native is None, reason="the extension is not built")
ISAS = [] if extension.native is None else extension.supported_isas()
SHAPES = [(1, 1, 2, 1), (1000, 8, 16, 3), (37, 33, 19, 4), (200, 5, 257, 2), (60, 700, 300, 8), (20, 9, 40, 16)]
SHAPES += [(50, 9, 1100, 3), (40, 24, 9000, 3), (70, 5, 16384, 2)]  # by products at every level, see level.py
NAMES = ("x", "codebook", "scale", "offset")
OPERATIONS = pytest.mark.parametrize("op", [functional.distortion, functional.quantize], ids=lambda op: op.__name__)


def run(op, inputs, backend="native", dtype=torch.float32, **options):
    """(what op returns but codes, codes, gradients of x, codebook, scale and offset), random gradients upstream."""
    leaves = [t.detach().to(dtype).clone().requires_grad_() for t in inputs]
    *results, codes = op(*leaves[:3], offset=leaves[3], backend=backend, **options)
    generator = torch.Generator().manual_seed(0)
    upstream = [torch.randn(r.shape, dtype=torch.float64, generator=generator).to(r) for r in results]
    torch.autograd.backward(results, upstream)
    return [r.detach() for r in results], codes, [leaf.grad for leaf in leaves]


def assert_agrees(op, inputs, limit=1e-5, **options):
    """Native float32 against the float64 reference, both with the same codes."""
    results, codes, gradients = run(op, inputs, **options)
    exact_results, exact_codes, exact = run(op, inputs, "torch", torch.float64, **options)
    assert torch.equal(codes, exact_codes)
    for a, b in zip(results, exact_results, strict=True):
        assert (a.double() - b).norm() <= limit * b.norm()
    for name, a, b in zip(NAMES, gradients, exact, strict=True):
        assert (a.double() - b).norm() <= limit * b.norm().clamp_min(0.1), name  # it can be 0


@OPERATIONS
@pytest.mark.parametrize(("N", "D", "K", "M"), SHAPES)
def test_results_and_gradients(codec, op, N, D, K, M):
    assert_agrees(op, codec(N, D, K, M), gamma=1.5)


@OPERATIONS
@pytest.mark.parametrize("gamma", [0.01, 1.0, 30.0])
def test_sharp_and_flat_assignments(codec, op, gamma):
    assert_agrees(op, codec(N=200, D=20, K=50, M=4), gamma=gamma)


@OPERATIONS
def test_small_residuals_are_rebased(codec, op):
    """Level 0 leaves 1 % of the vectors: ||x||^2 / r is 1e4, and score space alone would lose four digits."""
    noise, codebook, scale, offset = codec(N=300, D=32, K=64, M=4)
    scale = scale.abs() * torch.tensor([1.0, 0.01, 0.01, 0.01])
    x = codebook[torch.arange(300) % 64] + 0.01 * noise + offset
    assert_agrees(op, (x, codebook, scale, offset), limit=1e-4, gamma=10.0)


@OPERATIONS
def test_clusters_far_from_each_other(op):
    """Rounding of the large norms makes other codewords seem nearer than the chosen one, which was recomputed."""
    torch.manual_seed(0)
    x = 100 * torch.randn(4, 64)[torch.arange(2000) % 4] + 0.1 * torch.randn(2000, 64)
    layer = RecurrentQuantizer(64, 64, 4)
    layer.initialise(x, seed=0)
    inputs = x, layer.codebook, layer.scale, layer.offset
    results, _, gradients = run(op, inputs, gamma=float(layer.gamma))
    assert all(bool(torch.isfinite(t).all()) for t in [*results, *gradients])
    exact, _, _ = run(op, inputs, "torch", torch.float64, gamma=float(layer.gamma))
    for a, b in zip(results[:2], exact[:2], strict=True):
        assert (a.double() - b).norm() <= 3e-2 * b.norm()  # float32 chooses differently here and there


@OPERATIONS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_its_row_alone(codec, op, bad):
    x, codebook, scale, _ = codec(N=200, D=20, K=50, M=3)
    clean = op(x, codebook, scale, gamma=1.0, backend="native")
    x[5, 3] = bad
    results = op(x, codebook, scale, gamma=1.0, backend="native")
    for name in {"soft", "joint"} & set(results._fields):
        result, expected = getattr(results, name), getattr(clean, name)
        assert not torch.isfinite(result[5]).any()
        assert torch.equal(result[6:], expected[6:])


@pytest.mark.parametrize("op", [functional.loss, functional.distortion, functional.quantize])
@pytest.mark.parametrize("gamma", [-1.0, float("inf"), float("nan")])
def test_a_tensor_gamma_is_looked_at(codec, op, gamma):
    x, codebook, scale, _ = codec(N=20)
    with pytest.raises(ValueError, match=rf"{op.__name__}: gamma must be a finite number above 0, got {gamma}\."):
        op(x, codebook, scale, gamma=torch.tensor(gamma), backend="native")


def test_few_rows_need_the_sums_of_one_thread(codec, monkeypatch):
    made, plain = [], training._Sums
    monkeypatch.setattr(training, "_Sums", lambda codec: made.append(plain(codec)) or made[-1])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        run(functional.distortion, codec(N=20, D=5, K=40, M=2), gamma=1.0)
    finally:
        torch.set_num_threads(before)
    assert len(made) == 1


def agreeing_rows(inputs, sharpness):
    """(inputs without the rows where float32 and float64 choose differently, gamma = sharpness / mean d_0)."""
    x, codebook, scale, offset = inputs
    codes = functional.encode(x, codebook, scale, offset=offset, backend="native")
    wide = [t.double() for t in inputs]
    same = (codes == functional.encode(*wide[:3], offset=wide[3], backend="torch")).all(dim=1)
    assert same.float().mean() > 0.9
    return (x[same], codebook, scale, offset), sharpness / float(torch.cdist(x - offset, codebook).mean())


@pytest.mark.slow
@OPERATIONS
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("small_residuals", [False, True])
def test_gradients_of_long_vectors(codec, op, sharpness, small_residuals):
    x, codebook, scale, offset = codec(N=512, D=2048, K=256, M=8)
    if small_residuals:  # n/r is 1e4 after level 0
        scale = scale * torch.tensor([1.0] + [0.01] * 7)
        x = codebook[torch.arange(512) % 256] + 0.01 * x + offset
    inputs, gamma = agreeing_rows((x, codebook, scale, offset), sharpness)
    assert_agrees(op, inputs, limit=1e-4, gamma=gamma)


def test_exact_hits_have_no_error_and_finite_gradients(codec):
    codebook = codec(K=8).codebook
    inputs = (codebook, codebook, torch.tensor([1.0, 0, 0]), torch.zeros(5))
    (hard, *_), _, gradients = run(functional.distortion, inputs, gamma=9.0)
    assert hard.abs().max() == 0
    assert all(g.isfinite().all() for g in gradients)
    assert all(g.isfinite().all() for g in run(functional.quantize, inputs, gamma=9.0)[2])


def test_vectors_that_are_met_up_to_rounding_get_no_wild_gradient(codec):
    """The gradient of a norm has length 1 at most, however small the norm."""
    x, codebook, _, _ = codec(N=64, D=32, K=64)
    for distance in (1e-9, 1e-7, 1e-5, 1e-2):
        leaf = (25 * codebook + distance * x).requires_grad_()
        scale = torch.tensor([1.0, 0.7])
        functional.distortion(leaf, 25 * codebook, scale, gamma=5.0, backend="native").hard.sum().backward()
        assert leaf.grad.norm(dim=1).max() < 2.5, distance  # two levels


@OPERATIONS
def test_every_instruction_set_gives_the_same_bits(codec, monkeypatch, op):
    inputs = codec(N=700, D=24, K=70, M=4)
    inputs.x[::5] = inputs.codebook[torch.arange(140) % 70] + inputs.offset + 1e-3 * inputs.x[::5]
    found = []
    for isa in ISAS:
        monkeypatch.setenv("DRQ_FAST_ISA", isa)
        results, codes, gradients = run(op, inputs, gamma=2.0)
        found.append([*results, codes, *gradients])
    assert ISAS[0] == "portable"
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


@OPERATIONS
def test_the_same_twice_and_in_parts(codec, monkeypatch, op):
    inputs = codec(N=2000, D=16, K=32, M=4)
    first, again = (run(op, inputs, gamma=1.0) for _ in range(2))
    for a, b in zip(first[0] + first[2], again[0] + again[2], strict=True):
        assert torch.equal(a, b)
    monkeypatch.setattr(training, "_TILE", 32 * 9 * 60)
    tiles = run(op, inputs, gamma=1.0)
    assert all(torch.equal(a, b) for a, b in zip(first[0], tiles[0], strict=True))
    monkeypatch.setattr(training, "_BLOCK", 32 * 300)
    blocks = run(op, inputs, gamma=1.0)
    assert torch.equal(first[1], blocks[1])
    for a, b, c in zip(first[2], tiles[2], blocks[2], strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()
        assert (a - c).norm() <= 1e-5 * a.norm()


def test_hard_is_what_decode_gives_and_the_errors_are_those_of_quantize(codec):
    x, codebook, scale, offset = codec(N=300, D=16, K=32, M=4)
    soft, hard, codes = functional.quantize(x, codebook, scale, gamma=1.5, offset=offset, backend="native")
    assert torch.equal(hard, functional.decode(codes, codebook, scale, offset=offset))
    errors = functional.distortion(x, codebook, scale, gamma=1.5, offset=offset, backend="native")
    assert torch.equal(codes, errors.codes)
    torch.testing.assert_close(errors.hard[:, -1], (x - hard).norm(dim=1))
    torch.testing.assert_close(errors.soft[:, -1], (x - soft).norm(dim=1))


@OPERATIONS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes(codec, assert_close, op, dtype):
    inputs = [t.to(dtype) for t in codec(N=200, D=24, K=16, M=4)]
    results, codes, gradients = run(op, inputs, dtype=dtype, gamma=1.0)
    exact_results, exact_codes, exact = run(op, inputs, "torch", torch.float64, gamma=1.0)
    assert torch.equal(codes, exact_codes)
    assert all(r.dtype == (dtype if op is functional.quantize else torch.float32) for r in results)
    for a, b in zip(results + gradients, exact_results + exact, strict=True):
        assert_close(a, b, dtype)


@OPERATIONS
@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_one_result_to_one_input(codec, op, which):
    x, codebook, scale, offset = codec()
    for i in range(1 if op is functional.quantize and which == 1 else 0, 4):  # hard does not depend on x
        narrow, wide = ([t.to(dtype) for t in (x, codebook, scale, offset)] for dtype in (torch.float32, torch.float64))
        for inputs, backend in ((narrow, "native"), (wide, "torch")):
            inputs[i].requires_grad_()
            op(*inputs[:3], offset=inputs[3], gamma=1.0, backend=backend)[which].square().sum().backward()
        assert narrow[i].grad is not None
        assert (narrow[i].grad - wide[i].grad).norm() <= 1e-5 * wide[i].grad.norm().clamp_min(1e-2), NAMES[i]


@OPERATIONS
def test_no_gradient_and_empty_batches(codec, op):
    x, codebook, scale, _ = codec()
    assert not op(x, codebook, scale, gamma=1.0, backend="native")[0].requires_grad
    leaf = codebook.clone().requires_grad_()
    empty = op(x[:0], leaf, scale, gamma=1.0, backend="native")
    empty[0].sum().backward()
    assert empty.codes.shape == (0, 3)
    assert not leaf.grad.any()


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_nothing_is_prepared_for_gradients_that_are_switched_off(codec, monkeypatch, off):
    x, codebook, scale, _ = codec(N=50, D=8, K=16, M=3)
    codebook.requires_grad_()
    asked = []
    plain = training.Recursion.each
    monkeypatch.setattr(
        training.Recursion, "each", lambda *a, **kw: (asked.append(kw.get("scores")), plain(*a, **kw))[1]
    )
    monkeypatch.setattr(training.Totals, "__init__", lambda *_: pytest.fail("gradients are added up"))
    with off():
        for op in (functional.loss, functional.distortion, functional.quantize):
            op(x, codebook, scale, gamma=1.0, backend="native")
    assert asked == [None] * 3  # no scores are kept


@pytest.mark.parametrize("op", [functional.loss, functional.distortion, functional.quantize])
@pytest.mark.parametrize("K", [8, 1100])  # by C C^T, and by products at every level
def test_backward_twice_adds_up_and_what_it_cannot_do_is_refused(codec, op, K):
    x, codebook, scale, _ = codec(K=K)
    leaf = codebook.clone().requires_grad_()
    *results, _ = op(x, leaf, scale, gamma=1.0, backend="native")
    value = sum(result.sum() for result in results)
    value.backward(retain_graph=True)
    once = leaf.grad.clone()
    value.backward(retain_graph=True)
    assert torch.equal(leaf.grad, 2 * once)
    with pytest.raises(RuntimeError, match=rf"^{op.__name__}: the native backend has no second .*; backend="):
        torch.autograd.grad(value, leaf, create_graph=True)
    with pytest.raises(BackendUnavailable, match="an input is float64"):
        op(x.double(), codebook, scale, gamma=1.0, backend="native")


def test_soft_gradient_of_the_layer_is_that_of_quantize(codec):
    x = codec(N=64, D=8).x
    layer = RecurrentQuantizer(8, 16, 3, gradient="soft", gamma=1.0, update="gradient")
    layer.initialise(x, seed=0)
    (expected,) = torch.autograd.grad(layer(x).quantized.square().sum(), layer.codebook)
    inputs = (x, layer.codebook, layer.scale)
    soft, hard, _ = functional.quantize(*inputs, gamma=layer.gamma, offset=layer.offset, backend="torch")
    (found,) = torch.autograd.grad((soft * 2 * hard.detach()).sum(), layer.codebook)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
