"""The report of a run: a folder with tables, figures and a page with retrieved images, replaced atomically."""

from __future__ import annotations

import html
import importlib.util
import json
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from .. import checks, files
from ..files import FileError
from ..quantizer import RecurrentQuantizer
from ..retrieval.experiment import Experiment
from ..retrieval.settings import OF_FEATURES, OF_IMAGES, PROTOCOLS, Settings
from . import metrics as measures
from . import page
from .run import Run

_PACKAGES = {"matplotlib": "matplotlib", "sklearn": "scikit-learn", "PIL": "pillow"}
_SAME_SPLIT = ("command", "data", "labels", "root", "protocol", "train", "query", "seed")
_SAME_ANSWERS = ("kind", "R", "k", "queries", "database")


class Part(NamedTuple):
    """One run of a report: its name, settings, metrics, model and codes [N, levels].

    source: identifies the vectors of the codes. history: the losses of every epoch of a trained run.
    """

    name: str
    config: dict[str, Any]
    metrics: dict[str, Any]
    layer: RecurrentQuantizer
    codes: Tensor
    source: Any
    history: list[dict[str, float]]

    @property
    def labelled(self) -> bool:
        """True for a trained run, False for a fitted one."""
        return self.metrics["kind"] == "labels"

    @property
    def measure(self) -> str:
        """The key of the main metric in metrics.json."""
        return "mAP" if self.labelled else "recall"

    @property
    def measured(self) -> str:
        """The name of the main metric in tables and figures."""
        return f"mAP@{self.metrics['R']:,}" if self.labelled else f"recall@{self.metrics['k']}"

    def usage(self) -> list[dict[str, Any]]:
        """Entropy and perplexity (2**entropy) of the codewords of each level, and how often each is used."""
        levels = []
        for level, counts in enumerate(self.layer.usage(self.codes), 1):
            share = counts.double() / max(int(counts.sum()), 1)
            share = share[share > 0]
            entropy = max(0.0, -float((share * share.log2()).sum()))
            levels.append(
                {
                    "level": level,
                    "used": len(share),
                    "codewords": self.layer.codewords,
                    "entropy": entropy,
                    "perplexity": 2**entropy,
                    "counts": counts.sort(descending=True).values.tolist(),
                }
            )
        return levels


