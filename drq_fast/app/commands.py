"""The commands of `drq-fast`. Each takes the parsed options and returns its result twice: for JSON, and as text."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__, checks, files
from ..codes import bits
from ..files import FileError
from ..fit import default_rounds, sample_size, seeded
from ..index import Index
from ..index.source import sample_of
from ..quantizer import RecurrentQuantizer
from ..retrieval.experiment import Experiment, ItemSource, side
from ..retrieval.settings import NEW_IN_CONFIG, NEW_SETTINGS, Config, Settings
from ..semantic import SemanticIds
from . import info as information
from . import metrics as measures
from .description import counted, describe, table
from .images import ImageQueries, is_images
from .indexes import Result, index_file, same_dim, writable
from .indexes import add as add
from .indexes import build as build
from .indexes import remove as remove
from .indexes import tune as tune
from .options import nearest
from .run import Encodable, Run, vacant
from .vectors import VectorFiles

_FITTED = ("codewords", "levels", "codebooks", "scale", "rounds", "beam", "seed")  # options that a run records


def info(options: argparse.Namespace) -> Result:
    """`drq-fast info`."""
    if options.index is not None:
        path = index_file("info", options.index)
        return describe(path, Index.load(path, mmap=True))
    facts = information.collect_info()
    return facts, information.format_info(facts)


def fit(options: argparse.Namespace) -> Result:
    """`drq-fast fit`."""
    run = Run(options.folder)
    run.claim_folder()  # first, because it finds swapped arguments
    vectors = VectorFiles(options.vectors)
    _not_inside(run, options.vectors)
    seed = checks.seed("fit", options.seed) or 0
    levels = checks.integer("fit", "levels", options.levels, 1, 1000)
    layer = RecurrentQuantizer(vectors.dim, options.codewords, levels, codebooks=options.codebooks, scale=options.scale)
    run.not_trained()
    run.all_vacant(options.force)
    if options.rounds is None:
        options.rounds = default_rounds(layer.codewords, layer.codebooks)
    default = sample_size(layer.codewords)
    sample = default if options.sample is None else checks.integer("fit", "sample", options.sample, 1)
    x = sample_of("fit", vectors, sample, seeded(seed))
    config = {
        "command": "fit",
        "vectors": [str(Path(name).resolve()) for name in options.vectors],
        **{name: getattr(options, name) for name in _FITTED},
        "sample": len(x),
        "drq_fast": __version__,
    }
    with run.writing():
        run.claim_folder()  # again: another process may have written here meanwhile
        run.not_trained()
        run.all_vacant(options.force)
        errors = layer.fit(x, rounds=options.rounds, beam=options.beam, sample=len(x), seed=seed)
        run.replace_model(layer, config)
        options.written = True  # what Ctrl-C says depends on it
    lengths = _lengths(layer.codewords, layer.levels)
    result = {"model": str(run.model), "sample": len(x), "errors": dict(zip(map(str, lengths), errors, strict=True))}
    rows = [(f"{b} bits", f"{e:.4f}") for b, e in zip(lengths, errors, strict=True)]
    return (
        result,
        f"{table(('code', 'relative squared error'), rows)}\n{run.model}: fitted to {counted(len(x), 'vector')}",
    )


def encode(options: argparse.Namespace) -> Result:
    """`drq-fast encode`."""
    run = Run(options.folder)
    if any(name.endswith(".parquet") for name in options.vectors):
        from .parquet import encode as encode_parquet  # imports pyarrow

        return encode_parquet(run, options)
    for name in ("column", "ray", "workers"):
        if getattr(options, name) is not None:
            checks.fail("encode", name, "left out unless files are Parquet", getattr(options, name) or f"--{name}")
    with run.locked_model() as layer:
        source: Encodable
        if options.vectors:
            source = VectorFiles(options.vectors)
            _not_inside(run, options.vectors)
        else:
            run.vacant(run.codes, options.force)  # before the network is loaded
            source = _database(run, run.experiment(), layer)
        run.encode(layer, source, beam=options.beam, force=options.force)
    result = {"codes": str(run.codes), "rows": len(source), "levels": layer.levels, "bits": layer.bits}
    return result, f"{run.codes}: {counted(len(source), 'code')} of {layer.bits} bits"


def index(options: argparse.Namespace) -> Result:
    """`drq-fast index`."""
    run = Run(options.folder)
    run.vacant(run.index, options.force)
    with run.locked_model() as layer:
        codes, _ = run.load_codes()
        made = Index(layer, metric=_metric(run, options))
        made.add_codes(codes, None if options.ids is None else files.read_array("index", options.ids))
        run.claim(run.index)
        made.save(run.index)
    size = run.index.stat().st_size
    result = {"index": str(run.index), "size": len(made), "metric": made.metric, "bytes": size}
    return result, f"{run.index}: {counted(len(made), 'code')}, metric {made.metric}, {size:,} bytes"


def search(options: argparse.Namespace) -> Result:
    """`drq-fast search`."""
    run = Run(options.folder)
    path = run.queries if options.queries is None else Path(options.queries)
    images = ImageQueries(run, path) if is_images(path) else None
    index = index_file("search", options.folder)
    if options.queries is None and not path.exists():
        checks.fail("search", "queries", "a file of vectors or images", "none")
    target = None if options.out is None else Path(options.out)
    if target is not None:
        if target.suffix != ".npz":
            checks.fail("search", "out", "a .npz file", options.out)
        writable("search", target)
        vacant(target, options.force)
    queries = VectorFiles([path]) if images is None else images
    made = Index.load(index)
    same_dim("search", "queries", queries, made)
    L = None if options.bits is None else _levels(options.bits, made.codewords, made.levels)
    k = min(checks.integer("search", "k", options.k, 1), max(len(made), 1))
    own = None if options.vectors is None else files.read_array("search", options.vectors, mmap=True)
    keep = None if options.keep is None else files.read_array("search", options.keep)
    if options.refine is not None and own is None and made.vectors is None:
        checks.fail("search", "vectors", "given with --refine, as the index has codes only", "none")
    _measured(options, index, made)
    settings = {name: getattr(options, name) for name in ("recall", "probes", "refine")}
    scores, ids = made.search(queries.read(0, len(queries)), k, L, keep, **settings, vectors=own)
    if made.metric == "l2":
        scores = scores.clamp(min=0)  # squared distances, which rounding makes negative near 0
    if target is not None:
        archive = io.BytesIO()
        np.savez(archive, ids=ids.numpy(), scores=scores.numpy())
        files.write_bytes(target, archive.getvalue())
        return {"out": str(target), "queries": len(ids), "k": k}, f"{target}: {len(ids):,} x {k} results"
    result = {"ids": ids.tolist(), "scores": scores.tolist()} | ({} if images is None else images.names(made, ids))
    found = [sum(i >= 0 for i in row) for row in result["ids"]]  # the others are padding, where fewer than k are kept
    for name in result.keys() & {"ids", "scores", "found"}:
        result[name] = [row[:n] for row, n in zip(result[name], found, strict=True)]
    asked, names = result.get("images", range(len(ids))), result.get("found", result["ids"])
    lines = [
        "\t".join([str(q), *(f"{name}:{s:.6g}" for name, s in zip(row, score, strict=True))])
        for q, row, score in zip(asked, names, result["scores"], strict=True)
    ]
    return result, "\n".join(lines)


def _measured(options: argparse.Namespace, path: Path, index: Index) -> None:
    """Raises ValueError if --recall or --probes does not fit the index."""
    if options.recall is not None and index.tuning is None:
        maker = "build" if index.vectors is None else "tune"
        why = f"left out, as the recall of {path} was not measured, which `drq-fast {maker}` does"
        checks.fail("search", "recall", why, options.recall)
    if options.probes is not None and index.lists is None:
        why = f"left out, as {path} has no inverted lists, which `drq-fast build --lists` makes"
        checks.fail("search", "probes", why, options.probes)


def ids(options: argparse.Namespace) -> Result:
    """`drq-fast ids`."""
    run, target = Run(options.folder), None if options.out is None else Path(options.out)
    if target is not None:
        if target.suffix not in (".json", ".parquet"):
            checks.fail("ids", "out", "a .json or .parquet file", options.out)
        writable("ids", target)
        vacant(target, options.force)
    if options.add and not options.vectors:
        checks.fail("ids", "vectors", "given with --add", "none")
    if options.add or not options.vectors:
        run.need(run.ids, f"`drq-fast ids {run.folder} FILE.npy`")
    else:
        run.vacant(run.ids, options.force)
    with run.locked_model() as layer:
        made = SemanticIds.load(run.ids) if options.add or not options.vectors else SemanticIds(layer)
        if options.vectors:
            vectors = VectorFiles(options.vectors)
            _not_inside(run, options.vectors)
            if vectors.dim != layer.dim:
                checks.fail("ids", "vectors", f"of {layer.dim} dimensions, as the model is", vectors.dim)
            made.add(vectors.read(0, len(vectors)), options.beam)
            run.claim(run.ids)
            made.save(run.ids)
    if target is not None:
        (made.to_json if target.suffix == ".json" else made.to_parquet)(target)
    metrics = made.metrics()
    rows = [
        (f"level {m}", f"{level['used']:,}", f"{level['entropy']:.3f}", f"{level['perplexity']:.1f}")
        for m, level in enumerate(metrics["levels"])
    ]
    text = (
        f"{run.ids}: {counted(len(made), 'unique id')}; {metrics['unique']:.2%} of the codes were distinct before, "
        f"{metrics['moved']:,} changed, relative squared error {metrics['error_before']:.4f} -> "
        f"{metrics['error_after']:.4f}"
    )
    return {"ids": str(run.ids), **metrics}, f"{table(('', 'used', 'entropy', 'perplexity'), rows)}\n{text}"


def train(options: argparse.Namespace) -> Result:
    """`drq-fast train`."""
    run = Run(options.folder)
    given = {} if options.config is None else _read_settings(Path(options.config))
    given |= {name: value for name, value in vars(options).items() if name in _SETTINGS}
    if not given.get("data"):
        checks.fail("train", "data", "a folder or a file", "nothing")
    settings = Settings(**{name: given[name] for name in given.keys() & _fields(Settings)}).resolved()
    changes = {name: given[name] for name in given.keys() & _fields(Config)}
    experiment = Experiment(settings, dataclasses.replace(settings.config, **changes))
    experiment.check()  # raises errors before anything is written
    config = {"command": "train", **dataclasses.asdict(settings), **dataclasses.asdict(experiment.config)}
    facts = {} if settings.of_features else {"side": side(settings)}
    config = json.loads(json.dumps(config)) | facts | {"drq_fast": __version__}
    run.claim_folder()
    with run.writing():
        run.claim_folder()  # again: another process may have written here meanwhile
        _make_way(run, config, options.force)
        run.claim(run.model, *run.of_training)
        run.write_json(run.config, config)
        try:
            model, history = experiment.train(run.folder)
        finally:
            if not run.checkpoint.exists():
                run.forget(run.model, *run.of_training)  # the training has not begun
        run.write_json(run.history, {"epochs": history})
        run.replace_model(model.quantizer, config)
    counts = {name: len(rows) for name, rows in experiment.split._asdict().items()}
    classes = len(experiment.items.classes)
    return {"model": str(run.model), **counts, "classes": classes, "epochs": len(history)}, (
        f"{run.model}: trained on {counted(counts['train'], 'item')} of {counted(classes, 'class', 'classes')}; "
        f"next: drq-fast evaluate {run.folder} "
        f"({counted(counts['query'], 'query', 'queries')}, {counts['database']:,} to rank)"
    )


def evaluate(options: argparse.Namespace) -> Result:
    """`drq-fast evaluate`."""
    run = Run(options.folder)
    run.vacant(run.metrics, options.force)
    with run.locked_model() as layer:
        trained = run.read_json(run.config, "train").get("command") == "train"
        metrics = _by_labels(run, layer, options) if trained else _by_neighbours(run, layer, options)
        run.write_json(run.metrics, metrics)
    name = "mAP" if trained else "recall"
    rows = [(f"{row['bits']} bits", f"{row[name]:.4f}", f"{row['error']:.4f}") for row in metrics["lengths"]]
    if metrics.get("exact"):
        rows.append(("exact", f"{metrics['exact'][name]:.4f}", ""))
    what = f"mAP@{metrics['R']:,}" if trained else f"recall@{metrics['k']}"
    rows_of_codes = table(("code", what, "relative squared error"), rows)
    return metrics, f"{rows_of_codes}\n{run.metrics}: metric {metrics['metric']}"


def report(options: argparse.Namespace) -> Result:
    """`drq-fast report`."""
    from . import report as reporting

    written = reporting.write(
        Run(options.folder),
        beside=[Run(folder) for folder in options.beside],
        images=None if options.images is None else Path(options.images),
        queries=checks.integer("report", "queries", options.queries, 1),
        points=checks.integer("report", "points", options.points, 0),
        force=options.force,
    )
    return {"files": [str(path) for path in written]}, "\n".join(str(path) for path in written)


def _database(run: Run, experiment: Experiment, layer: RecurrentQuantizer) -> ItemSource:
    """The database of a trained run as vectors to encode."""
    return ItemSource(experiment, experiment.trained(run.folder, layer), experiment.split.database)


def _by_labels(run: Run, layer: RecurrentQuantizer, options: argparse.Namespace) -> dict[str, Any]:
    """Metrics of a trained run; encodes the database if there are no codes, and writes the queries' features."""
    if options.queries is not None:
        checks.fail("evaluate", "queries", "left out for a trained run, whose protocol has queries", options.queries)
    if options.k is not None:
        checks.fail("evaluate", "k", "left out for a trained run, whose protocol has a depth R", options.k)
    experiment = run.experiment()
    database = _database(run, experiment, layer)
    x = database.all() if options.exact else None  # before they are encoded, so that they are computed once
    if not run.codes.exists():
        run.encode(layer, database, beam=1, force=options.force)
    codes, made_by = run.load_codes()
    source, here = made_by.get("source"), json.loads(json.dumps(database.identity()))
    if source != here:
        same = isinstance(source, dict) and source | {"files": ""} == here | {"files": ""}
        what = (
            f"the data have changed since {run.codes} was encoded" if same else f"{run.codes} has other vectors' codes"
        )
        raise FileError(f"run: {what}; encode again with --force.")
    query = experiment.features(database.model, experiment.split.query)
    run.claim(run.queries)
    files.write_array(run.queries, query.numpy())
    return measures.by_labels(
        layer, codes, query, experiment, _searched_metric(run, options), x, made_by.get("beam", 1)
    )


