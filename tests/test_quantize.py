"""quantize and distortion: the definition itself, on numbers worked out by hand, literally, and by gradcheck."""

from __future__ import annotations

import math

import pytest
import torch

from drq_fast import functional
from drq_fast.backends import torch as definition
from drq_fast.backends.types import Parameters

F64 = torch.float64


def by_hand(x: float, scale: list[float], gamma: float = math.log(2)) -> tuple:
    """One dimension, two codewords 0 and 2: distances are whole numbers, gamma = ln 2 makes p powers of two."""
    arguments = (
        torch.tensor([[x]], dtype=F64),
        torch.tensor([[0.0], [2.0]], dtype=F64),
        torch.tensor(scale, dtype=F64),
    )
    return functional.quantize(*arguments, gamma=gamma, backend="torch"), functional.distortion(
        *arguments, gamma=gamma, backend="torch"
    )


def test_by_hand():
    # Level 0: d = (3, 1), p = (1/5, 4/5), hard 2, soft 8/5. Level 1 (codewords 0 and 1) sees 1: d = (1, 0),
    # p = (1/3, 2/3), hard 1, soft 2/3.
    quantized, errors = by_hand(3.0, [1.0, 0.5])
    assert quantized.codes.tolist() == [[1, 1]]
    assert quantized.hard.item() == pytest.approx(3)
    assert quantized.soft.item() == pytest.approx(8 / 5 + 2 / 3)
    assert errors.hard[0].tolist() == pytest.approx([1, 0])
    assert errors.soft[0].tolist() == pytest.approx([3 - 8 / 5, 3 - 8 / 5 - 2 / 3])
    assert errors.joint[0].tolist() == pytest.approx([0.16, (3 - 8 / 5 - 2 / 3) ** 2])


def test_negative_scale_by_hand():
    # Level 1 has codewords 0 and -1 and sees 1: d = (1, 2), p = (2/3, 1/3), so it keeps 0.
    quantized, errors = by_hand(3.0, [1.0, -0.5])
    assert quantized.codes.tolist() == [[1, 0]]
    assert quantized.hard.item() == pytest.approx(2)
    assert quantized.soft.item() == pytest.approx(8 / 5 - 1 / 3)
    assert errors.hard[0].tolist() == pytest.approx([1, 1])


def test_tie_goes_to_the_smaller_index():
    quantized, _ = by_hand(1.0, [1.0])
    assert quantized.codes.tolist() == [[0]]
    twins = torch.tensor([[1.0, 2.0]] * 5)
    assert functional.encode(torch.randn(9, 2), twins, torch.ones(3), backend="torch").unique().tolist() == [0]


def test_offset_is_subtracted_and_added_back():
    codebook, scale = torch.tensor([[0.0], [2.0]], dtype=F64), torch.tensor([1.0, 0.5], dtype=F64)
    offset = torch.tensor([10.0], dtype=F64)
    moved = functional.quantize(
        torch.tensor([[13.0]], dtype=F64), codebook, scale, gamma=math.log(2), offset=offset, backend="torch"
    )
    assert moved.hard.item() == pytest.approx(13)
    assert moved.soft.item() == pytest.approx(10 + 8 / 5 + 2 / 3)


def test_one_codeword():
    x, codebook = torch.tensor([[3.0, 4.0]], dtype=F64), torch.zeros(1, 2, dtype=F64)
    errors = definition.distortion(x, Parameters(codebook, torch.ones(2, dtype=F64), None), 1.0)
    assert errors.codes.tolist() == [[0, 0]]
    assert errors.hard.tolist() == errors.soft.tolist() == [[5, 5]]


def test_zero_distance_has_a_finite_gradient():
    codebook = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    x = codebook.detach().clone().requires_grad_()
    scale = torch.tensor([1.0, 0.5, 0.0], requires_grad=True)
    errors = functional.distortion(x, codebook, scale, gamma=5.0, backend="torch")
    assert errors.hard[:, 0].tolist() == [0, 0]
    (errors.hard.sum() + errors.soft.sum() + errors.joint.sum()).backward()
    for leaf in (x, codebook, scale):
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()


