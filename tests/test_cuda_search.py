"""search in CUDA: every kernel and its host code, on a GPU or, where there is none, from their PTX in a simulator."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from drq_fast import _native, reference

ROOT = Path(__file__).parents[1]
PTXSIM = Path(os.environ.get("DRQ_PTXSIM") or ROOT.parent / "shared/tools/ptxsim")
METRICS = ["l2", "ip", "cosine"]


@dataclass
class Case:
    """A search as the kernels are given it, and what it must return."""

    Q: int
    N: int
    K: int
    M: int
    k: int
    metric: str = "l2"
    stride: int = 0  # codes from row to row; M if 0
    wide: bool = False
    keep: float = 1.0  # the share of codes that is looked at
    lead: int = 0  # codes that the first row lies behind an aligned address
    seed: int = 0
    ties: bool = False  # few different scores
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.stride = self.stride or self.M
        self.wide = self.wide or self.K > 256
        self.dtype = torch.uint16 if self.wide else torch.uint8
        rows = torch.randint(self.K, (self.N, self.M), generator=generator)
        flat = torch.randint(self.K, (self.lead + self.N * self.stride,), generator=generator)
        flat = flat[: max(self.lead, len(flat) - self.stride + self.M)]  # nothing may be read beyond the last code
        for m in range(self.M if self.N else 0):
            flat[self.lead + m :: self.stride] = rows[:, m]
        make = (lambda *shape: torch.randint(-2, 3, shape, generator=generator).float()) if self.ties else None
        make = make or (lambda *shape: torch.randn(*shape, generator=generator))
        self.rows = rows
        self.tensors = {
            "table": make(self.Q, self.K),
            "scale": make(self.M),
            "codes": flat.to(self.dtype),
            "constants": make(self.Q),
        }
        if self.metric != "ip":
            self.tensors["norms"] = make(self.N).square()
        if self.metric == "cosine":
            self.tensors["lengths"] = make(self.Q).abs()
        if self.keep < 1:
            self.tensors["keep"] = (torch.rand(self.N, generator=generator) < self.keep).to(torch.uint8)

    def expected(self) -> tuple[Tensor, Tensor]:
        """scores and positions [Q, k] by a stable sort of all scores."""
        given = self.tensors
        if self.N == 0:
            scores = torch.empty(self.Q, 0)
        else:
            sums, constants = reference.lookup(given["table"], self.rows, given["scale"]), given["constants"][:, None]
            scores = (given["norms"] - 2 * sums) + constants if self.metric == "l2" else sums + constants
        if self.metric == "cosine" and self.N:
            lengths = given["lengths"][:, None] * given["norms"].clamp_min(0).sqrt()
            scores = torch.where(lengths > 0, scores / torch.where(lengths > 0, lengths, 1), 0)
        kept = given["keep"].nonzero().squeeze(1) if "keep" in given else torch.arange(self.N)
        scores = scores[:, kept]
        cost = scores if self.metric == "l2" else -scores
        order = cost.sort(dim=1, stable=True).indices[:, : self.k]
        return reference.pad_result(scores.gather(1, order), kept[order], self.k, self.metric)

    def sizes(self) -> dict[str, int]:
        sizes = {name: getattr(self, name) for name in ("Q", "N", "K", "M", "k", "stride")}
        return sizes | {"metric": METRICS.index(self.metric), "wide": int(self.wide)}


def assert_right(case: Case, scores: Tensor, positions: Tensor) -> None:
    """To the bit, but for the payload of NaN."""
    expected_scores, expected_positions = case.expected()
    assert torch.equal(positions, expected_positions)
    number = ~expected_scores.isnan()
    assert torch.equal(scores.isnan(), ~number)
    assert torch.equal(scores[number].view(torch.int32), expected_scores[number].view(torch.int32))


POINTERS = ["table", "scale", "codes", "norms", "constants", "lengths", "keep", "scores", "positions"]


class SearchStruct(ctypes.Structure):
    """drq::Search of csrc/adc.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in POINTERS),
        *((name, ctypes.c_int64) for name in ("Q", "N", "K", "M", "k", "stride")),
        ("metric", ctypes.c_int),
        ("wide", ctypes.c_bool),
    ]