def _by_neighbours(run: Run, layer: RecurrentQuantizer, options: argparse.Namespace) -> dict[str, Any]:
    """Metrics of a fitted run."""
    if options.queries is None:
        checks.fail("evaluate", "queries", "a file of vectors for a fitted run", "none")
    if options.exact:
        checks.fail("evaluate", "exact", "left out for a fitted run, whose recall is measured by exact search", True)
    codes, made_by = run.load_codes()
    with files.describing(run.made_by, "codes of vectors in files"):
        paths = [Path(file["path"]) for file in made_by["source"]]
    vectors = VectorFiles(paths)
    if vectors.identity() != made_by["source"]:
        raise FileError("evaluate: the vectors have changed since they were encoded; encode again with --force.")
    queries = VectorFiles([options.queries])
    if queries.dim != layer.dim:
        checks.fail("evaluate", "queries", f"of {layer.dim} dimensions, as the model is", queries.dim)
    k = checks.integer("evaluate", "k", min(10, len(codes)) if options.k is None else options.k, 1, len(codes))
    query = queries.read(0, len(queries))
    return measures.by_neighbours(layer, codes, vectors, query, k, _searched_metric(run, options))


def _metric(run: Run, options: argparse.Namespace) -> str:
    """The metric of the options, else of the run."""
    return options.metric or run.read_json(run.config, "fit").get("metric", "l2")


