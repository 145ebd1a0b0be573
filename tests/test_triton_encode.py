"""encode on Triton: greedy and with a beam, in the interpreter or on a GPU, against the reference."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from drq_fast import BackendUnavailable, functional

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = Path(__file__).parents[1] / "kernels"


def excess(x, codebook, scale, codes):
    """How much worse than the best each greedy choice is, given those before it, relative to ||h||^2 + ||s C||^2."""
    h, codebook, scale, worst = x.double(), codebook.double(), scale.double(), 0.0
    for m, s in enumerate(scale):
        error = (h[:, None] - s * codebook).square().sum(dim=2)
        chosen = error.gather(1, codes[:, m : m + 1].long()).squeeze(1)
        size = h.square().sum(dim=1) + (s * codebook).square().sum(dim=1).max()
        worst = max(worst, float(((chosen - error.min(dim=1).values) / size).max()))
        h = h - s * codebook[codes[:, m].long()]
    return worst


def encode(x, codebook, scale, **options):
    return functional.encode(x, codebook, scale, backend="triton", **options)


@pytest.mark.parametrize(
    ("N", "D", "K", "M"),
    [(1, 1, 2, 1), (101, 33, 17, 4), (33, 5, 256, 16), (33, 40, 129, 3), (19, 7, 257, 3), (5, 3, 4096, 2)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_choices_are_the_best(codec, N, D, K, M, dtype):
    x, codebook, scale, offset = (t.to(DEVICE) for t in codec(N, D, K, M, dtype))
    codes = encode(x, codebook, scale)
    assert codes.dtype == (torch.uint8 if K <= 256 else torch.int32)
    assert excess(x.float(), codebook, scale, codes) < 1e-6
    codes = encode(x, codebook, scale, offset=offset)
    assert excess(x.float() - offset.float(), codebook, scale, codes) < 1e-6


@pytest.mark.parametrize("K", [12, 300])
def test_exact_precision_and_a_wrong_one(codec, monkeypatch, K):
    x, codebook, scale, _ = (t.to(DEVICE) for t in codec(N=40, K=K))
    fast = encode(x, codebook, scale)
    monkeypatch.setenv("DRQ_FAST_PRECISION", "exact")
    assert torch.equal(encode(x, codebook, scale), fast)
    assert torch.equal(encode(x, codebook, scale, beam=2), functional.encode(x, codebook, scale, beam=2))
    monkeypatch.setenv("DRQ_FAST_PRECISION", "tf32")
    with pytest.raises(ValueError, match="encode: DRQ_FAST_PRECISION must be one of 'fast', 'exact', got 'tf32'"):
        encode(x, codebook, scale)


@pytest.mark.parametrize(
    ("N", "D", "K", "M", "beam", "omega"),
    [
        (20, 12, 40, 4, 5, None),
        (9, 12, 20, 4, 16, (0.1, 0.1, 0.1, 1.0)),
        (8, 6, 30, 3, 4, (1.0, 0.0, 0.0)),
        (5, 3, 5, 3, 25, (0.0, 0.0, 1.0)),
        (2, 7, 300, 3, 20, None),  # more candidates than one tile holds
        (3, 4, 2, 16, 3, None),
        (2, 3, 8, 1, 4, None),
    ],
)
def test_a_beam_finds_the_codes_of_the_reference(codec, N, D, K, M, beam, omega):
    x, codebook, scale, offset = (t.to(DEVICE) for t in codec(N, D, K, M))
    options = {"offset": offset, "beam": beam, "level_weights": omega}
    expected = functional.encode(x, codebook, scale, backend="torch", **options)
    assert torch.equal(encode(x, codebook, scale, **options), expected)


def test_ties_go_to_the_smaller_code(codec):
    twins = torch.tensor([[1.0, 2.0]] * 5, device=DEVICE)
    many = twins.repeat(60, 1)
    x = codec(N=9, D=2).x.to(DEVICE)
    assert encode(x, twins, torch.ones(3, device=DEVICE)).unique().tolist() == [0]
    assert encode(x, many, torch.ones(3, device=DEVICE)).unique().tolist() == [0]
    assert encode(x, twins, torch.ones(3, device=DEVICE), beam=3).unique().tolist() == [0]
    words = torch.tensor([[1.0], [1.0], [3.0]], device=DEVICE)
    four, ones = torch.tensor([[4.0]], device=DEVICE), torch.ones(2, device=DEVICE)
    assert encode(four, words, ones, beam=3).tolist() == [[2, 0]]
    assert encode(four, words, ones, beam=3, level_weights=(0, 1)).tolist() == [[0, 2]]


@pytest.mark.parametrize(("K", "beam"), [(64, 1), (300, 1), (64, 2)])
def test_small_residuals_are_rebased(K, beam):
    """x = C[a] + C[b] / 100,000: in score space the second level would see little but rounding errors of the first."""
    codebook = torch.randn(K, 32, generator=torch.Generator().manual_seed(0)) + 10
    wanted = torch.stack([torch.arange(20), torch.arange(20).flip(0)], dim=1)
    scale = torch.tensor([1.0, 1e-5])
    x = functional.decode(wanted, codebook.double(), scale.double()).float()
    codes = encode(x.to(DEVICE), codebook.to(DEVICE), scale.to(DEVICE), beam=beam)
    assert torch.equal(codes.long().cpu(), wanted)


@pytest.mark.parametrize(("K", "beam"), [(8, 1), (300, 1), (8, 4)])
def test_vectors_that_are_not_finite_get_some_code_and_disturb_no_other(codec, K, beam):
    x, codebook, scale, _ = (t.to(DEVICE) for t in codec(N=12, K=K))
    clean = encode(x, codebook, scale, beam=beam)
    x[3], x[7, 2] = float("nan"), float("inf")
    codes = encode(x, codebook, scale, beam=beam)
    others = [n for n in range(12) if n not in (3, 7)]
    assert torch.equal(codes[others], clean[others])
    assert int(codes.max()) < K
    assert codes[3].tolist() == [0, 0, 0]


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("K", [8, 300])
def test_empty_and_strided_inputs_are_left_alone(codec, beam, K):
    x, codebook, scale, _ = (t.to(DEVICE) for t in codec(N=6, K=K))
    assert encode(x[:0], codebook, scale, beam=beam).shape == (0, 3)
    turned = (x.T.contiguous().T, codebook.T.contiguous().T, scale)
    before = [t.clone() for t in turned]
    assert torch.equal(encode(*turned, beam=beam), encode(x, codebook, scale, beam=beam))
    assert all(torch.equal(a, b) for a, b in zip(turned, before, strict=True))


def test_parts_change_nothing(codec, monkeypatch):
    from drq_fast.kernels import levels

    x, codebook, scale, _ = (t.to(DEVICE) for t in codec(N=20, K=300))
    whole = [encode(x, codebook, scale), encode(x[:5], codebook, scale, beam=2)]
    monkeypatch.setattr(levels, "MAX_SCORES", 7 * 384)
    assert torch.equal(encode(x, codebook, scale), whole[0])
    assert torch.equal(encode(x[:5], codebook, scale, beam=2), whole[1])


@pytest.mark.skipif(DEVICE == "cuda", reason="matrix products on a GPU have at least 16 rows")
def test_launches_follow_the_tile_height_in_the_settings(codec, monkeypatch):
    from drq_fast.kernels import beam
    from drq_fast.kernels import encode as greedy

    x, codebook, scale, _ = codec(N=20, K=300)
    whole = [encode(x, codebook, scale), encode(x, codebook, scale, beam=2)]
    tiled, errors = greedy.tiled_settings, beam.errors_settings
    monkeypatch.setattr(greedy, "tiled_settings", lambda precision: tiled(precision) | {"ROWS": 8})
    monkeypatch.setattr(beam, "errors_settings", lambda precision: errors(precision) | {"ROWS": 8})
    assert torch.equal(encode(x, codebook, scale), whole[0])
    assert torch.equal(encode(x, codebook, scale, beam=2), whole[1])


def test_refuses_what_it_cannot_do(codec):
    x, codebook, scale, _ = (t.to(DEVICE) for t in codec())
    with pytest.raises(BackendUnavailable, match="an input is float64"):
        encode(x.double(), codebook, scale)


def to_tf32(values):
    """float32 with its fraction rounded to 10 bits."""
    bits = values.view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def test_tf32x3_is_as_good_as_float32(codec):
    """An emulation, because the interpreter multiplies float32 as it is: three products of parts with 10 bits each."""
    x, codebook, scale, _ = codec(N=400, D=512, K=64, M=1)
    truth = x.double() @ codebook.double().T
    size = x.double().norm(dim=1)[:, None] * codebook.double().norm(dim=1)
    high, c_high = to_tf32(x), to_tf32(codebook)
    low, c_low = to_tf32(x - high), to_tf32(codebook - c_high)
    three = (low @ c_high.T + high @ c_low.T) + high @ c_high.T
    errors = [float(((s - truth).abs() / size).max()) for s in (x @ codebook.T, three, high @ c_high.T)]
    assert errors[1] < 2 * errors[0] < 1e-6  # float32 and tf32x3
    assert errors[2] > 30 * errors[1]  # tf32 alone would be far off
    key = codebook.square().sum(dim=1) - 2 * three
    assert excess(x, codebook, scale, key.argmin(dim=1, keepdim=True)) < 1e-6


def test_every_kernel_says_what_it_does_in_four_points():
    kernels = [
        node
        for path in KERNELS.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    ]
    assert len(kernels) >= 10
    for node in kernels:
        lines = [line.strip() for line in ast.get_docstring(node).splitlines()]
        points = [
            line.split(":")[0] for line in lines if line.split(":")[0] in ("Math", "Tiling", "Memory", "Numerics")
        ]
        assert points == ["Math", "Tiling", "Memory", "Numerics"], node.name
