"""fit: closed forms against brute force, k-means as its special case, and data of every kind."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import numpy as np
import pytest
import torch

from drq_fast import RecurrentQuantizer, fit, functional, refit
from drq_fast.backends.types import Parameters
from drq_fast.blocks import Blocks
from drq_fast.functional import default_weights

F64 = torch.float64


def data(N: int = 3000, D: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(40, D, generator=generator)
    return centres[torch.randint(40, (N,), generator=generator)] + 0.4 * torch.randn(N, D, generator=generator) + 2


def weighted_error(x, codes, codebook, scale, omega):
    decoded = [functional.decode(codes, codebook, scale, levels=m + 1) for m in range(len(scale))]
    return sum(w * (x - d).square().sum() for w, d in zip(omega, decoded, strict=True))


@pytest.fixture
def job(codec):
    x, codebook, scale, _ = codec(N=400, D=6, K=9, M=4, dtype=F64)
    codes = functional.encode(x, codebook, scale)
    codes[codes == 7] = 2  # codeword 7 is not used
    return x, codes, codebook, scale, torch.tensor([0.5, 0.1, 2.0, 1.0], dtype=F64)


@pytest.mark.parametrize("factor", [0.0, 3.0])
def test_refit_is_the_minimum_for_given_codes(job, factor):
    x, codes, codebook, scale, omega = job
    penalty = factor * torch.linspace(1, 2, 9, dtype=F64)
    penalty[7] = 0
    statistics = refit.collect(x, codes, Parameters(codebook, scale, None), x.square().sum())
    for _ in range(8):  # the ridge keeps each refit a little short of the minimum
        codec = Parameters(codebook, scale, None)
        codebook_before, codebook = codebook, refit.codebook_of(statistics, Blocks([]), codec, omega, penalty)
        assert torch.equal(codebook[7], codebook_before[7])
    codebook = codebook.clone().requires_grad_()
    cost = weighted_error(x, codes, codebook, scale, omega) + (penalty[:, None] * codebook.square()).sum()
    (gradient,) = torch.autograd.grad(cost, codebook)
    assert gradient.norm() < 1e-6 * cost


def test_penalty_by_hand():
    """Two codebooks of two codewords: noise / signal for the first, half a weight for the second, 0 where unused."""
    codebook, codes = torch.tensor([[2.0], [4.0], [0.0], [1.0]]), torch.tensor([[0, 0], [1, 0]])
    codec, x, omega = Parameters(codebook, torch.ones(2), None, (0, 1)), torch.tensor([[2.0], [5.0]]), [0.5, 1]
    statistics = refit.collect(x, codes, codec, x.square().sum())  # mean squared errors 0.5 and 0.5
    expected = torch.tensor([1.5 * 0.5 / 10, 1.5 * 0.5 / 10, 0.5, 0])
    torch.testing.assert_close(refit.penalty_of(statistics, codec, torch.tensor(omega)), expected)
    zero = Parameters(torch.zeros(4, 1), torch.ones(2), None, (0, 1))
    assert not refit.penalty_of(refit.collect(x, codes, zero, x.square().sum()), zero, torch.ones(2)).any()


@pytest.mark.parametrize("codebooks", [1, 3])
def test_the_penalty_lowers_the_error_of_other_vectors(monkeypatch, codebooks):
    x = torch.randn(2500, 24, generator=torch.Generator().manual_seed(0))  # all noise: small signals must not vanish

    def error():
        layer = RecurrentQuantizer(24, 64, 3, codebooks=codebooks)
        layer.fit(x[:500], rounds=15, seed=0)
        return float((x[500:] - layer.decode(layer.encode(x[500:], beam=8))).square().sum())

    penalised, penalty_of = error(), refit.penalty_of
    monkeypatch.setattr(refit, "penalty_of", lambda *given: 0 * penalty_of(*given))
    assert penalised < 0.99 * error()


@pytest.mark.parametrize("dense", [9, 8])
def test_statistics_give_the_error_at_every_prefix(job, monkeypatch, dense):
    monkeypatch.setattr(refit, "_DENSE", dense)
    x, codes, codebook, scale, _ = job
    errors = refit.collect(x, codes, Parameters(codebook, scale, None), x.square().sum()).errors(scale)
    for m in range(4):
        exact = (x - functional.decode(codes, codebook, scale, levels=m + 1)).square().sum()
        torch.testing.assert_close(errors[m], exact)


def test_best_scale_shared_and_free(job):
    x, codes, codebook, old_scale, omega = job
    codec = Parameters(codebook, old_scale, None)
    statistics = refit.collect(x, codes, codec, x.square().sum())
    costs = {}
    for free in (False, True):
        scale = refit.scale_of(statistics, omega, codec, free)
        costs[free] = weighted_error(x, codes, codebook, scale, omega)
        for other in (scale * torch.tensor([1.0, 1.01, 1, 1]), scale * torch.tensor([1.0, 1, 1, 0.99])):
            if free:
                assert weighted_error(x, codes, codebook, other.to(F64), omega) > costs[free]
        if not free:
            grid = [
                weighted_error(x, codes, codebook, (w / 400) ** torch.arange(4.0, dtype=F64), omega)
                for w in range(1, 601)
            ]
            torch.testing.assert_close(costs[False], min(grid))
    assert costs[True] <= costs[False]


@pytest.mark.parametrize("K", [32, 5000])
def test_fewer_vectors_than_codewords_start_as_codewords_beside_zeros(K):
    x = data(20)
    codebook = fit.plus_plus(x, K, fit.seeded(0))
    assert torch.equal(codebook[:20], x)
    assert codebook.shape == (K, 12)
    assert not codebook[20:].any()
    twice = fit.plus_plus(x.repeat(3, 1), 32, fit.seeded(0))
    assert {tuple(row) for row in twice[:20].tolist()} == {tuple(row) for row in x.tolist()}
    assert not twice[20:].any()


def test_with_fewer_vectors_than_codewords_the_scale_does_not_vanish():
    """Level 0 reproduces every vector, so any later level with a scale that is not tiny would increase the error."""
    for N in (5, 20, 30):
        assert fit.fit(data(N), 32, 3, rounds=8, seed=0).scale[1] > 0.05


@pytest.mark.parametrize("free", [False, True])
def test_levels_that_do_not_count_are_fitted_all_the_same(free):
    """All shared scales would tie, and the smallest of the grid would be taken; free ones would be 0."""
    codec = fit.fit(data(), 32, 3, omega=torch.tensor([1.0, 0, 0]), free_scale=free, rounds=8, seed=0)
    assert codec.scale[1] > 0.1
    assert codec.errors[2] < 0.9 * codec.errors[1] < 0.9 * codec.errors[0]


@pytest.mark.parametrize("x", [torch.ones(1, 4), torch.zeros(50, 4)], ids=["one", "zeros"])
def test_nothing_to_fit_a_scale_to(x):
    layer = RecurrentQuantizer(4, 8, 3, scale="per_level")
    layer.fit(x, rounds=2)
    assert torch.equal(layer.decode(layer.encode(x)), x)


def test_noise_finds_better_codecs():
    x = torch.randn(1000, 32, generator=torch.Generator().manual_seed(0))
    calm, shaken = (
        np.mean([fit.fit(x, 64, 3, rounds=60, beam=4, noise=noise, seed=seed).errors[-1] for seed in range(4)])
        for noise in (0.0, fit.NOISE)
    )
    assert shaken < 0.98 * calm


def test_rounds_that_go_beyond_the_refitted_codebook_get_further(monkeypatch):
    x = torch.randn(2000, 6, generator=torch.Generator().manual_seed(0))
    far = [fit.fit(x, 64, 3, rounds=20, beam=1, noise=0.0, seed=seed).errors[-1] for seed in range(4)]
    monkeypatch.setattr(fit, "_STRIDE", 1.0)
    near = [fit.fit(x, 64, 3, rounds=20, beam=1, noise=0.0, seed=seed).errors[-1] for seed in range(4)]
    assert np.mean(far) < 0.99 * np.mean(near)


def test_a_beam_counts_the_levels_as_fit_does():
    layer = RecurrentQuantizer(12, 32, 3)
    layer.fit(data(), rounds=4, seed=0)
    options = {"offset": layer.offset, "beam": 4}
    codec = (layer.codebook, layer.scale)
    assert default_weights(3) == (0.16, 0.1, 1.0)
    assert torch.equal(
        layer.encode(data(), beam=4), functional.encode(data(), *codec, level_weights=(0.16, 0.1, 1.0), **options)
    )
    assert torch.equal(layer.encode(data(), beam=4), functional.encode(data(), *codec, **options))
    alike = functional.encode(data(), *codec, level_weights=(1.0, 1.0, 1.0), **options)
    assert not torch.equal(layer.encode(data(), beam=4), alike)


def test_revived_codewords_are_bad_rows_drawn_by_their_error():
    """Errors 0, 1 and 3: one dead codeword becomes the second row in a quarter of all draws, the third in the rest."""
    x = torch.tensor([[0.0], [1.0], [3.0**0.5]])
    codebook, scale, codes = torch.tensor([[0.0], [9.0]]), torch.ones(1), torch.zeros(3, 1, dtype=torch.uint8)
    generator = fit.seeded(0)
    codec = Parameters(codebook, scale, None)
    drawn = [float(fit.revive(x, codes, codec, generator)[1]) for _ in range(2000)]
    assert set(drawn) == set(x[1:].flatten().tolist())
    assert 0.22 < drawn.count(1.0) / 2000 < 0.28
    several = Parameters(torch.cat([codebook, codebook[1:].expand(5, 1)]), scale, None)
    many = fit.revive(x, codes, several, generator)
    assert sorted(many[1:3].flatten().tolist()) == x[1:].flatten().tolist()  # no row twice while there are others
    assert set(many.flatten().tolist()) == set(x.flatten().tolist())


def test_many_codewords_without_a_vector_cost_no_draw_each(monkeypatch):
    draws = []
    rand = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *size, **options: draws.append(1) or rand(*size, **options))
    fit.fit(data(50), 5000, 2, rounds=2, beam=1, seed=0)
    assert len(draws) < 100


def test_one_level_is_k_means():
    sklearn = pytest.importorskip("sklearn.cluster")
    x = data()
    total = float((x - x.mean(0)).square().sum())
    ours = [total * fit.fit(x, 40, 1, rounds=15, seed=seed).errors[0] for seed in range(5)]
    theirs = [sklearn.KMeans(40, n_init=1, random_state=s, max_iter=15).fit(x.numpy()).inertia_ for s in range(5)]
    assert np.mean(ours) < 1.02 * np.mean(theirs)


def test_reported_errors_are_those_of_the_layer():
    layer = RecurrentQuantizer(12, 32, 3)
    errors = layer.fit(data(), beam=4, rounds=6, seed=0)
    x, total = data(), (data() - data().mean(0)).square().sum()
    codes = layer.encode(x, beam=4)
    actual = [float((x - layer.decode(codes, levels=m)).square().sum() / total) for m in (1, 2, 3)]
    assert errors == pytest.approx(actual, rel=1e-3)
    assert list(errors) == sorted(errors, reverse=True)


@pytest.mark.parametrize("options", [{}, {"scale": "per_level"}, {"offset": False}, {"level_weights": (1, 1, 1)}])
def test_fit_beats_the_quick_start_at_what_it_is_asked_for(options):
    quick, thorough = (RecurrentQuantizer(12, 32, 3, **options) for _ in range(2))
    quick.initialise(data(), seed=0)
    errors = thorough.fit(data(), rounds=12, seed=0)
    codes = quick.encode(data())
    centre = 0 if options.get("offset") is False else data().mean(0)
    baseline = (data() - centre).square().sum()
    assert errors[-1] < float((data() - quick.decode(codes)).square().sum() / baseline)
    assert thorough.eval()(data()).loss.isfinite()


def test_level_weights_trade_short_codes_for_long_ones():
    short, long = (
        RecurrentQuantizer(12, 32, 3, level_weights=w).fit(data(), rounds=8, seed=0) for w in ((1, 0, 0), (0, 0, 1))
    )
    assert short[0] < long[0]
    assert long[2] < short[2]


def test_deterministic_and_independent_of_the_kind_of_data(tmp_path):
    x = data()
    np.save(tmp_path / "x.npy", x.numpy())
    kinds = [x, x.numpy(), np.load(tmp_path / "x.npy", mmap_mode="r"), x.reshape(3, 1000, 12), x.double().numpy()]
    layers = [RecurrentQuantizer(12, 16, 2) for _ in kinds]
    for layer, kind in zip(layers, kinds, strict=True):
        layer.fit(kind, rounds=3, seed=5)
        assert torch.equal(layer.codebook, layers[0].codebook)
    layer.fit(x, rounds=3, seed=6)
    assert not torch.equal(layer.codebook, layers[0].codebook)


def test_an_iterable_of_batches_is_read_once_and_sampled():
    seen = []

    def batches():
        for part in data().split(500):
            seen.append(len(part))
            yield part.numpy()

    layer = RecurrentQuantizer(12, 16, 2)
    errors = layer.fit(batches(), rounds=5, sample=1000, seed=0)
    assert seen == [500] * 6
    assert errors[-1] < 0.5
    sample = fit.sample((part for part in data().split(7)), 1000, 12, fit.seeded(0))
    assert sample.shape == (1000, 12)
    assert torch.isin(sample[:, 0], data()[:, 0]).all()
    assert len(sample[:, 0].unique()) == 1000


def test_a_sample_of_batches_is_that_of_one_vector_at_a_time_and_of_a_buffer_that_is_filled_again():
    whole = data(700, 3)
    buffer = torch.empty(7, 3)
    refilled = (buffer.copy_(part) for part in whole.split(7))
    parts = [refilled, (row for row in whole), iter([whole])]
    first, second, third = (fit.sample(part, 100, 3, fit.seeded(0)) for part in parts)
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    order = [int((whole == row).all(dim=1).nonzero()) for row in first]
    assert order == sorted(set(order))
    assert len(order) == 100
    assert 270 < sum(order) / 100 < 430  # from the whole of it, not from one end


def test_single_vectors_are_read_in_linear_time(monkeypatch):
    copied = []
    cat = torch.cat
    monkeypatch.setattr(
        torch, "cat", lambda parts, **options: copied.append(sum(map(len, parts))) or cat(parts, **options)
    )
    fit.sample(iter(data(5000, 2)), 500, 2, fit.seeded(0))
    assert sum(copied) < 10 * 5000


MANY = """
import re, sys, threading, time
import numpy as np
import drq_fast

