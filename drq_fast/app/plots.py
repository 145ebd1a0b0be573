"""The figures of a report, of a training and of an index; the same data give the same files.

All figures need matplotlib, and those of a report scikit-learn.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from .. import files
from ..index.tuning import Setting, Tuning
from ..retrieval.experiment import Experiment

if TYPE_CHECKING:
    from .report import Part

# Of the run, then of those that it is compared with.
_COLOURS = (
    "#c00020",
    "#0b5fa5",
    "#1a7f37",
    "#b35900",
    "#6f42c1",
    "#00807a",
    "#a0307f",
    "#5c5c00",
    "#333333",
    "#7a4b2a",
)
_STYLE: Any = {
    "svg.hashsalt": "drq_fast",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": "small",
}
_LOSSES = {"semantic": "$l_s$, adaptive margin", "triplet": "$l_t$, triplets", "error": "$E_h + E_s + E_j$, quantizer"}
_LINES = 4  # per run in a figure; with more levels, some are omitted
_DETAILED = 2  # runs up to which a figure shows several code lengths of each; of more runs it shows the longest
_COLUMNS = 3  # of panels, or in a legend
_DISTANCE = 0.12  # between labels of settings, relative to the range of recall
_NAMED = 20  # classes with a colour of their own
_COMPONENTS = 50  # principal components that t-SNE starts from
_GAP = 0.004  # between items of one code, relative to the size of the figure
_SEED = 0


def draw(folder: Path, parts: Sequence[Part], experiment: Experiment | None, points: int) -> dict[str, str]:
    """Writes all figures that the runs have data for; returns captions by file name."""
    figures: dict[str, tuple[Callable[[Sequence[Part]], Any], str]] = {}
    if experiment is not None:
        figures |= {
            "map.svg": (_by_bits, f"{parts[0].measured} by code length"),
            "precision_recall.svg": (_precision_recall, "Precision against recall, by code length"),
            "precision.svg": (_precision, "Precision among the first R, by code length"),
        }
    else:
        figures["recall.svg"] = (_by_bits, f"{parts[0].measured} by code length")
    figures |= {
        "error.svg": (_error, "Squared error after each level"),
        "usage.svg": (_usage, "How often each codeword is used, by level"),
    }
    if any(part.history for part in parts):
        figures["losses.svg"] = (_losses, "Losses by epoch; dotted: more levels from here on")
    drawn = {}
    with matplotlib.rc_context(_STYLE):
        for name, (make, caption) in figures.items():
            _save(make(parts), folder / name, caption)
            drawn[name] = caption
        if experiment is not None and points:
            caption = f"t-SNE of the decoded codes of {min(points, len(parts[0].codes)):,} database items"
            _save(_tsne(parts, experiment, points), folder / "tsne.png", caption)
            drawn["tsne.png"] = caption
    return drawn


def draw_losses(path: Path, history: Sequence[dict[str, float]], name: str) -> None:
    """The losses of a training by epoch, as `train` returns them."""
    with matplotlib.rc_context(_STYLE):
        _save(_by_epoch([(_name(name), history)]), path, f"{name}: losses by epoch; dotted: more levels from here on")


def draw_tuning(path: Path, tuning: Tuning, name: str) -> None:
    """The recall of every setting in `index.tuning` against its cost, as .svg or .png."""
    with matplotlib.rc_context(_STYLE):
        _save(_tuning(tuning), path, f"{_name(name)}: recall of the {tuning.k} nearest of {tuning.size:,} vectors")


def _save(figure: Any, path: Path, title: str) -> None:
    """Writes a figure, atomically, and without a date, so that equal figures give equal files."""
    figure.suptitle(title, fontsize="medium", fontweight="bold")
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:], metadata=metadata, facecolor="white", dpi=130)
    files.write_bytes(path, content.getvalue())


def _name(name: str) -> str:
    """A name without mathtext, shortened if it is long."""
    short = name if len(name) <= 24 else f"{name[:23]}…"
    return short.replace("$", r"\$")


def _axes(xlabel: str, ylabel: str) -> tuple[Any, Any]:
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def _panels(count: int, width: float, height: float, margin: float, **options: Any) -> tuple[Any, Any]:
    """A figure and `count` axes of this size in inches, in rows of up to _COLUMNS; margin: added to the width."""
    columns = min(count, _COLUMNS)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns + margin, height * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **options).ravel()
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def _tuning(tuning: Tuning) -> Any:
    figure, axes = _axes("estimated cost of a query, in codes scanned", f"recall@{tuning.k}")
    costs, recalls = ([getattr(each, key) for each in tuning.settings] for key in ("cost", "recall"))
    axes.plot(costs, recalls, "o-", color=_COLOURS[0], linewidth=2, markersize=5)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_formatter("")
    for setting in _apart(tuning.settings):
        _note(axes, _label(setting), (setting.cost, setting.recall), (8, -12), _COLOURS[0])
    low = recalls[0] - 0.1 * (1 - recalls[0])
    axes.set_ylim(max(0, low), 1.02)
    return figure


def _apart(settings: Sequence[Setting]) -> list[Setting]:
    """The best setting, and others whose labels do not overlap because their recalls differ enough."""
    distance = _DISTANCE * (settings[-1].recall - settings[0].recall)
    chosen = [settings[-1]]
    for setting in settings[-2::-1]:
        if setting.recall <= chosen[-1].recall - distance:
            chosen.append(setting)
    return chosen


def _label(setting: Setting) -> str:
    """What `search` is given for a setting."""
    given = [("probes", setting.probes), ("refine", setting.refine)]
    return ", ".join(f"{name} {value}" for name, value in given if value is not None) or "all codes"


def _by_bits(parts: Sequence[Part]) -> Any:
    figure, axes = _axes("bits per vector", parts[0].measured)
    lines = []
    for part, colour in zip(parts, cycle(_COLOURS), strict=False):
        lengths, values = _curve(part, part.measure)
        axes.plot(lengths, values, "o-", color=colour, linewidth=2.4, markersize=7, label=_name(part.name))
        for x, y in _some(list(zip(lengths, values, strict=True))) if len(parts) <= _DETAILED else ():
            _note(axes, f"{y:.3f}", (x, y), (0, -17), colour, ha="center")
        exact = part.metrics.get("exact")
        if exact:
            text = f"{_name(part.name)}, exact ({4 * part.layer.dim:,} bytes)"
            lines.append(axes.axhline(exact[part.measure], color=colour, linestyle="--", linewidth=1.2, label=text))
    axes.set_xticks(sorted({bits for part in parts for bits in _curve(part, part.measure)[0]}))
    low, high = axes.get_ylim()
    axes.set_ylim(max(0, low - 0.12 * (high - low)), min(1.01, high + 0.02 * (high - low)))
    if len(parts) > 1 or lines:
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def _note(axes: Any, text: str, place: tuple[float, float], shift: tuple[int, int], colour: str, **align: str) -> None:
    """A text beside its point, legible over lines."""
    halo = [withStroke(linewidth=4, foreground="white")]
    options = {"textcoords": "offset points", "fontsize": "small", "color": colour, "path_effects": halo}
    axes.annotate(text, place, shift, **options, **align)


def _curve(part: Part, key: str) -> tuple[list[int], list[float]]:
    rows = part.metrics["lengths"]
    return [row["bits"] for row in rows], [row[key] for row in rows]


def _precision_recall(parts: Sequence[Part]) -> Any:
    figure, axes = _axes("recall", "precision")
    for part, row, shade in _rows(parts):
        precision = row["precision_at_recall"]
        recall = np.arange(1, len(precision) + 1) / len(precision)
        axes.plot(recall, precision, color=shade, linewidth=2, label=f"{_name(part.name)}, {row['bits']} bits")
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    figure.legend(loc="outside lower center", ncols=_COLUMNS if len(parts) > _COLUMNS else max(len(parts), 2))
    return figure


def _precision(parts: Sequence[Part]) -> Any:
    figure, axes = _axes("R, items retrieved", "precision")
    for part, row, shade in _rows(parts):
        axes.plot(
            part.metrics["depths"],
            row["precision"],
            "o-",
            color=shade,
            linewidth=2,
            markersize=4,
            label=f"{_name(part.name)}, {row['bits']} bits",
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylim(top=1.02)
    figure.legend(loc="outside lower center", ncols=_COLUMNS if len(parts) > _COLUMNS else max(len(parts), 2))
    return figure


def _rows(parts: Sequence[Part]) -> list[tuple[Part, dict[str, Any], Any]]:
    """The code lengths of every run, each in a shade of the run's colour; longer codes are darker."""
    found = []
    for part, colour in zip(parts, cycle(_COLOURS), strict=False):
        rows = _some(part.metrics["lengths"]) if len(parts) <= _DETAILED else part.metrics["lengths"][-1:]
        found += [(part, row, _shade(colour, (n + 1) / len(rows))) for n, row in enumerate(rows)]
    return found