def literal(x, codebook, scale, gamma, offset):
    """The formulas with every difference formed, vector by vector."""
    rows = []
    for vector in x - offset:
        h, hard, soft, columns = vector, torch.zeros_like(vector), torch.zeros_like(vector), []
        for s in scale:
            distance = (h - s * codebook).norm(dim=1)
            p = torch.softmax(-gamma * distance, dim=0)
            b = int(distance.argmin())
            hard, soft, h = hard + s * codebook[b], soft + (s * p[:, None] * codebook).sum(0), h - s * codebook[b]
            columns.append((b, (vector - hard).norm(), (vector - soft).norm(), (soft - hard).square().sum()))
        rows.append((hard + offset, soft + offset, *(torch.tensor(c) for c in zip(*columns, strict=True))))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize(
    ("N", "D", "K", "M"), [(1, 1, 2, 1), (7, 3, 5, 4), (13, 17, 64, 2), (5, 2, 4096, 1), (3, 31, 2, 16)]
)
def test_equals_the_literal_formulas(codec, N, D, K, M):
    x, codebook, scale, offset = codec(N, D, K, M, F64)
    hard, soft, codes, hard_error, soft_error, joint = literal(x, codebook, scale, 1.3, offset)
    quantized = functional.quantize(x, codebook, scale, gamma=1.3, offset=offset)
    errors = functional.distortion(x, codebook, scale, gamma=1.3, offset=offset)
    torch.testing.assert_close(quantized.hard, hard)
    torch.testing.assert_close(quantized.soft, soft)
    torch.testing.assert_close(errors.hard, hard_error)
    torch.testing.assert_close(errors.soft, soft_error)
    torch.testing.assert_close(errors.joint, joint)
    assert torch.equal(errors.codes, codes)
    assert torch.equal(quantized.codes, codes)


def test_gradcheck(codec):
    leaves = [t.requires_grad_() for t in codec(4, 3, 5, 3, F64)]

    def both(x, codebook, scale, offset):
        soft, hard, _ = functional.quantize(x, codebook, scale, gamma=0.9, offset=offset, backend="torch")
        errors = functional.distortion(x, codebook, scale, gamma=0.9, offset=offset, backend="torch")
        return soft, hard, errors.hard, errors.soft, errors.joint

    assert torch.autograd.gradcheck(both, leaves)


def test_gradient_of_offset_is_minus_the_sum_over_x(codec):
    x, codebook, scale, offset = (t.requires_grad_() for t in codec(dtype=F64))
    functional.distortion(x, codebook, scale, gamma=1.0, offset=offset).soft.sum().backward()
    torch.testing.assert_close(offset.grad, -x.grad.sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes(codec, assert_close, dtype):
    inputs = codec(N=101, D=24, K=16, M=4, dtype=dtype)
    exact = [t.double() for t in inputs]
    narrow = functional.distortion(*inputs[:3], gamma=1.0, offset=inputs.offset)
    truth = functional.distortion(*exact[:3], gamma=1.0, offset=exact[3])
    assert narrow.hard.dtype == torch.float32  # only x and the parameters are rounded
    assert torch.equal(narrow.codes, truth.codes)
    assert_close(narrow.hard, truth.hard)
    assert_close(narrow.soft, truth.soft)
    assert functional.quantize(*inputs[:3], gamma=1.0).soft.dtype == dtype


def test_empty_batch(codec):
    x, codebook, scale, offset = codec(N=0)
    quantized = functional.quantize(x, codebook, scale, gamma=1.0, offset=offset)
    assert quantized.hard.shape == (0, 5)
    assert quantized.codes.shape == (0, 3)
    assert functional.distortion(x, codebook, scale, gamma=1.0).hard.shape == (0, 3)


def test_inputs_stay_as_they_are_and_need_not_be_contiguous(codec):
    inputs = codec(N=30, D=6)
    copies = [t.clone() for t in inputs]
    turned = [t.T.contiguous().T if t.ndim == 2 else t for t in inputs]
    assert not turned[0].is_contiguous()
    a = functional.distortion(*inputs[:3], gamma=1.0, offset=inputs.offset)
    b = functional.distortion(*turned[:3], gamma=1.0, offset=turned[3])
    assert torch.equal(a.codes, b.codes)
    assert all(torch.equal(t, c) for t, c in zip(inputs, copies, strict=True))


def test_autocast_changes_nothing(codec):
    inputs = codec(N=30, D=16)
    plain = functional.distortion(*inputs[:3], gamma=1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = functional.distortion(*inputs[:3], gamma=1.0)
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))
