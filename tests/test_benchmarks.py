"""The fixture `compare` of benchmarks/conftest.py, on a file of tiny benchmarks that a pytest of its own runs."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pytest_benchmark") is None, reason="pytest-benchmark is not installed"
)

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

TINY = """
def right(N, device):
    return lambda: sum(range(N))

def wrong(N, device):
    return lambda: sum(range(N)) + 1

def triton(N, device):
    import torch
    from drq_fast import functional
    codes, codebook = torch.zeros(N, 1, dtype=torch.uint8), torch.zeros(2, 4)
    functional.decode(codes, codebook, torch.ones(1), backend="triton")
    return right(N, device)

def slow(N, device):
    return lambda: [sum(range(N)) for _ in range(20)]

def large(N, device):
    return lambda: b"x" * (32 << 20)

def unsteady(N, device):
    import itertools, time
    waits = itertools.cycle([0.03, 0.2])
    return lambda: time.sleep(next(waits))

def elsewhere(N, device):
    raise NotImplementedError("for another device")

def missing(N, device):
    import a_library_that_nobody_has

def agrees(result, N, device):
    return result == N * (N - 1) // 2

def says_nothing(result, N, device):
    assert agrees(result, N, device)

def size(result, N, device):
    return {"size": len(str(result))}

PEERS = {"slow": slow, "large": large, "unsteady": unsteady, "missing": missing, "elsewhere": elsewhere}

def bench_right(compare):
    compare(right, PEERS, agrees, sizes={"N": 10000}, work=10000, unit="numbers", quality=size)

def bench_wrong(compare):
    compare(wrong, PEERS, agrees, sizes={"N": 10}, work=10, unit="numbers")

def bench_unjudged(compare):
    compare(right, PEERS, says_nothing, sizes={"N": 10}, work=10, unit="numbers")

def bench_triton(compare):
    compare(triton, PEERS, agrees, sizes={"N": 10}, work=10, unit="numbers")
"""


SWAPPED = """
import ctypes
from drq_fast import _C

right = _C.{kernel}

class Remembered(_C.{job}):  # a job whose members can be read
    def __init__(self, **members):
        super().__init__(**members)
        self.members = members

def wrong(job, *arguments):
    result = right(job, *arguments)
    {spoil}
    return result

_C.{kernel}, _C.{job} = wrong, Remembered
"""


def load(name: str) -> Any:
    """A file of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


class Outcome(NamedTuple):
    text: str
    file: dict[str, Any]

    @property
    def right(self) -> dict[str, Any]:
        return self.file["figures"]["bench_right"]


