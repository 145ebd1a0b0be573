"""What the commands of `drq-fast` do. Each takes the parsed options and returns its result for JSON, and as text."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import __version__, checks, files
from . import info as information
from .codes import bits
from .files import FileError
from .index import Index
from .quantizer import RecurrentQuantizer
from .retrieval import evaluate as figures
from .retrieval.experiment import Experiment, ItemSource, Settings
from .retrieval.train import CHECKPOINT, Config
from .run import Run, Source
from .vectors import VectorFiles

Result = tuple[dict[str, Any], str]
DEPTHS = (1, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)  # of the curve of precision


def nearest(wrong: str, known: Iterable[str]) -> str:
    """`, did you mean ...?` where a known name is like the wrong one, else the names."""
    names = list(known)
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.5)
    return f", did you mean {close[0]}?" if close else f" (there are {', '.join(names)})" if len(names) < 12 else ""


def info(options: argparse.Namespace) -> Result:
    """`drq-fast info`."""
    facts = information.collect_info()
    return facts, information.format_info(facts)


def fit(options: argparse.Namespace) -> Result:
    """`drq-fast fit`."""
    run, vectors = Run(options.folder), VectorFiles(options.vectors)
    _not_inside(run, options.vectors)
    seed = checks.seed("fit", options.seed) or 0
    levels = checks.integer("fit", "levels", options.levels, 1, 1000)
    layer = RecurrentQuantizer(vectors.dim, options.codewords, levels, scale=options.scale)
    run.vacant(run.model, options.force)
    default = max(1 << 16, 256 * layer.codewords)
    sample = default if options.sample is None else checks.integer("fit", "sample", options.sample, 1)
    x = vectors.sample(sample, seed)
    config = {
        "command": "fit",
        "vectors": [str(Path(name).resolve()) for name in options.vectors],
        **{name: getattr(options, name) for name in ("codewords", "levels", "scale", "rounds", "beam", "seed")},
        "sample": len(x),
        "drq_fast": __version__,
    }
    with run.writing():
        run.vacant(run.model, options.force)
        errors = layer.fit(x, rounds=options.rounds, beam=options.beam, sample=len(x), seed=seed)
        run.replace_model(layer, config)
        for path in (run.folder / CHECKPOINT, run.history):  # of a training in the same place
            path.unlink(missing_ok=True)
    lengths = _lengths(layer.codewords, layer.levels)
    result = {"model": str(run.model), "sample": len(x), "errors": dict(zip(map(str, lengths), errors, strict=True))}
    rows = [(f"{b} bits", f"{e:.4f}") for b, e in zip(lengths, errors, strict=True)]
    return result, f"{_table(('code', 'relative squared error'), rows)}\n{run.model}: fitted to {len(x):,} vectors"


def encode(options: argparse.Namespace) -> Result:
    """`drq-fast encode`."""
    run = Run(options.folder)
    layer = run.quantizer()
    source: Source
    if options.vectors:
        source = VectorFiles(options.vectors)
        _not_inside(run, options.vectors)
    else:
        run.vacant(run.codes, options.force)
        source = _database(run, layer)[0]
    with run.writing():
        run.encode(source, beam=options.beam, force=options.force)
    result = {"codes": str(run.codes), "rows": len(source), "levels": layer.levels, "bits": layer.bits}
    return result, f"{run.codes}: {len(source):,} codes of {layer.bits} bits"


def index(options: argparse.Namespace) -> Result:
    """`drq-fast index`."""
    run = Run(options.folder)
    layer = run.quantizer()
    codes, _ = run.load_codes()
    run.vacant(run.index, options.force)
    made = Index(layer, metric=_metric(run, options))
    made.add_codes(codes, None if options.ids is None else files.read_array("index", options.ids))
    with run.writing():
        made.save(run.index)
    result = {"index": str(run.index), "size": len(made), "metric": made.metric, "bytes": run.index.stat().st_size}
    return result, f"{run.index}: {len(made):,} codes, metric {made.metric}, {run.index.stat().st_size:,} bytes"


def search(options: argparse.Namespace) -> Result:
    """`drq-fast search`."""
    run = Run(options.folder)
    if not run.index.exists():
        run.quantizer()  # says so if this is no run, or has no model
        raise FileNotFoundError(f"run: {run.index} is not there; `drq-fast index {run.folder}` makes it.")
    path = run.queries if options.queries is None else Path(options.queries)
    if options.queries is None and not path.exists():
        checks.fail("search", "queries", "a file of vectors", "none")
    target = None if options.out is None else Path(options.out)
    if target is not None:
        run.vacant(target, options.force)
    queries = VectorFiles([path])
    found = Index.load(run.index)
    if queries.dim != found.dim:
        checks.fail("search", "queries", f"of {found.dim} dimensions, as the index is", queries.dim)
    L = _levels(options.bits, found.codewords, found.levels)
    k = min(checks.integer("search", "k", options.k, 1), max(len(found), 1))
    scores, ids = found.search(queries.read(0, len(queries)), k, L)
    if target is not None:
        archive = io.BytesIO()
        np.savez(archive, ids=ids.numpy(), scores=scores.numpy())
        files.write_bytes(target, archive.getvalue())
        return {
            "out": str(target),
            "queries": len(ids),
            "k": options.k,
        }, f"{target}: {len(ids):,} x {options.k} results"
    lines = [
        "\t".join([str(q), *(f"{i}:{s:.6g}" for i, s in zip(row.tolist(), score.tolist(), strict=True))])
        for q, (row, score) in enumerate(zip(ids, scores, strict=True))
    ]
    return {"ids": ids.tolist(), "scores": scores.tolist()}, "\n".join(lines)


def train(options: argparse.Namespace) -> Result:
    """`drq-fast train`."""
    run = Run(options.folder)
    given = {} if options.config is None else _settings(Path(options.config))
    named = vars(options)
    given |= {name: named[name] for name in (*_fields(Settings), *_fields(Config)) if name in named}
    if not given.get("data"):
        checks.fail("train", "data", "given by --data, a folder or a file", "nothing")
    settings = Settings(**{name: value for name, value in given.items() if name in _fields(Settings)}).resolved()
    changes = {name: value for name, value in given.items() if name in _fields(Config)}
    experiment = Experiment(settings, dataclasses.replace(settings.config, **changes))
    experiment.model()  # says what is wrong before anything is written
    config = {"command": "train", **dataclasses.asdict(settings), **dataclasses.asdict(experiment.config)}
    config = json.loads(json.dumps(config)) | {"drq_fast": __version__}
    with run.writing():
        _make_way(run, config, options.force)
        run.write_json(run.config, config)
        try:
            model, history = experiment.train(run.folder)
        finally:
            if not (run.folder / CHECKPOINT).exists():
                run.config.unlink()  # nothing has begun
        run.write_json(run.history, {"epochs": history})
        run.replace_model(model.quantizer, config)
    rows = experiment.split
    counts = {name: len(part) for name, part in rows._asdict().items()}
    result = {"model": str(run.model), **counts, "classes": len(experiment.items.classes), "epochs": len(history)}
    return result, (
        f"{run.model}: trained on {counts['train']:,} items of {len(experiment.items.classes)} classes; "
        f"next: drq-fast evaluate {run.folder} ({counts['query']:,} queries, {counts['database']:,} to rank)"
    )


def evaluate(options: argparse.Namespace) -> Result:
    """`drq-fast evaluate`."""
    run = Run(options.folder)
    layer = run.quantizer()
    run.vacant(run.metrics, options.force)
    trained = run.read_json(run.config, "train").get("command") == "train"
    if trained and options.queries is not None:
        checks.fail("evaluate", "queries", "those of the protocol for a trained run", options.queries)
    with run.writing():
        metrics = _by_labels(run, layer, options) if trained else _by_neighbours(run, layer, options)
        run.write_json(run.metrics, metrics)
    name = "mAP" if trained else "recall"
    rows = [(f"{row['bits']} bits", f"{row[name]:.4f}", f"{row['error']:.4f}") for row in metrics["lengths"]]
    if metrics.get("exact"):
        rows.append(("exact", f"{metrics['exact'][name]:.4f}", ""))
    what = f"mAP@{metrics['R']:,}" if trained else f"recall@{metrics['k']}"
    return metrics, f"{_table(('code', what, 'relative squared error'), rows)}\n{run.metrics}"


def report(options: argparse.Namespace) -> Result:
    """`drq-fast report`."""
    from .retrieval import report as reporting

    run = Run(options.folder)
    beside = None if options.beside is None else Run(options.beside)
    written = reporting.write(
        run,
        beside=beside,
        images=None if options.images is None else Path(options.images),
        queries=checks.integer("report", "queries", options.queries, 1),
        points=checks.integer("report", "points", options.points, 0),
        force=options.force,
    )
    return {"files": [str(path) for path in written]}, "\n".join(str(path) for path in written)


def _database(run: Run, layer: RecurrentQuantizer) -> tuple[ItemSource, Experiment]:
    experiment = Experiment.of(run)
    model = experiment.trained(run.folder, layer)
    return ItemSource(experiment, model, experiment.split.database), experiment


def _by_labels(run: Run, layer: RecurrentQuantizer, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of a trained run at every length, by the labels of its items."""
    database, experiment = _database(run, layer)
    if not run.codes.exists():
        run.encode(database, beam=1, force=False)
    codes, made_by = run.load_codes()
    if made_by["source"] != json.loads(json.dumps(database.identity())):
        raise FileError(f"run: {run.codes} are of other items than the database; encode again with --force.")
    rows, labels = experiment.split, experiment.items.labels
    query = experiment.features(database.model, rows.query)
    files.write_array(run.queries, query.numpy())
    depths = [d for d in DEPTHS if d <= len(codes)]
    metric = _metric(run, options)
    options_of_both: dict[str, Any] = {"R": experiment.R, "metric": metric, "depths": depths}
    found = figures.evaluate_codes(layer, codes, labels[rows.database], query, labels[rows.query], **options_of_both)
    errors = _errors(layer, query)
    metrics = {
        "kind": "labels",
        "protocol": experiment.settings.protocol,
        "metric": metric,
        "R": experiment.R,
        "queries": len(query),
        "database": len(codes),
        "depths": depths,
        "lengths": [_figures(f, L, layer, errors) for L, f in enumerate(found, 1)],
    }
    if options.exact:
        x = experiment.features(database.model, rows.database)
        exact = figures.evaluate_vectors(x, labels[rows.database], query, labels[rows.query], **options_of_both)
        metrics["exact"] = _figures(exact, 0, layer, errors)
    return metrics


