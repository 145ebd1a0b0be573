"""adc: the scores of all codes, in plain torch, in C++ and in CUDA; the same bits from each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from drq_fast import BackendUnavailable, functional
from drq_fast.backends import native
from drq_fast.backends import torch as definition
from drq_fast.backends.native.search import lookup
from drq_fast.backends.types import Parameters

METRICS = ["l2", "ip", "cosine"]
PTXSIM = Path(os.environ.get("DRQ_PTXSIM") or Path(__file__).parents[2] / "shared/tools/ptxsim")
SHAPES = [
    (1, 1, 2, 1),
    (3, 0, 8, 2),
    (0, 5, 8, 2),
    (2, 70001, 256, 4),
    (5, 1031, 300, 3),
    (3, 17, 20000, 16),
]  # Q N K M


def by_hand(metric: str, offset: list[float] | None = None, **options) -> list[float]:
    codebook, scale = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([1.0, -0.5])
    codes = torch.tensor([[0, 0], [1, 0], [1, 1]])  # xhat = (0, .5) (2, -.5) (1, 0)
    query = torch.tensor([[3.0, 4.0]])
    shift = None if offset is None else torch.tensor(offset)
    return functional.adc(query, codes, codebook, scale, metric=metric, offset=shift, **options)[0].tolist()


@pytest.mark.parametrize("backend", ["torch", None])
def test_by_hand(backend):
    assert by_hand("l2", backend=backend) == [9 + 12.25, 1 + 20.25, 4 + 16]
    assert by_hand("ip", backend=backend) == [2, 4, 3]
    assert by_hand("cosine", backend=backend) == pytest.approx([0.8, 4 / 5 / 4.25**0.5, 0.6])
    assert by_hand("l2", levels=1, backend=backend) == [9 + 9, 1 + 16, 1 + 16]
    # With the offset the vectors are (1, .5) (3, -.5) (2, 0).
    assert by_hand("l2", [1.0, 0.0], backend=backend) == [4 + 12.25, 0 + 20.25, 1 + 16]
    assert by_hand("ip", [1.0, 0.0], backend=backend) == [5, 7, 6]
    assert by_hand("cosine", [1.0, 0.0], backend=backend) == pytest.approx([1 / 1.25**0.5, 7 / 5 / 9.25**0.5, 0.6])


@pytest.mark.parametrize("metric", METRICS)
def test_scores_are_those_of_the_decoded_vectors(codec, metric):
    x, codebook, scale, offset = codec(N=40, D=6, K=9, M=4, dtype=torch.float64)
    query = x[:7] + 0.1
    codes = functional.encode(x, codebook, scale, offset=offset)
    for levels in (1, 2, 4):
        x_hat = functional.decode(codes, codebook, scale, offset=offset, levels=levels)
        expected = {
            "l2": torch.cdist(query, x_hat).square(),
            "ip": query @ x_hat.T,
            "cosine": torch.nn.functional.cosine_similarity(query[:, None], x_hat[None], dim=2),
        }[metric]
        actual = functional.adc(query, codes, codebook, scale, offset=offset, metric=metric, levels=levels)
        torch.testing.assert_close(actual, expected)


def test_cosine_with_a_zero_vector_is_zero():
    codebook = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    scores = functional.adc(
        torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([[0], [1]]), codebook, torch.ones(1), metric="cosine"
    )
    assert scores.tolist() == [[0, 0], [0, 1]]


@pytest.mark.parametrize("metric", METRICS)
def test_gradcheck(codec, metric):
    x, codebook, scale, offset = codec(5, 3, 4, 3, torch.float64)
    codes = functional.encode(x, codebook, scale)
    query = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = [t.requires_grad_() for t in (query, codebook, scale, offset)]
    assert torch.autograd.gradcheck(lambda q, c, s, o: functional.adc(q, codes, c, s, offset=o, metric=metric), leaves)


def test_equal_codes_have_equal_norms(codec):
    x, codebook, scale, offset = codec(N=500, D=3, K=4, M=4)
    codes = functional.encode(x, codebook, scale)
    for shift in (None, offset):
        norms = definition.squared_norms(codes, Parameters(codebook, scale, shift), "cosine")
        for code in codes.unique(dim=0):
            assert len(norms[(codes == code).all(dim=1)].unique()) == 1


def test_norms_without_the_gram_matrix(codec, monkeypatch):
    x, codebook, scale, offset = codec(N=500, D=3, K=4, M=4, dtype=torch.float64)
    codes = functional.encode(x, codebook, scale)
    for shift in (None, offset):
        expected = definition.squared_norms(codes, Parameters(codebook, scale, shift), "cosine")
        with monkeypatch.context() as patch:
            patch.setattr("drq_fast.backends.torch.scores._MAX_GRAM", 3)
            norms = definition.squared_norms(codes, Parameters(codebook, scale, shift), "cosine")
        torch.testing.assert_close(norms, expected)
        for code in codes.unique(dim=0):
            assert len(norms[(codes == code).all(dim=1)].unique()) == 1


def random_lookup(Q: int, N: int, K: int, M: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(Q + N + K + M)
    codes = torch.randint(K, (N, M), generator=generator).to(torch.uint8 if K <= 256 else torch.int32)
    return torch.randn(Q, K, generator=generator), codes, torch.randn(M, generator=generator)


@pytest.mark.skipif(native.why_not("cpu") is not None, reason="the extension is not built")
@pytest.mark.parametrize(("Q", "N", "K", "M"), SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_native_lookup_gives_the_bits_of_the_reference(Q, N, K, M, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        job = random_lookup(Q, N, K, M)
        assert torch.equal(lookup(*job), definition.lookup(*job))
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize(("Q", "N", "K", "M"), SHAPES)
def test_native_lookup_on_a_gpu_gives_the_bits_of_the_reference(Q, N, K, M):
    job = random_lookup(Q, N, K, M)
    assert torch.equal(lookup(*(t.cuda() for t in job)).cpu(), definition.lookup(*job))


@pytest.mark.skipif(native.why_not("cpu") is not None, reason="the extension is not built")
@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
@pytest.mark.parametrize("op", ["adc", "search"])
def test_native_gradients(codec, op, metric):
    """Of query, codebook, scale and offset, against plain autograd in float64."""
    inputs = codec(N=300, D=7, K=16, M=3)
    codes = functional.encode(*inputs[:3])

    def gradients(backend, dtype):
        x, *parts = (t.to(dtype).requires_grad_() for t in inputs)
        codebook, scale, offset = parts
        settings = {"offset": offset, "metric": metric, "backend": backend}
        if op == "adc":
            scores = functional.adc(x[:5], codes, codebook, scale, **settings)
        else:
            scores = functional.search(x[:5], codes, codebook, scale, k=9, **settings).scores
        weights = torch.linspace(-1, 2, scores.numel(), dtype=dtype).view_as(scores)
        return torch.autograd.grad((scores * weights).sum(), [x, *parts])

    for ours, exact in zip(gradients("native", torch.float32), gradients("torch", torch.float64), strict=True):
        assert float((ours - exact).norm()) <= 1e-4 * float(exact.norm())
    for once, again in zip(gradients("native", torch.float32), gradients("native", torch.float32), strict=True):
        assert torch.equal(once, again)


@pytest.mark.skipif(native.why_not("cpu") is not None, reason="the extension is not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_search_with_given_norms_and_in_half_precision(codec, dtype):
    x, codebook, scale, _ = codec(N=500, D=7, K=16, M=3, dtype=dtype)
    codes = functional.encode(x, codebook, scale)
    norms = torch.linspace(0, 9, 500)
    for given in (norms, None):
        results = []
        for backend in ("native", "torch"):
            leaves = [t.clone().requires_grad_() for t in (x[:4], codebook, scale)]
            found = functional.search(leaves[0], codes, *leaves[1:], k=9, norms=given, backend=backend)
            results.append((found.positions, found.scores, *torch.autograd.grad(found.scores.sum(), leaves)))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.skipif(native.why_not("cpu") is not None, reason="the extension is not built")
def test_threads_of_torch_stay_as_they_were(codec):
    """Also in threads that start later: torch gives them the number that was set last."""
    x, codebook, scale, _ = codec(N=3000, D=40, K=256, M=3)
    codes = functional.encode(x, codebook, scale)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        functional.encode(x, codebook, scale)
        seen = []

        def use() -> None:
            for _ in range(5):
                functional.search(x[:100], codes, codebook, scale, k=5, backend="native")
            seen.append(torch.get_num_threads())

        for _ in range(3):
            threads = [threading.Thread(target=use) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert seen == [2] * 12
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(native.why_not("cpu") is not None, reason="the extension is not built")
def test_native_has_no_second_derivative(codec):
    x, codebook, scale, _ = codec()
    codes = functional.encode(x, codebook, scale)
    leaf = x[:2].clone().requires_grad_()
    scores = functional.adc(leaf, codes, codebook, scale, backend="native")
    with pytest.raises(RuntimeError, match="adc: the native backend has no second derivatives"):
        torch.autograd.grad(scores.sum(), leaf, create_graph=True)


@pytest.mark.skipif(native.why_not("cpu") is not None, reason="the extension is not built")
@pytest.mark.parametrize("K", [3, 256, 300])
@pytest.mark.parametrize("with_offset", [False, True])
def test_native_norms_have_the_bits_of_the_reference(codec, K, with_offset):
    x, codebook, scale, offset = codec(N=5000, D=5, K=K, M=5)
    codes = functional.encode(x, codebook, scale)
    shift = offset if with_offset else None
    expected = definition.squared_norms(codes, Parameters(codebook, scale, shift), "cosine")
    assert torch.equal(native.squared_norms(codes, Parameters(codebook, scale, shift), "cosine"), expected)
    assert torch.equal(
        native.squared_norms(codes[:, :2], Parameters(codebook, scale[:2], shift), "cosine"),
        definition.squared_norms(codes[:, :2], Parameters(codebook, scale[:2], shift), "cosine"),
    )


@pytest.mark.skipif(native.why_not("cpu") is not None, reason="the extension is not built")
def test_native_refuses_what_it_cannot_do(codec):
    x, codebook, scale, _ = codec()
    codes = functional.encode(x, codebook, scale)
    with pytest.raises(BackendUnavailable, match="an input is float64"):
        functional.adc(x.double(), codes, codebook, scale, backend="native")


@pytest.fixture(scope="module")
def cuda_module(tmp_path_factory):
    """The PTX of csrc/cuda/adc.cu, loaded into the simulator."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    if not (PTXSIM / "ptxsim.py").exists():
        pytest.skip("no PTX simulator at DRQ_PTXSIM")
    source = Path(__file__).parents[1] / "csrc/cuda/adc.cu"
    ptx = tmp_path_factory.mktemp("ptx") / "adc.ptx"
    command = [nvcc, "-std=c++17", "-fmad=false", "-arch=compute_80", "-DDRQ_FAST_CUDA", f"-I{source.parents[1]}"]
    subprocess.run([*command, "-ptx", "-o", str(ptx), str(source)], check=True)
    sys.path.insert(0, str(PTXSIM))
    try:
        import ptxsim
    finally:
        sys.path.remove(str(PTXSIM))
    device = ptxsim.Device(1 << 26)
    return device, ptxsim.Module(ptx.read_text(), device), ptx.read_text()


