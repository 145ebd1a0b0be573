"""Builds drq_fast._C with ninja: C++ always, CUDA where nvcc is found, torch never.

DRQ_FAST_CUDA=auto|1|0       with CUDA: if nvcc is found (default), always, never
DRQ_FAST_CUDA_ARCH=all-major nvcc's -arch; `native` builds faster for the GPU at hand
DRQ_FAST_CUDART=static|shared  the CUDA runtime, in the extension (default) or a library of its own, with plain PTX
DRQ_FAST_NATIVE=1            without a C++ compiler: fail instead of installing pure Python
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
CXX_SOURCES = [
    "csrc/bindings.cpp",
    "csrc/cpu/adc.cpp",
    "csrc/cpu/checksum.cpp",
    "csrc/cpu/dispatch.cpp",
    "csrc/cpu/parallel.cpp",
    "csrc/cpu/search/search.cpp",
]
CUDA_SOURCES = ["csrc/cuda/adc.cu", "csrc/cuda/search.cu"]
# Compiled once per instruction set and chosen at run time.
ISA_SOURCES = [
    "csrc/cpu/search/bins.cpp",
    "csrc/cpu/encode.cpp",
    "csrc/cpu/search/lists.cpp",
    "csrc/cpu/search/refine.cpp",
    "csrc/cpu/search/scan.cpp",
    "csrc/cpu/search/tables.cpp",
    "csrc/cpu/squared.cpp",
    "csrc/cpu/training.cpp",
]
# Scores are defined without fused multiply-add, so that every backend returns the same bits.
CXX_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-pthread",
]
NVCC_FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-Xcompiler", "-fPIC,-fvisibility=hidden"]


def isa_flags(machine: str) -> tuple[str, dict[str, str]]:
    """The definition that declares the copies for a machine (see csrc/isa.h), and the flags of each."""
    if machine.lower() in ("x86_64", "amd64"):
        # GCC 12 warns about its own AVX-512 headers.
        avx512 = "-mfma -mavx512f -mavx512bw -mavx512vl -mavx512dq -Wno-uninitialized -Wno-maybe-uninitialized"
        vbmi = f"{avx512} -mavx512vbmi -mavx512vnni"
        return "-DDRQ_X86", {"portable": "", "avx2": "-mavx2 -mfma -mf16c", "avx512": avx512, "vbmi": vbmi}
    if machine.lower() in ("aarch64", "arm64"):
        dotprod = "-DDRQ_NEON -march=armv8.2-a+dotprod"
        return "-DDRQ_ARM", {"portable": "", "neon": "-DDRQ_NEON", "dotprod": dotprod}
    return "", {"portable": ""}


def setting(name: str, allowed: tuple[str, ...]) -> str:
    value = os.environ.get(name, allowed[0])
    if value not in allowed:
        sys.exit(f"setup: {name} must be one of {', '.join(allowed)}, got {value!r}.")
    return value


def find_compiler() -> str | None:
    """The C++ compiler's path, or None: then the package is installed as pure Python."""
    if sys.platform == "win32":
        return None  # only GCC and Clang command lines are written here
    wanted = os.environ.get("CXX")
    if wanted:
        found = shutil.which(shlex.split(wanted)[0])
        if found is None:
            sys.exit(f"setup: CXX must name a C++ compiler, got {wanted!r}, which is not there.")
        return wanted
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def find_nvcc() -> str | None:
    """nvcc from CUDA_HOME, CUDA_PATH or PATH, in that order, as DRQ_FAST_CUDA allows."""
    wish = setting("DRQ_FAST_CUDA", ("auto", "1", "0"))
    if wish == "0":
        return None
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [shutil.which(str(Path(home, "bin", "nvcc"))) for home in homes] + [shutil.which("nvcc")]
    nvcc = next((path for path in candidates if path), None)
    if nvcc is None and wish == "1":
        sys.exit("setup: DRQ_FAST_CUDA=1 needs nvcc in CUDA_HOME, CUDA_PATH or PATH, and none is there.")
    return nvcc