def _figures(found: figures.Figures, L: int, layer: RecurrentQuantizer, errors: list[float]) -> dict[str, Any]:
    return {
        "bits": found.bits,
        "bytes": 4 * layer.dim if L == 0 else -(-bits(layer.codewords, L) // 8),
        "mAP": found.mean_average_precision,
        "precision": list(found.precision),
        "precision_at_recall": list(found.precision_at_recall),
        "error": errors[L - 1] if L else 0.0,
    }


def _by_neighbours(run: Run, layer: RecurrentQuantizer, options: argparse.Namespace) -> dict[str, Any]:
    """Recall of a fitted run at every length."""
    if options.queries is None:
        checks.fail("evaluate", "queries", "a file of vectors given by --queries for a fitted run", "none")
    codes, made_by = run.load_codes()
    vectors = VectorFiles([file["path"] for file in made_by["source"]])
    if vectors.identity() != made_by["source"]:
        raise FileError("evaluate: the vectors have changed since they were encoded; encode again with --force.")
    queries = VectorFiles([options.queries])
    if queries.dim != layer.dim:
        checks.fail("evaluate", "queries", f"of {layer.dim} dimensions, as the model is", queries.dim)
    k = checks.integer("evaluate", "k", options.k, 1, len(codes))
    query = queries.read(0, len(queries))
    metric = _metric(run, options)
    exact = _neighbours(vectors, query, k, metric)
    made = Index(layer, metric=metric)
    made.add_codes(codes)
    errors = _errors(layer, vectors.sample(1 << 14, 0))
    lengths = [
        {
            "bits": bits(layer.codewords, L),
            "bytes": -(-bits(layer.codewords, L) // 8),
            "recall": figures.recall(made.search(query, k, L).ids, exact),
            "error": errors[L - 1],
        }
        for L in range(1, layer.levels + 1)
    ]
    sizes = {"k": k, "queries": len(query), "database": len(codes)}
    return {"kind": "neighbours", "metric": metric, **sizes, "lengths": lengths}


def _neighbours(vectors: VectorFiles, query: Tensor, k: int, metric: str) -> Tensor:
    """Row numbers [Q, k] of the exact nearest vectors, read once."""
    normalise = torch.nn.functional.normalize
    query = normalise(query, dim=1) if metric == "cosine" else query
    best = torch.empty(len(query), 0)
    ids = torch.empty(len(query), 0, dtype=torch.int64)
    for first, block in vectors.blocks("exact neighbours"):
        block = normalise(block, dim=1) if metric == "cosine" else block
        scores = query @ block.T
        if metric == "l2":
            scores = 2 * scores - block.square().sum(dim=1)
        numbers = torch.arange(first, first + len(block)).expand_as(scores)
        top = torch.cat([best, scores], dim=1).topk(min(k, best.shape[1] + len(block)), dim=1)
        best, ids = top.values, torch.cat([ids, numbers], dim=1).gather(1, top.indices)
    return ids


def _errors(layer: RecurrentQuantizer, x: Tensor) -> list[float]:
    """The squared error of x [N, dim] after each level, relative to that of the offset alone."""
    codes = layer.encode(x)
    whole = (x if layer.offset is None else x - layer.offset.detach()).square().sum().clamp_min(1e-30)
    return [float((x - layer.decode(codes, L)).square().sum() / whole) for L in range(1, layer.levels + 1)]


def _metric(run: Run, options: argparse.Namespace) -> str:
    """What to rank by: what was asked for, or what the run was made for."""
    return options.metric or run.read_json(run.config, "fit").get("metric", "l2")


def _make_way(run: Run, config: dict[str, Any], force: bool) -> None:
    """Refuses to train where another run is, or where this one is done; `force` clears the place.

    A training of the same settings that is not over goes on, with `force`, too.
    """
    if not run.config.exists() and not run.model.exists():
        return
    there = {} if force and not run.config.exists() else run.read_json(run.config, "train")
    differing = sorted(n for n in config if n != "drq_fast" and there.get(n) != config[n])
    if not differing and not run.model.exists():
        return
    if not force:
        run.vacant(run.model if not differing else run.config, force, _difference(there, config, differing))
    run.forget_codes()
    for path in (run.model, run.folder / CHECKPOINT, run.history, run.config):
        path.unlink(missing_ok=True)


def _difference(there: dict[str, Any], here: dict[str, Any], names: list[str]) -> str:
    return f" of another run ({names[0]} is {there.get(names[0])} there and {here[names[0]]} here)" if names else ""


def _settings(path: Path) -> dict[str, Any]:
    """Settings by name from a JSON file; a name that nobody knows is refused."""
    try:
        given = json.loads(path.read_text())
    except OSError as error:
        raise type(error)(f"train: {path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise FileError(f"train: {path} is not JSON ({error}).") from error
    if not isinstance(given, dict):
        raise FileError(f"train: {path} must hold a JSON object of settings.")
    known = [*_fields(Settings), *_fields(Config)]
    for name in given:
        if name not in (*known, "command", "drq_fast"):
            raise FileError(f"train: {path} has {name!r}, which is no setting{nearest(name, known)}")
    return given


def _fields(options: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(options)]


def _not_inside(run: Run, paths: Iterable[str]) -> None:
    """A run's own files are no input: they are replaced."""
    for path in paths:
        if Path(path).resolve().parent == run.folder.resolve():
            checks.fail("vectors", "a file", f"outside of {run.folder}, whose files are replaced", path)


def _levels(length: int | None, codewords: int, levels: int) -> int:
    """How many levels so many bits are."""
    lengths = _lengths(codewords, levels)
    if length is not None and length not in lengths:
        checks.fail("search", "bits", f"one of {', '.join(map(str, lengths))}", length)
    return levels if length is None else lengths.index(length) + 1


def _lengths(codewords: int, levels: int) -> list[int]:
    return [bits(codewords, L) for L in range(1, levels + 1)]


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    )
