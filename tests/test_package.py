"""Installation as a user meets it: import time, missing compiler, source trees, wrong settings, CUDA builds."""

from __future__ import annotations

import os
import pickle
import pydoc
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from statistics import median

import pytest

import drq_fast
from drq_fast.app.options import _parsers

ROOT = Path(__file__).parents[1]


def copy_of_the_source(folder: Path) -> Path:
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "out", "*.so", "*.egg-info", ".*_cache", ".hypothesis")
    return Path(shutil.copytree(ROOT, folder / "source", ignore=ignored))


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs in a folder that is no source tree, so that `python -m` finds the installed package."""
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=os.sep, check=False)


def seconds(code: str) -> float:
    """Computing time of a process, whatever else the machine does."""
    before = os.times()
    subprocess.run([sys.executable, "-c", code], check=True)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


@pytest.mark.slow
def test_import_costs_little_beside_torch():
    pairs = [(seconds("from drq_fast import *"), seconds("import torch")) for _ in range(9)][2:]
    assert median(ours for ours, _ in pairs) < 1.2 * median(torch for _, torch in pairs)


def modules_after(code: str, *names: str) -> str:
    """Which of these modules are imported after `code` has run in a new process."""
    code += f"\nimport sys; print([name for name in {names} if name in sys.modules])"
    return run(sys.executable, "-c", code).stdout.splitlines()[-1]


def test_import_loads_nothing_heavy():
    assert modules_after("import drq_fast", "torch", "numpy") == "[]"
    bridged = ("faiss", "huggingface_hub", "langchain_core", "llama_index", "pyarrow", "ray", "sentence_transformers")
    assert modules_after("from drq_fast import *", "torch", "triton", "matplotlib", "sklearn", *bridged) == "['torch']"
    assert modules_after("import drq_fast.interop.sentence_transformers", "torch", *bridged) == "['torch']"


def test_public_names_are_imported_at_first_use():
    code = "import drq_fast; assert set(drq_fast.__all__) <= set(dir(drq_fast)); drq_fast.__version__"
    assert modules_after(code, "torch") == "[]"
    assert modules_after("from drq_fast import Index", "torch") == "['torch']"
    assert all(getattr(drq_fast, name).__name__.endswith(name) for name in drq_fast.__all__)
    assert "RecurrentQuantizer" in pydoc.render_doc(drq_fast)
    assert pickle.loads(pickle.dumps(drq_fast.RecurrentQuantizer)) is drq_fast.RecurrentQuantizer
    with pytest.raises(AttributeError, match=r"^module 'drq_fast' has no attribute 'Indx'$"):
        drq_fast.Indx  # noqa: B018


COMMANDS = list(_parsers()[1])


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["serch"], ["fit", "--codeword"], *([name, "--help"] for name in COMMANDS)]
)
def test_options_are_read_without_torch(arguments):
    code = f"""
from drq_fast.app.cli import main
try:
    main({arguments})
except SystemExit:
    pass