def run(folder: Path, *arguments: str, **environment: str) -> Outcome:
    """What a pytest of its own prints and stores for the benchmarks in a folder, of which some must fail."""
    file = folder / "figures.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "--import-mode=importlib", "--rootdir=.", f"--benchmark-json={file}"]
    environment = {**os.environ, "PYTEST_ADDOPTS": "", **environment}
    child = subprocess.run([*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert child.returncode != 0, child.stdout + child.stderr
    text = child.stdout + child.stderr
    return Outcome(text, json.loads(file.read_text()) if file.exists() and file.stat().st_size else {"figures": {}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(BENCHMARKS, tmp_path_factory.mktemp("copy") / "benchmarks"))


@pytest.fixture(scope="module")
def outcome(folder: Path) -> Outcome:
    (folder / "bench_tiny.py").write_text(TINY)
    return run(folder, "bench_tiny.py", TRITON_INTERPRET="1")


def test_only_what_agrees_leaves_a_figure(outcome: Outcome) -> None:
    assert list(outcome.file["figures"]) == ["bench_right"]
    assert "3 failed, 3 passed, 6 skipped" in outcome.text
    reasons = [line for line in outcome.text.splitlines() if line.startswith("E ")]
    assert sum("ours disagrees with the definition at {'N': 10}: nothing is timed" in line for line in reasons) == 2


def test_triton_interpreter_is_not_timed(outcome: Outcome) -> None:
    pytest.importorskip("triton")
    assert "triton runs in Triton's interpreter (TRITON_INTERPRET=1), whose timings mean nothing" in outcome.text


def test_ratio_interval_and_rate(outcome: Outcome) -> None:
    slow, ours = outcome.right["peers"]["slow"], outcome.right["ours"]
    low, high = slow["interval"]
    assert 2 < low <= slow["ratio"] <= high
    assert ours["rate"] > 2 * slow["rate"] > 0
    assert outcome.right["unit"] == "numbers"
    assert 7 <= outcome.right["rounds"] <= 21
    assert outcome.right["passes"] == 3


def test_interval_that_is_too_wide_is_marked(outcome: Outcome) -> None:
    assert outcome.right["peers"]["unsteady"]["wide"]
    assert "too wide" in next(line for line in outcome.text.splitlines() if line.startswith("bench_right  unsteady"))


def test_how_wide_is_too_wide() -> None:
    spread = load("conftest").spread
    assert spread([np.ones(7)]) == {"ratio": 1.0, "interval": [1.0, 1.0], "wide": False}
    assert not spread([np.array([0.8, 0.8, 0.8, 1.0, 1.2, 1.2, 1.2])])["wide"]
    assert spread([np.array([0.7, 0.7, 0.7, 1.0, 1.0, 1.0, 1.0])])["wide"]
    assert spread([np.array([1.0, 1.0, 1.0, 1.0, 1.3, 1.3, 1.3])])["wide"]


def test_passes_that_differ_widen_the_interval() -> None:
    spread = load("conftest").spread
    near = spread([np.full(3, 1.0), np.full(3, 1.01), np.full(3, 0.99)])["interval"]
    far = spread([np.full(3, 1.0), np.full(3, 1.1), np.full(3, 0.9)])["interval"]
    assert near[0] == pytest.approx(np.exp(-2.92 * np.std(np.log([1, 1.01, 0.99]), ddof=1) / 3**0.5), rel=1e-3)
    assert far[0] < 0.85
    assert far[1] > 1.15


@pytest.mark.parametrize(("asked", "rounds"), [(1, 1), (None, 7)])
def test_rounds_of_a_pass(asked: int | None, rounds: int) -> None:
    conftest, counts = load("conftest"), []

    class Benchmark:
        """pytest-benchmark's fixture, as far as it is used."""

        stats = types.SimpleNamespace(stats=types.SimpleNamespace(data=[]))

        def pedantic(self, run: Any, setup: Any, rounds: int, warmup_rounds: int) -> None:
            counts.append(rounds)
            for _ in range(warmup_rounds + rounds):
                setup()
            self.stats.stats.data = [1.0] * rounds

    times = conftest.Times({}, {"peer": {}}, {})
    conftest.time_pass(Benchmark(), lambda: None, {"peer": lambda: None}, times, 3, asked)
    assert counts == [rounds]
    assert len(times.ours[0]) == len(times.peers[0]["peer"]) == rounds


def test_quality_of_ours_and_the_peers(outcome: Outcome) -> None:
    assert outcome.right["ours"]["quality"] == {"size": len(str(sum(range(10000))))}
    assert outcome.right["peers"]["unsteady"]["quality"] == {"size": len("None")}


def test_absent_peer_is_named(outcome: Outcome) -> None:
    assert outcome.right["peers"]["missing"] == {"absent": "No module named 'a_library_that_nobody_has'"}
    assert "absent: No module named 'a_library_that_nobody_has'" in outcome.text
    assert outcome.right["peers"]["elsewhere"] == {"absent": "for another device"}


def test_peak_memory(outcome: Outcome) -> None:
    ours, large = outcome.right["ours"], outcome.right["peers"]["large"]
    if "no_peak" in ours:
        pytest.skip(ours["no_peak"])
    assert ours["peak_mib"] < 8
    assert 31 < large["peak_mib"] < 40  # the kernel counts resident pages in batches


def test_provenance(outcome: Outcome) -> None:
    provenance = outcome.file["provenance"]
    assert provenance["processor"]
    assert provenance["cores"] >= 1
    assert provenance["torch_threads"] >= 1
    assert {"python", "drq_fast", "torch", "numpy", "faiss-cpu", "turbovec"} <= set(provenance["versions"])
    assert {"instructions", "commit", "dirty", "date"} <= set(provenance)


def test_table_names_every_peer(outcome: Outcome) -> None:
    table = outcome.text.partition("ours and the peers")[2]
    for peer in ("slow", "large", "missing"):
        assert f"bench_right  {peer} " in table


@pytest.mark.parametrize(
    ("file", "job", "kernel", "spoil"),
    [
        ("bench_encode.py", "Encode", "encode_cpu", "ctypes.memset(job.members['codes'], 7, 4)"),
        ("bench_search.py", "Database", "search_cpu", "ctypes.memset(arguments[2], 0, 16)"),
        ("bench_quantize.py", "Squared", "pulls_cpu", "ctypes.memset(job.pulls, 0, 1 << 18)"),
    ],
)
def test_wrong_kernel_leaves_no_figure(folder: Path, file: str, job: str, kernel: str, spoil: str) -> None:
    """A kernel that spoils a little of what the right one has written."""
    if importlib.util.find_spec("drq_fast._C") is None:
        pytest.skip("no compiled kernels here")
    (folder / "swapped.py").write_text(SWAPPED.format(job=job, kernel=kernel, spoil=spoil))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    outcome = run(folder, "-p", "swapped", "-m", "quick", file, PYTHONPATH=path)
    assert "ours disagrees with the definition" in outcome.text, outcome.text
    assert "passed" not in outcome.text
    assert outcome.file["figures"] == {}


def test_no_gpu_is_said_at_once(folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "--device cuda: torch sees no CUDA device" in run(folder, "--device", "cuda", "bench_encode.py").text


def test_timer_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    conftest = load("conftest")
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    assert conftest.synchronised(lambda: 1, "cpu")() == 1
    assert not waited
    run, repeats, _ = conftest.repeated(conftest.synchronised(lambda: None, "cuda"))
    del waited[:]
    run()
    assert len(waited) == repeats


def test_models_on_tiny_sizes(tmp_path: Path) -> None:
    """All tables, with a peer that cannot be imported; what the file holds is not run again."""
    (tmp_path / "vector_quantize_pytorch.py").write_text("raise ModuleNotFoundError('not on this machine')")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    file = tmp_path / "runs.json"
    command = [sys.executable, str(BENCHMARKS / "bench_models.py"), "--quick", "--seeds", "2", "--json", str(file)]
    first, again = (
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
        for _ in range(2)
    )
    assert again.stdout == first.stdout
    titles = [line.partition(":")[0] for line in first.stdout.splitlines() if line.startswith("###")]
    assert titles == ["### Autoencoder", "### RQ-VAE", "### RQ-VAE", "### Quantizer alone, forward and backward"]
    for name, tables in (("no quantizer", 3), ("ours", 4), ('ours, `loss="paper"`', 3)):
        rows = [line.split(" | ") for line in first.stdout.splitlines() if line.startswith(f"| {name} |")]
        assert len(rows) == tables
        assert all("[" in row[-1] for row in rows)
    assert first.stdout.count("absent: not on this machine") == 9
    assert len(json.loads(file.read_text())["runs"]) == 2 * (5 + 5 + 2 + 2)


def test_models_without_fashion_mnist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    models = load("bench_models")
    monkeypatch.setattr(models, "DEBIAN", tmp_path / "absent")
    digits = models.images(None, 20)
    assert digits.name == "scikit-learn's digits, enlarged (no Fashion-MNIST here)"
    assert digits.train.shape == (1777, 1, 28, 28)
    assert digits.test.shape == (20, 1, 28, 28)
    pixels = np.arange(2 * 28 * 28, dtype=np.uint8)
    for name in ("train", "t10k"):
        header = np.array([2051, 2, 28, 28], ">i4").tobytes()
        (tmp_path / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + pixels.tobytes()))
    given = models.images(tmp_path, 1)
    assert given.name == "Fashion-MNIST"
    assert torch.equal(given.train.flatten(), torch.arange(2 * 28 * 28).remainder(256) / 255)
    assert given.test.shape == (1, 1, 28, 28)


def test_recall_against_speed_on_few_vectors(tmp_path: Path) -> None:
    """Vectors of a file; what was built and found is not built and timed again."""
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(5000, 16)).astype(np.float32))
    script, keep, file = BENCHMARKS / "bench_tradeoff.py", tmp_path / "keep", tmp_path / "runs.json"
    data = ["--sets", "--data", f"own={tmp_path / 'x.npy'}", "--only", "drq_fast, 8", "--rounds", "1"]
    command = [sys.executable, str(script), *data, "--keep", str(keep), "--json", str(file)]
    first, again = (subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2))
    assert again.stdout == first.stdout
    assert "### own, 3,000 x 16" in first.stdout
    methods = json.loads(file.read_text())["runs"]["own"]["methods"]
    points = methods["drq_fast, 8 bytes + float16"]["points"]
    assert [point["setting"] for point in points][:3] == ["recall=0.8", "recall=0.9", "recall=0.95"]
    asked = [point for point in points if point["setting"].startswith("recall=")]
    assert all(point["recall"] > float(point["setting"].partition("=")[2]) - 0.02 for point in asked)


