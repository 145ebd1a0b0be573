"""A run: one folder with the settings, the model, its codes, an index of them and figures.

Everything in it is whole or not there. Codes know the model that made them by its fingerprint, so that those of
another model are refused, and are written a block at a time, so that an interrupted encoding goes on where it was.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from . import checks, files
from .files import FileError
from .quantizer import RecurrentQuantizer
from .vectors import block_rows

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows; there two processes are up to the user
    fcntl = None

_SECONDS = 2.0  # of encoding that a kill may cost


class Source(Protocol):
    """Vectors to encode: how many of how many dimensions, what tells them from others, and how to read them."""

    dim: int

    def __len__(self) -> int: ...

    def identity(self) -> Any:
        """Anything that JSON can hold."""

    def read(self, first: int, last: int) -> Tensor:
        """Rows as float32 [last - first, dim]."""


class Run:
    """The folder; every method says in one sentence what is missing in it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.config = self.folder / "config.json"
        self.model = self.folder / "model.drq"
        self.codes = self.folder / "codes.npy"
        self.made_by = self.folder / "codes.json"
        self.index = self.folder / "index.drq"
        self.queries = self.folder / "queries.npy"
        self.metrics = self.folder / "metrics.json"
        self.history = self.folder / "history.json"
        self.partial = self.folder / "codes.partial"
        self.partial_state = self.folder / "codes.partial.json"

    def make(self) -> None:
        """Makes the folder, or says why it cannot be written to."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise type(error)(f"run: {self.folder} cannot be made: {error.strerror or error}.") from error
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise PermissionError(f"run: {self.folder} cannot be written to.")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One process at a time; whoever comes second is told so."""
        self.make()
        with (self.folder / ".lock").open("w") as file:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    raise BlockingIOError(f"run: another process is writing to {self.folder}.") from error
            files.remove_remains(self.folder)
            yield

    def vacant(self, path: Path, force: bool, what: str = "") -> None:
        """FileError where a result is there already and may not be replaced; `what` says more about it."""
        if path.exists() and not force:
            raise FileError(f"run: {path}{what} is there already; --force replaces it.")

    def replace_model(self, layer: RecurrentQuantizer, config: dict[str, Any]) -> None:
        """Model and settings, in place of others and of all that was made with these."""
        new = self.folder / "model.new"
        try:
            layer.save(new)
            self.forget_codes()
            self.write_json(self.config, config)
            os.replace(new, self.model)
        finally:
            new.unlink(missing_ok=True)

    def write_json(self, path: Path, value: Any) -> None:
        """Replaces a JSON file atomically."""
        files.write_text(path, json.dumps(value, indent=1) + "\n")

    def read_json(self, path: Path, command: str) -> Any:
        """What a JSON file of the run holds; `command` would make it."""
        if not self.folder.is_dir():
            raise FileNotFoundError(f"run: {self.folder} is not there; `drq-fast fit` or `train` makes a run.")
        if not path.exists():
            raise FileNotFoundError(f"run: {path} is not there; `drq-fast {command} {self.folder}` makes it.")
        try:
            value = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise FileError(f"run: {path} cannot be read as JSON ({error}).") from error
        if not isinstance(value, dict):
            raise FileError(f"run: {path} must hold a JSON object.")
        return value

    def quantizer(self) -> RecurrentQuantizer:
        """The model."""
        if not self.model.exists():
            self.read_json(self.config, "fit")  # says so if this is no run at all
            raise FileNotFoundError(f"run: {self.model} is not there; `drq-fast fit` or `train` makes it.")
        return RecurrentQuantizer.load(self.model)

    def encode(self, source: Source, *, beam: int, force: bool) -> None:
        """Writes the codes of all vectors; goes on with what an interrupted call of the same kind has left."""
        layer = self.quantizer()
        if source.dim != layer.dim:
            checks.fail("encode", "vectors", f"of {layer.dim} dimensions, as the model is", source.dim)
        self.vacant(self.codes, force)
        made_by = {
            "model": files.fingerprint(self.model, "quantizer"),
            "beam": checks.beam("encode", beam),
            "source": json.loads(json.dumps(source.identity())),
            "rows": len(source),
            "levels": layer.levels,
            "codewords": layer.codewords,
        }
        try:
            digest = self._encode(source, layer, made_by)
        except OSError as error:
            if error.filename is None and error.errno is not None:  # of a write
                raise type(error)(f"run: {self.partial} cannot be written: {error.strerror}.") from error
            raise
        self._forget(self.index, self.metrics)
        self.write_json(self.made_by, made_by | {"checksum": digest})
        os.replace(self.partial, self.codes)
        self.partial_state.unlink(missing_ok=True)

    def _encode(self, source: Source, layer: RecurrentQuantizer, made_by: dict[str, Any]) -> str:
        """Writes all codes to the partial file, from where it ends; its checksum."""
        dtype = np.dtype(np.uint8 if layer.codewords <= 256 else np.int32)
        header = _npy_header(dtype, (len(source), layer.levels))
        row, step, total = layer.levels * dtype.itemsize, block_rows(source.dim), len(source)
        done, digest = self._resume(made_by, header, row)
        with (
            self.partial.open("r+b" if done else "wb") as file,
            tqdm(total=total, initial=done, desc="encode", unit="vector", unit_scale=True, disable=None) as bar,
        ):
            if not done:
                file.write(header)
            file.seek(len(header) + done * row)
            file.truncate()
            saved = -_SECONDS
            while done < total:
                block = source.read(done, min(done + step, total))
                codes = np.ascontiguousarray(layer.encode(block, made_by["beam"]).numpy().astype(dtype)).data
                file.write(codes)
                digest.update(codes)
                done += len(block)
                bar.update(len(block))
                if time.monotonic() - saved > _SECONDS or done == total:
                    file.flush()
                    os.fsync(file.fileno())
                    self.write_json(self.partial_state, made_by | {"done": done, "checksum": digest.hexdigest()})
                    saved = time.monotonic()
        return digest.hexdigest()

    def _resume(self, made_by: dict[str, Any], header: bytes, row: int) -> tuple[int, Any]:
        """How many rows of the same encoding are on disk, and the checksum of header and rows so far."""
        fresh = _digest()
        fresh.update(header)
        try:
            state = json.loads(self.partial_state.read_text())
            done, checksum = state.pop("done"), state.pop("checksum")
            digest = _file_digest(self.partial, len(header) + done * row)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return 0, fresh
        return (done, digest) if state == made_by and digest.hexdigest() == checksum else (0, fresh)

    def load_codes(self) -> tuple[Tensor, dict[str, Any]]:
        """Codes [N, levels] and what made them; FileError where that is not the model of the run."""
        made_by = self.read_json(self.made_by, "encode")
        if not self.codes.exists():
            raise FileNotFoundError(f"run: {self.codes} is not there; `drq-fast encode {self.folder}` makes it.")
        if made_by.get("model") != files.fingerprint(self.model, "quantizer"):
            raise FileError(f"run: {self.codes} was made by another model; encode again with --force.")
        if made_by.get("checksum") != _file_digest(self.codes).hexdigest():
            raise FileError(f"run: {self.codes} is not what {self.made_by} describes; encode again with --force.")
        return torch.from_numpy(np.load(self.codes)), made_by

    def forget_codes(self) -> None:
        """Removes what an earlier model of the run has made."""
        self._forget(self.codes, self.made_by, self.partial, self.partial_state, self.index, self.queries, self.metrics)

    def _forget(self, *paths: Path) -> None:
        """Removes these files, and the report, which was made of them."""
        for path in paths:
            path.unlink(missing_ok=True)
        shutil.rmtree(self.folder / "report", ignore_errors=True)


def _npy_header(dtype: np.dtype[Any], shape: tuple[int, int]) -> bytes:
    text = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        text, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )
    return text.getvalue()


def _digest() -> Any:
    return hashlib.blake2b(digest_size=16)


def _file_digest(path: Path, length: int | None = None) -> Any:
    """Of a file, or of its first `length` bytes."""
    digest, left = _digest(), path.stat().st_size if length is None else length
    with path.open("rb") as file:
        while left and (block := file.read(min(left, 1 << 24))):
            digest.update(block)
            left -= len(block)
    return digest
