"""The fixture `compare` of benchmarks/conftest.py, on a file of tiny benchmarks that a pytest of its own runs."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pytest_benchmark") is None, reason="pytest-benchmark is not installed"
)

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

TINY = """
def right(N):
    return lambda: sum(range(N))

def wrong(N):
    return lambda: sum(range(N)) + 1

def triton(N):
    import torch
    from drq_fast import functional
    codes, codebook = torch.zeros(N, 1, dtype=torch.uint8), torch.zeros(2, 4)
    functional.decode(codes, codebook, torch.ones(1), backend="triton")
    return right(N)

def slow(N):
    return lambda: [sum(range(N)) for _ in range(20)]

def large(N):
    return lambda: b"x" * (32 << 20)

def missing(N):
    import a_library_that_nobody_has

def agrees(result, N):
    return result == N * (N - 1) // 2

def says_nothing(result, N):
    assert agrees(result, N)

PEERS = {"slow": slow, "large": large, "missing": missing}

def bench_right(compare):
    compare(right, PEERS, agrees, sizes={"N": 10000}, work=10000, unit="numbers")

def bench_wrong(compare):
    compare(wrong, PEERS, agrees, sizes={"N": 10}, work=10, unit="numbers")

def bench_unjudged(compare):
    compare(right, PEERS, says_nothing, sizes={"N": 10}, work=10, unit="numbers")

def bench_triton(compare):
    compare(triton, PEERS, agrees, sizes={"N": 10}, work=10, unit="numbers")
"""


class Outcome(NamedTuple):
    text: str
    benchmarks: list[dict[str, Any]]

    @property
    def right(self) -> dict[str, Any]:
        """What is stored beside the times of bench_right."""
        return self.benchmarks[0]["extra_info"]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("benchmarks")
    for name in ("conftest.py", "memory.py", "provenance.py"):
        shutil.copy(BENCHMARKS / name, folder)
    (folder / "bench_tiny.py").write_text(TINY)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--import-mode=importlib",
        "--rootdir=.",
        "--benchmark-json=figures.json",
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    child = subprocess.run([*command, "."], cwd=folder, env=environment, capture_output=True, text=True)
    assert child.returncode == 1, child.stdout + child.stderr
    return Outcome(child.stdout, json.loads((folder / "figures.json").read_text())["benchmarks"])


def test_only_what_agrees_leaves_a_figure(outcome: Outcome) -> None:
    assert [benchmark["name"] for benchmark in outcome.benchmarks] == ["bench_right"]
    assert "3 failed, 1 passed" in outcome.text
    reasons = [line for line in outcome.text.splitlines() if line.startswith("E ")]
    assert sum("ours disagrees with the reference at {'N': 10}: nothing is timed" in line for line in reasons) == 2


def test_triton_interpreter_is_not_timed(outcome: Outcome) -> None:
    pytest.importorskip("triton")
    assert "triton runs in Triton's interpreter (TRITON_INTERPRET=1), whose timings mean nothing" in outcome.text


def test_ratio_interval_and_rate(outcome: Outcome) -> None:
    slow, ours = outcome.right["peers"]["slow"], outcome.right["ours"]
    low, high = slow["interval"]
    assert 2 < low <= slow["ratio"] <= high
    assert ours["rate"] > 2 * slow["rate"] > 0
    assert outcome.right["unit"] == "numbers"
    assert outcome.benchmarks[0]["stats"]["rounds"] == 7


def test_absent_peer_is_named(outcome: Outcome) -> None:
    assert outcome.right["peers"]["missing"] == {"absent": "No module named 'a_library_that_nobody_has'"}
    assert "absent: No module named 'a_library_that_nobody_has'" in outcome.text


def test_peak_memory(outcome: Outcome) -> None:
    ours, large = outcome.right["ours"], outcome.right["peers"]["large"]
    if "no_peak" in ours:
        pytest.skip(ours["no_peak"])
    assert ours["peak_mib"] < 8
    assert 31 < large["peak_mib"] < 40  # the kernel counts resident pages in batches


def test_provenance(outcome: Outcome) -> None:
    provenance = outcome.right["provenance"]
    assert provenance["processor"]
    assert provenance["cores"] >= 1
    assert provenance["torch_threads"] >= 1
    assert {"python", "drq_fast", "torch", "numpy", "faiss-cpu", "turbovec"} <= set(provenance["versions"])
    assert {"instructions", "commit", "dirty", "date"} <= set(provenance)


def test_table_names_every_peer(outcome: Outcome) -> None:
    table = outcome.text.partition("ours and the peers")[2]
    for peer in ("slow", "large", "missing"):
        assert f"bench_right  {peer} " in table
