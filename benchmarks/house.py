"""Numbers about the code base itself: floors of imports, files that a call runs through, sizes of functions, lines.

python benchmarks/house.py [root of a source tree, this one by default]
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCES = (".py", ".pyi", ".h", ".cpp", ".cu", ".cuh")


def floors(root: Path) -> int:
    """The length of FLOORS in tests/test_imports.py."""
    for node in ast.parse((root / "tests/test_imports.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS":
            return len(ast.literal_eval(node.value))
    raise SystemExit(f"house: {root}/tests/test_imports.py has no FLOORS.")


def functions(folder: Path) -> list[tuple[str, int, int]]:
    """(name, lines with docstring, parameters without self and cls) of all Python functions in a folder."""
    found = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                a = node.args
                named = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
                parameters = sum(parameter.arg not in ("self", "cls") for parameter in named)
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                found.append((f"{node.name} in {path.relative_to(folder.parent)}", lines, parameters))
    return found


def files_of(call: Callable[[Any], Any], argument: Any, package: Path) -> list[str]:
    """The files of the package whose functions run in one call, after a first call that may import and prepare."""
    found: dict[str, None] = {}
    call(argument)
    sys.setprofile(lambda frame, event, _: found.setdefault(frame.f_code.co_filename) if event == "call" else None)
    call(argument)
    sys.setprofile(None)
    return [name[len(f"{package}/") :] for name in found if name.startswith(f"{package}/")]


def main(root: Path) -> None:
    sys.path.insert(0, str(root))
    import torch

    import drq_fast

    package = Path(drq_fast.__file__).parent
    assert package == root / "drq_fast", package
    torch.set_num_threads(1)  # a profiler sees its own thread only
    x, layer = torch.randn(300, 8), drq_fast.RecurrentQuantizer(8, codewords=16, levels=2)
    layer.initialise(x, seed=0)
    index = drq_fast.Index(layer)
    index.add(x)
    print(f"floors of imports: {floors(root)}")
    calls = {"Index.search": (index.search, x[:1]), "layer.encode": (layer.encode, x), "layer(x)": (layer, x)}
    for name, (call, argument) in calls.items():
        files = files_of(call, argument, package)
        print(f"files that {name} runs through: {len(files)} ({', '.join(files)})")
    for folder in (root / "drq_fast", root / "kernels", root / "csrc"):
        paths = [path for path in folder.rglob("*") if path.suffix in SOURCES]
        lines = sum(len(path.read_text().splitlines()) for path in paths)
        print(f"{folder.name}/: {lines:,} lines in {len(paths)} files")
        for what, column in (("longest function, lines", 1), ("widest signature, parameters", 2)):
            for found in sorted(functions(folder), key=lambda function: -function[column])[:1]:
                print(f"  {what}: {found[column]}, {found[0]}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve())
