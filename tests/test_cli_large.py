"""Ten million vectors from the shell, in less memory than they take on disk, and again after a kill half-way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from patience import wait_until

N, D, QUERIES = 10_000_000, 64, 100
LIMIT = 2_000_000_000  # bytes
# A process counts the memory of the one that started it, so a small one has to.
LAUNCH = """
import resource, subprocess, sys
code = subprocess.call([sys.executable, "-m", "drq_fast", *sys.argv[1:]])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def write_vectors(path: Path) -> None:
    """N x D float32, clustered, a block at a time."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(1000, D)).astype(np.float32)
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(N, D))
    for first in range(0, N, 100_000):
        noise = rng.standard_normal((100_000, D), dtype=np.float32)
        out[first : first + 100_000] = centres[rng.integers(1000, size=100_000)] + 0.5 * noise
    out.flush()


def shell(folder: Path, *arguments: str) -> tuple[str, int]:
    """(stdout, peak bytes of memory) of a command."""
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout, 1024 * int(done.stderr.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted in other units elsewhere")
def test_ten_million_vectors(tmp_path):
    if os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize < 4 << 30:
        pytest.skip("less than 4 GB of disk are free")
    write_vectors(tmp_path / "x.npy")
    rows = np.load(tmp_path / "x.npy", mmap_mode="r")
    np.save(tmp_path / "q.npy", rows[:: N // QUERIES] + 0.01)
    peaks = {}
    _, peaks["fit"] = shell(tmp_path, "fit", "run", "x.npy", "--rounds", "30")

    killed = subprocess.Popen([sys.executable, "-m", "drq_fast", "encode", "run", "x.npy"], cwd=tmp_path)
    state = tmp_path / "run/codes.partial.json"
    wait_until(lambda: state.exists() and json.loads(state.read_text())["done"] >= N // 3)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "run/codes.npy").exists()
    assert N // 3 <= json.loads(state.read_text())["done"] < N

    _, peaks["encode"] = shell(tmp_path, "encode", "run", "x.npy")
    resumed = np.load(tmp_path / "run/codes.npy")
    _, peaks["encode again"] = shell(tmp_path, "encode", "run", "x.npy", "--force")
    assert np.array_equal(resumed, np.load(tmp_path / "run/codes.npy"))
    assert resumed.shape == (N, 4)
    _, peaks["index"] = shell(tmp_path, "index", "run")
    out, peaks["search"] = shell(tmp_path, "search", "run", "q.npy", "-k", "100", "--json")
    found = json.loads(out)["ids"]
    assert len(found) == QUERIES
    own = [number * (N // QUERIES) in ids for number, ids in enumerate(found)]
    assert sum(own) > QUERIES // 4
    out, peaks["evaluate"] = shell(tmp_path, "evaluate", "run", "--queries", "q.npy", "--json")
    recalls = [row["recall"] for row in json.loads(out)["lengths"]]
    assert recalls == sorted(recalls)
    print({name: f"{peak / 1e9:.2f} GB" for name, peak in peaks.items()})
    assert max(peaks.values()) < LIMIT


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted in other units elsewhere")
def test_an_index_is_built_and_tuned_in_less_memory_than_the_vectors_take(tmp_path):
    """The index keeps int8 vectors, a fourth of the vectors in float32, and needs them twice while it is ordered."""
    rows, dim = 250_000, 1024
    rng = np.random.default_rng(0)
    out = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float16, shape=(rows, dim))
    for first in range(0, rows, 10_000):
        out[first : first + 10_000] = rng.standard_normal((10_000, dim), dtype=np.float32)
    np.save(tmp_path / "q.npy", out[:20].astype(np.float32))
    del out
    _, idle = shell(tmp_path, "info")
    options = ["--bits", "8", "--lists", "32", "--vectors", "int8", "--sample", "2000", "--beam", "1"]
    _, build = shell(tmp_path, "build", "x.npy", "x.drq", *options)
    _, tune = shell(tmp_path, "tune", "x.drq", "q.npy")
    print({"idle": idle, "build": build, "tune": tune})
    assert max(build, tune) - idle < 4 * rows * dim
