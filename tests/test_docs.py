"""Every Python block of README and docs runs, page by page and top to bottom."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python(?: requires=(\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(page.read_text())
    if page.name in ("README.md", "migrating.md"):
        assert blocks
    names: dict[str, object] = {}
    for requirement, code in blocks:
        if not requirement or importlib.util.find_spec(requirement):
            exec(compile(code, str(page), "exec"), names)


def test_no_other_kind_of_python_block_hides_from_this_test():
    for page in PAGES:
        text = page.read_text()
        assert len(re.findall(r"^```(?:py|python)", text, re.MULTILINE)) == len(BLOCK.findall(text)), page


def test_readme_is_short_and_reaches_python_early():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert lines.index("```python") < 15


def test_every_argument_of_residual_vq_has_a_row():
    library = pytest.importorskip("vector_quantize_pytorch")
    made = [library.ResidualVQ.__init__, library.VectorQuantize.__init__]
    text = (ROOT / "docs" / "migrating.md").read_text().partition("### Every argument")[2].partition("\n## ")[0]
    constructor, _, forward = text.partition("Options of its forward")
    for part, functions in ((constructor, made), (forward, [library.ResidualVQ.forward])):
        named = set(re.findall(r"`(\w+)=`", "".join(line.split(" | ")[0] for line in part.splitlines())))
        assert named == {n for f in functions for n in inspect.signature(f).parameters} - {"self", "x", "vq_kwargs"}


def test_links_inside_the_repository_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_shell_blocks_of_the_tutorial_run(tmp_path):
    blocks = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "docs/tutorial.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for block in blocks:
        shell = ["bash", "-e", "-c", block]
        done = subprocess.run(shell, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert {"found.npz", "vectors.drq", "found_items.npz", "run"} <= {path.name for path in tmp_path.iterdir()}
