"""Every Triton kernel compiles for GPUs that are not here: no spills, registers and shared memory within a budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# name in aot.py -> (registers a thread, bytes of shared memory a block), the most on any architecture
BUDGET = {
    "decode": (64, 1024),
    "encode float32": (128, 40960),
    "encode float32 odd": (128, 40960),
    "encode float32 exact": (128, 40960),
    "encode bfloat16": (128, 20480),
    "encode float16": (128, 20480),
    "encode float32 K=64": (128, 25600),
    "encode float32 exact K=64": (128, 25600),
    "encode float32 exact K=128": (128, 40960),
    "encode float32 K=128": (128, 40960),
    "encode float32 K=16": (128, 25600),
    "encode_tiled": (128, 8192),
    "encode_tiled exact": (128, 9216),
    "beam_errors": (128, 8192),
    "beam_select": (128, 32768),
    "beam_select small": (128, 16384),
    "distortion": (128, 3072),
    "distortion exact": (128, 4096),
    "distortion again": (128, 3072),
    "quantize": (128, 3072),
    "quantize_backward": (128, 8192),
    "distortion_backward": (128, 8192),
    "joint": (128, 36864),
    "joint by codewords": (128, 36864),
    "joint of few lines": (128, 12288),
    "joint exact": (128, 12288),
    "products": (128, 36864),
    "level": (128, 8192),
    "level again": (128, 8192),
    "level_backward": (128, 4096),
    "squared_errors": (48, 1024),
    "squared_errors_backward": (72, 1024),
    "squared_errors_backward bfloat16 odd": (80, 1024),
    "own_pulls": (64, 1024),
    "scatter": (64, 1024),
}

SPILLED = {("encode float32 exact", 80): 16}  # bytes a thread; as many registers as it takes would leave 8 warps


def check(arch: str, *names: str) -> list[dict[str, Any]]:
    """Compiles these kernels, or all; what `aot.py` says about each."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("aot.py")), arch, *names]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    rows = {row["kernel"]: row for row in map(json.loads, result.stdout.splitlines())}
    assert rows.keys() == set(names or BUDGET)
    for name, row in rows.items():
        registers, shared = BUDGET[name]
        assert row["spilled"] <= SPILLED.get((name, row["arch"]), 0), row
        assert row["registers"] <= registers, row
        assert row["shared"] <= shared, row
        assert row["warps"] >= 16, row  # on a multiprocessor at once
    return list(rows.values())


def test_some_kernels_compile_within_the_budget_and_without_spills():
    check("80", "decode", "encode float32", "distortion", "distortion_backward", "squared_errors_backward")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90", "100", "120"])
def test_every_kernel_compiles_within_the_budget_and_without_spills(arch):
    rows = check(arch)
    if arch == "90":
        table = Path(__file__).parents[1].joinpath("docs/gpu.md").read_text().split("<!-- occupancy -->")[1]
        columns = ("kernel", "registers", "spilled", "shared", "blocks", "warps")
        assert [f"| {' | '.join(str(row[column]) for column in columns)} |" for row in rows] == (
            table.split("<!-- end -->")[0].strip().splitlines()[2:]
        )