def own():
    return int(re.search(r"RssAnon:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

x = np.load(sys.argv[1], mmap_mode="r")
layer, before, most = drq_fast.RecurrentQuantizer(64, 256, 4), own(), [0.0]

def watch():
    while True:
        most.append(max(most.pop(), own()))
        time.sleep(0.01)

threading.Thread(target=watch, daemon=True).start()
errors = layer.fit(x, rounds=20, seed=0)
codes = layer.encode(x)
assert codes.shape == (len(x), 4)
print(errors[-1], most[0] - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="this system does not tell its memory in /proc")
def test_ten_million_rows_on_disk_need_little_memory_and_show_their_progress(tmp_path):
    """2.4 GiB of vectors; pages of the file itself, which the system can drop at any time, do not count."""
    N, block = 10_000_000, data(100_000, 64).numpy()
    x = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(N, 64))
    for first in range(0, N, len(block)):
        x[first : first + len(block)] = block + first / N
    del x
    terminal, theirs = pty.openpty()  # progress bars are for terminals only, and need room
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-c", MANY, str(tmp_path / "x.npy")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True) as child:
        os.close(theirs)
        shown = read_to_the_end(terminal)
        output = child.stdout.read()
    assert child.returncode == 0, shown
    error, mib = map(float, output.split())
    assert error < 0.6
    assert mib < 1024
    assert "fit: " in shown
    assert "encode: " in shown


def read_to_the_end(terminal: int) -> str:
    parts = []
    with open(terminal, "rb", buffering=0) as stream:
        try:
            while part := stream.read(4096):
                parts.append(part)
        except OSError:  # raised by Linux when the other side is closed
            pass
    return b"".join(parts).decode(errors="replace")


def test_batches_whatever_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        errors = RecurrentQuantizer(12, 16, 2).fit(iter([data().float()]), rounds=1, seed=0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert errors[-1] < 0.6


def test_errors_are_never_negative():
    layer = RecurrentQuantizer(4, 64, 4, offset=False)
    assert min(layer.fit(100 + data(20, 4), rounds=3, seed=0)) >= 0


def test_interrupted_it_keeps_the_best_so_far(monkeypatch):
    calls = []

    def encode(*arguments, **options):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return whole(*arguments, **options)

    whole = functional.encode_checked
    monkeypatch.setattr(functional, "encode_checked", encode)
    layer = RecurrentQuantizer(12, 32, 3)
    errors = layer.fit(data(), seed=0)
    assert len(calls) == 5
    assert errors[-1] < 0.3
    assert layer.initialised


def test_an_error_names_the_row_of_the_users_data():
    """Only a sample is read, and batches come one after another: rows are counted in the whole."""
    x, layer = data(2000), RecurrentQuantizer(12, 16, 2)
    x[1500:] = float("nan")
    drawn = fit.shuffled(2000, fit.seeded(0))[:50].sort().values
    for source in (x, x.numpy(), x.double() * 1e30):
        with pytest.raises(ValueError, match="fit: x must be finite, got NaN or infinity in row") as caught:
            layer.fit(source, sample=50, seed=0)
        assert str(caught.value).endswith(f" in row {int(drawn[drawn >= 1500][0])}.")
    x[1500:], x[1777] = 1, float("nan")
    with pytest.raises(ValueError, match=r"^fit: x must be finite, got NaN or infinity in row 1777\.$"):
        layer.fit(iter(x.split(300)), seed=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integers_are_fitted_as_floats(dtype):
    x = (data() * 10 + 100).clamp(0, 255).to(dtype)
    layers = [RecurrentQuantizer(12, 16, 2) for _ in range(3)]
    for layer, source in zip(layers, (x, x.float(), iter(x.numpy()[:, None])), strict=True):
        layer.fit(source, rounds=2, seed=0)
    assert layers[0].codec() == layers[1].codec()
    assert torch.equal(layers[0].encode(x), layers[0].encode(x.float()))
    layers[2].initialise(x, seed=0)
    with pytest.raises(TypeError, match=r"^fit: x must be floats or integers, got bool\.$"):
        layers[0].fit(x > 0)


def test_interrupted_in_early_rounds_it_keeps_the_best_of_them(monkeypatch):
    """The first rounds use half of the vectors each; the noise of a later one may be worse than an earlier codec."""
    costs, collect = [], refit.collect

    def collected(x, codes, codec, energy):
        if len(costs) == 9:
            raise KeyboardInterrupt
        statistics = collect(x, codes, codec, energy)
        costs.append((x - codec.codebook[codes[:, 0].long()]).square().sum(dim=1).mean())
        return statistics

    monkeypatch.setattr(refit, "collect", collected)
    x = data()
    fitted = fit.fit(x, 16, 1, noise=3.0, rounds=40, seed=0)
    nearest = torch.cdist(x - x.mean(dim=0), fitted.codebook).min(dim=1).values.square().mean()
    assert costs[-1] > 1.2 * min(costs)
    assert float(nearest) < 1.1 * float(min(costs))


def test_an_interruption_before_the_first_round_or_in_initialise_is_raised(monkeypatch):
    def encode(*arguments, **options):
        left.pop()
        if not left:
            raise KeyboardInterrupt
        return whole(*arguments, **options)

    whole = functional.encode_checked
    monkeypatch.setattr(functional, "encode_checked", encode)
    for rounds, call in ((1, RecurrentQuantizer.fit), (3, RecurrentQuantizer.initialise)):
        layer, left = RecurrentQuantizer(12, 32, 3), [1] * rounds
        with pytest.raises(KeyboardInterrupt):
            call(layer, data())
        assert not layer.initialised


def test_more_codewords_than_can_be_solved_for(monkeypatch):
    monkeypatch.setattr(refit, "_DIRECT", 8)
    monkeypatch.setattr(refit, "_DENSE", 8)
    errors = RecurrentQuantizer(12, 16, 2).fit(data(500), rounds=2, seed=0)
    assert errors[1] < errors[0] < 1


def test_bad_input():
    layer = RecurrentQuantizer(12, 16, 2)
    for call, message in (
        (lambda: layer.fit(data()[:, :5]), r"fit: x must be \[..., 12\], got \[3000, 5\]\."),
        (lambda: layer.fit(data() * float("inf")), r"fit: x must be finite, got NaN or infinity in row 0\."),
        (lambda: layer.fit(data()[:0]), r"fit: x must be at least one vector, got none\."),
        (lambda: layer.fit([]), r"fit: x must be at least one vector, got none\."),
        (lambda: layer.fit(data(), rounds=0), r"fit: rounds must be an integer of at least 1, got 0\."),
        (lambda: layer.fit(data(), sample=0), r"fit: sample must be an integer of at least 1, got 0\."),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match=r"fit: x must be a torch.Tensor or a numpy array, got int\."):
        layer.fit(5)
    assert not layer.initialised


def test_weights_of_levels_balance_short_codes_and_long_ones():
    """The first two of six levels are best if fitted alone, and better the more they weigh."""
    generator = torch.Generator().manual_seed(0)
    centres, noise = (torch.randn(n, 16, generator=generator) for n in (100, 6000))
    x = (centres[torch.randint(100, (6000,), generator=generator)] + 0.7 * noise) / torch.arange(1, 17).sqrt()

    def errors(levels: int, weights: list[float] | None = None) -> list[float]:
        layer = RecurrentQuantizer(16, 32, levels, level_weights=weights)
        return layer.fit(x, seed=0, rounds=15)

    alone, equal, weighted = errors(2), errors(6), errors(6, [8.0, 8.0, 1.0, 1.0, 1.0, 1.0])
    assert alone[1] < weighted[1] < equal[1]
    assert equal[5] < weighted[5]


@pytest.mark.parametrize("K", [16, 600])
def test_a_fit_in_blocks_is_as_good_as_one_in_a_single_block(monkeypatch, K):
    """With many rows (halves in early rounds), unused codewords and, for K = 600, counts of pairs by block."""
    x = torch.cat([data(2500), data(10)[:1].expand(600, 12)])
    whole = fit.fit(x, K, 3, seed=0, rounds=40)
    monkeypatch.setattr(fit, "BLOCK", 512)
    blocks = fit.fit(x, K, 3, seed=0, rounds=40)
    again = fit.fit(x, K, 3, seed=0, rounds=40)
    assert torch.equal(blocks.codebook, again.codebook)
    assert blocks.errors[-1] == pytest.approx(whole.errors[-1], rel=0.03)
    codes = functional.encode(x - blocks.offset, blocks.codebook, blocks.scale, beam=16)
    error = (x - functional.decode(codes, blocks.codebook, blocks.scale, offset=blocks.offset)).square().sum()
    assert float(error / (x - x.mean(dim=0)).square().sum()) == pytest.approx(blocks.errors[-1], rel=0.02)
