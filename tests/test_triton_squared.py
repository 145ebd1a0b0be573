"""squared_errors on Triton, in the interpreter or on a GPU, with gradients against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from drq_fast import BackendUnavailable, RecurrentQuantizer, functional, use_backend

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("errors", "x", "codebook", "scale", "offset")
SHAPES = [  # N, D, K, M
    (0, 3, 4, 2),
    (1, 1, 2, 1),
    (37, 33, 19, 4),
    (9, 3, 8, 16),
    (17, 131, 130, 2),  # two tiles of dimensions
    (7, 20, 257, 3),
]


def run(inputs, backend, dtype=torch.float32, commitment=0.3):
    """(codes, [errors, gradients of x, codebook, scale and offset]), random gradients upstream."""
    leaves = [None if t is None else t.detach().to(DEVICE, dtype).requires_grad_() for t in inputs]
    x, codebook, scale, offset = leaves
    options = {"offset": offset, "commitment": commitment, "backend": backend}
    errors, codes = functional.squared_errors(x, codebook, scale, **options)
    weights = torch.randn(errors.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    errors.backward(weights.to(errors))
    return codes, [errors.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


def assert_agrees(inputs, limit=3e-6, **options):
    codes, found = run(inputs, "triton", **options)
    true_codes, expected = run(inputs, "torch", torch.float64, **options)
    assert torch.equal(codes, true_codes)
    for name, a, b in zip(NAMES, found, expected, strict=False):
        assert a.dtype == torch.float32
        assert a.shape == b.shape
        assert (a.double() - b).norm() <= limit * b.norm(), name


@pytest.mark.parametrize(("N", "D", "K", "M"), SHAPES)
def test_errors_and_gradients(codec, N, D, K, M):
    inputs = codec(N, D, K, M)
    before = [t.clone() for t in inputs]
    assert_agrees(inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@pytest.mark.parametrize("commitment", [0.0, 1.0])
def test_without_an_offset(codec, commitment):
    assert_agrees((*codec(30, 7, 11, 3)[:3], None), commitment=commitment)


def test_numbers_by_hand():
    """x = 5, codewords 0 and 2, scales 1 and 1/2, offset 1: approximations 3 and 4, residuals 2 and 1."""
    numbers = ([[5.0]], [[0.0], [2.0]], [1.0, 0.5], [1.0])
    x, codebook, scale, offset = (torch.tensor(each, device=DEVICE, requires_grad=True) for each in numbers)
    found = functional.squared_errors(x, codebook, scale, offset=offset, commitment=0.25, backend="triton")
    assert found.codes.tolist() == [[1, 1]]
    assert found.errors.tolist() == [[5.0, 1.25]]
    found.errors.sum().backward()  # an expanded gradient
    assert x.grad.tolist() == [[1.5]]
    assert codebook.grad.tolist() == [[0.0], [-7.0]]
    assert scale.grad.tolist() == [-12.0, -4.0]
    assert offset.grad.tolist() == [-6.0]


def test_a_small_residual_before_a_large_one_keeps_its_digits(codec):
    """Level 0 leaves 1 part in 4096 and level 1 adds a whole codeword; only the error after level 0 counts."""
    noise, codebook, _, _ = codec(20, 8, 30, 2)
    x, scale = codebook[:20] + noise / 4096, torch.tensor([1.0, 1.0])
    results = []
    for backend, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        leaf, words = x.detach().to(DEVICE, dtype).requires_grad_(), codebook.to(DEVICE, dtype)
        functional.squared_errors(leaf, words, scale.to(words), backend=backend).errors[:, 0].sum().backward()
        results.append(leaf.grad.double())
    assert (results[0] - results[1]).norm() <= 3e-6 * results[1].norm()


def test_the_same_twice_and_in_blocks(codec, monkeypatch):
    from drq_fast.kernels import distortion

    inputs = codec(N=53, D=9, K=19, M=3)
    first, again = (run(inputs, "triton")[1] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    monkeypatch.setattr(distortion, "MAX_SCORES", 1)  # 16 vectors at a time
    assert_agrees(inputs)
    blocks = run(inputs, "triton")[1]
    assert torch.equal(first[0], blocks[0])
    assert torch.equal(first[1], blocks[1])


def test_vectors_that_are_not_finite_spoil_no_others(codec):
    x, codebook, scale, offset = codec(N=20, D=5, K=12, M=3)
    clean = run((x, codebook, scale, offset), "triton")[1]
    x[3], x[17, 2] = float("nan"), float("inf")
    bad = torch.tensor([n in (3, 17) for n in range(20)], device=DEVICE)
    for a, b in zip(run((x, codebook, scale, offset), "triton")[1][:2], clean[:2], strict=True):
        assert torch.equal(a[~bad], b[~bad])
        assert not a[bad].isfinite().all(dim=1).any()


def test_strided_inputs(codec):
    x, codebook, scale, offset = codec(N=21, D=10, K=12, M=3)
    wide = torch.stack([x, x], dim=2).flatten(1)[:, ::2]
    strided = (wide, codebook.T.contiguous().T, scale.repeat_interleave(2)[::2], offset.repeat_interleave(2)[::2])
    expected, found = run((x, codebook, scale, offset), "triton")[1], run(strided, "triton")[1]
    assert not any(t.is_contiguous() for t in strided)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_default_dtype_changes_nothing(codec):
    inputs = codec(N=12, D=6, K=9, M=2)
    expected = run(inputs, "triton")[1]
    torch.set_default_dtype(torch.float64)
    try:
        found = run(inputs, "triton")[1]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_floats_are_computed_in_float32(codec, dtype):
    inputs = [t.to(dtype) for t in codec(40, 24, 16, 3)]
    codes, found = run(inputs, "triton", dtype)
    true_codes, expected = run(inputs, "triton", torch.float32)
    assert torch.equal(codes, true_codes)
    assert torch.equal(found[0], expected[0])
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, b.to(dtype))


@pytest.mark.parametrize("options", [{"commitment": 0.5}, {"loss": "paper", "weights": (1, 0, 0), "gamma": 1.0}])
def test_the_layer_trains(codec, options):
    """All levels, fewer levels by vector, a mask; the paper's loss with weights (1, 0, 0) takes squared errors, too."""
    x, codebook, _, _ = codec(N=26, D=6, K=10, M=3)
    results = []
    for backend in ("triton", "torch"):
        layer = RecurrentQuantizer(6, 10, 3, init="random", **options).to(DEVICE)
        layer.load_state_dict(layer.state_dict() | {"codebook": codebook})
        leaf = x.to(DEVICE, copy=True).requires_grad_()
        with use_backend(backend):
            output = layer(leaf)
            total = output.loss + output.quantized.square().mean()
            if layer.loss == "squared":
                lengths = torch.arange(26, device=DEVICE) % 3 + 1
                total = total + layer(leaf, levels=lengths, mask=lengths > 1, reconstruct=False).loss
            total.backward()
        results.append((output.codes, [total.detach(), leaf.grad, *(p.grad for p in layer.parameters())]))
    assert torch.equal(results[0][0], results[1][0])
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert (a - b).norm() <= 3e-6 * b.norm()


def test_what_it_cannot_do(codec):
    x, codebook, scale, _ = (t.to(DEVICE) for t in codec())
    with pytest.raises(BackendUnavailable, match="an input is float64"):
        functional.squared_errors(x.double(), codebook, scale, backend="triton")
    errors = functional.squared_errors(x.requires_grad_(), codebook, scale, backend="triton").errors
    with pytest.raises(RuntimeError, match="squared_errors: the triton backend has no second derivatives"):
        torch.autograd.grad(errors.sum(), x, create_graph=True)
    assert not functional.squared_errors(x.detach(), codebook, scale, backend="triton").errors.requires_grad
