"""Every Python block of README and docs runs, page by page and top to bottom."""

from __future__ import annotations

import importlib.util
import re
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
    assert len(lines) <= 150
    assert lines.index("```python") < 15


def test_links_inside_the_repository_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
