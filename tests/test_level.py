"""Large codebooks on the CPU, whose levels multiply anew instead of forming C C^T; test_loss.py has the gradients."""

from __future__ import annotations

import pytest
import torch

from drq_fast import functional
from drq_fast.backends.native import extension, level, products

pytestmark = pytest.mark.skipif(extension.native is None, reason="the extension is not built")
ISAS = [] if extension.native is None else extension.supported_isas()
OPERATIONS = pytest.mark.parametrize(
    "op", [functional.loss, functional.distortion, functional.quantize], ids=lambda op: op.__name__
)


def run(op, inputs, backend="native", dtype=torch.float32, then=lambda: None):
    """(codes, [what else op returns, gradients of x, codebook, scale, offset]); `then` is called before backward."""
    leaves = [t.detach().to(dtype).clone().requires_grad_() for t in inputs]
    *results, codes = op(*leaves[:3], offset=leaves[3], gamma=2.0, backend=backend)
    then()
    sum(r.sum() for r in results).backward()
    return codes, [*(r.detach() for r in results), *(leaf.grad for leaf in leaves)]


@pytest.fixture
def assert_same(assert_close):
    """The same codes, and everything else up to rounding."""

    def check(found, expected, dtype=torch.float32):
        assert torch.equal(found[0], expected[0])
        for a, b in zip(found[1], expected[1], strict=True):
            assert_close(a, b, dtype)

    return check


@OPERATIONS
def test_both_ways_agree_and_so_do_tiles(codec, monkeypatch, assert_same, op):
    inputs = codec(N=60, D=12, K=1500, M=3)
    found = run(op, inputs)
    with monkeypatch.context() as patch:
        patch.setattr(level, "_TILE", 17 * 1504)
        assert_same(found, run(op, inputs))
    monkeypatch.setattr(level, "by_products", lambda *_: False)
    assert_same(found, run(op, inputs))


@OPERATIONS
def test_every_instruction_set_gives_the_same_bits(codec, monkeypatch, op):
    inputs = codec(N=60, D=12, K=1030, M=2)
    inputs.x[::3] = inputs.codebook[:20] + inputs.offset + 1e-3 * inputs.x[::3]  # small residuals
    found = []
    for isa in ISAS:
        monkeypatch.setenv("DRQ_FAST_ISA", isa)
        found.append(run(op, inputs))
    for codes, others in found[1:]:
        assert torch.equal(codes, found[0][0])
        assert all(torch.equal(a, b) for a, b in zip(others, found[0][1], strict=True))


@OPERATIONS
def test_threads_may_change_before_the_backward_pass(codec, assert_same, op):
    inputs, before = codec(N=300, D=8, K=1024, M=1), torch.get_num_threads()
    found = run(op, inputs)
    try:
        torch.set_num_threads(3)
        changed = run(op, inputs, then=lambda: torch.set_num_threads(2))
    finally:
        torch.set_num_threads(before)
    assert_same(found, changed)


@pytest.mark.parametrize("op", [functional.distortion, functional.quantize])
def test_what_is_not_finite_shows_in_its_row_alone(codec, op):
    x, codebook, scale, _ = codec(N=20, D=6, K=1100, M=2)
    clean = op(x, codebook, scale, gamma=1.0, backend="native")
    x[5, 3] = float("nan")
    found = op(x, codebook, scale, gamma=1.0, backend="native")
    assert found.soft[5].isnan().all()
    assert torch.equal(found.soft[6:], clean.soft[6:])


@OPERATIONS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_and_empty_batches(codec, assert_same, op, dtype):
    inputs = [t.to(dtype) for t in codec(N=20, D=6, K=1100, M=2)]
    assert_same(run(op, inputs, dtype=dtype), run(op, inputs, "torch", torch.float64), dtype)
    empty = run(op, [inputs[0][:0], *inputs[1:]])[1]
    assert not empty[-3].any()  # the codebook's gradient


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize(("n", "d", "k"), [(0, 3, 4), (1, 1, 1), (70, 33, 160), (5, 1000, 17)])
def test_products(monkeypatch, onednn, n, d, k):
    if onednn and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("torch has no oneDNN here")
    monkeypatch.setattr(products, "_prefers_onednn", lambda: onednn)
    monkeypatch.setattr(products, "_LARGE", 1)
    a, b, total = (torch.randint(-9, 9, shape).float() for shape in ((n, d), (d, k), (n, k)))  # sums are exact
    assert torch.equal(products.product(a, b), a @ b)
    assert torch.equal(products.product(a, b.T.contiguous().T), a @ b)
    expected = total + a @ b
    products.add_product(total, a.T.contiguous(), b)
    assert torch.equal(total, expected)