"""
    assert modules_after(code, "torch", "numpy") == "[]"


@pytest.mark.parametrize(("line", "completed"), [("drq-fast se", "search"), ("drq-fast search --ref", "--refine")])
def test_shells_complete_commands_and_options(tmp_path, line, completed):
    pytest.importorskip("argcomplete", reason="the extra [completion] is not installed")
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_COMP_WORDBREAKS": " "}
    asked["_ARGCOMPLETE_STDOUT_FILENAME"] = str(tmp_path / "completions")
    run(sys.executable, "-c", "from drq_fast.app.cli import main; main()", **asked)
    assert (tmp_path / "completions").read_text().strip() == completed


def test_info_says_what_has_no_cuda():
    from drq_fast.app import info

    facts = info.collect_info()
    facts["cuda"] |= {"in the extension": "built without CUDA", "driver": "unknown"}
    text = info.format_info(facts)
    assert "extension: built without CUDA; driver: unknown; torch: " in text
    assert "not built" not in text


def test_the_package_names_its_author():
    text = (ROOT / "pyproject.toml").read_text()
    assert 'authors = [{ name = "drq_fast developers" }]' in text


def test_wheels_have_every_package_and_every_file():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    made = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    files = [path for path in (ROOT / "drq_fast").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    package_of = {path: ".".join(path.relative_to(ROOT).parts[:-1]) for path in files}
    kernels = {path.parent for path in (ROOT / "kernels").rglob("*.py")}
    assert kernels == {ROOT / "kernels"}
    assert sorted(made["packages"]) == sorted({*package_of.values(), "drq_fast.kernels"})
    others = [path for path in files if path.suffix not in (".py", ".so", ".pyd")]
    missing = [path for path in others if path.name not in made["package-data"].get(package_of[path], [])]
    assert others
    assert not missing


def test_source_tree_without_a_build_works_and_warns_once(tmp_path):
    source = copy_of_the_source(tmp_path)
    code = (
        "import torch, warnings, drq_fast; print(drq_fast.__file__)\n"
        "layer = drq_fast.RecurrentQuantizer(4, 8, 2); x = torch.randn(50, 4); layer.initialise(x)\n"
        "index = drq_fast.Index(layer); index.add(x); index.search(x); index.search(x)\n"
    )
    # -S and a path of our own: neither the installed package nor its import hooks are seen.
    paths = os.pathsep.join([str(source), *(p for p in sys.path if p.endswith("site-packages"))])
    result = run(sys.executable, "-S", "-c", code, PYTHONPATH=paths)
    assert result.returncode == 0, result.stderr
    assert str(source) in result.stdout
    assert result.stderr.count("drq_fast runs without its native code") == 1
    assert "run `pip install -e .` in the source tree" in result.stderr


def setup(source: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    line = [sys.executable, "setup.py", *command]
    return subprocess.run(line, capture_output=True, text=True, env=environment, cwd=source, check=False)


def test_wrong_settings_are_named(tmp_path):
    pytest.importorskip("setuptools")
    source = copy_of_the_source(tmp_path)
    bare = str(tmp_path / "empty")  # a PATH without compilers
    for variables, message in (
        ({"DRQ_FAST_CUDA": "yes"}, "DRQ_FAST_CUDA must be one of auto, 1, 0, got 'yes'."),
        (
            {"DRQ_FAST_CUDA": "1", "PATH": bare, "CUDA_HOME": "", "CUDA_PATH": "", "CXX": sys.executable},
            "DRQ_FAST_CUDA=1 needs nvcc",
        ),
        ({"CXX": "no-such-compiler"}, "CXX must name a C++ compiler, got 'no-such-compiler', which is not there."),
        ({"DRQ_FAST_NATIVE": "1", "PATH": bare, "CXX": ""}, "DRQ_FAST_NATIVE=1 was set, but no C++ compiler found"),
    ):
        result = setup(source, "build_ext", **variables)
        assert result.returncode != 0
        assert message in result.stderr


@pytest.mark.slow
def test_without_a_compiler_the_install_is_pure_python_and_says_so(tmp_path):
    wheel = build_wheel(tmp_path, PATH=str(Path(sys.executable).parent), CXX="", CC="")
    assert wheel.name.endswith("-py3-none-any.whl")
    python = environment_with(tmp_path, wheel)
    info = run(str(python), "-m", "drq_fast", "info")
    assert "it was installed without a C++ compiler" in info.stdout


@pytest.mark.slow
def test_an_isolated_build_needs_no_torch(tmp_path):
    wheel = build_wheel(tmp_path, DRQ_FAST_CUDA="0")
    python = environment_with(tmp_path, wheel)
    info = run(str(python), "-m", "drq_fast", "info")
    assert "built with" in info.stdout, info.stderr
    assert "extension: built without CUDA" in info.stdout
    code = "import drq_fast, drq_fast.kernels, drq_fast.retrieval, sys; print(drq_fast.__file__)"
    assert "site-packages" in run(str(python), "-c", code).stdout


@pytest.mark.slow
def test_a_build_with_cuda(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    python = environment_with(tmp_path, build_wheel(tmp_path, DRQ_FAST_CUDA="1"))
    assert "extension: runtime" in run(str(python), "-m", "drq_fast", "info").stdout


@pytest.mark.slow
@pytest.mark.parametrize("cuda", ["0", "1"])
def test_a_path_with_spaces(tmp_path, cuda):
    if cuda == "1" and shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    folder = tmp_path / "a path with spaces"
    folder.mkdir()
    wheel = build_wheel(folder, DRQ_FAST_CUDA=cuda, DRQ_FAST_CUDA_ARCH="sm_80")
    assert "linux" in wheel.name or "macos" in wheel.name


@pytest.mark.slow
def test_a_compile_error_is_an_error(tmp_path):
    source = copy_of_the_source(tmp_path)
    (source / "csrc/cpu/adc.cpp").write_text("this is not C++")
    result = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(tmp_path), str(source), DRQ_FAST_CUDA="0")
    assert result.returncode != 0


def build_wheel(folder: Path, **variables: str) -> Path:
    """`pip wheel` of a copy of the source, in pip's own isolated environment, where torch is not."""
    source = copy_of_the_source(folder)
    result = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(folder), str(source), **variables)
    assert result.returncode == 0, result.stdout + result.stderr
    return next(folder.glob("*.whl"))


def environment_with(folder: Path, wheel: Path) -> Path:
    """The python of a new environment with this wheel, borrowing torch and the rest from the present one."""
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv/bin/python"
    site = next((folder / "venv/lib").glob("python*/site-packages"))
    shutil.unpack_archive(wheel, site, "zip")
    present = next(p for p in sys.path if p.endswith("site-packages"))
    # A path line, not a site directory: the editable install there is not activated.
    (site / "borrowed.pth").write_text(f"{present}\n")
    return python
