"""Imports point down only, no file is too long, every public function is typed and documented."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "drq_fast"

# Each floor may import from the floors below it.
FLOORS = [
    ["constants", "_C", "kernels"],
    ["blocks", "checks", "devices", "modes", "pretrained", "ranks"],
    ["backends", "codes", "sampling"],
    ["functional", "files", "refit"],
    ["codec", "ema", "objective"],
    ["fit", "parameters", "unique"],
    ["quantizer"],
    ["index", "semantic"],
    ["interop", "retrieval"],
    ["__init__"],
    ["app"],
    ["__main__"],
]
FLOOR = {name: height for height, names in enumerate(FLOORS) for name in names}


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imported_rooms(path: Path) -> set[str]:
    """The rooms of drq_fast that a file imports, anywhere in it.

    Methods such as Index.to_faiss import another library's bridge when they are called, which does not count.
    """
    depth = len(path.relative_to(PACKAGE).parts)
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    when_called = {id(node) for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) for node in ast.walk(each)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("interop.") and id(node) in when_called:
            continue
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("drq_fast"):
            found.add((node.module or "").partition(".")[2].split(".")[0] or "__init__")
        elif isinstance(node, ast.Import):
            found |= {
                a.name.partition(".")[2].split(".")[0] or "__init__"
                for a in node.names
                if a.name.startswith("drq_fast")
            }
    return {name if name in FLOOR else "__init__" for name in found}  # `from . import __version__`


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    own = room(path)
    for other in imported_rooms(path) - {own}:
        assert FLOOR[other] < FLOOR[own], f"{path.name} imports {other}"


def test_kernels_import_nothing_from_the_package():
    for path in sorted((ROOT / "kernels").glob("*.py")):
        assert "drq_fast" not in {
            name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            for name in (
                [node.module or ""] if isinstance(node, ast.ImportFrom)
                else [a.name for a in node.names] if isinstance(node, ast.Import) else []
            )
        }  # fmt: skip


def test_only_the_native_backend_imports_the_extension():
    for path in FILES:
        if path.parent.name != "native":
            assert "_C" not in imported_rooms(path)


def test_no_file_is_too_long():
    for pattern in (
        "drq_fast/**/*.py",
        "kernels/*.py",
        "csrc/**/*.*",
        "benchmarks/*.py",
        "tests/*.py",
        "examples/*.py",
        "setup.py",
    ):
        for path in ROOT.glob(pattern):
            assert len(path.read_text().splitlines()) <= 500, path


def public_functions(path: Path):
    for node in ast.parse(path.read_text()).body:
        nodes = [node, *node.body] if isinstance(node, ast.ClassDef) else [node]
        for item in nodes:
            if isinstance(item, (ast.FunctionDef, ast.ClassDef)) and not item.name.startswith("_"):
                yield item


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_public_functions_are_typed_and_documented(path):
    for item in public_functions(path):
        if not any(isinstance(d, ast.Name) and d.id == "overload" for d in item.decorator_list):
            helper = path.name == "checks.py"  # functions there need no docstring
            assert ast.get_docstring(item) or helper or item.name == "extra_repr", f"{path.name}: {item.name}"
        if isinstance(item, ast.FunctionDef):
            arguments = [*item.args.args, *item.args.kwonlyargs]
            assert all(a.annotation for a in arguments if a.arg not in ("self", "cls")), f"{path.name}: {item.name}"
            assert item.returns is not None, f"{path.name}: {item.name}"