def test_recall_against_speed_keeps_what_is_worth_it() -> None:
    tradeoff = load("bench_tradeoff")
    points = [tradeoff.Point(*row) for row in [("a", 0.5, 9, 9), ("b", 0.6, 8, 1), ("c", 0.6, 7, 2), ("d", 0.4, 8, 8)]]
    assert [point.setting for point in tradeoff.frontier(points)] == ["b", "a"][::-1]
    slow = [tradeoff.Point("slow", 0.3, 1, 1), tradeoff.Point("recall=0.3", 0.3, 1, 1)]
    assert tradeoff.worth_timing(points + slow) == {"a", "b", "c", "recall=0.3"}
    assert tradeoff.best(points, 0.55, lambda point: point.single).setting == "c"
    assert tradeoff.best(points, 0.7, lambda point: point.single) is None
    x = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
    exact = torch.cdist(x[:5].double(), x.double()).topk(10, largest=False).indices
    assert torch.equal(tradeoff.nearest(x[:5], x), exact)


CONSTANTS = {
    "scan_one": 1e8,
    "scan_batch": 1e9,
    "scan_lists": 5e7,
    "bytes_per_code": 24.0,
    "encode_beam_1": 1e5,
    "encode_beam_16": 1e4,
    "encode_threads": 2e4,
    "encode_workers": 1.8e4,
    "fit_rounds": 1e6,
    "fit_bytes": 3e6,
    "merge_1000x1x10": 1e-3,
    "call_1_shard": 1e-3,
    "call_32_shards": 32e-3,
}


