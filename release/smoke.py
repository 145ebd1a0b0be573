"""Runs the examples of the README with the installed package, which carries the README itself.

`python smoke.py` needs the package and its dependencies alone, and is to be run outside of the source tree.
"""

from __future__ import annotations

import os
import re
import tempfile
from importlib.metadata import metadata
from pathlib import Path

import drq_fast
from drq_fast.backends.native import extension


def main() -> None:
    place = Path(drq_fast.__file__).parent
    if place.parent.joinpath("setup.py").exists():
        raise SystemExit(f"smoke: drq_fast must be installed, got the source tree {place.parent}.")
    if extension.native is None:
        raise SystemExit(f"smoke: drq_fast must have native code, but {extension.why_not('cpu')}.")
    message = metadata("drq_fast")
    blocks = re.findall(r"^```python\n(.*?)^```$", str(message.get_payload()), re.MULTILINE | re.DOTALL)
    if not blocks:
        raise SystemExit("smoke: the description of the package must have examples, got none.")
    names: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for block in blocks:
            exec(compile(block, "README.md", "exec"), names)
    print(f"{len(blocks)} examples run by drq_fast {drq_fast.__version__} with {extension.instruction_set()}")


if __name__ == "__main__":
    main()