class NinjaBuild(build_ext):
    """Writes one build.ninja for the whole extension and runs it: incremental and parallel."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        folder = Path(self.build_temp).resolve() / "drq_fast_C"
        folder.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        (folder / "build.ninja").write_text(ninja_file(target, find_compiler() or "c++", find_nvcc()))
        subprocess.run([sys.executable, "-m", "ninja", "-C", str(folder)], check=True)


def ninja_file(
    target: Path,
    cxx: str,
    nvcc: str | None = None,
    *,
    machine: str = platform.machine(),
    system: str = sys.platform,
) -> str:
    """How to build the extension; for another machine and system if `cxx` compiles for these."""
    import pybind11

    python = sysconfig.get_paths()
    includes = " ".join(f"-isystem {shell_path(p)}" for p in (pybind11.get_include(), python["include"]))
    declared, copies = isa_flags(machine)
    defines = f"-DDRQ_FAST_CUDA {declared}" if nvcc else declared
    shared = "-bundle -undefined dynamic_lookup" if system == "darwin" else "-shared"
    arch = os.environ.get("DRQ_FAST_CUDA_ARCH", "all-major")
    cxx_sources = [ROOT / name for name in CXX_SOURCES]
    cuda_sources = [ROOT / name for name in CUDA_SOURCES] if nvcc else []
    lines = [
        f"cxx = {cxx}",
        f"flags = {' '.join(CXX_FLAGS)} {defines} {includes} -I{shell_path(ROOT / 'csrc')}",
        "rule cxx",
        "  command = $cxx $flags $isa -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
    ]
    if nvcc:
        # nvcc links too: it knows where its own runtime lies. A stand-in for a shared one can read PTX, if it is plain.
        cudart = setting("DRQ_FAST_CUDART", ("static", "shared"))
        plain = "-no-compress" if cudart == "shared" else ""
        lines += [
            f"nvcc = {shell_path(nvcc)} -arch={arch} {plain} {' '.join(NVCC_FLAGS)} -I{shell_path(ROOT / 'csrc')}",
            "rule cuda",
            "  command = $nvcc -MD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "rule link",
            f"  command = {shell_path(nvcc)} -arch={arch} -shared -cudart {cudart} -Xcompiler -pthread $in -o $out",
        ]
    else:
        lines += ["rule link", f"  command = $cxx {shared} -pthread $in -o $out"]
    objects = []
    for rule, sources in (("cxx", cxx_sources), ("cuda", cuda_sources)):
        for source in sources:
            objects.append(f"{source.stem}.{rule}.o")
            lines.append(f"build {objects[-1]}: {rule} {ninja_path(source)}")
    for name in ISA_SOURCES:
        for isa, flags in copies.items():
            objects.append(f"{Path(name).stem}.{isa}.o")
            lines.append(f"build {objects[-1]}: cxx {ninja_path(ROOT / name)}")
            lines.append(f"  isa = -DDRQ_ISA={isa} {flags}")
    lines.append(f"build {ninja_path(target)}: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def shell_path(path: Path | str) -> str:
    """For a command that ninja hands to the shell."""
    return shlex.quote(str(path)).replace("$", "$$")


def ninja_path(path: Path | str) -> str:
    """For ninja's own lists of inputs and outputs."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def main() -> None:
    compiler = find_compiler()
    if compiler is None:
        message = "no C++ compiler found: drq_fast is installed as pure Python, without its native code."
        if setting("DRQ_FAST_NATIVE", ("0", "1")) == "1":
            sys.exit(f"setup: DRQ_FAST_NATIVE=1 was set, but {message}")
        print(f"warning: {message}", file=sys.stderr)
    setup(
        ext_modules=[] if compiler is None else [Extension("drq_fast._C", [])],
        cmdclass={"build_ext": NinjaBuild},
    )


if __name__ == "__main__":  # tests read the flags
    main()
