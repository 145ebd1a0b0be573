"""Vectors in a column of Parquet files, and files of their codes; `pip install 'drq_fast[parquet]'`."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

if importlib.util.find_spec("pyarrow") is None:
    raise ModuleNotFoundError(
        "drq_fast.interop.parquet: pyarrow is missing; `pip install 'drq_fast[parquet]'` installs it."
    )

import pyarrow as pa
import pyarrow.parquet as pq

from .. import checks, files
from ..codec import Codec
from ..files import FileError

_NUMBERS = 1 << 22  # numbers of the vectors that are read at a time
_MADE_BY = b"drq_fast"  # key of the metadata of a file


class Task(NamedTuple):
    """A file to encode: the column `column` of `source` becomes the column `output` of `target`.

    made_by: JSON that changes when the codes would; a target that has the same is complete.
    """

    source: str
    target: str
    column: str
    output: str
    beam: int
    made_by: str

    def done(self) -> bool:
        """Whether the target is there already."""
        if not os.path.exists(self.target):
            return False
        try:
            found = pq.read_schema(self.target).metadata or {}
        except (OSError, pa.ArrowException):
            return False
        return found.get(_MADE_BY) == self.made_by.encode()


def tasks(
    codec: Codec,
    sources: Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    column: str = "embedding",
    output: str = "codes",
    beam: int = 1,
) -> list[Task]:
    """One task for each Parquet file, whose target has the same name in `folder`. Checks the columns of all files."""
    if not sources:
        checks.fail("encode", "files", "at least one Parquet file", "none")
    beam, found = checks.beam("encode", beam), dict[str, Task]()
    codec_id = [files.checksum(t.cpu()) for t in codec.tensors() if t is not None]
    for path in map(Path, sources):
        with _opened(path) as file:
            _check_columns(path, file.schema_arrow, column, output)
        state = path.stat()
        source = {"size": state.st_size, "modified": state.st_mtime_ns, "column": column}
        made_by = json.dumps({"codec": codec_id, **codec.settings(), "beam": beam, "source": source}, sort_keys=True)
        target = str(Path(folder).resolve() / path.name)
        if target in found:
            checks.fail("encode", "files", "of different names", f"{found[target].source} and {path}")
        if str(path.resolve()) == target:
            checks.fail("encode", "files", f"outside of {folder}, where codes are written", str(path))
        found[target] = Task(str(path.resolve()), target, column, output, beam, made_by)
    return list(found.values())


def encode_files(codec: Codec, todo: Iterable[Task]) -> int:
    """Encodes files one after the other in this process; returns the number of vectors in all of them.

    Files that are complete are not encoded again. Each is written to a temporary name, synced and renamed. A target has
    the columns of its source, with the codes, fixed_size_list<uint8 or int32>[levels], in place of the vectors.
    """
    todo, rows = list(todo), 0
    total = sum(pq.read_metadata(task.source).num_rows for task in todo)
    with tqdm(total=total, desc="encode", unit="vector", unit_scale=True, disable=None) as bar:
        for task in todo:
            rows += encode_file(codec, task, bar.update)
    return rows


def encode_file(codec: Codec, task: Task, progress: Callable[[int], Any] = lambda rows: None) -> int:
    """Encodes one file, unless that was done before; returns its number of vectors."""
    with _opened(Path(task.source)) as file:
        rows = int(file.metadata.num_rows)
        if task.done():
            progress(rows)
            return rows
        target = Path(task.target)
        files.remove_remains(target.parent)
        with files.temporary_folder(target.parent) as folder:
            temporary = folder / "new"
            _write(codec, task, file, temporary, progress)
            with open(temporary, "rb+") as written:
                os.fsync(written.fileno())
            os.replace(temporary, target)
    return rows


def _write(codec: Codec, task: Task, file: Any, target: Path, progress: Callable[[int], Any]) -> None:
    schema = file.schema_arrow
    _check_columns(Path(task.source), schema, task.column, task.output)
    place = schema.get_field_index(task.column)
    kind = pa.list_(pa.uint8() if codec.codewords <= 256 else pa.int32(), codec.levels)
    made = schema.set(place, pa.field(task.output, kind))
    made = made.with_metadata((schema.metadata or {}) | {_MADE_BY: task.made_by.encode()})
    first = 0
    with pq.ParquetWriter(target, made) as writer:
        for batch in _batches(Path(task.source), file, max(1, _NUMBERS // codec.dim)):
            codes = encoded(codec, batch.column(place), task.beam, task.source, first)
            columns = [codes if i == place else column for i, column in enumerate(batch.columns)]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=made))
            first += len(batch)
            progress(len(batch))


def encoded(codec: Codec, column: Any, beam: int, where: str, first: int = 0) -> Any:
    """The codes of an Arrow array of vectors, as fixed_size_list[levels]; where: what an error names."""
    x = vectors("encode", column, codec.dim, where, first)
    codes = codec.encode(x, beam)
    return pa.FixedSizeListArray.from_arrays(pa.array(codes.ravel()), codec.levels)


def vectors(op: str, column: Any, dim: int, where: str, first: int = 0) -> np.ndarray:
    """An Arrow array of lists of `dim` numbers each as float32 [n, dim]; first: the number of its first row."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # which pyarrow leaves where there is no single chunk
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    if isinstance(column.type, pa.BaseExtensionType):  # tensors, of Arrow or of Ray
        column = column.storage
    kind = column.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not lists or not (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)):
        raise FileError(f"{op}: {where} must have lists of numbers as vectors, got {kind}.")
    if len(column) == 0:
        return np.empty((0, dim), np.float32)
    if column.null_count:
        raise FileError(f"{op}: {where} has no vector in row {first + _first(column.is_null().to_numpy(False))}.")
    if pa.types.is_fixed_size_list(kind):
        wrong = None if kind.list_size == dim else (0, kind.list_size)
    else:
        lengths = np.diff(column.offsets.to_numpy())
        other = np.flatnonzero(lengths != dim)
        wrong = (int(other[0]), int(lengths[other[0]])) if len(other) else None
    if wrong is not None:
        raise FileError(
            f"{op}: {where} has a vector of {wrong[1]} dimensions in row {first + wrong[0]}, and the codec has {dim}."
        )
    values = column.flatten()
    if values.null_count:
        row = _first(values.is_null().to_numpy(False)) // dim
        raise FileError(f"{op}: {where} has a missing number in row {first + row}.")
    with np.errstate(over="ignore"):  # infinities are refused
        x = values.to_numpy(False).astype(np.float32, copy=False).reshape(-1, dim)
    good = np.isfinite(x).all(axis=1)
    if not good.all():
        raise FileError(f"{op}: row {first + _first(~good)} of {where} is not finite in float32.")
    return x


def _first(flags: np.ndarray) -> int:
    return int(np.flatnonzero(flags)[0])


def _check_columns(path: Path, schema: Any, column: str, output: str) -> None:
    if column not in schema.names:
        raise FileError(f"encode: {path} has no column {column!r}; its columns are {', '.join(schema.names)}.")
    if schema.names.count(column) > 1:
        raise FileError(f"encode: {path} has several columns {column!r}.")
    if output in schema.names and output != column:
        raise FileError(f"encode: {path} has a column {output!r} already.")


def _opened(path: Path) -> Any:
    """A Parquet file, to be closed."""
    with _reading(path):
        return pq.ParquetFile(path)


def _batches(path: Path, file: Any, size: int) -> Iterator[Any]:
    """The rows of an open file, so many at a time."""
    with _reading(path):
        yield from file.iter_batches(batch_size=size)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Names the file in errors of pyarrow."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system, which names the file
            raise
        what = " ".join(str(error).split()).rstrip(".")
        raise FileError(f"encode: {path} is not a complete Parquet file ({what}).") from error
