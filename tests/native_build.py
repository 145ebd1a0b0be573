"""Builds the programs of tests/native/ with the flags of setup.py.

`python native_build.py FOLDER` builds them with sanitizers: FOLDER/search_test, FOLDER/levels_test
and FOLDER/refine_test.
"""

from __future__ import annotations

import os
import platform
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
    """Compiles each source once for the same flags, with the copies of the kernels for a machine."""

    def __init__(self, folder: Path, compiler: str | None = COMPILER, machine: str = platform.machine()) -> None:
        self.folder, self.compiler = folder, shlex.split(str(compiler))
        self.declared, self.copies = SETUP["isa_flags"](machine)
        self.objects: dict[tuple[str, ...], Path] = {}

    def run(self, *command: str | Path) -> None:
        done = subprocess.run([*self.compiler, *map(str, command)], capture_output=True, text=True)
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
        defined = ("-DDRQ_COUNT_SCANS", *self.declared.split())
        flags = (*SETUP["CXX_FLAGS"], "-I" + str(ROOT / "csrc"), *defined, *flags)
        simde_flags = ("-DDRQ_SIMDE", "-O1", "-Wno-psabi", "-include", str(ROOT / "tests/native/simde_missing.h"))
        emulated = {"avx512": simde_flags, "vbmi": (*simde_flags, "-DDRQ_VBMI")} if simde else {}
        units = [(f"tests/native/{test}.cpp", *flags)]
        for source in set(SETUP["CXX_SOURCES"]) - {"csrc/bindings.cpp"}:
            says_so = simde and source == "csrc/cpu/dispatch.cpp"
            units.append((source, *flags, *(["-DDRQ_SIMDE"] if says_so else [])))
        # Portable objects come first: if a function is in several objects, the linker takes the first.
        for isa, isa_flags in self.copies.items():
            chosen = emulated.get(isa, tuple(isa_flags.split()))
            units += [(source, *flags, f"-DDRQ_ISA={isa}", *chosen) for source in SETUP["ISA_SOURCES"]]
        program = self.folder / f"program{len(self.objects)}"
        self.run(*flags, *self.compile_all(units), "-o", program)
        return program


if __name__ == "__main__":
    target = Path(sys.argv[1])
    builder = Builder(target)
    for program in PROGRAMS:
        builder.executable(program, *SANITIZED, MEMORY).rename(target / program)
