"""`make wheel` and `make cross`: the wheel works with torch alone, and the extension compiles for other machines."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="wheels are repaired on Linux"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source in which the tools are installed."""
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "dist", "out", "*.so", "*.egg-info", ".*_cache")
    copy = shutil.copytree(ROOT, tmp_path_factory.mktemp("wheel") / "source", ignore=ignored)
    if make(copy, "out/tools/ready").returncode != 0:
        pytest.skip("the tools that build wheels could not be installed")
    return copy


def make(source: Path, target: str) -> subprocess.CompletedProcess[str]:
    command = ["make", f"PYTHON={sys.executable}", target]
    return subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)


def requirements(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """The installed packages that a package needs, itself included."""
    from packaging.requirements import Requirement

    if name in found:
        return found
    try:
        found[name] = distribution(name)
    except PackageNotFoundError:
        return found  # of another platform
    for line in found[name].requires or []:
        needed = Requirement(line)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            requirements(needed.name, found)
    return found


def environment_with(folder: Path, wheel: Path) -> Path:
    """The python of a new environment with this wheel and links to what it needs; nothing else can be imported."""
    venv.create(folder / "venv", with_pip=False)
    site = next((folder / "venv/lib").glob("python*/site-packages"))
    shutil.unpack_archive(wheel, site, "zip")
    for name, package in requirements("drq_fast", {}).items():
        tops = {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}
        for top in tops if name != "drq_fast" else ():
            if not (site / top).exists():
                (site / top).symlink_to(package.locate_file(top))
    return folder / "venv/bin/python"


def test_the_wheel_works_with_torch_alone(source, tmp_path):
    done = make(source, "wheel")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (source / "dist").glob("*.whl")
    assert "manylinux" in wheel.name
    assert wheel.stat().st_size < 2e6
    python = environment_with(tmp_path, wheel)
    smoke = shutil.copy(ROOT / "release/smoke.py", tmp_path)
    for code, expected in (("import torch", 0), ("import sklearn", 1)):
        assert subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == expected
    result = subprocess.run([python, smoke], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "examples run by drq_fast" in result.stdout


def test_the_extension_compiles_for_other_machines(source):
    done = make(source, "cross")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((source / "out/cross").glob("*/_C.so"))) == done.stdout.count(": built ") > 1
