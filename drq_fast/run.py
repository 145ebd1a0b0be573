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

    def vacant(self, path: Path, force: bool) -> None:
        """FileError where a result is there already and may not be replaced."""
        if path.exists() and not force:
            raise FileError(f"run: {path} is there already; --force replaces it.")

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

    def encode(self, source: Source, *, beam: int, force: bool) -> dict[str, Any]:
        """Writes the codes of all vectors; goes on with what an interrupted call of the same kind has left."""
        layer = self.quantizer()
        if source.dim != layer.dim:
            checks.fail("encode", "vectors", f"of {layer.dim} dimensions, as the model is", source.dim)
        self.vacant(self.codes, force)
        dtype = np.dtype(np.uint8 if layer.codewords <= 256 else np.int32)
        made_by = {
            "model": files.fingerprint(self.model, "quantizer"),
            "beam": checks.beam("encode", beam),
            "source": json.loads(json.dumps(source.identity())),
            "rows": len(source),
            "levels": layer.levels,
            "codewords": layer.codewords,
        }
        done = self._resume(made_by)
        row = layer.levels * dtype.itemsize
        with self.partial.open("r+b" if done else "wb") as file:
            header = _npy_header(dtype, (len(source), layer.levels))
            if not done:
                file.write(header)
            file.seek(len(header) + done * row)
            file.truncate()
            self._encode_rest(file, layer, source, dtype, beam, done, made_by)
        checksum = _checksum(self.partial)
        self._forget(self.index, self.metrics)
        self.write_json(self.made_by, made_by | {"checksum": checksum})
        os.replace(self.partial, self.codes)
        self.partial_state.unlink(missing_ok=True)
        return made_by

    def _resume(self, made_by: dict[str, Any]) -> int:
        """How many rows of the same encoding are on disk."""
        if not (self.partial.exists() and self.partial_state.exists()):
            return 0
        state = self.read_json(self.partial_state, "encode")
        done = state.pop("done", 0)
        return done if state == made_by else 0

    def _encode_rest(
        self,
        file: Any,
        layer: RecurrentQuantizer,
        source: Source,
        dtype: np.dtype[Any],
        beam: int,
        done: int,
        made_by: dict[str, Any],
    ) -> None:
        total, step = len(source), block_rows(source.dim)
        self.write_json(self.partial_state, made_by | {"done": done})
        saved = time.monotonic()
        with tqdm(total=total, initial=done, desc="encode", unit="vector", unit_scale=True, disable=None) as bar:
            while done < total:
                block = source.read(done, min(done + step, total))
                file.write(np.ascontiguousarray(layer.encode(block, beam).numpy().astype(dtype)).data)
                done += len(block)
                bar.update(len(block))
                if time.monotonic() - saved > _SECONDS or done == total:
                    file.flush()
                    os.fsync(file.fileno())
                    self.write_json(self.partial_state, made_by | {"done": done})
                    saved = time.monotonic()

    def load_codes(self) -> tuple[Tensor, dict[str, Any]]:
        """Codes [N, levels] and what made them; FileError where that is not the model of the run."""
        made_by = self.read_json(self.made_by, "encode")
        if not self.codes.exists():
            raise FileNotFoundError(f"run: {self.codes} is not there; `drq-fast encode {self.folder}` makes it.")
        if made_by.get("model") != files.fingerprint(self.model, "quantizer"):
            raise FileError(f"run: {self.codes} was made by another model; encode again with --force.")
        if made_by.get("checksum") != _checksum(self.codes):
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


def _checksum(path: Path) -> str:
    """BLAKE2b of a file."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()