@pytest.mark.parametrize(("Q", "N", "K", "M"), [(1, 1, 2, 1), (2, 1500, 256, 4), (3, 1031, 300, 3), (2, 40, 20000, 5)])
def test_cuda_kernel_executed_from_its_ptx(cuda_module, Q, N, K, M):
    import numpy as np

    device, module, text = cuda_module
    table, codes, scale = random_lookup(Q, N, K, M)
    pointers = [device.to(t.numpy()) for t in (table, scale, codes)] + [device.alloc(Q * N * 4)]
    wide, shared = codes.dtype == torch.int32, K <= 12288
    job = np.array([*pointers, Q, N, K, M], dtype=np.int64).tobytes() + bytes([wide]) + bytes(7)
    mangled = re.escape("lookup_kernel") + ("Ii" if wide else "Ih") + f"Lb{int(shared)}"
    name = next(n for n in re.findall(r"\.entry (\w+)", text) if re.search(mangled, n))
    grid = Q * -(-N // 1024)
    for seed in range(3):
        state = module.launch(name, grid, 256, [job], shared=4 * K if shared else 0, seed=seed, racecheck=True)
        assert not state.warn
        sums = device.get(pointers[3], np.float32, (Q, N))
        assert np.array_equal(sums, definition.lookup(table, codes, scale).numpy())
