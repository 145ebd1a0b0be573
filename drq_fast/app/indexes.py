"""The commands of `drq-fast` that make or change the file of an index; see commands.py."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .. import checks, files
from ..files import FileError
from ..index import Index
from ..index.ids import checked_ids
from ..index.source import in_blocks
from .description import counted, describe
from .images import ImageQueries
from .report import need_packages
from .run import Run, lock, vacant
from .vectors import VectorFiles

Result = tuple[dict[str, Any], str]
_HIGH = 0.95  # recall below which `build` says how to reach more


def build(options: argparse.Namespace) -> Result:
    """`drq-fast build`."""
    target = Path(options.index)
    if target.suffix == ".npy":
        checks.fail("build", "index", "the file to write, after those of vectors", options.index)
    vectors = VectorFiles(options.vectors)
    plot = _figure("build", options)
    _replaceable(target, options.force)
    if plot is not None and len(vectors) == 1:
        checks.fail("build", "plot", "left out for a single vector, which cannot be tuned", plot)
    made = Index.build(
        vectors,
        **{name: getattr(options, name) for name in ("bits", "codebooks", "metric", "lists", "beam", "sample", "seed")},
        vectors=None if options.keep == "none" else options.keep,
        ids=None if options.ids is None else files.read_array("build", options.ids),
    )
    _replaceable(target, options.force)  # again: another process may have written it meanwhile
    made.save(target)
    options.written = True  # what Ctrl-C says depends on it
    _draw(plot, made, target)
    facts, text = describe(target, made)
    return facts, text + _advice(made)


def tune(options: argparse.Namespace) -> Result:
    """`drq-fast tune`."""
    index_file("tune", options.index)  # first, because it finds swapped arguments
    plot, queries = _figure("tune", options), VectorFiles([options.queries])
    with _changing("tune", options.index) as (path, made):
        same_dim("tune", "queries", queries, made)
        if made.vectors is None:
            expected = "one that keeps vectors, which `drq-fast build --vectors float16` makes"
            checks.fail("tune", "index", expected, f"{path}, which has codes only")
        made.tune(queries.read(0, len(queries)), options.k)
    _draw(plot, made, path)
    return describe(path, made)


def add(options: argparse.Namespace) -> Result:
    """`drq-fast add`."""
    index_file("add", options.folder)  # first, because it finds swapped arguments
    vectors, given = VectorFiles(options.vectors), None
    if options.ids is not None:
        given = checked_ids("add", files.read_array("add", options.ids), torch.device("cpu"))
        if len(given) != len(vectors):
            checks.fail("add", "ids", f"{len(vectors)} numbers, one per vector", len(given))
    with _changing("add", options.folder) as (path, made):
        same_dim("add", "vectors", vectors, made)
        before, last = len(made), -1
        for block in in_blocks(vectors.read, len(vectors), vectors.dim, "add"):
            first = len(made) - before
            ids = None if given is None else given[first : first + len(block)]
            last = int(made.add(block, ids, beam=options.beam)[-1])
    N = len(vectors)
    new = f" with id {last}" if N == 1 else f" with ids {last + 1 - N} to {last}"
    numbered = "" if given is not None else new
    text = f"{path}: {counted(N, 'vector')} added{numbered}, {len(made):,} in all"
    return {"index": str(path), "added": N, "last_id": last, "size": len(made)}, text


def remove(options: argparse.Namespace) -> Result:
    """`drq-fast remove`."""
    index_file("remove", options.folder)  # first, because it finds swapped arguments
    unwanted = files.read_array("remove", options.ids)
    with _changing("remove", options.folder) as (path, made):
        made.remove(unwanted)
    result = {"index": str(path), "removed": len(unwanted), "size": len(made)}
    return result, f"{path}: {counted(len(unwanted), 'id')} removed, {len(made):,} left"


@contextmanager
def _changing(op: str, name: str) -> Iterator[tuple[Path, Index]]:
    """An index in a file or in a run, which is written back afterwards unless an error was raised.

    BlockingIOError if another process changes it, whose changes would be lost.
    """
    path, run = index_file(op, name), Run(name)
    with run.writing() if run.folder.is_dir() else _locked(op, path):
        made = Index.load(path)
        yield path, made
        if run.folder.is_dir():
            run.claim(run.index)
        made.save(path)


@contextmanager
def _locked(op: str, path: Path) -> Iterator[None]:
    """The same for a file alone: the lock is that of the file which will be replaced."""
    writable(op, path)
    with files.open_regular(path) as file:
        lock(file, path)
        if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise BlockingIOError(f"{op}: another process has replaced {path}; repeat the command.")
        yield


def _advice(index: Index) -> str:
    """How to find more, if searches found less than 95 % and the options of `build` can change that; else nothing."""
    tuning = index.tuning
    if tuning is None or tuning.settings[-1].recall >= _HIGH or (index.vectors is not None and index.bits >= 128):
        return ""
    return f"\nTo find {_HIGH:.0%} and more, build with --bits 128 --vectors float16."


def index_file(op: str, name: str) -> Path:
    """The file of the index that an argument names: the file itself, or the folder of a run."""
    path = Path(name)
    if not path.exists():
        raise FileNotFoundError(
            f"{op}: {path} does not exist; `drq-fast build` makes an index, `fit` or `train` a run."
        )
    if not path.is_dir():
        _may_be_index(op, path)
        return path
    run = Run(path)
    run.need_index()
    return run.index


def _may_be_index(op: str, path: Path) -> None:
    """Raises FileError if a file is not of the format that an index has."""
    try:
        with files.open_regular(path) as file:
            start = file.read(9)  # the length of a header, and a brace
    except OSError:
        return  # reading the index says why
    if start[8:] != b"{":
        hint = " (INDEX comes first)" if start.startswith(b"\x93NUMPY") and op != "info" else ""
        raise FileError(f"{op}: {path} is not an index of drq-fast{hint}.")


def _replaceable(path: Path, force: bool) -> None:
    """Raises an error if an index cannot be written to `path` or a file is there; `force` replaces only an index."""
    writable("build", path)
    vacant(path, force)
    if os.path.lexists(path):
        try:
            files.fingerprint(path, "index")
        except (OSError, ValueError) as error:
            raise FileError(f"build: {path} is not an index, so it is not replaced.") from error


def writable(op: str, path: Path) -> None:
    """Raises OSError if a file cannot be written to `path`, before work begins whose result would be lost."""
    if path.is_dir():
        raise IsADirectoryError(f"{op}: {path} cannot be written: it is a folder.")
    if not path.parent.is_dir():
        what = "is not a folder" if path.parent.exists() else "does not exist"
        raise FileNotFoundError(f"{op}: {path} cannot be written: {path.parent} {what}.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"{op}: {path} cannot be written: {path.parent} is read-only.")


def _figure(op: str, options: argparse.Namespace) -> Path | None:
    """The checked path of --plot."""
    if options.plot is None:
        return None
    path = Path(options.plot)
    if path.suffix not in (".svg", ".png"):
        checks.fail(op, "plot", "a .svg or .png file", options.plot)
    need_packages(op, "matplotlib")
    writable(op, path)
    vacant(path, options.force)
    return path


def _draw(path: Path | None, index: Index, name: Path) -> None:
    """Writes the figure of the tuning of an index, if there is a path."""
    if path is not None and index.tuning is not None:
        from .plots import draw_tuning  # imports matplotlib

        draw_tuning(path, index.tuning, name.name)


def same_dim(op: str, name: str, vectors: VectorFiles | ImageQueries, index: Index) -> None:
    """Raises ValueError if vectors have other dimensions than those in the index."""
    if vectors.dim != index.dim:
        checks.fail(op, name, f"of {index.dim} dimensions, as the index is", vectors.dim)
