"""From the figures that benchmarks leave (JSON) to tables and plots; nothing is typed by hand.

    python benchmarks/report.py out/bench   # writes report.md and plots beside the JSON files of a folder
    python benchmarks/report.py --publish   # benchmarks/results/*.json into the marked blocks of README.md and docs/

A ratio whose interval is too wide is named as such, and its figure is left out of tables and plots.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import bounds
from figures import (
    BOUND,
    ENCODING,
    GROUPS,
    OURS,
    SEARCH,
    TRAINING,
    Figure,
    load,
    number,
    of_sizes,
    origin,
    size_text,
)
from plots import plot

ROOT = Path(__file__).parents[1]
HEADLINE = {  # title: group and sizes
    "Training step": ("quantize", TRAINING | {"loss": "squared"}),
    "Encode": ("encode", ENCODING),
    "Search, 256 queries at a time": ("search", SEARCH),
    "Search, one query": ("search", SEARCH | {"Q": 1}),
}


def ratio(peer: dict[str, Any]) -> str:
    """How many times as fast ours is, with its interval; or why there is no such figure."""
    if "absent" in peer:
        return f"absent: {peer['absent']}"
    if peer["wide"]:
        return "too noisy to publish"
    low, high = peer["interval"]
    return f"{number(peer['ratio'])} [{number(low)}, {number(high)}]"


def case(figure: Figure) -> str:
    """What was run: the benchmark's name and its sizes."""
    words = figure.name.removeprefix("bench_").partition("[")[0].replace("_", " ")
    return f"{words}: {sizes_of(figure)}"


def sizes_of(figure: Figure) -> str:
    return ", ".join(f"{name} {size_text(value)}" for name, value in figure.sizes.items())


def table(figures: list[Figure]) -> str:
    """One row for each benchmark and peer, and where the figures come from; markdown."""
    measures = sorted({measure for figure in figures for measure in figure.ours.get("quality", {})})
    titles = ["", "ours / s", "beside", "times as fast [90 %]", "MiB, ours", "MiB, peer"]
    titles += [f"{measure}, {whose}" for measure in measures for whose in ("ours", "peer")]
    rows = [titles, ["---"] * len(titles)]
    for figure in figures:
        speed = f"{number(figure.ours['rate'])} {figure.unit}"
        for n, (name, peer) in enumerate(figure.peers.items()):
            memory = [mib(figure.ours), mib(peer)]
            quality = [quality_text(side, measure) for measure in measures for side in (figure.ours, peer)]
            rows.append([*((case(figure), speed) if n == 0 else ("", "")), name, ratio(peer), *memory, *quality])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\n{origin(figures)}."


def mib(side: dict[str, Any]) -> str:
    return "" if "absent" in side else "unknown" if side["peak_mib"] is None else f"{max(0.0, side['peak_mib']):.1f}"


def quality_text(side: dict[str, Any], measure: str) -> str:
    return f"{side['quality'][measure]:.3f}" if "quality" in side else ""


def headline(figures: list[Figure]) -> str:
    """A row for each of HEADLINE that was measured, beside other people's code."""
    rows = ["| | ours / s | that is |", "| --- | --- | --- |"]
    shown = []
    for title, (group, sizes) in HEADLINE.items():
        figure = of_sizes(figures, group, sizes)
        if figure is None:
            continue
        shown.append(figure)
        others = {name: side for name, side in figure.steady().items() if not name.startswith((OURS, BOUND, "ours"))}
        peers = ", ".join(f"{number(side['ratio'])} x {name}" for name, side in others.items())
        rows.append(f"| **{title}**: {sizes_of(figure)} | {number(figure.ours['rate'])} {figure.unit} | {peers} |")
    return "\n".join(rows) + f"\n\n{origin(shown)}."


def blocks(figures: list[Figure]) -> dict[str, str]:
    """What stands in the marked blocks, by name."""
    groups = {group: [figure for figure in figures if figure.group == group] for group in GROUPS}
    tables = {group: table(found) for group, found in groups.items() if found}
    return {"headline": headline(figures), **tables, "bounds": bounds.tables()}


def fill(text: str, kind: str, contents: dict[str, str]) -> str:
    """The page with the blocks `<!-- kind: name -->` ... `<!-- end -->` filled anew; others stay."""

    def new(match: re.Match[str]) -> str:
        return f"{match[1]}\n{contents[match[2]]}\n<!-- end -->" if match[2] in contents else match[0]

    return re.sub(rf"(<!-- {kind}: ([^>]*) -->).*?<!-- end -->", new, text, flags=re.DOTALL)


def publish(results: Path, root: Path) -> None:
    """Fills the blocks of README.md and docs/*.md in `root`, and writes docs/plots."""
    figures = load(results)
    contents = blocks(figures)
    pages = (root / "README.md", *sorted((root / "docs").glob("*.md")))
    for page, text in [(page, fill(page.read_text(), "bench", contents)) for page in pages]:
        page.write_text(text)
    plot(figures, root / "docs" / "plots")


def write(folder: Path) -> None:
    """report.md, with a table for each group and the plots that the figures allow, and the plots."""
    figures = load(folder)
    parts = [f"![{name}]({name}.svg)" for name in plot(figures, folder)]
    for group, title in GROUPS.items():
        found = [figure for figure in figures if figure.group == group]
        parts += [f"## {title}", table(found)] if found else []
    path = folder / "report.md"
    path.write_text("\n\n".join(["# Throughput", *parts]) + "\n")
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of JSON files; benchmarks/results with --publish")
    parser.add_argument("--publish", action="store_true")
    options = parser.parse_args()
    if options.publish:
        publish(options.folder or ROOT / "benchmarks/results", ROOT)
    elif options.folder is None:
        parser.error("a folder of JSON files is needed, or --publish")
    else:
        write(options.folder)


if __name__ == "__main__":
    main()
