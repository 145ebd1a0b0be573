"""Compiles the extension for other machines with zig (PyPI: ziglang), so that an error shows before a release.

`python cross.py FOLDER` builds FOLDER/<target>/_C.so with the flags of setup.py. Nothing is executed, and the headers
of this machine's Python stand in for those of the target.
"""

from __future__ import annotations

import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]


class Target(NamedTuple):
    name: str  # as zig spells it
    machine: str  # platform.machine() there
    system: str  # sys.platform there


TARGETS = (
    Target("aarch64-linux-gnu.2.28", "aarch64", "linux"),
    Target("aarch64-macos.11.0", "arm64", "darwin"),
)
# zig names processors rather than architectures, and crashes when it links a bundle of macOS.
SPELLINGS = {"-march=armv8.2-a+dotprod": "-mcpu=generic+dotprod", "-bundle": "-shared"}


def build(target: Target, folder: Path) -> Path:
    """Builds the extension for a target in a folder; returns its path."""
    setup: dict[str, Any] = runpy.run_path(str(ROOT / "setup.py"))
    folder.mkdir(parents=True, exist_ok=True)
    extension = folder.resolve() / "_C.so"
    compiler = shlex.join([sys.executable, "-m", "ziglang", "c++", "-target", target.name])
    text: str = setup["ninja_file"](extension, compiler, machine=target.machine, system=target.system)
    for ours, zigs in SPELLINGS.items():
        text = text.replace(ours, zigs)
    (folder / "build.ninja").write_text(text)
    subprocess.run([sys.executable, "-m", "ninja", "-C", str(folder)], check=True)
    return extension


if __name__ == "__main__":
    for each in TARGETS:
        print(f"{each.name}: built {build(each, Path(sys.argv[1]) / each.name)}")
