"""Every Python block of README and docs runs, page by page and top to bottom; and the site that is made of the pages.

Blocks that take long are marked `slow` and run with the slow tests. What no test can run says so in its first line.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import drq_fast

ROOT = Path(__file__).parents[1]
SITE = ROOT / "website"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python(?: requires=(\w+))?( slow)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"# Not run by the tests: (.*)\.\n")


def run_blocks(page: Path, slow: bool) -> None:
    """Runs the blocks of a page as one program, in the present folder."""
    names: dict[str, object] = {}
    for requirement, is_slow, code in BLOCK.findall(page.read_text()):
        missing = requirement and not importlib.util.find_spec(requirement)
        if not (missing or (is_slow and not slow) or NOT_RUN.match(code)):
            exec(compile(code, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page.name in ("README.md", "migrating.md", "tutorial.md", "recipes.md"):
        assert BLOCK.search(page.read_text())
    run_blocks(page, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["scale.md"])
def test_slow_blocks_run(page, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")
    monkeypatch.chdir(tmp_path)
    try:
        run_blocks(ROOT / "docs" / page, slow=True)
    finally:
        ray.shutdown()
    assert {"0.parquet", "1.parquet"} <= {path.name for path in (tmp_path / "codes").iterdir()}


def test_blocks_that_do_not_run_always_are_these():
    found = {(page.name, *block) for page in PAGES for block in BLOCK.findall(page.read_text())}
    assert {page for page, _, slow, _ in found if slow} == {"scale.md"}
    reasons = {(page, why[1]) for page, *_, code in found if (why := NOT_RUN.match(code))}
    assert reasons == {("retrieval.md", "it needs a run that was trained on images")}


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


def prose(page: Path) -> str:
    """The text of a page without code, tables, and what benchmarks wrote."""
    text = re.sub(r"^```.*?^```$|<!-- (bench|quality):.*?<!-- end -->", "\n", page.read_text(), flags=re.M | re.S)
    return re.sub(r"^(\||    |#).*$", "", text, flags=re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = [title.lower() for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_links_inside_the_repository_lead_somewhere():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", prose(page)):
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(path), f"{page.name}: {target}#{anchor}"


def test_no_page_repeats_a_sentence_of_another():
    seen: dict[tuple[str, ...], str] = {}
    for page in PAGES:
        words = re.findall(r"[\w'-]+", prose(page).lower())
        for phrase in zip(*(words[i:] for i in range(14)), strict=False):
            assert seen.setdefault(phrase, page.name) == page.name, (page.name, seen[phrase], " ".join(phrase))


def pages_of(entries: list[object] | str) -> list[str]:
    """All pages of a navigation."""
    if isinstance(entries, str):
        return [entries]
    return [page for entry in entries for part in entry.values() for page in pages_of(part)]


def test_the_navigation_of_the_site_names_every_page():
    yaml = pytest.importorskip("yaml")
    named = pages_of(yaml.safe_load((SITE / "mkdocs.yml").read_text())["nav"])
    written = {path.name for path in (ROOT / "docs").glob("*.md")}
    reference = {f"reference/{path.name}" for path in (SITE / "reference").glob("*.md")}
    outside = {"index.md", "source/examples.md", "contributing.md", "security.md", "changelog.md"}
    assert len(named) == len(set(named))
    assert set(named) - {"choosing.md"} == (written | reference | outside) - {"choosing.md"}


def test_the_reference_has_every_public_name():
    text = "".join(page.read_text() for page in (SITE / "reference").glob("*.md"))
    assert set(re.findall(r"^::: drq_fast\.(\w+)$", text, re.MULTILINE)) == set(drq_fast.__all__)
    for name in re.findall(r"^::: (.+)$", text, re.MULTILINE):
        assert pkgutil.resolve_name(name).__doc__, name


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra [docs] is not installed")
    pytest.importorskip("mkdocstrings", reason="the extra [docs] is not installed")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "-f",
        SITE / "mkdocs.yml",
        "-d",
        tmp_path,
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    made = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "tutorial.html", "reference/index_.html", "source/examples/adapters.py.html"} <= set(made)
    for name, text in made.items():
        loaded = re.findall(r"<(?:script|img|iframe|link)[^>]*(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)", text)
        assert not loaded, (name, loaded)
    assert 'id="drq_fast.Index.search"' in made["reference/index_.html"]
    assert "<strong>metric</strong>" in made["reference/index_.html"]
    assert 'id="drq_fast.interop.ray.fit.fit"' in made["reference/interop.html"]  # a function named like its module
    assert "&lt;h_m, C_k&gt;" in made["math.html"]
    assert "\n    metric: str = " in re.sub(r"<[^>]*>", "", made["reference/index_.html"])  # a line for each argument
    assert ">>>" not in re.sub(r"<[^>]*>", "", made["reference/functional.html"])
    for name, text in made.items():
        words = re.sub(r"<[^>]*>", "", re.sub(r"<(code|pre)\b.*?</\1>", "", text, flags=re.DOTALL))
        assert not re.search(r"(?<!\w)\*\*|\*\*(?!\w)", words), name  # bold type that was not understood


def test_shell_blocks_of_the_tutorial_run(tmp_path):
    blocks = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "docs/tutorial.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for block in blocks:
        shell = ["bash", "-e", "-c", block]
        done = subprocess.run(shell, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert {"found.npz", "vectors.drq", "found_items.npz", "run"} <= {path.name for path in tmp_path.iterdir()}
