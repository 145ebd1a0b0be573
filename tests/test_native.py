"""The native code without Python: every instruction set on random cases, under sanitizers, AVX-512 over SIMDe.

DRQ_FAST_SEED sets the first seed, DRQ_FAST_CASES the number of cases.
"""

from __future__ import annotations

import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from drq_fast.backends.native import extension

pytest.importorskip("setuptools", reason="setup.py, which has the flags, needs setuptools")
ROOT = Path(__file__).parents[1]
SETUP: dict[str, Any] = runpy.run_path(str(ROOT / "setup.py"))
COMPILER: str | None = SETUP["find_compiler"]()
SIMDE = Path("/usr/include/simde/x86/avx512.h")
# Sanitizers report files and lines, and end the program at the first finding.
SANITIZED = ("-g", "-O1", "-fno-sanitize-recover=all")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler was found")


class Builder:
    """Compiles each source once for the same flags."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[tuple[str, ...], Path] = {}

    def run(self, *command: str | Path) -> None:
        done = subprocess.run([*shlex.split(str(COMPILER)), *map(str, command)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def compile_all(self, units: list[tuple[str, ...]]) -> list[Path]:
        """Compiles units (source, flag, flag, ...), each once; returns their objects."""
        missing = [unit for unit in units if unit not in self.objects]
        self.objects |= {unit: self.folder / f"{len(self.objects) + i}.o" for i, unit in enumerate(missing)}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda unit: self.run(*unit[1:], "-c", ROOT / unit[0], "-o", self.objects[unit]), missing))
        return [self.objects[unit] for unit in units]

    def executable(self, test: str, *flags: str, simde: bool = False) -> Path:
        """Builds tests/native/<test>.cpp with the kernels, using the flags of setup.py and these."""
        x86 = len(SETUP["ISA_FLAGS"]) > 1
        defined = ("-DDRQ_COUNT_SCANS", *(["-DDRQ_X86"] if x86 else []))
        flags = (*SETUP["CXX_FLAGS"], "-I" + str(ROOT / "csrc"), *defined, *flags)
        emulated = ("-DDRQ_SIMDE", "-O1", "-Wno-psabi", "-include", str(ROOT / "tests/native/simde_missing.h"))
        units = [(f"tests/native/{test}.cpp", *flags)]
        for source in set(SETUP["CXX_SOURCES"]) - {"csrc/bindings.cpp"}:
            says_so = simde and source == "csrc/cpu/dispatch.cpp"
            units.append((source, *flags, *(["-DDRQ_SIMDE"] if says_so else [])))
        # Portable objects come first: if a function is in several objects, the linker takes the first.
        for isa, isa_flags in SETUP["ISA_FLAGS"].items():
            chosen = emulated if simde and isa == "avx512" else tuple(isa_flags.split())
            units += [(source, *flags, f"-DDRQ_ISA={isa}", *chosen) for source in SETUP["ISA_SOURCES"]]
        program = self.folder / f"program{len(self.objects)}"
        self.run(*flags, *self.compile_all(units), "-o", program)
        return program


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(tmp_path_factory.mktemp("native"))


def run(program: Path, cases: int) -> str:
    """Runs the program; returns what it printed. A failure prints its seed: repeat it by `program SEED 1`."""
    seed, count = os.environ.get("DRQ_FAST_SEED", "0"), os.environ.get("DRQ_FAST_CASES", str(cases))
    done = subprocess.run([str(program), seed, count], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert f"{count} cases" in done.stdout
    return done.stdout


TESTS = pytest.mark.parametrize(("test", "cases"), [("search_test", 300), ("levels_test", 300)])


@TESTS
def test_every_instruction_set(builder, test, cases):
    done_by = run(builder.executable(test), cases).split(" by ")[1].split()
    assert done_by == (["portable"] if extension.native is None else list(extension.supported_isas()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["address,undefined,float-cast-overflow", "thread"])
@TESTS
def test_sanitizers(builder, test, cases, kind):
    assert "portable" in run(builder.executable(test, *SANITIZED, f"-fsanitize={kind}"), cases // 2)


@pytest.mark.skipif(not SIMDE.exists(), reason="SIMDe is not installed (Debian: libsimde-dev)")
@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="AVX-512 is compiled on x86 only")
@TESTS
def test_avx512_emulated(builder, test, cases):
    assert "avx512" in run(builder.executable(test, simde=True), cases)


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_no_function_is_shared_between_instruction_sets(builder):
    """Of functions with the same name the linker keeps one, so AVX-512 could get into the portable code."""
    builder.executable("search_test")
    copies = [
        str(path) for unit, path in builder.objects.items() if "-O1" not in unit and unit[0] in SETUP["ISA_SOURCES"]
    ]
    assert len(copies) == len(SETUP["ISA_SOURCES"]) * len(SETUP["ISA_FLAGS"])
    symbols = subprocess.run(["nm", "--demangle", *copies], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^\S+ [Wu] .*", symbols, re.MULTILINE) == []
