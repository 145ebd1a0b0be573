"""encode: greedy is the codes of quantize; a beam finds the best path by its weights."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time

import pytest
import torch
from patience import PATIENCE

from drq_fast import BackendUnavailable, fit, functional
from drq_fast import codec as codecs
from drq_fast.backends.native import extension, threads
from drq_fast.backends.types import Parameters

needs_native = pytest.mark.skipif(extension.native is None, reason="the extension is not built")


@pytest.mark.parametrize(
    ("N", "D", "K", "M"), [(0, 3, 4, 2), (1, 1, 2, 1), (37, 5, 256, 4), (11, 7, 257, 3), (5, 3, 4096, 2)]
)
def test_greedy_gives_the_codes_of_quantize(codec, N, D, K, M):
    x, codebook, scale, offset = codec(N, D, K, M)
    codes = functional.encode(x, codebook, scale, offset=offset)
    assert codes.dtype == (torch.uint8 if K <= 256 else torch.int32)
    assert torch.equal(codes.long(), functional.quantize(x, codebook, scale, gamma=1.0, offset=offset).codes)


def brute_force(x, codebook, scale, omega):
    """Every one of K^M paths, judged by sum_m omega_m d_m^2; ties to the smaller code."""
    paths = torch.tensor(list(itertools.product(range(len(codebook)), repeat=len(scale))))
    words = scale[:, None] * codebook[paths]  # [paths, M, D]
    errors = (x[:, None, None] - words.cumsum(dim=1)).square().sum(dim=3)  # [N, paths, M]
    return paths[(errors * omega).sum(dim=2).argmin(dim=1)]


@pytest.mark.parametrize("omega", [(1.0, 1.0, 1.0), (0.1, 0.1, 1.0), (0.0, 0.0, 1.0), (3.0, 1.0, 0.5)])
def test_a_beam_that_keeps_everything_is_exhaustive(codec, omega):
    x, codebook, scale, _ = codec(N=40, D=3, K=5, M=3, dtype=torch.float64)
    codes = functional.encode(x, codebook, scale, beam=25, level_weights=omega)
    assert torch.equal(codes.long(), brute_force(x, codebook, scale, torch.tensor(omega)))


def test_wider_beams_lower_the_error(codec):
    x, codebook, scale, _ = codec(N=400, D=16, K=32, M=4)
    errors = []
    for beam in (1, 4, 16):
        codes = functional.encode(x, codebook, scale, beam=beam, level_weights=(0, 0, 0, 1))
        errors.append(float((x - functional.decode(codes, codebook, scale)).square().sum()))
    assert errors[0] > errors[1] > errors[2]


def test_beam_one_is_greedy_whatever_the_weights(codec):
    x, codebook, scale, _ = codec()
    greedy = functional.encode(x, codebook, scale)
    assert torch.equal(greedy, functional.encode(x, codebook, scale, beam=1, level_weights=(0, 0, 1)))


def test_weight_on_the_first_level_alone_still_chooses_the_rest_well(codec):
    x, codebook, scale, _ = codec(N=60, dtype=torch.float64)
    greedy = functional.encode(x, codebook, scale)
    beam = functional.encode(x, codebook, scale, beam=4, level_weights=(1, 0, 0))
    assert torch.equal(beam[:, 0], greedy[:, 0])
    error = [(x - functional.decode(c, codebook, scale)).square().sum() for c in (greedy, beam)]
    assert error[1] <= error[0]


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_native)])
def test_levels_without_weight_do_not_drown_in_rounding(backend):
    x = torch.randn(2000, 32, generator=torch.Generator().manual_seed(0))
    codebook, scale, *_ = fit.fit(x, 64, 4, offset=False, rounds=5, seed=0)
    errors = []
    for options in ({"beam": 1}, {"beam": 16, "level_weights": (1, 0, 0, 0)}):
        codes = functional.encode(x, codebook, scale, backend=backend, **options)
        errors.append(float((x - functional.decode(codes, codebook, scale)).square().sum()))
    assert errors[1] <= errors[0]


def test_beam_ties_go_to_the_lexicographically_smaller_code():
    codebook = torch.tensor([[1.0], [1.0], [3.0]])  # 0 and 1 are twins
    x = torch.tensor([[4.0]])
    assert functional.encode(x, codebook, torch.ones(2), beam=9).tolist() == [[2, 0]]
    assert functional.encode(x, codebook, torch.ones(2), beam=9, level_weights=(0, 1)).tolist() == [[0, 2]]


def test_beam_wider_than_there_are_paths_and_empty_input(codec):
    x, codebook, scale, _ = codec(N=6, K=2, M=2)
    assert functional.encode(x, codebook, scale, beam=100).shape == (6, 2)
    assert functional.encode(x[:0], codebook, scale, beam=3).shape == (0, 2)


def test_tiles_give_the_same_codes_as_one_piece(codec, monkeypatch):
    x, codebook, scale, offset = codec(N=1000, D=5, K=16, M=3, dtype=torch.float64)
    monkeypatch.setattr(codecs, "_BLOCK", 100 * 5)
    tiled = codecs.encode(x, Parameters(codebook, scale, offset), 1, None)
    assert torch.equal(tiled, functional.encode(x, codebook, scale, offset=offset, backend="torch"))


ISAS = [] if extension.native is None else extension.supported_isas()


def excess(x, codebook, scale, codes):
    """How much worse than the best each greedy choice is, given those before it: [N, M] in float64, relative to
    ||x||^2 + ||s C||^2."""
    h, codebook, scale = x.double(), codebook.double(), scale.double()
    columns = []
    for m, s in enumerate(scale):
        error = (h[:, None] - s * codebook).square().sum(dim=2)
        chosen = error.gather(1, codes[:, m : m + 1].long()).squeeze(1)
        size = h.square().sum(dim=1) + (s * codebook).square().sum(dim=1).max()
        columns.append((chosen - error.min(dim=1).values) / size)
        h = h - s * codebook[codes[:, m].long()]
    return torch.stack(columns, dim=1)


@needs_native
@pytest.mark.parametrize(
    ("N", "D", "K", "M"),
    [(0, 3, 4, 2), (1, 1, 2, 1), (1000, 33, 17, 4), (301, 5, 256, 16), (90, 7, 4096, 3), (50, 700, 300, 4)],
)
def test_native_greedy_choices_are_the_best(codec, N, D, K, M):
    x, codebook, scale, offset = codec(N, D, K, M)
    codes = functional.encode(x + offset, codebook, scale, offset=offset, backend="native")
    assert codes.dtype == (torch.uint8 if K <= 256 else torch.int32)
    if N:
        assert excess(x + offset - offset, codebook, scale, codes).max() < 1e-6


@needs_native
@pytest.mark.parametrize("beam", [2, 5, 16])
def test_native_beam_is_as_good_as_the_reference(codec, beam):
    x, codebook, scale, offset = codec(N=500, D=12, K=40, M=4)
    for omega in (None, (0.1, 0.1, 0.1, 1.0), (1.0, 0.0, 0.0, 0.0)):
        options = {"offset": offset, "beam": beam, "level_weights": omega}
        codes = {b: functional.encode(x, codebook, scale, backend=b, **options) for b in ("torch", "native")}
        assert (codes["torch"] == codes["native"]).all(dim=1).float().mean() > 0.99
        cost = {}
        for name, code in codes.items():
            decoded = [functional.decode(code, codebook, scale, offset=offset, levels=m) for m in range(1, 5)]
            weights = omega or (1.0,) * 4
            cost[name] = sum(w * float((x - d).square().sum()) for w, d in zip(weights, decoded, strict=True))
        assert cost["native"] == pytest.approx(cost["torch"], rel=1e-4)


@needs_native
def test_ties_padding_and_empty_input(codec):
    twins = torch.tensor([[1.0, 2.0]] * 5)
    x = torch.randn(9, 2, generator=torch.Generator().manual_seed(0))
    for beam in (1, 3):
        assert functional.encode(x, twins, torch.ones(3), beam=beam, backend="native").unique().tolist() == [0]
    words = torch.tensor([[1.0], [1.0], [3.0]])
    assert functional.encode(torch.tensor([[4.0]]), words, torch.ones(2), beam=9, backend="native").tolist() == [[2, 0]]


@needs_native
@pytest.mark.parametrize("beam", [1, 4])
def test_small_residuals_are_rebased(beam):
    """x = C[a] + C[b] / 1000: in score space the second level would see little but rounding errors of the first."""
    generator = torch.Generator().manual_seed(0)
    codebook = torch.randn(64, 32, generator=generator) + 10
    wanted = torch.stack([torch.arange(64), torch.arange(64).flip(0)], dim=1)
    scale = torch.tensor([1.0, 1e-3])
    x = functional.decode(wanted, codebook.double(), scale.double()).float()
    codes = functional.encode(x, codebook, scale, beam=beam, backend="native")
    assert torch.equal(codes.long(), wanted)


@needs_native
@pytest.mark.parametrize("beam", [1, 7])
def test_every_instruction_set_gives_the_same_codes(codec, monkeypatch, beam):
    x, codebook, scale, offset = codec(N=2000, D=40, K=100, M=5)
    x[::3] = codebook[torch.arange(len(x[::3])) % 100] + 1e-4 * x[::3] + offset  # these are re-based
    results = []
    for isa in ISAS:
        monkeypatch.setenv("DRQ_FAST_ISA", isa)
        results.append(functional.encode(x, codebook, scale, offset=offset, beam=beam, backend="native"))
    assert ISAS[0] == "portable"
    assert all(torch.equal(result, results[0]) for result in results)
    monkeypatch.setenv("DRQ_FAST_ISA", "mmx")
    with pytest.raises(ValueError, match=r"DRQ_FAST_ISA must be one of portable.* on this machine, got 'mmx'\."):
        functional.encode(x, codebook, scale, backend="native")


@needs_native
def test_native_refuses_what_it_cannot_do(codec):
    x, codebook, scale, _ = codec()
    with pytest.raises(BackendUnavailable, match="an input is float64"):
        functional.encode(x.double(), codebook, scale, backend="native")
    with pytest.raises(BackendUnavailable, match="codewords, and there are more than 16384"):
        functional.encode(torch.zeros(1, 1), torch.zeros(17_000, 1), scale, beam=2, backend="native")


@needs_native
def test_native_takes_narrow_and_strided_inputs(codec):
    x, codebook, scale, _ = codec(N=200, D=20)
    codes = functional.encode(x, codebook, scale, backend="native")
    turned = (x.T.contiguous().T, codebook.T.contiguous().T, scale)
    assert torch.equal(functional.encode(*turned, backend="native"), codes)
    half = functional.encode(x.bfloat16(), codebook, scale, backend="native")
    assert torch.equal(half, functional.encode(x.bfloat16().float(), codebook, scale, backend="native"))


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("beam", [1, 4])
def test_vectors_that_are_not_finite_get_some_code_and_disturb_no_other(codec, backend, beam):
    x, codebook, scale, _ = codec(N=30)
    clean = functional.encode(x, codebook, scale, beam=beam, backend=backend)
    x[3], x[7, 2] = float("nan"), float("inf")
    codes = functional.encode(x, codebook, scale, beam=beam, backend=backend)
    others = torch.ones(30, dtype=torch.bool).index_fill_(0, torch.tensor([3, 7]), False)
    assert torch.equal(codes[others], clean[others])
    assert int(codes.max()) < 8
    assert codes[3].tolist() == [0, 0, 0]


def test_a_beam_is_never_wider_than_there_are_paths(codec):
    x, codebook, scale, _ = codec(N=5, K=3, M=3)
    assert torch.equal(functional.encode(x, codebook, scale, beam=4096), functional.encode(x, codebook, scale, beam=9))


@needs_native
def test_threads_of_ours_leave_torch_s_number_of_threads_alone(codec):
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 2):
            torch.set_num_threads(threads)
            x, codebook, scale, _ = codec(N=1000, D=8)
            codes = functional.encode(x, codebook, scale, backend="native")
            assert torch.get_num_threads() == threads
            assert excess(x, codebook, scale, codes).max() < 1e-6
    finally:
        torch.set_num_threads(before)


@needs_native
def test_inference_mode(codec):
    x, codebook, scale, _ = codec(N=1000)
    expected = functional.encode(x, codebook, scale, backend="native")
    with torch.inference_mode():
        assert torch.equal(functional.encode(x, codebook, scale, backend="native"), expected)
        assert functional.loss(x.clone(), codebook, scale, gamma=1.0, backend="native").loss.isfinite()


@pytest.mark.skipif(not hasattr(os, "fork") or extension.why_not("cpu") is not None, reason="no fork, or no extension")
def test_a_forked_process_encodes_and_searches(codec):
    x, codebook, scale, _ = codec(N=3000, D=40, K=256, M=3)

    def work() -> int:
        codes = functional.encode(x, codebook, scale)
        searches = [functional.search(x[:Q], codes, codebook, scale, k=3) for Q in (1, 3, 30, 100)]
        return sum(int(search.positions.sum()) for search in searches)

    expected = work()
    with threads._Pool.growing:  # as another thread may at that moment
        child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE)  # where it hangs, it is killed
            os._exit(0 if work() == expected else 1)
    assert os.waitpid(child, 0)[1] == 0


@needs_native
def test_an_interruption_ends_the_work_of_all_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    done, started, tiles = [0, 0], threading.Event(), 60_000  # of a hundredth of a second

    def work(part: int, rows: slice) -> None:
        for _ in threads.tiles(rows, 1):
            started.set()
            done[part] += 1
            time.sleep(0.01)

    def interrupt() -> None:
        started.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            threads.in_threads(work, 2 * tiles)
    finally:
        torch.set_num_threads(before)
    at_once = tuple(done)
    time.sleep(0.1)
    assert tuple(done) == at_once
    assert max(done) < tiles


def test_an_error_in_a_thread_does_not_end_later_work_early():
    before = torch.get_num_threads()
    torch.set_num_threads(2)

    def fail(part: int, rows: slice) -> None:
        raise ValueError("on purpose")

    try:
        with pytest.raises(ValueError, match="on purpose"):
            threads.in_threads(fail, 4000)
        whole = [slice(0, 2), slice(2, 4)]
        assert threads.in_parallel([lambda: list(threads.tiles(slice(0, 4), 2))] * 4) == [whole] * 4
    finally:
        torch.set_num_threads(before)
