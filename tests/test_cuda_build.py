"""The CUDA code as it is built: registers on every architecture, and the whole extension over a stand-in for cudart."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PTXSIM = Path(os.environ.get("DRQ_PTXSIM") or ROOT.parent / "shared/tools/ptxsim")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed"),
]

# The most registers of a thread: 64 leave room for 1024 threads on a multiprocessor.
REGISTERS = {
    "lookup_kernel": 64,
    "queue_kernel": 64,
    "select_kernel": 64,
    "merge_kernel": 64,
    "sort_kernel": 64,
    "emit_kernel": 64,
    "digit_kernel": 32,
    "transpose_kernel": 32,
    "exchange_kernel": 32,
}
THREE_BLOCKS = re.compile("queue_kernelI[ht]Lb0ELb0ELb1E")  # instead of four: with lists, and a table in the L2 cache
SPILLED = {("queue_kernel", "120"): 20}  # bytes a thread, at most; three blocks instead of four would cost more


@pytest.mark.parametrize("source", ["adc.cu", "search.cu"])
def test_registers_and_spills(tmp_path, source):
    flags = [
        "-std=c++17",
        "-O3",
        "-fmad=false",
        "-arch=all-major",
        f"-I{ROOT / 'csrc'}",
        "-Xptxas",
        "-v",
        "--threads=2",
    ]
    command = ["nvcc", *flags, "-c", "-o", str(tmp_path / "object.o"), str(ROOT / "csrc/cuda" / source)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    pattern = r"entry function '(\w+)' for 'sm_(\d+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    used = re.findall(pattern, text, re.DOTALL)
    assert {"75", "80", "90", "100", "120"} <= {arch for _, arch, _, _ in used}
    entries = set(re.findall(r"__global__ .*?(\w+_kernel)\(", "".join(f.read_text() for f in csrc_of(source))))
    assert {kernel_of(name) for name, *_ in used} == entries
    for name, arch, spilled, registers in used:
        assert int(spilled) <= SPILLED.get((kernel_of(name), arch), 0), (name, arch)
        assert int(registers) <= (80 if THREE_BLOCKS.search(name) else REGISTERS[kernel_of(name)]), (name, arch)

    release = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    if source == "search.cu" and "release 13.0" in release:
        table = (ROOT / "docs/gpu_search.md").read_text().split("## Registers")[1].split("## ")[0]
        documented = [line for line in table.splitlines() if line.startswith("| `")]
        assert sorted(documented) == sorted(rows_of(used))


def rows_of(used: list[tuple[str, str, str, str]]) -> list[str]:
    """The rows of docs/gpu_search.md: the most registers of the instances of each kernel, by architecture."""
    most: dict[str, dict[int, int]] = {}
    for name, arch, _, registers in used:
        flags = re.search(r"kernelI[ht]Lb[01]ELb([01])ELb([01])E", name)
        label = f"`{kernel_of(name)}`" + (", lists" if flags and flags[2] == "1" else "")
        label += ", table in the L2 cache" if THREE_BLOCKS.search(name) else ""
        found = most.setdefault(label, {})
        found[int(arch)] = max(found.get(int(arch), 0), int(registers))
    return [f"| {label} | {' | '.join(str(found[arch]) for arch in sorted(found))} |" for label, found in most.items()]


def csrc_of(source: str) -> list[Path]:
    return [ROOT / "csrc/cuda" / source, *([] if source == "adc.cu" else (ROOT / "csrc/cuda").glob("*.cuh"))]


def kernel_of(mangled: str) -> str:
    return next(name for name in REGISTERS if name in mangled)


DRIVE = """
import importlib.util, sys
import numpy as np
from hostsim import HostSim

host = HostSim(1 << 26, racecheck=True)
found = importlib.util.spec_from_file_location("_C", sys.argv[1])
native = importlib.util.module_from_spec(found)
found.loader.exec_module(native)
assert native.cuda and native.cuda_driver_version() == 13000

random, device = np.random.default_rng(0), host.dev
Q, N, K, M, k = 20, 700, 256, 4, 9
table = random.integers(-9, 10, (Q, K)).astype(np.float32)
codes = random.integers(0, K, (N, M)).astype(np.uint8)
scale = np.array([1, -1, 2, 1], np.float32)
sums = sum(scale[m] * table[:, codes[:, m]] for m in range(M))
order = np.argsort(-sums, axis=1, kind="stable")[:, :k]

inputs = {"table": device.to(table), "scale": device.to(scale), "codes": device.to(codes), "wide": False}
inputs |= {"Q": Q, "N": N, "K": K, "M": M}
out = device.alloc(4 * Q * N)
native.lookup_cuda(native.Lookup(**inputs, sums=out), stream=0)
assert np.array_equal(device.get(out, np.float32, (Q, N)), sums)

inputs |= {"norms": 0, "constants": device.to(np.zeros(Q, np.float32)), "lengths": 0, "keep": 0, "k": k, "stride": M}
inputs |= {"scores": device.alloc(4 * Q * k), "positions": device.alloc(8 * Q * k), "metric": 1}
job = native.Search(**inputs)
workspace = device.alloc(native.search_cuda_workspace(job, None))
native.search_cuda(job, None, workspace=workspace, stream=0)
assert np.array_equal(device.get(inputs["positions"], np.int64, (Q, k)), order)
assert np.array_equal(device.get(inputs["scores"], np.float32, (Q, k)), np.take_along_axis(sums, order, 1))
assert not any(stats.warn for *_, stats, _ in host.log)

try:
    native.search_cuda(native.Search(**inputs | {"M": 65}), None, workspace=workspace, stream=0)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(not (PTXSIM / "hostsim.py").exists(), reason="no PTX simulator at DRQ_PTXSIM")
def test_the_whole_extension_over_a_shared_cudart(tmp_path):
    for file in PTXSIM.iterdir():
        if file.is_file():
            shutil.copyfile(file, tmp_path / file.name)
    flags = ["-cudart", "none", "-Xcompiler", "-fPIC,-w", "-shared", "-Xlinker", "-soname,libcudart.so.13"]
    flags += ["-Xlinker", f"--version-script={tmp_path / 'shim.map'}", "-o", str(tmp_path / "libcudart.so.13")]
    subprocess.run(["nvcc", *flags, str(tmp_path / "shim.c")], check=True)
    settings = {"DRQ_FAST_CUDA": "1", "DRQ_FAST_CUDA_ARCH": "compute_75", "DRQ_FAST_CUDART": "shared"}
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "out", "*.so", "*.egg-info", ".*_cache", ".hypothesis")
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(source)]
    subprocess.run(command, env=os.environ | settings, check=True)
    shutil.unpack_archive(next(tmp_path.glob("*.whl")), tmp_path / "wheel", "zip")
    extension = next((tmp_path / "wheel/drq_fast").glob("_C*.so"))
    program = [sys.executable, "-c", DRIVE, str(extension)]
    result = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.strip() == "more than 64 levels"
