"""quantize on Triton, in the interpreter or on a GPU, with gradients against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from drq_fast import BackendUnavailable, functional

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(inputs, backend, dtype=torch.float32, gamma=1.5):
    """[soft, hard, codes, gradients of x, codebook, scale and offset], random gradients upstream."""
    leaves = [t.detach().to(DEVICE, dtype).clone().requires_grad_() for t in inputs]
    found = functional.quantize(*leaves[:3], offset=leaves[3], gamma=gamma, backend=backend)
    generator = torch.Generator().manual_seed(0)
    upstream = [torch.randn(e.shape, dtype=torch.float64, generator=generator).to(e) for e in found[:2]]
    torch.autograd.backward(found[:2], upstream)
    return [*(t.detach() for t in found), *(leaf.grad for leaf in leaves)]


def assert_agrees(inputs, limit=2e-5, **options):
    actual, expected = run(inputs, "triton", **options), run(inputs, "torch", torch.float64, **options)
    assert torch.equal(actual[2], expected[2])
    for a, b in zip(actual, expected, strict=True):
        assert (a.double() - b.double()).norm() <= limit * b.double().norm().clamp_min(1e-2)  # it can be 0


@pytest.mark.parametrize(("N", "D", "K", "M"), [(1, 1, 2, 1), (37, 33, 19, 4), (17, 9, 130, 2), (5, 5, 257, 2)])
def test_approximations_and_gradients(codec, N, D, K, M):
    assert_agrees(codec(N, D, K, M))


def test_small_residuals_are_rebased(codec):
    noise, codebook, scale, offset = codec(N=20, D=32, K=32, M=3)
    scale = scale.abs() * torch.tensor([1.0, 0.01, 0.01])
    assert_agrees((codebook[:20] + 0.01 * noise + offset, codebook, scale, offset), limit=1e-4, gamma=10.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes(codec, assert_close, dtype):
    inputs = [t.to(dtype) for t in codec(N=40, D=24, K=16, M=4)]
    narrow, exact = run(inputs, "triton", dtype), run(inputs, "torch", torch.float64)
    assert torch.equal(narrow[2], exact[2])
    for i in (0, 1, 3, 4, 5, 6):
        assert narrow[i].dtype == dtype
        assert_close(narrow[i], exact[i])


def test_the_same_twice_and_in_parts(codec, monkeypatch):
    from drq_fast.kernels import distortion

    first, again = (run(codec(N=33), "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    monkeypatch.setattr(distortion, "MAX_SCORES", 1)  # 16 rows at a time
    for a, b in zip(first, run(codec(N=33), "triton"), strict=True):
        assert (a - b).double().norm() <= 1e-5 * a.double().norm()


def test_empty_input_and_what_it_cannot_do(codec):
    x, codebook, scale, offset = (t.to(DEVICE) for t in codec())
    leaf = codebook.clone().requires_grad_()
    empty = functional.quantize(x[:0], leaf, scale, gamma=1.0, offset=offset, backend="triton")
    assert empty.soft.shape == empty.hard.shape == (0, 5)
    empty.soft.sum().backward()
    assert not leaf.grad.any()
    with pytest.raises(BackendUnavailable, match="an input is float64"):
        functional.quantize(x.double(), codebook, scale, gamma=1.0, backend="triton")
    soft = functional.quantize(x, leaf, scale, gamma=1.0, backend="triton").soft
    with pytest.raises(RuntimeError, match=r"quantize: the triton backend has no second derivatives"):
        torch.autograd.grad(soft.sum(), leaf, create_graph=True)