def _some(rows: list[Any]) -> list[Any]:
    """At most _LINES of them, with the first and the last."""
    places = np.linspace(0, len(rows) - 1, min(len(rows), _LINES)).round().astype(int)
    return [rows[place] for place in places]


def _shade(colour: str, part: float) -> tuple[float, ...]:
    strength = 0.25 + 0.75 * part
    return tuple(1 - strength * (1 - value) for value in to_rgb(colour))


def _losses(parts: Sequence[Part]) -> Any:
    return _by_epoch([(_name(part.name), part.history) for part in parts])


def _by_epoch(histories: Sequence[tuple[str, Sequence[dict[str, float]]]]) -> Any:
    """A panel for each loss; lines between epochs where the number of levels changes."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = figure.subplots(1, len(_LOSSES))
    for axes, (key, title) in zip(panels, _LOSSES.items(), strict=True):
        axes.set(title=title, xlabel="epoch")
        axes.title.set_fontsize("medium")
        for (name, history), colour in zip(histories, cycle(_COLOURS), strict=False):
            if not history:
                continue
            epochs = [(n, row) for n, row in enumerate(history, 1) if key != "error" or row["levels"]]
            values = [row[key] for _, row in epochs]
            axes.plot([n for n, _ in epochs], values, ".-", color=colour, linewidth=2, label=name)
            for n, (row, following) in enumerate(pairwise(history), 1):
                if row["levels"] != following["levels"]:
                    axes.axvline(n + 0.5, color=colour, linestyle=":", linewidth=1.2)
        axes.set_xlim(0.5, max(len(history) for _, history in histories) + 0.5)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(histories) > 1:
        panels[0].legend()
    return figure


def _error(parts: Sequence[Part]) -> Any:
    figure, axes = _axes("level", "relative squared error")
    for part, colour in zip(parts, cycle(_COLOURS), strict=False):
        errors = [1.0, *(row["error"] for row in part.metrics["lengths"])]
        axes.plot(range(len(errors)), errors, "o-", color=colour, linewidth=2.4, markersize=7, label=_name(part.name))
        _note(axes, f"{errors[-1]:.3f}", (len(errors) - 1, errors[-1]), (9, 0), colour, va="center")
    levels = max(part.layer.levels for part in parts)
    axes.set_xticks(range(levels + 1), ["none", *map(str, range(1, levels + 1))])
    axes.set(xlim=(-0.2, 1.12 * levels), ylim=(0, 1.05))
    if len(parts) > 1:
        axes.legend()
    return figure


def _usage(parts: Sequence[Part]) -> Any:
    figure, panels = _panels(len(parts), 5.6, 4.2, 0.8, sharey=True)
    for axes, part, colour in zip(panels, parts, cycle(_COLOURS), strict=False):
        levels = _some(part.usage())
        for n, level in enumerate(levels, 1):
            share = 100 * np.array(level["counts"][: level["used"]]) / max(sum(level["counts"]), 1)
            label = f"level {level['level']}: {level['used']:,} used, perplexity {level['perplexity']:.0f}"
            ranks = np.arange(1, len(share) + 1)
            axes.plot(ranks, share, color=_shade(colour, n / len(levels)), linewidth=2, label=label)
        K = part.layer.codewords
        axes.axhline(100 / K, color="#555555", linestyle=":", linewidth=1.4, label=f"all {K:,} alike")
        axes.set(xlabel="codewords, the most used first", title=_name(part.name))
        axes.title.set_fontsize("medium")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlim(0, 1.02 * K)
        axes.legend()
    for axes in panels[::_COLUMNS]:
        axes.set_ylabel("% of the items")
    return figure


def _tsne(parts: Sequence[Part], experiment: Experiment, points: int) -> Any:
    """One panel per run, with the same items, coloured by class. t-SNE places each distinct code once."""
    labels = experiment.items.labels[experiment.split.database]
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SEED))[:points].sort().values
    names, colours, kind = _kinds(labels[rows].numpy(), experiment.items.classes)
    figure, panels = _panels(len(parts), 5.4, 5.2, 1.6)
    legend: list[tuple[Any, str]] = []
    for axes, part in zip(panels, parts, strict=True):
        distinct, copy = torch.unique(part.codes[rows], dim=0, return_inverse=True)
        place = spread(embed(part.layer.decode(distinct).numpy()), copy.numpy())
        for n, (name, colour) in enumerate(zip(names, colours, strict=True)):
            x, y = place[kind == n].T
            dots = axes.scatter(x, y, s=60 / len(rows) ** 0.3, color=colour, linewidths=0)
            if axes is panels[0]:
                legend.append((dots, _name(name)))
        axes.set_aspect("equal", adjustable="datalim")
        axes.set_box_aspect(1)
        axes.set(xticks=[], yticks=[], title=f"{_name(part.name)}: {part.measured} {_last(part)}")
        axes.title.set_fontsize("medium")
        axes.spines[:].set_visible(False)
    figure.legend(*zip(*legend, strict=True), loc="outside right center", title="class", markerscale=3)
    return figure


def _last(part: Part) -> str:
    row = part.metrics["lengths"][-1]
    return f"{row[part.measure]:.3f} with {row['bits']} bits"


def _kinds(labels: np.ndarray, classes: Sequence[str]) -> tuple[list[str], list[Any], np.ndarray]:
    """labels [n, C] -> names and colours of the common classes, and the number [n] of each item's first one."""
    few = len(classes) <= 10
    colours: list[Any] = [matplotlib.colormaps["tab10" if few else "tab20"](n) for n in range(10 if few else _NAMED)]
    common = sorted(np.argsort(-labels.sum(axis=0), kind="stable")[:_NAMED].tolist())
    flags = labels[:, common]
    kind = np.where(flags.any(axis=1), flags.argmax(axis=1), len(common))
    names = [classes[c] for c in common]
    if (kind == len(common)).any():
        names.append("others")
        colours = [*colours[: len(common)], "#bbbbbb"]
    return names, colours[: len(names)], kind


def embed(x: np.ndarray) -> np.ndarray:
    """Vectors [n, D] -> places [n, 2]: t-SNE of their first 50 principal components."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    if len(x) < 4:
        return np.zeros((len(x), 2))
    components = min(_COMPONENTS, *x.shape)
    reduced = PCA(components, svd_solver="full" if components < _COMPONENTS else "auto", random_state=_SEED)
    perplexity = min(30.0, (len(x) - 1) / 3)
    return TSNE(perplexity=perplexity, random_state=_SEED).fit_transform(reduced.fit_transform(x))


def spread(place: np.ndarray, copy: np.ndarray) -> np.ndarray:
    """Places [U, 2] of codes -> places [n, 2] of items with codes copy [n], in a sunflower spiral around each code."""
    order = np.argsort(copy, kind="stable")
    turn = np.empty(len(copy))
    turn[order] = np.arange(len(copy)) - np.searchsorted(copy[order], copy[order])
    radius = _GAP * max(np.ptp(place, axis=0).max(), 1e-9) * np.sqrt(turn)
    angle = np.pi * (3 - 5**0.5) * turn
    return place[copy] + (radius * np.stack([np.cos(angle), np.sin(angle)])).T