class Simulator:
    """Runs the host code of csrc/cuda/search.cu, and its kernels from their PTX."""

    def __init__(self, host: object, folder: Path, source: Path = ROOT / "csrc/cuda/search.cu") -> None:
        self.host, self.device = host, host.dev
        library = host.load(str(build(folder, source)))
        self.workspace = getattr(library, "_ZN3drq21search_cuda_workspaceERKNS_6SearchE")
        self.workspace.restype = ctypes.c_size_t
        self.run = getattr(library, "_ZN3drq11search_cudaERKNS_6SearchEPvS3_")
        self.run.restype = ctypes.c_char_p

    def put(self, case: Case) -> SearchStruct:
        """The case in a device memory that was emptied, with rubbish where nothing was written."""
        self.device.mem[4096 : self.device.top] = 0xA5
        self.device.top = 4096
        self.device.starts.clear()
        self.device.ends.clear()
        pointers = {name: self.device.to(tensor.numpy()) for name, tensor in case.tensors.items()}
        pointers["codes"] += case.lead * case.dtype.itemsize
        pointers["scores"] = self.device.alloc(max(1, case.Q * case.k * 4))
        pointers["positions"] = self.device.alloc(max(1, case.Q * case.k * 8))
        return SearchStruct(**pointers, **case.sizes())

    def search(self, case: Case, shared: int = 99 * 1024, **options: object) -> tuple[Tensor, Tensor]:
        """The result on a device whose blocks have `shared` bytes at most; options are those of ptxsim's launch."""
        job = self.put(case)
        workspace = self.device.alloc(max(1, self.workspace(ctypes.byref(job))))
        ctypes.c_int.in_dll(self.host.shim, "most_shared").value = shared
        self.host.kw, self.host.log = options, []
        error = self.run(ctypes.byref(job), ctypes.c_uint64(workspace), None)
        assert error is None, (error, self.host.errors)
        scores = self.device.get(job.scores, np.float32, (case.Q, case.k))
        positions = self.device.get(job.positions, np.int64, (case.Q, case.k))
        return torch.from_numpy(scores), torch.from_numpy(positions)

    @property
    def warnings(self) -> list[str]:
        return [f"{name}: {warning}" for name, *_, stats, _ in self.host.log for warning in stats.warn]

    @property
    def kernels(self) -> set[str]:
        return {name for name, *_ in self.host.log}


def build(folder: Path, source: Path) -> Path:
    library = folder / f"lib{source.stem}.so"
    flags = ["-std=c++17", "-fmad=false", "-DDRQ_FAST_CUDA", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc/cuda'}"]
    flags += ["-gencode", "arch=compute_75,code=compute_75", "-no-compress", "-cudart", "shared"]
    subprocess.run(["nvcc", *flags, "-Xcompiler", "-fPIC", "-shared", "-o", str(library), str(source)], check=True)
    return library


def why_no_simulator() -> str | None:
    if shutil.which("nvcc") is None:
        return "nvcc is not installed"
    if not (PTXSIM / "hostsim.py").exists():
        return "no PTX simulator at DRQ_PTXSIM"
    return "torch brings a CUDA runtime of its own" if torch.version.cuda else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A copy of the simulator with its CUDA runtime, whose `most_shared` a test can set."""
    reason = why_no_simulator()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("ptxsim")
    for file in PTXSIM.iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    shim = (PTXSIM / "shim.c").read_text()
    assert "v > 65536" in shim
    (folder / "shim.c").write_text("int most_shared = 65536;\n" + shim.replace("65536", "most_shared"))
    flags = ["-cudart", "none", "-Xcompiler", "-fPIC,-w", "-shared", "-Xlinker", "-soname,libcudart.so.13"]
    script = ["-Xlinker", f"--version-script={folder / 'shim.map'}"]
    subprocess.run(
        ["nvcc", *flags, *script, "-o", str(folder / "libcudart.so.13"), str(folder / "shim.c")], check=True
    )
    return folder


@pytest.fixture(scope="module")
def simulator(folder) -> Simulator:
    sys.path.insert(0, str(folder))
    import hostsim

    return Simulator(hostsim.HostSim(1 << 28), folder)


CASES = [
    Case(1, 1, 2, 1, 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gives_the_bits_of_the_reference(simulator, case):
    assert_right(case, *simulator.search(case, racecheck=True))
    assert not simulator.warnings
