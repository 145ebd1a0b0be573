"""The plots of report.py: one figure for each part of the library, a panel for each size that changes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from figures import BOUND, ENCODING, OURS, SEARCH, TRAINING, Figure, number, origin, size_text
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, NullLocator

STYLE: Any = {"svg.hashsalt": OURS, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
COLOURS = ("#1f77b4", "#e08214", "#2ca02c", "#7b52ab", "#8c564b", "#17a2b8")


class Panel(NamedTuple):
    """A diagram: what all figures of a group show that differ from `sizes` in the size `axis` alone."""

    group: str
    axis: str
    sizes: dict[str, Any]
    label: str
    value: str = "rate"

    def lines(self, figures: Iterable[Figure]) -> dict[str, list[tuple[float, float]]]:
        """Points (size, value) by name, ours first."""
        found: dict[str, list[tuple[float, float]]] = {OURS: []}
        for figure in figures:
            if figure.group == self.group and figure.sizes == self.sizes | {self.axis: figure.sizes.get(self.axis)}:
                shown = figure.present() if self.value == "peak_mib" else figure.steady()
                for name, values in shown.items():
                    found.setdefault(name, []).append((figure.sizes[self.axis], values[self.value]))
        return {name: sorted(points) for name, points in found.items()}


OLD_SEARCH = {"N": 1_000_000, "Q": 256, "K": 256, "M": 4, "metric": "ip", "k": 10}  # of files without fitted codes
AXES = {"D": "dimensions D", "M": "levels M", "K": "codewords K", "N": "codes N", "Q": "queries at a time"}
PLOTS = {
    "training": ("Training step", [Panel("quantize", axis, TRAINING, "vectors / s") for axis in "DMK"]),
    "encode": ("Encode", [Panel("encode", axis, ENCODING, "vectors / s") for axis in "DMK"]),
    "search": (
        "Search, the ten nearest of clustered vectors",
        [Panel("search", "N", SEARCH | {"Q": 1}, "codes / s"), Panel("search", "Q", SEARCH, "codes / s")],
    ),
    "memory": (
        "Peak memory beside the inputs",
        [
            Panel("quantize", "M", TRAINING, "MiB, training step", "peak_mib"),
            Panel("encode", "D", ENCODING, "MiB, encode", "peak_mib"),
        ],
    ),
}
OLD_PLOTS = {  # drawn where the figures do not suffice for the plot of that name
    "search": (
        "Search, the ten best by inner product",
        [Panel("search", axis, OLD_SEARCH, "codes / s") for axis in "NQ"],
    ),
}


def plot(figures: list[Figure], folder: Path) -> list[str]:
    """Writes every plot for which there are at least two points; returns their names."""
    matplotlib.use("Agg")
    drawn = []
    with matplotlib.rc_context(STYLE):
        for name, (title, panels) in PLOTS.items():
            lines = [panel.lines(figures) for panel in panels]
            if name in OLD_PLOTS and not enough(lines):
                title, panels = OLD_PLOTS[name]
                lines = [panel.lines(figures) for panel in panels]
            if enough(lines):
                save(draw(title, panels, lines, figures), folder / f"{name}.svg")
                drawn.append(name)
        recalls = [figure for figure in figures if figure.group == "recall"]
        if len(recalls) > 1:
            save(draw_recall(recalls), folder / "recall.svg")
            drawn.append("recall")
    return drawn


def enough(lines: list[dict[str, list[tuple[float, float]]]]) -> bool:
    return max(len(line[OURS]) for line in lines) > 1


def save(canvas: Any, path: Path) -> None:
    """The same bytes for the same figures: without a date."""
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, metadata={"Date": None}, facecolor="white")
    canvas.clear()


def looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """How the line of each name is drawn: ours bold, limits dashed, peers in colours of their own."""
    peers = [name for name in names if name != OURS and not name.startswith(BOUND)]
    colours = {name: COLOURS[n % len(COLOURS)] for n, name in enumerate(peers)}
    return {
        name: {"color": "#c00020", "linewidth": 3, "marker": "o", "markersize": 7, "zorder": 3}
        if name == OURS
        else {"color": "#777777", "linestyle": "--", "linewidth": 1.2}
        if name.startswith(BOUND)
        else {"color": colours[name], "linewidth": 1.6, "marker": "s", "markersize": 4}
        for name in names
    }


def draw(title: str, panels: list[Panel], lines: list[dict[str, list[tuple[float, float]]]], figures: Any) -> Any:
    names = list(dict.fromkeys(name for line in lines for name in line))
    style = looks(names)
    canvas = Canvas(figsize=(4.1 * len(panels), 4.4))
    rows = canvas.subplots(1, len(panels), squeeze=False, sharey=len({panel.label for panel in panels}) == 1)
    for axes, panel, line in zip(rows[0], panels, lines, strict=True):
        for name, points in line.items():
            axes.plot(*zip(*points, strict=True), **style[name], label=name)
        axes.set(xscale="log", yscale="log", xlabel=AXES[panel.axis], title=fixed(panel))
        axes.title.set(fontsize=9, color="#555555")
        axes.set_xticks([x for x, _ in line[OURS]], [tick(x) for x, _ in line[OURS]])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: tick(y)))
        axes.grid(axis="y", color="#e5e5e5")
        if axes is rows[0][0] or panel.label != panels[0].label:
            axes.set_ylabel(panel.label)
    better = "lower is better" if panels[0].value == "peak_mib" else "higher is better"
    handles = {
        label: handle for axes in rows[0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    canvas.suptitle(f"{title} ({better})", fontweight="bold")
    canvas.legend(
        handles.values(), handles.keys(), loc="lower center", ncols=3, frameon=False, bbox_to_anchor=(0.5, 0.05)
    )
    footer(canvas, [figure for figure in figures if figure.group in {panel.group for panel in panels}])
    canvas.tight_layout(rect=(0, 0.07 + 0.05 * math.ceil(len(handles) / 3), 1, 1))
    return canvas


def tick(value: float) -> str:
    return f"{value:g}" if value < 10_000 else number(value).replace(".0", "")


def fixed(panel: Panel) -> str:
    """The sizes that stay as they are."""
    return ", ".join(
        f"{name} = {size_text(size)}" for name, size in panel.sizes.items() if name in AXES and name != panel.axis
    )


def footer(canvas: Any, figures: list[Figure]) -> None:
    text = textwrap.fill(origin(figures), int(canvas.get_figwidth() * 18))
    canvas.text(0.5, 0.005, text, ha="center", va="bottom", fontsize=6, color="#777777")


def draw_recall(figures: list[Figure]) -> Any:
    """Recall over speed, a line for each method, a point for each code length."""
    measure = next(iter(figures[0].ours["quality"]))
    points: dict[str, list[tuple[float, float, str]]] = {}
    for figure in sorted(figures, key=lambda figure: figure.sizes["bits"]):
        for name, values in figure.steady().items():
            method, _, own = name.partition(", ")
            bits = own if own.endswith("bits") else f"{figure.sizes['bits']} bits"
            method = method if own.endswith("bits") else name
            points.setdefault(method, []).append((values["rate"], values["quality"][measure], bits))
    canvas = Canvas(figsize=(7.4, 4.8))
    axes, style = canvas.subplots(), looks(points)
    for method, found in points.items():
        speeds, recalls, bits = zip(*found, strict=True)
        axes.plot(speeds, recalls, **style[method], label=method)
        for speed, recall, text in found:
            colour = style[method]["color"]
            side = {"ha": "left", "xytext": (8, -3)} if method == OURS else {"ha": "right", "xytext": (-7, -3)}
            axes.annotate(text, (speed, recall), textcoords="offset points", fontsize=8, color=colour, **side)
    axes.set(xscale="log", xlabel="codes / s (right is better)", ylabel=f"{measure} (higher is better)", ylim=(0, 1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tick(x)))
    axes.grid(color="#e5e5e5")
    axes.margins(x=0.2)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    canvas.suptitle("Recall against speed of search", fontweight="bold")
    footer(canvas, figures)
    canvas.tight_layout(rect=(0, 0.04, 1, 1))
    return canvas