def test_what_a_billion_vectors_need_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the file sets
    scale = load("bench_scale")
    small, large = (dict(scale.model(CONSTANTS, N)) for N in (1e9, 1e11))
    assert large["shards of 200 million"] == "500"
    assert small["memory, codes and ids"] == "0.02 TB"
    assert large["memory of a shard"] == "4.8 GB"
    assert small["full scan of one query, core-seconds"] == "10.00"
    assert large["lists, 1/64 of the codes, core-seconds per query"] == "31.250"
    assert large["sent per query by all shards, k 10"] == "60.0 kB"
    assert large["calls of all shards for one search, at most"] == "500.0 ms"
    assert large["encode, beam 16, core-hours"] == "2,777.8"
    assert small["fit to 1 in 100, 120 rounds, core-hours"] == "0.3"
    facts = {"processor": "Some", "versions": {"drq_fast": "1"}, "commit": "0123456789", "date": "2000-01-01T00:00"}
    text = scale.tables({"found": CONSTANTS, "provenance": facts, "codes": 1000, "rough": True})
    assert "encode 90% of what one process with two threads does." in text
    assert text.endswith("Some, 1,000 codes in 32 shards, drq_fast 1, commit 012345678, 2000-01-01, under load.")


@pytest.mark.slow
def test_constants_of_scale_can_be_measured(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    script, file = BENCHMARKS / "bench_scale.py", tmp_path / "scale.json"
    for part in ("core", "shards", "files"):
        command = [sys.executable, str(script), "--quick", "--json", str(file), "--part", part]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())["found"]
    assert set(CONSTANTS) <= set(found)
    assert all(value > 0 for value in found.values())
