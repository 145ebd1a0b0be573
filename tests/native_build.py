"""Builds the programs of tests/native/ with the flags of setup.py.

`python native_build.py FOLDER` builds them with sanitizers: FOLDER/search_test, FOLDER/levels_test
and FOLDER/refine_test.
"""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SETUP: dict[str, Any] = runpy.run_path(str(ROOT / "setup.py"))
COMPILER: str | None = SETUP["find_compiler"]()
PROGRAMS = ("search_test", "levels_test", "refine_test")
# Sanitizers report files and lines, and end the program at the first finding.
SANITIZED = ("-g", "-O1", "-fno-sanitize-recover=all")
MEMORY = "-fsanitize=address,undefined,float-cast-overflow"


class Builder:
    """Compiles each source once for the same flags."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[tuple[str, ...], Path] = {}

    def run(self, *command: str | Path) -> None:
        done = subprocess.run([*shlex.split(str(COMPILER)), *map(str, command)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)

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


if __name__ == "__main__":
    target = Path(sys.argv[1])
    builder = Builder(target)
    for program in PROGRAMS:
        builder.executable(program, *SANITIZED, MEMORY).rename(target / program)
