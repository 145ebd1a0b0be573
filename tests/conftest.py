"""Shared by all tests: torch.empty is filled with NaN, Triton kernels run without a GPU, one table of tolerances."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background jobs ignore it
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported
torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())  # fills torch.empty with NaN, too

from cuda_simulator import host, in_rounds, ptxsim_folder, simulator  # noqa: E402, F401

from drq_fast.app import cli  # noqa: E402
from drq_fast.app.run import Run  # noqa: E402

# Largest error of a result, relative to the largest entry of the float64 reference.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Codec(NamedTuple):
    """Random inputs of every operation: x [N, D], codebook [K, D], scale [M], offset [D]."""

    x: Tensor
    codebook: Tensor
    scale: Tensor
    offset: Tensor


@pytest.fixture
def codec() -> Callable[..., Codec]:
    """codec(N, D, K, M, dtype=...) makes reproducible inputs; the scales have both signs."""

    def make(
        N: int = 50, D: int = 5, K: int = 8, M: int = 3, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> Codec:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(N, D, dtype=torch.float64, generator=generator)
        codebook = torch.randn(K, D, dtype=torch.float64, generator=generator)
        scale = torch.tensor([(-1) ** m * 0.8**m for m in range(M)], dtype=torch.float64)
        offset = torch.randn(D, dtype=torch.float64, generator=generator) / 3
        return Codec(*(t.to(dtype) for t in (x, codebook, scale, offset)))

    return make


@pytest.fixture
def assert_close() -> Callable[..., None]:
    """assert_close(actual, expected float64): by the tolerance of the actual dtype (or of `dtype`)."""

    def check(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
        assert actual.shape == expected.shape
        if actual.numel():
            error = (actual.double() - expected.double()).abs().max()
            assert float(error) <= TOLERANCE[dtype or actual.dtype] * max(1e-30, float(expected.abs().max()))

    return check


class Shell:
    """The command line in a folder with vectors, queries and labelled features."""

    FIT = ("--rounds", "6", "--codewords", "16", "--levels", "3")

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        x = self.clustered(3000)
        np.save("x.npy", x)
        np.save("q.npy", x[:7] + 0.01)
        label = np.arange(120) % 3
        noise = 0.2 * np.random.default_rng(1).normal(size=(120, 8))
        np.savez("labelled.npz", x=(np.eye(3, 8)[label] + noise).astype(np.float32), label=label)

    @staticmethod
    def clustered(N: int, seed: int = 0, D: int = 16) -> np.ndarray:
        """Vectors [N, D] around twenty places."""
        rng = np.random.default_rng(seed)
        return (rng.normal(size=(20, D))[rng.integers(20, size=N)] + 0.3 * rng.normal(size=(N, D))).astype(np.float32)

    def ok(self, *arguments: str) -> str:
        """Runs a command that must succeed; returns what it prints."""
        code = cli.main(list(arguments))
        captured = self.capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    def refused(self, *arguments: str, code: int = 1) -> str:
        """Runs a command that must fail; returns its only line on stderr. Its stdout must be empty."""
        self.capsys.readouterr()
        try:
            found = cli.main(list(arguments))
        except SystemExit as exit:
            found = exit.code
        captured = self.capsys.readouterr()
        assert found == code
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert captured.err.startswith("drq-fast")
        assert "Traceback" not in captured.err
        return captured.err

    @staticmethod
    def start(*arguments: str) -> subprocess.Popen[str]:
        """Starts a command in a process of its own, which can be interrupted."""
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "drq_fast", *arguments]
        return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def fitted(self) -> Run:
        """A run with an index."""
        self.ok("fit", "run", "x.npy", *self.FIT)
        self.ok("encode", "run", "x.npy")
        self.ok("index", "run")
        return Run("run")

    def tree(self) -> dict[str, bytes]:
        """The contents of all files in the folder, by path."""
        return {str(p): p.read_bytes() for p in sorted(self.folder.rglob("*")) if p.is_file()}


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """The command line in a new folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)
