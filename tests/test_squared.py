"""Squared errors and decoding: every backend against the definition in float64, and that against numbers by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drq_fast import functional, use_backend
from drq_fast.backends.native import extension

needs_native = pytest.mark.skipif(extension.native is None, reason="the extension is not built")
ISAS = extension.supported_isas()
SHAPES = [  # N, D, K, M
    (0, 3, 4, 2),
    (1, 1, 2, 1),
    (50, 5, 8, 3),
    (300, 17, 33, 4),
    (130, 64, 256, 9),
    (7, 40, 1100, 3),  # products instead of K x K inner products
]


def gradients(codec, commitment: float, backend: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(errors, codes, gradients of x, codebook, scale and offset), the errors weighted at random."""
    leaves = [t.detach().clone().requires_grad_() for t in codec]
    x, codebook, scale, offset = leaves
    errors, codes = functional.squared_errors(x, codebook, scale, offset=offset, commitment=commitment, backend=backend)
    weights = torch.rand(errors.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (errors * weights).sum().backward()
    return errors.detach(), codes, [leaf.grad for leaf in leaves]


def test_numbers_by_hand():
    """x = 5, codewords 0 and 2, scales 1 and 1/2, offset 1: approximations 1 + 2 = 3 and 3 + 1 = 4."""
    x, codebook = torch.tensor([[5.0]], requires_grad=True), torch.tensor([[0.0], [2.0]], requires_grad=True)
    scale, offset = torch.tensor([1.0, 0.5], requires_grad=True), torch.tensor([1.0], requires_grad=True)
    errors, codes = functional.squared_errors(x, codebook, scale, offset=offset, commitment=0.25)
    assert codes.tolist() == [[1, 1]]
    assert errors.tolist() == [[1.25 * 4, 1.25 * 1]]
    errors.sum().backward()
    assert x.grad.tolist() == [[0.25 * 2 * (2 + 1)]]
    # The residuals are 2 and 1: level 0 is pulled by both, level 1 by the second.
    assert codebook.grad.tolist() == [[0.0], [-2 * (2 + 1) - 2 * 1 * 0.5]]
    assert scale.grad.tolist() == [-2 * (2 + 1) * 2, -2 * 1 * 2]
    assert offset.grad.tolist() == [-2 * (2 + 1)]


def test_the_definition_has_right_derivatives(codec):
    """Without commitment, and without stopping the gradient by x: the plain squared error given the codes."""
    x, codebook, scale, offset = (t.requires_grad_() for t in codec(6, 3, 4, 2, torch.float64))

    def errors(codebook: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        found = functional.squared_errors(x.detach(), codebook, scale, offset=offset, commitment=0, backend="torch")
        return found.errors

    assert torch.autograd.gradcheck(errors, (codebook, scale, offset))


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("N", "D", "K", "M"), SHAPES)
def test_native_agrees_with_the_definition(codec, monkeypatch, isa, N, D, K, M):
    monkeypatch.setenv("DRQ_FAST_ISA", isa)
    inputs = codec(N, D, K, M)
    exact = codec(N, D, K, M, torch.float64)
    before = [t.clone() for t in inputs]
    errors, codes, found = gradients(inputs, 0.3, "native")
    expected_errors, expected_codes, expected = gradients(exact, 0.3, "torch")
    assert torch.equal(codes, expected_codes)
    for ours, right in zip([errors, *found], [expected_errors, *expected], strict=True):
        assert ours.dtype == torch.float32
        assert (ours - right).norm() <= 2e-6 * right.norm()
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@needs_native
def test_bits_depend_neither_on_the_instruction_set_nor_on_the_threads(codec, monkeypatch):
    inputs, results, threads = codec(700, 21, 40, 4), [], torch.get_num_threads()
    try:
        for isa in ISAS:
            for count in (1, 2, 3):
                monkeypatch.setenv("DRQ_FAST_ISA", isa)
                torch.set_num_threads(count)
                errors, _, found = gradients(inputs, 1.0, "native")
                results.append([errors, *found])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_native
def test_many_rows_are_taken_in_blocks(codec, monkeypatch):
    inputs = codec(500, 8, 16, 3)
    whole = gradients(inputs, 1.0, "native")[2]
    monkeypatch.setattr("drq_fast.backends.native.squared._BLOCK", 8 * 3 * 77)
    parts = gradients(inputs, 1.0, "native")[2]
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_floats_are_computed_in_float32(codec, dtype):
    inputs = codec(60, 16, 8, 3, dtype)
    errors, codes, found = gradients(inputs, 1.0, "native")
    expected = gradients([t.float() for t in inputs], 1.0, "native")
    assert torch.equal(codes, expected[1])
    assert torch.equal(errors, expected[0])
    for ours, right in zip(found, expected[2], strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, right.to(dtype))


@needs_native
def test_second_derivatives_raise(codec):
    x, codebook, scale, _ = codec()
    errors = functional.squared_errors(x.requires_grad_(), codebook, scale).errors
    with pytest.raises(RuntimeError, match="the native backend has no second derivatives"):
        torch.autograd.grad(errors.sum(), x, create_graph=True)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_decodes_to_the_bits_of_the_definition(codec, monkeypatch, isa, dtype):
    monkeypatch.setenv("DRQ_FAST_ISA", isa)
    for N, D, K, M in SHAPES:
        _, codebook, scale, offset = codec(N, D, K, M, dtype)
        codebook[0] = -0.0
        codes = torch.randint(K, (N, M), generator=torch.Generator().manual_seed(0))
        for shift in (None, offset):
            ours, right = (
                functional.decode(codes, codebook, scale, offset=shift, backend=b) for b in ("native", "torch")
            )
            assert ours.dtype == dtype
            assert torch.equal(ours.view(torch.int16), right.view(torch.int16))  # the sign of 0, too


@needs_native
def test_large_codebooks_are_encoded_by_products(codec):
    x, codebook, scale, offset = codec(40, 12, 9001, 3)
    ours, right = (functional.encode(x, codebook, scale, offset=offset, backend=b) for b in ("native", "torch"))
    assert torch.equal(ours, right)


def test_errors_that_do_not_count_are_not_computed(codec):
    """With weights (1, 0, 0) the paper's loss needs no soft assignment, and has the gradients of its definition."""
    x, codebook, scale, offset = (t.requires_grad_() for t in codec(40, 6, 8, 3, torch.float64))
    with use_backend("torch"):
        hard = functional.distortion(x, codebook, scale, gamma=1.0, offset=offset).hard
        expected = torch.autograd.grad(hard.sum(dim=1).mean(), (x, codebook, scale, offset))
        loss = functional.loss(x, codebook, scale, gamma=1e30, offset=offset, weights=(1, 0, 0)).loss
        found = torch.autograd.grad(loss, (x, codebook, scale, offset))
    assert torch.allclose(loss, hard.sum(dim=1).mean())
    assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))
