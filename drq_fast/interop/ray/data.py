"""Vectors in Ray Datasets and Parquet files, encoded by stateful workers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
from tqdm import tqdm

from ... import checks
from ...codec import Codec
from ...files import FileError
from .. import parquet

_BATCH = 1 << 16  # vectors of a batch


def encode(
    codec: Codec,
    dataset: ray.data.Dataset,
    column: str = "embedding",
    *,
    output: str = "codes",
    beam: int = 1,
    workers: int | None = None,
    **options: Any,
) -> ray.data.Dataset:
    """The dataset with a column of codes, fixed_size_list<uint8 or int32>[levels]; Ray computes it when it is read.

    column: lists or tensors of codec.dim numbers. workers: actors that hold the codec; by default as many as Ray finds
    useful. options: of the workers, as `map_batches` takes them, such as num_cpus, of which each uses all.

    >>> codes = encode(codec, ray.data.read_parquet("vectors/"), "embedding")
    """
    if output in check_column("encode", dataset, column):
        checks.fail("encode", "output", "the name of a new column", repr(output))
    settings = {"num_cpus": 1, "batch_size": max(1, min(_BATCH, (1 << 22) // codec.dim))} | options
    return dataset.map_batches(
        _Encoder,
        fn_constructor_args=(codec, column, output, checks.beam("encode", beam)),
        batch_format="pyarrow",
        compute=_pool(workers),
        **settings,
    )


def encode_files(
    codec: Codec,
    sources: Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    column: str = "embedding",
    output: str = "codes",
    beam: int = 1,
    workers: int | None = None,
    **options: Any,
) -> int:
    """Encodes Parquet files, each by one worker, to files of the same names in `folder`; returns the number of vectors.

    Called again after an interruption, it encodes the files that are not complete. The workers must be able to read and
    write the same paths. Results are those of `drq_fast.interop.parquet.encode_files`.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    todo = parquet.tasks(codec, sources, folder, column=column, output=output, beam=beam)
    items = [{"task": [str(part) for part in task]} for task in todo]
    done = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        _FileEncoder,
        fn_constructor_args=(codec,),
        batch_format="numpy",
        batch_size=1,
        compute=_pool(workers, len(items)),
        **({"num_cpus": 1} | options),
    )
    done.context.enable_progress_bars = False  # Ray's own
    rows, errors = 0, list[str]()
    try:
        with tqdm(total=len(items), desc="encode", unit="file", disable=None) as bar:
            for row in done.iter_rows():
                rows += int(row["rows"])
                errors += [str(row["error"])] if row["error"] else []
                bar.update()
    except ray.exceptions.RayError as error:
        raise RuntimeError(f"encode: a worker failed ({type(error).__name__}); finished files are kept.") from error
    if errors:
        raise FileError(min(errors))
    return rows


def batches(dataset: ray.data.Dataset, column: str = "embedding", *, dim: int) -> Iterator[np.ndarray]:
    """The vectors of a column in blocks [65536, dim], in the order of the dataset, for `RecurrentQuantizer.fit`.

    >>> errors = layer.fit(batches(dataset, "embedding", dim=layer.dim), sample=1 << 18, seed=0)
    """
    check_column("fit", dataset, column)
    with in_order(dataset):
        tables = dataset.select_columns([column]).iter_batches(batch_size=_BATCH, batch_format="pyarrow")
        first = 0
        for table in tables:
            yield parquet.vectors("fit", table.column(column), dim, f"column {column!r}", first)
            first += table.num_rows


def check_column(op: str, dataset: ray.data.Dataset, column: str) -> list[str]:
    """The columns of a dataset, of which `column` must be one."""
    schema = dataset.schema()
    names = [] if schema is None else schema.names
    if column not in names:
        checks.fail(
            op, "column", f"one of {', '.join(names)}" if names else "in the dataset, which is empty", repr(column)
        )
    return names


@contextmanager
def in_order(dataset: ray.data.Dataset) -> Iterator[None]:
    """Inside it, the rows of the dataset come in their order."""
    settings = dataset.context.execution_options
    before, settings.preserve_order = settings.preserve_order, True
    try:
        yield
    finally:
        settings.preserve_order = before


class _Encoder:
    """A worker of `encode`."""

    def __init__(self, codec: Codec, column: str, output: str, beam: int) -> None:
        self.codec, self.column, self.output, self.beam = codec, column, output, beam

    def __call__(self, table: Any) -> Any:
        where = f"a batch of column {self.column!r}"
        codes = parquet.encoded(self.codec, table.column(self.column), self.beam, where)
        return table.append_column(self.output, codes)


class _FileEncoder:
    """A worker of `encode_files`."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"rows": [], "error": []}
        for source, target, column, output, beam, made_by in batch["task"]:
            task = parquet.Task(source, target, column, output, int(beam), made_by)
            try:
                rows, error = parquet.encode_file(self.codec, task), ""
            except (FileError, OSError) as wrong:
                rows, error = 0, str(wrong)
            found["rows"].append(rows)
            found["error"].append(error)
        return found


def _pool(workers: int | None, most: int | None = None) -> Any:
    """So many workers; as many as Ray finds useful by default, and at most `most`."""
    if workers is None:
        return ray.data.ActorPoolStrategy()
    workers = checks.integer("encode", "workers", workers, 1)
    return ray.data.ActorPoolStrategy(size=workers if most is None else min(workers, most))
