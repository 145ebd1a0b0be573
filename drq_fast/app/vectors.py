"""Vectors in `.npy` files, read block by block, so that files may be larger than memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from .. import checks
from ..files import FileError, open_regular, read_array

_BYTES = 1 << 24  # size of a block


class VectorFiles:
    """One or more `.npy` files as one array [N, D]; `read` returns any rows as float32.

    Rows are read with `seek` and `readinto`: pages of a memory map would count as memory of the process.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self.files = [_File(Path(path)) for path in paths]
        if not self.files:
            checks.fail("vectors", "paths", "at least one .npy file", "none")
        for file in self.files[1:]:
            if file.dim != self.files[0].dim:
                expected = f"of {self.files[0].dim} dimensions, as {self.files[0].path} is"
                checks.fail("vectors", "vectors", expected, f"{file.dim} in {file.path}", error=FileError)
        self.dim = self.files[0].dim
        self.ends = np.cumsum([file.rows for file in self.files])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def identity(self) -> list[dict[str, Any]]:
        """A value for JSON that changes when the files do."""
        return [file.identity() for file in self.files]

    def read(self, first: int, last: int) -> Tensor:
        """Rows first to last - 1 as float32 [last - first, D]; FileError if one is not finite."""
        parts = [np.empty((0, self.dim), np.float32)]
        for file, end in zip(self.files, self.ends.tolist(), strict=True):
            begin = end - file.rows
            if first < end and last > begin:
                parts.append(file.read(max(first - begin, 0), min(last - begin, file.rows)))
        return self._finite(np.concatenate(parts[1:] or parts), np.arange(first, last))

    def pick(self, numbers: Tensor) -> Tensor:
        """The rows with these ascending numbers [n], as float32 [n, D]."""
        rows = numbers.numpy()
        of_file = np.split(rows, np.searchsorted(rows, self.ends[:-1]))
        begins = self.ends - [file.rows for file in self.files]
        drawn = [file.pick(part - begin) for file, part, begin in zip(self.files, of_file, begins, strict=True)]
        return self._finite(np.concatenate(drawn), rows)

    def _finite(self, x: np.ndarray, rows: np.ndarray) -> Tensor:
        """x [n, D] as a tensor; rows [n] are the row numbers for the error message."""
        wrong = np.flatnonzero(~np.isfinite(x).all(axis=1))
        if len(wrong):
            row = int(rows[wrong[0]])
            number = int(np.searchsorted(self.ends, row, side="right"))
            file, end = self.files[number], int(self.ends[number])
            raise FileError(f"vectors: row {row - (end - file.rows)} of {file.path} is not finite in float32.")
        return torch.from_numpy(x)


def block_rows(dim: int) -> int:
    """The number of vectors in a block."""
    return max(1, _BYTES // (4 * dim))


class _File:
    """One `.npy` file of numbers [rows, dim]."""

    def __init__(self, path: Path) -> None:
        self.path = path
        array = read_array("vectors", path, mmap=True)
        if array.ndim != 2 or 0 in array.shape or array.dtype.kind not in "fiu":
            what = f"{array.dtype} {list(array.shape)}"
            raise FileError(f"vectors: {path} must hold real numbers [N, D] with N and D of at least 1, got {what}.")
        if not array.flags.c_contiguous:
            raise FileError(f"vectors: {path} is stored by columns; save numpy.ascontiguousarray of it.")
        self.rows, self.dim = array.shape
        assert isinstance(array, np.memmap)
        self.dtype, self.offset = array.dtype, int(array.offset)
        self.state = path.stat()

    def identity(self) -> dict[str, Any]:
        """Path, size, time of modification, shape and dtype."""
        return {
            "path": str(self.path.resolve()),
            "size": self.state.st_size,
            "modified": self.state.st_mtime_ns,
            "shape": [self.rows, self.dim],
            "dtype": self.dtype.str,
        }

    def read(self, first: int, last: int) -> np.ndarray:
        """Rows first to last - 1 as float32."""
        values = np.empty((last - first, self.dim), self.dtype)
        with self._opened() as file:
            file.seek(self.offset + first * values.itemsize * self.dim)
            if file.readinto(values.data) != values.nbytes:
                raise self._changed()
        return _float32(values)

    def pick(self, rows: np.ndarray) -> np.ndarray:
        """The rows with these sorted numbers [n], as float32."""
        values = np.empty((len(rows), self.dim), self.dtype)
        length = values.itemsize * self.dim
        with self._opened(buffering=0) as file:
            for value, row in zip(values, tqdm(rows, desc="sample", delay=2, disable=None, leave=False), strict=True):
                file.seek(self.offset + int(row) * length)
                if file.readinto(value.data) != length:
                    raise self._changed()
        return _float32(values)

    def _opened(self, buffering: int = -1) -> Any:
        """Opens the file; FileError if it has changed since `__init__`."""
        file = open_regular(self.path, buffering=buffering)
        now, then = os.fstat(file.fileno()), self.state
        if (now.st_ino, now.st_size, now.st_mtime_ns) != (then.st_ino, then.st_size, then.st_mtime_ns):
            file.close()
            raise self._changed()
        return file

    def _changed(self) -> FileError:
        return FileError(f"vectors: {self.path} has changed since it was opened.")


def _float32(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # `_finite` refuses infinities afterwards
        return values.astype(np.float32, copy=False)
