"""Makes a site of README.md, docs/ and the docstrings of the package: hooks of MkDocs, named in mkdocs.yml.

The pages are written for GitHub and stay readable there. Here README.md becomes the first page, every file outside of
docs/ that a page links to becomes a page too, and links are changed to these.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OPTIONAL = {"choosing.md"}  # left out of the navigation where there is no such page
NO_BRIDGES = {"__init__", "parquet", "shard"}  # modules of drq_fast.interop that are not for users
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")

_pages: dict[str, str] = {}  # path in the repository -> path in the site, of all files but those of docs/


def on_config(config: Any) -> Any:
    """Reads Markdown as GitHub does, and drops optional pages that are missing."""
    config.markdown_extensions.append(GitHub())
    for section in config.nav:
        for name, entries in section.items():
            if isinstance(entries, list):
                section[name] = [each for each in entries if not _missing(*each.values())]
    return config


def _missing(page: str) -> bool:
    return page in OPTIONAL and not (ROOT / "docs" / page).exists()


def on_files(files: Any, config: Any) -> Any:
    """Adds README.md, the API reference, the style, and what pages link to outside of docs/."""
    _pages.clear()
    _pages["README.md"] = "index.md"
    todo = ["README.md", *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
    for origin in todo:  # grows
        if origin in _pages:
            files.append(File.generated(config, _pages[origin], content=_content(ROOT / origin)))
        for path in _linked(origin):
            if not path.startswith("docs/") and path not in _pages:
                upper = path.endswith(".md") and "/" not in path  # CONTRIBUTING.md and the like
                _pages[path] = path.lower() if upper else f"source/{path.lstrip('.').removesuffix('.md')}.md"
                todo.append(path)
    for page in sorted((ROOT / "website" / "reference").glob("*.md")):
        files.append(File.generated(config, f"reference/{page.name}", content=_reference(page)))
    files.append(File.generated(config, "style.css", abs_src_path=str(ROOT / "website" / "style.css")))
    return files


def _linked(origin: str) -> Iterator[str]:
    """What a page, or the list of the files of a folder, links to: paths in the repository."""
    path = ROOT / origin
    if path.is_dir():
        yield from (each.relative_to(ROOT).as_posix() for each in sorted(path.glob("*.py")))
    elif path.suffix == ".md":
        for target, _ in LINK.findall(path.read_text()):
            found = _resolve(origin, target)
            if (ROOT / found).exists():
                yield found


def _resolve(origin: str, target: str) -> str:
    """The path in the repository that a link leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def _content(path: Path) -> str:
    """The Markdown of a page: a page as it is, a folder as a list of its files, any other file as code."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        rows = [f"- [{each.name}]({path.name}/{each.name}.md): {_summary(each)}" for each in sorted(path.glob("*.py"))]
        return f"# {name}\n\n" + "\n".join(rows)
    if path.suffix == ".md":
        return path.read_text()
    language = {".py": "python", ".yml": "yaml"}.get(path.suffix, "text")
    return f"---\nsearch: {{exclude: true}}\n---\n# {name}\n\n````{language}\n{path.read_text()}````\n"


def _summary(path: Path) -> str:
    """The first paragraph of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ")


def _reference(page: Path) -> str:
    """A page of the API reference; that of drq_fast.interop also has modules which it does not name."""
    text = page.read_text()
    if page.stem == "interop":
        modules = sorted(path.stem for path in (ROOT / "drq_fast" / "interop").glob("*.py"))
        others = [name for name in modules if name not in NO_BRIDGES and f"interop.{name}" not in text]
        text += "".join(f"\n::: drq_fast.interop.{name}\n" for name in others)
    return text


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Changes links between files of the repository to links between pages."""
    here = page.file.src_uri
    origin = next((path for path, site in _pages.items() if site == here), f"docs/{here}")

    def changed(link: re.Match[str]) -> str:
        path = _resolve(origin, link[1])
        site = path.removeprefix("docs/") if path.startswith("docs/") else _pages.get(path)
        if site is None or here.startswith(("source/", "reference/")):
            return link[0]
        return f"]({posixpath.relpath(site, posixpath.dirname(here) or '.')}{link[2] or ''})"

    return LINK.sub(changed, markdown)


class GitHub(Extension):
    """What GitHub reads otherwise than Python-Markdown, and the examples of docstrings."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        md.preprocessors.register(_GitHub(md), "github", 29)  # before fences and HTML are taken out


class _GitHub(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        parts = re.split(r"^(```.*?^```$)", "\n".join(lines), flags=re.MULTILINE | re.DOTALL)
        parts[1::2] = [re.sub(r"^```(\w*).*", r"```\1", part, count=1) for part in parts[1::2]]
        parts[::2] = map(_prose, parts[::2])
        return "".join(parts).split("\n")


def _prose(text: str) -> str:
    """Text outside of fences: <x, y> is no tag, a table may follow a comment, and >>> is Python."""
    code = r"^    .*$|(?P<ticks>`+)[^`]*(?P=ticks)|<!--.*?-->"
    text = re.sub(rf"{code}|<(?=/?[a-zA-Z])(?!https?:)", lambda m: "&lt;" if m[0] == "<" else m[0], text, flags=re.M)
    text = re.sub(r"^(<!--.*-->)\n(?!\n)", r"\1\n\n", text, flags=re.MULTILINE)
    return re.sub(r"^>>> .*(?:\n.+)*", _example, text, flags=re.MULTILINE)


def _example(found: re.Match[str]) -> str:
    """An interactive session as Python that can be copied; what it prints as comments."""
    lines = found[0].splitlines()
    return "\n".join(
        ["```python", *(line[4:] if re.match(r">>>|\.\.\.", line) else f"# {line}" for line in lines), "```"]
    )


class Arguments(griffe.Extension):
    """Names of arguments in docstrings, as in `k: how many results`, in bold."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for everything that was read."""
        if obj.docstring is None or not (obj.is_function or obj.is_class):
            return
        names = sorted(each.name.lstrip("*") for each in getattr(obj, "parameters", ()))
        if names:
            starts = rf"(^|[.;:,] |\band |\n)({'|'.join(names)})(?=(?: \[[^\]]*\])?(?:,| and \w+)?:)"
            obj.docstring.value = re.sub(starts, r"\1**\2**", obj.docstring.value)