def _searched_metric(run: Run, options: argparse.Namespace) -> str:
    """The metric of the options, else of the index, else of the run."""
    if options.metric is None and run.index.exists():
        return Index.load(run.index, mmap=True).metric
    return _metric(run, options)


def _make_way(run: Run, config: dict[str, Any], force: bool) -> None:
    """Raises FileError if the folder has another run or a finished training; with `force`, deletes that first.

    An unfinished training with the same settings stays, so that it is resumed, with or without `force`.
    """
    there = run.read_json(run.config, "train") if run.config.exists() else {}
    if there.get("command") == "fit":
        run.all_vacant(force, "a fitted run")
    there = NEW_SETTINGS | NEW_IN_CONFIG | there if there else there
    differing = sorted(name for name in config if name not in _FACTS and there.get(name) != config[name])
    if not differing and not run.model.exists():
        return
    name = differing[0] if there and differing else None
    another = f"another run ({name} is {there.get(name)} there and {config[name]} here)" if name else "a run already"
    run.all_vacant(force, another)
    run.forget(run.model, *run.of_training, *run.of_codes)


def _read_settings(path: Path) -> dict[str, Any]:
    """Settings by name from a JSON file; FileError if a name is unknown."""
    try:
        given = files.read_json(path)
    except OSError as error:
        raise type(error)(f"train: {path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise FileError(f"train: {path} is not JSON ({error}).") from error
    if not isinstance(given, dict):
        raise FileError(f"train: {path} must hold a JSON object of settings.")
    if given.get("command") == "fit":
        raise FileError(f"train: {path} is a config of `fit`, not of `train`.")
    for name in given:
        if name not in (*_SETTINGS, *_FACTS, "command"):
            raise FileError(f"train: {path} has an unknown setting {name!r}{nearest(name, _SETTINGS)}")
    return given


def _fields(options: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(options)]


_SETTINGS = [*_fields(Settings), *_fields(Config)]
_FACTS = ("side", "drq_fast")  # in config.json beside the settings of a training


def _not_inside(run: Run, paths: Iterable[str]) -> None:
    """Raises ValueError if a file of vectors is in the run's folder, where commands replace files."""
    for path in paths:
        if Path(path).resolve().parent == run.folder.resolve():
            checks.fail("vectors", "vectors", f"outside of {run.folder}, whose files are replaced", path)


def _levels(length: int, codewords: int, levels: int) -> int:
    """The number of levels in a code of `length` bits."""
    lengths = _lengths(codewords, levels)
    if length not in lengths:
        checks.fail("search", "bits", f"one of {', '.join(map(str, lengths))}", length)
    return lengths.index(length) + 1


def _lengths(codewords: int, levels: int) -> list[int]:
    return [bits(codewords, L) for L in range(1, levels + 1)]
