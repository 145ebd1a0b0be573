"""The native code without Python: every instruction set on random cases, under sanitizers, AVX-512 over SIMDe.

DRQ_FAST_SEED sets the first seed, DRQ_FAST_CASES the number of cases.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from drq_fast.backends.native import extension

pytest.importorskip("setuptools", reason="setup.py, which has the flags, needs setuptools")
from native_build import COMPILER, MEMORY, SANITIZED, SETUP, Builder

SIMDE = Path("/usr/include/simde/x86/avx512.h")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler was found")


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


TESTS = pytest.mark.parametrize(("test", "cases"), [("search_test", 300), ("levels_test", 300), ("refine_test", 300)])


@TESTS
def test_every_instruction_set(builder, test, cases):
    done_by = run(builder.executable(test), cases).split(" by ")[1].split()
    assert done_by == (["portable"] if extension.native is None else list(extension.supported_isas()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MEMORY, "-fsanitize=thread"])
@TESTS
def test_sanitizers(builder, test, cases, kind):
    assert "portable" in run(builder.executable(test, *SANITIZED, kind), cases // 2)


@pytest.mark.skipif(not SIMDE.exists(), reason="SIMDe is not installed (Debian: libsimde-dev)")
@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="AVX-512 is compiled on x86 only")
@TESTS
def test_avx512_emulated(builder, test, cases):
    assert "avx512 vbmi" in run(builder.executable(test, simde=True), cases)


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_no_function_is_shared_between_instruction_sets(builder):
    """Of functions with the same name the linker keeps one, so AVX-512 could get into the portable code."""
    builder.executable("search_test")
    copies = [
        str(path) for unit, path in builder.objects.items() if "-O1" not in unit and unit[0] in SETUP["ISA_SOURCES"]
    ]
    assert len(copies) == len(SETUP["ISA_SOURCES"]) * len(builder.copies)
    symbols = subprocess.run(["nm", "--demangle", *copies], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^\S+ [Wu] .*", symbols, re.MULTILINE) == []
