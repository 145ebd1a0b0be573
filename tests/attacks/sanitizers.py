"""The native random tests of tests/native/, under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from .common import require

BUILD = Path(__file__).parents[1] / "native_build.py"


@functools.cache
def start() -> tuple[subprocess.Popen[bytes], Path] | str:
    """Starts to build the programs, once in a process: (the builder, their folder), or why they cannot be built."""
    if importlib.util.find_spec("setuptools") is None:
        return "setup.py, which has the flags, needs setuptools"
    sys.path.insert(0, str(BUILD.parent))
    from native_build import COMPILER

    if COMPILER is None:
        return "no C++ compiler was found"
    folder = tempfile.TemporaryDirectory(prefix="drq_fast-sanitizers-")  # deleted when the process ends
    with open(Path(folder.name) / "log", "wb") as log:
        builder = subprocess.Popen([sys.executable, BUILD, folder.name], stderr=log)
    atexit.register(folder.cleanup)
    atexit.register(builder.wait)
    atexit.register(builder.terminate)
    return builder, Path(folder.name)


def reason_to_skip() -> str:
    """Why there are no programs, or an empty string."""
    started = start()
    return started if isinstance(started, str) else ""


def ready() -> bool:
    """Whether the programs have been built."""
    started = start()
    return not isinstance(started, str) and started[0].poll() is not None


def wait() -> None:
    """Waits until the programs have been built; does nothing if they cannot be."""
    started = start()
    if not isinstance(started, str):
        code = started[0].wait()
        require(code == 0, f"the native tests could not be built: {(started[1] / 'log').read_text()[-4000:]}")


def sanitizers(dice: random.Random, folder: Path) -> int:
    started = start()
    if isinstance(started, str):
        return 0
    cases = {"levels_test": 60, "search_test": 15, "refine_test": 200}
    for program, count in cases.items():
        seed = dice.getrandbits(40)
        done = subprocess.run([started[1] / program, str(seed), str(count)], capture_output=True, text=True)
        what = f"{program} {seed} {count} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        require(done.returncode == 0 and f"{count} cases" in done.stdout, what)
    return sum(cases.values())
