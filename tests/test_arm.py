"""The native code for ARM, cross-compiled and executed by qemu: its bits, and its instructions per code.

The reference of every case is that of the tests on x86: portable code, or all scores sorted.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("setuptools", reason="setup.py, which has the flags, needs setuptools")
from native_build import SANITIZED, Builder

CROSS, QEMU, LIBRARIES = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"

pytestmark = [
    pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"{CROSS} is not installed"),
    pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"{QEMU} is not installed (Debian: qemu-user)"),
]


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(tmp_path_factory.mktemp("arm"), CROSS, "aarch64")


def run(program: Path, *arguments: object, options: tuple[str, ...] = ()) -> str:
    """Runs a program by qemu; returns what it printed."""
    command = [QEMU, "-L", LIBRARIES, *options, str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


TESTS = pytest.mark.parametrize(("test", "cases"), [("search_test", 40), ("levels_test", 300), ("refine_test", 300)])


@TESTS
def test_every_instruction_set(builder, test, cases):
    assert run(builder.executable(test), 0, cases).split(" by ")[1].split() == ["portable", "neon", "dotprod"]


def test_a_processor_without_products_of_bytes(builder):
    old = ("-cpu", "cortex-a53")
    assert run(builder.executable("refine_test"), 0, 1, options=old).split(" by ")[1].split() == ["portable", "neon"]


@pytest.mark.slow
@TESTS
def test_sanitizers(builder, test, cases):
    """Undefined behaviour only: AddressSanitizer's map of memory does not fit into that of qemu."""
    program = builder.executable(test, *SANITIZED, "-fsanitize=undefined,float-cast-overflow")
    assert "dotprod" in run(program, 1000, cases)


def instructions(program: Path, log: Path, *arguments: object) -> int:
    """Counts executed instructions by qemu's log: the blocks that it translated, and how often it executed each."""
    run(program, *arguments, options=("-d", "in_asm,exec,nochain", "-D", str(log)))
    sizes: dict[str, int] = {}
    times: Counter[str] = Counter()
    block: list[str] = []  # the addresses of its instructions
    with log.open() as lines:
        for line in lines:
            if line.startswith("0x"):
                block.append(line[2:].split(":")[0].lstrip("0"))
                continue
            if block:
                sizes[block[0]] = len(block)
            block = []
            if line.startswith("Trace"):
                times[line.split("[")[1].split("/")[1].lstrip("0")] += 1
    return sum(sizes[first] * count for first, count in times.items())


@pytest.mark.parametrize(("metric", "queries", "most"), [(0, 64, 1 / 3), (1, 32, 1 / 3), (1, 1, 0.6)])
def test_instructions_per_code(builder, tmp_path, metric, queries, most):
    """At most this part of the portable code's, for 8,192 more codes: tables made once per search do not count."""
    program = builder.executable("scan")

    def per_code(isa: str) -> float:
        few, many = (instructions(program, tmp_path / "log", isa, metric, queries, 4, N) for N in (4096, 12288))
        return (many - few) / 8192

    assert per_code("neon") < most * per_code("portable")
