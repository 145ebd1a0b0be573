"""The GPU code that Triton makes of the kernels, executed by a PTX simulator, and the launchers with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PTXSIM = Path(os.environ.get("DRQ_PTXSIM") or Path(__file__).parents[2] / "shared/tools/ptxsim")
LIMIT = {
    **dict.fromkeys(("encode exact", "encode", "encode bfloat16", "encode float16"), 0),
    **dict.fromkeys(("encode, tiled exact", "encode, tiled", "beam exact", "beam"), 0),
    **dict.fromkeys(("training exact", "training"), 2e-5),
    **dict.fromkeys(("training, many lines", "training, many lines by codewords"), 2e-5),
    **dict.fromkeys(("training, tiled exact", "training, tiled"), 2e-4),
    "squared": 3e-6,
}
ONCE = {"encode_kernel", "encode_tiled_kernel", "beam_errors_kernel", "level_backward_kernel", "scatter_kernel"}
ONCE |= {"squared_errors_kernel", "squared_errors_backward_kernel", "own_pulls_kernel"}


def simulate(seed: int, *jobs: str) -> list[str]:
    """Runs the simulator and checks all errors; returns the names of the jobs."""
    pytest.importorskip("triton")
    if not (PTXSIM / "ptxsim.py").exists():
        pytest.skip("no PTX simulator at DRQ_PTXSIM")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("simulate.py")), str(PTXSIM), str(seed), *jobs]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    for row in rows:
        assert row["error"] <= LIMIT[row["job"]], row
        assert row["races"] == {}, row
        twice = {"scatter_kernel"} if row["job"] == "squared" else set()  # for D columns, and for one
        assert all(row["variants"][kernel] == 1 + (kernel in twice) for kernel in ONCE & row["variants"].keys()), row
    return [row["job"] for row in rows]


def test_encode_on_tensor_cores():
    assert simulate(0, "encode", "encode bfloat16") == ["encode", "encode bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])  # orders in which warps take turns
def test_every_kernel(seed):
    assert simulate(seed, *LIMIT) == list(LIMIT)
