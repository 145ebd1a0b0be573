"""The CUDA search without a GPU: its host code over a stand-in for the CUDA runtime, its kernels from their PTX."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
PTXSIM = Path(os.environ.get("DRQ_PTXSIM") or ROOT.parent / "shared/tools/ptxsim")

POINTERS = ["table", "scale", "bases", "codes", "norms", "constants", "lengths", "keep", "scores", "positions"]


class SearchStruct(ctypes.Structure):
    """drq::Search of csrc/search.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in POINTERS),
        *((name, ctypes.c_int64) for name in ("Q", "N", "K", "T", "M", "k", "stride")),
        ("metric", ctypes.c_int),
        ("wide", ctypes.c_bool),
    ]


class ProbedStruct(ctypes.Structure):
    """drq::Probed of csrc/search.h; all 0: no lists."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("starts", "lists", "ends")),
        *((name, ctypes.c_int64) for name in ("L", "probes")),
    ]


class Simulator:
    """Runs the host code of csrc/cuda/search.cu, and its kernels from their PTX."""

    def __init__(self, host: Any, folder: Path, name: str = "as_it_is", changes: dict[str, str] | None = None) -> None:
        self.host, self.device = host, host.dev
        before = set(host.kernels)
        library = host.load(str(build(folder / name, changes or {})))
        self.entries = set(host.kernels) - before
        self.workspace = library._ZN3drq21search_cuda_workspaceERKNS_6SearchERKNS_6ProbedE
        self.workspace.restype = ctypes.c_size_t
        self.enqueue = library._ZN3drq11search_cudaERKNS_6SearchERKNS_6ProbedEPvS6_
        self.enqueue.restype = ctypes.c_char_p

    def clear(self) -> None:
        """Fills all device memory with garbage bytes."""
        self.device.mem[4096 : min(self.device.top, 1 << 28)] = 0xA5
        self.device.top = 4096
        self.device.starts.clear()
        self.device.ends.clear()

    def run(
        self,
        job: SearchStruct,
        probed: ProbedStruct | None = None,
        shared: int = 99 * 1024,
        granted: int = 99 * 1024,
        **options: object,
    ) -> tuple[Tensor, Tensor]:
        """The result on a device whose blocks have `shared` bytes at most, of which a kernel is `granted` so many;
        options are those of ptxsim's launch."""
        arguments = ctypes.byref(job), ctypes.byref(probed or ProbedStruct())
        workspace = self.device.alloc(max(1, self.workspace(*arguments)))
        ctypes.c_int.in_dll(self.host.shim, "most_shared").value = shared
        ctypes.c_int.in_dll(self.host.shim, "most_granted").value = granted
        self.host.kw, self.host.log = options, []
        error = self.enqueue(*arguments, ctypes.c_uint64(workspace), None)
        assert error is None, (error, self.host.errors)
        scores = self.device.get(job.scores, np.float32, (job.Q, job.k))
        positions = self.device.get(job.positions, np.int64, (job.Q, job.k))
        return torch.from_numpy(scores), torch.from_numpy(positions)

    @property
    def warnings(self) -> list[str]:
        return [f"{name}: {warning}" for name, *_, stats, _ in self.host.log for warning in stats.warn]

    @property
    def launched(self) -> set[str]:
        return set(self.launches)

    @property
    def launches(self) -> list[str]:
        return [name for name, *_ in self.host.log]


def build(folder: Path, changes: dict[str, str]) -> Path:
    """The CUDA sources, with each key of `changes` replaced by its value, as a library for the simulator."""
    folder.mkdir()
    remaining = set(changes)
    for file in (ROOT / "csrc/cuda").iterdir():
        text = file.read_text()
        for old, new in changes.items():
            remaining -= {old} if old in text else set()
            text = text.replace(old, new)
        (folder / file.name).write_text(text)
    assert not remaining
    flags = ["-std=c++17", "-fmad=false", "-DDRQ_FAST_CUDA", f"-I{ROOT / 'csrc'}", f"-I{folder}"]
    flags += ["-gencode", "arch=compute_75,code=compute_75", "-no-compress", "-cudart", "shared"]
    # Kernels in an anonymous namespace are named after the file.
    source = (folder / "search.cu").rename(folder / f"{folder.name}.cu")
    library = folder / "libsearch.so"
    subprocess.run(["nvcc", *flags, "-Xcompiler", "-fPIC", "-shared", "-o", str(library), str(source)], check=True)
    return library


def has_lists(kernel: str) -> bool:
    """Whether a kernel, by its mangled name, is an instance for lists: the last template argument is true."""
    return "Lb1EEEv" in kernel


def why_no_simulator() -> str | None:
    if shutil.which("nvcc") is None:
        return "nvcc is not installed"
    if not (PTXSIM / "hostsim.py").exists():
        return "no PTX simulator at DRQ_PTXSIM"
    return "torch brings a CUDA runtime of its own" if torch.version.cuda else None


@pytest.fixture(scope="session")
def ptxsim_folder(tmp_path_factory) -> Path:
    """A copy of the simulator and its CUDA runtime, whose `most_shared` and `most_granted` a test can set."""
    reason = why_no_simulator()
    if reason:
        pytest.skip(reason)
    folder: Path = tmp_path_factory.mktemp("ptxsim")
    for file in PTXSIM.iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    shim = (PTXSIM / "shim.c").read_text()
    assert "v > 65536" in shim
    shim = shim.replace("v > 65536", "v > most_shared || v > most_granted").replace("65536", "most_shared")
    (folder / "shim.c").write_text("int most_shared = 65536, most_granted = 65536;\n" + shim)
    flags = ["-cudart", "none", "-Xcompiler", "-fPIC,-w", "-shared", "-Xlinker", "-soname,libcudart.so.13"]
    flags += ["-Xlinker", f"--version-script={folder / 'shim.map'}", "-o", str(folder / "libcudart.so.13")]
    subprocess.run(["nvcc", *flags, str(folder / "shim.c")], check=True)
    return folder


@pytest.fixture(scope="session")
def host(ptxsim_folder) -> Any:
    sys.path.insert(0, str(ptxsim_folder))
    import hostsim

    return hostsim.HostSim(13 << 28)  # untouched pages take no memory


@pytest.fixture(scope="session")
def simulator(host, ptxsim_folder) -> Simulator:
    return Simulator(host, ptxsim_folder)


# Small limits, so that small cases have several rounds of queries and slices of codes.
SMALL_CONSTANTS = {
    "kRoundBytes = 1 << 28": "kRoundBytes = 1 << 11",
    "kBlocks = 1024": "kBlocks = 3",
    "kMinSliceRows = 2048": "kMinSliceRows = 16",
}


@pytest.fixture(scope="session")
def in_rounds(host, ptxsim_folder) -> Simulator:
    return Simulator(host, ptxsim_folder, "in_rounds", SMALL_CONSTANTS)