def write(
    run: Run,
    *,
    beside: Sequence[Run] = (),
    images: Path | None = None,
    queries: int = 12,
    points: int = 5000,
    force: bool = False,
) -> list[Path]:
    """Writes RUN/report and returns its files; an existing report is replaced only with `force`.

    beside: other runs on the same data, shown in the same tables and figures. images: pixels for the page where the
    data are features. queries: how many the page has. points: database items in the t-SNE picture, 0 for none.
    """
    need_packages("report", *_PACKAGES)
    from . import plots  # imports these packages

    parts = [_part(run)]
    run.report_vacant(force)
    for other in beside:
        parts.append(_part(other))
        _same_data(parts[0], parts[-1], other)
    parts = _distinct_names(parts, [run, *beside])
    first = parts[0]
    experiment = run.experiment() if first.labelled else None
    pixels = _pixels(experiment, images)
    with run.writing(), files.temporary_folder(run.folder) as temporary:
        partial = temporary / "report"
        partial.mkdir()
        if experiment is None:
            warnings.warn("a fitted run has no labels, so there is no page.html.", stacklevel=2)
        else:
            text = page.build(first, parts[1:], experiment, page.query_features(run, first.layer.dim), pixels, queries)
            (partial / "page.html").write_text(text, encoding="utf-8")
        drawn = plots.draw(partial, parts, experiment, points)  # last, because t-SNE is slow
        facts = _facts(parts, experiment)
        (partial / "report.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        (partial / "report.md").write_text(_markdown(parts, facts, drawn, experiment), encoding="utf-8")
        names = sorted(path.name for path in partial.iterdir())
        run.replace_report(partial, force)
    return [run.report / name for name in names]


def need_packages(op: str, *modules: str) -> None:
    """Raises ModuleNotFoundError unless these modules, which draw figures and pages, can be imported."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            package = _PACKAGES[module]
            raise ModuleNotFoundError(
                f"{op}: {package} is not installed; `pip install 'drq_fast[report]'` installs what figures need."
            )


def _part(run: Run) -> Part:
    layer = run.quantizer()
    config = run.read_json(run.config, "train")
    metrics = run.read_json(run.metrics, "evaluate")
    codes, made_by = run.load_codes()
    whole = metrics.get("kind") in ("labels", "neighbours") and metrics.get("database") == len(codes)
    lengths = metrics.get("lengths")
    if not whole or not isinstance(lengths, list) or len(lengths) != layer.levels:
        raise FileError(
            f"report: {run.metrics} was not made from the codes in {run.folder}; evaluate again with --force."
        )
    with files.describing(run.metrics, "the metrics of a run"):
        measures.check(metrics)
    name, ablation = run.folder.resolve().name, config.get("ablation", "none")
    name = name if ablation in ("none", name) else f"{name} ({ablation})"
    history = run.read_json(run.history, "train").get("epochs", []) if run.history.exists() else []
    with files.describing(run.history, "the losses of a training"):
        history = [{key: float(epoch[key]) for key in ("levels", "semantic", "triplet", "error")} for epoch in history]
    if metrics["kind"] == "labels" and config.get("protocol") not in list(PROTOCOLS):
        raise FileError(f"report: {run.config} does not name a protocol.")
    return Part(name, config, metrics, layer, codes, made_by.get("source"), history)


def _same_data(first: Part, other: Part, beside: Run) -> None:
    """Raises ValueError if two runs differ in data, split or queries."""
    mine, theirs = ({**_split(part), **_answers(part)} for part in (first, other))
    for name in mine:
        if mine[name] != theirs[name]:
            expected = "a run on the same data with the same split"
            got = f"{beside.folder}, whose {name} is {theirs[name]} and not {mine[name]}"
            checks.fail("report", "beside", expected, got)


def _split(part: Part) -> dict[str, Any]:
    """The settings that determine training items, queries and database."""
    if not part.labelled:
        return {"command": part.config.get("command"), "vectors": part.source}
    split = {name: part.config.get(name) for name in _SAME_SPLIT}
    rule = PROTOCOLS[part.config["protocol"]]
    defaults = {"train": rule.train, "query": rule.query}
    return split | {name: count for name, count in defaults.items() if split[name] is None}


def _answers(part: Part) -> dict[str, Any]:
    return {name: part.metrics.get(name) for name in _SAME_ANSWERS}


def _distinct_names(parts: list[Part], runs: Sequence[Run]) -> list[Part]:
    """The same runs, named by their folders where names are alike; raises ValueError if a run is there twice."""
    places = [run.folder.resolve() for run in runs]
    for run, place in zip(runs, places, strict=True):
        if places.count(place) > 1:
            checks.fail("report", "beside", "runs that are not in the report already", run.folder)
    names = [part.name for part in parts]
    return [
        part._replace(name=str(run.folder)) if names.count(part.name) > 1 else part
        for part, run in zip(parts, runs, strict=True)
    ]


def _pixels(experiment: Experiment | None, images: Path | None) -> page.Pixels | None:
    """The pixels for the page, or None."""
    if images is not None and (experiment is None or not experiment.settings.of_features):
        whose = "a fitted run, which has no page" if experiment is None else "a run on images, which has its own"
        checks.fail("report", "images", f"left out for {whose}", images)
    if experiment is None:
        return None
    if not experiment.settings.of_features:
        return page.item_pixels(experiment.items)
    return None if images is None else page.array_pixels(images, len(experiment.items))


def _facts(parts: Sequence[Part], experiment: Experiment | None) -> dict[str, Any]:
    runs = [
        {"name": part.name, "config": part.config, "metrics": part.metrics, "usage": part.usage()} for part in parts
    ]
    items = None
    if experiment is not None:
        counts = {name: len(rows) for name, rows in experiment.split._asdict().items()}
        items = {**counts, "classes": list(experiment.items.classes)}
    return {"runs": runs, "items": items, "page": None if experiment is None else "page.html"}


def _markdown(
    parts: Sequence[Part], facts: dict[str, Any], drawn: dict[str, str], experiment: Experiment | None
) -> str:
    first = parts[0]
    names = [_plain(part.name) for part in parts]
    blocks = [f"# {' beside '.join(names)}", _summary(parts, facts)]
    if experiment is None:
        blocks.append("A fitted run has no labels, so there is no page with retrieved images.")
    else:
        blocks.append("[page.html](page.html) shows what is retrieved at every code length; it opens in any browser.")
    blocks += ["## By code length", _by_length(first)] if len(parts) == 1 else _by_run(parts)
    blocks += [f"![{caption}]({file})" for file, caption in drawn.items()]
    blocks += ["## Codewords in use", _usage_table(facts), "## Settings", _settings(parts)]
    return "\n\n".join(blocks) + "\n"


def _summary(parts: Sequence[Part], facts: dict[str, Any]) -> str:
    """Counts, the metric of every run, and what the first run reaches with all bits."""
    part, several = parts[0], len(parts) > 1
    last = part.metrics["lengths"][-1]
    ranked = [f"{each.metrics['metric']}{f' ({_plain(each.name)})' if several else ''}" for each in parts]
    size, whole = f"{last['bytes']:,}", f"{4 * part.layer.dim:,}"
    text = (
        f"{part.metrics['queries']:,} queries, {part.metrics['database']:,} database items, ranked by metric "
        f"{', '.join(ranked)}. With {last['bits']} bits, {size} bytes instead of {whole}, "
        f"{part.measured}{f' of {_plain(part.name)}' if several else ''} is {last[part.measure]:.4f}"
    )
    exact = part.metrics.get("exact")
    text += f"; the features themselves reach {exact[part.measure]:.4f}." if exact else "."
    if facts["items"]:
        text += f" {len(facts['items']['classes'])} classes, {facts['items']['train']:,} training items."
    return text


def _by_length(part: Part) -> str:
    rows = [
        [str(row["bits"]), f"{row['bytes']:,}", _number(row[part.measure]), _number(row["error"])]
        for row in part.metrics["lengths"]
    ]
    exact = part.metrics.get("exact")
    if exact:
        rows.append(["exact", f"{4 * part.layer.dim:,}", _number(exact[part.measure]), _number(exact["error"])])
    return _table(["bits", "bytes", part.measured, "relative squared error"], rows)


def _by_run(parts: Sequence[Part]) -> list[str]:
    """Two tables with a row for every run and a column for every code length."""
    found = [{row["bits"]: row for row in part.metrics["lengths"]} for part in parts]
    lengths: list[int | str] = sorted({bits for by_bits in found for bits in by_bits})
    if any(part.metrics.get("exact") for part in parts):
        found = [
            by_bits | {"exact": part.metrics.get("exact") or {}} for by_bits, part in zip(found, parts, strict=True)
        ]
        lengths.append("exact")
    head = ["run", *(length if isinstance(length, str) else f"{length} bits" for length in lengths)]
    blocks = []
    for what, key in ((parts[0].measured, parts[0].measure), ("Relative squared error", "error")):
        rows = [
            [part.name, *(_number(by_bits.get(length, {}).get(key)) for length in lengths)]
            for part, by_bits in zip(parts, found, strict=True)
        ]
        blocks += [f"## {what} by code length", _table(head, rows)]
    return blocks


def _usage_table(facts: dict[str, Any]) -> str:
    head = ["run", "level", "codewords in use", "entropy, bits", "perplexity"]
    rows = [
        [
            run["name"],
            str(level["level"]),
            f"{level['used']:,} of {level['codewords']:,}",
            f"{level['entropy']:.2f}",
            f"{level['perplexity']:.1f}",
        ]
        for run in facts["runs"]
        for level in run["usage"]
    ]
    return _table(head, rows)


def _settings(parts: Sequence[Part]) -> str:
    names = list(dict.fromkeys(name for part in parts for name in part.config))
    if parts[0].labelled:  # all parts have the same data
        unused = OF_IMAGES if Settings(parts[0].config["data"]).of_features else OF_FEATURES
        names = [name for name in names if name not in unused]
    rows = [[name, *(_value(part.config.get(name)) for part in parts)] for name in names]
    return _table(["setting", *(part.name for part in parts)], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_plain, line)) + " |" for line in lines)


def _plain(text: str) -> str:
    """Text as one line of Markdown that has no markup and no HTML."""
    return re.sub(r"[\\`*\[\]|]", r"\\\g<0>", html.escape(" ".join(text.split()), quote=False))


def _number(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.4f}"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None else str(value)
