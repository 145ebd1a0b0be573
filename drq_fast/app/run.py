"""A run: one folder with the settings, the model, its codes, an index of them and metrics.

`run.json` lists the files that commands have made. Only these are replaced or deleted; all others belong to the user.
Files are replaced atomically, so each is complete or absent. `codes.json` records the fingerprint of the model that
made the codes; codes of another model are refused. Codes are written block by block, and an interrupted encoding
resumes at the last block that was recorded.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from .. import __version__, checks, files
from ..files import FileError
from ..quantizer import RecurrentQuantizer
from ..retrieval.embedder import CONFIG, MODEL
from ..retrieval.experiment import Experiment
from ..retrieval.settings import Settings
from ..retrieval.train import CHECKPOINT
from .vectors import block_rows

fcntl: Any
try:
    import fcntl
except ImportError:  # On Windows nothing locks a run.
    fcntl = None

_IN_FOLDER = re.compile(r"report/[\w-][\w.-]*|codes/[^/\0]+\.parquet")
_SECONDS = 2.0  # between two records of progress; a killed encoding repeats at most this much


class Encodable(Protocol):
    """Vectors that can be encoded, and recognised when an interrupted encoding resumes."""

    dim: int

    def __len__(self) -> int: ...

    def identity(self) -> Any:
        """A value for JSON that changes when the vectors do."""

    def read(self, first: int, last: int) -> Tensor:
        """Rows first to last - 1, float32 [last - first, dim]."""


class Run:
    """The folder of a run and its files."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.record = self.folder / "run.json"
        self.model = self.folder / MODEL
        self.config = self.folder / CONFIG
        self.checkpoint = self.folder / CHECKPOINT
        self.codes = self.folder / "codes.npy"
        self.made_by = self.folder / "codes.json"
        self.parts = self.folder / "codes"  # of Parquet files
        self.index = self.folder / "index.drq"
        self.ids = self.folder / "ids.drq"
        self.queries = self.folder / "queries.npy"
        self.metrics = self.folder / "metrics.json"
        self.history = self.folder / "history.json"
        self.partial = self.folder / "codes.partial"
        self.partial_state = self.folder / "codes.partial.json"
        self.report = self.folder / "report"
        self.of_training = self.config, self.checkpoint, self.history
        self.of_codes = (
            self.codes,
            self.made_by,
            self.partial,
            self.partial_state,
            self.index,
            self.queries,
            self.metrics,
        )

    def made(self) -> set[str]:
        """The names of the files that commands have made, relative to the folder."""
        if not os.path.lexists(self.record):
            return self._made_without_record()
        content = self.read_json(self.record, "fit")
        names, known = content.get("made"), {path.name for path in self._paths()}
        if not isinstance(names, list) or not all(
            isinstance(name, str) and (name in known or _IN_FOLDER.fullmatch(name)) for name in names
        ):
            raise FileError(f"run: {self.record} was not written by drq-fast; choose another folder.")
        return set(names)

    def _made_without_record(self) -> set[str]:
        """The same for a run of version 0.1.0, which has no run.json; empty if the folder is not a run."""
        try:
            config = self.read_json(self.config, "fit")
            files.fingerprint(self.model, "quantizer")
        except (OSError, ValueError):
            return set()
        if not {"command", "drq_fast"} <= config.keys():
            return set()
        return {path.name for path in self._paths() if path.exists()} | set(self._in_report())

    def _paths(self) -> tuple[Path, ...]:
        return (self.model, *self.of_training, *self.of_codes, self.ids)

    def _in_report(self) -> list[str]:
        """The names of all that is in the folder `report`."""
        return [f"report/{name}" for name in sorted(os.listdir(self.report))] if self.report.is_dir() else []

    def _write_record(self, names: Iterable[str]) -> None:
        if names := sorted(names):
            files.write_text(self.record, json.dumps({"drq_fast": __version__, "made": names}, indent=1) + "\n")
        else:
            self.record.unlink(missing_ok=True)

    def claim_folder(self) -> None:
        """Raises FileError unless the folder is a run, empty or missing."""
        self._not_file()
        if not self.folder.is_dir() or self.made():
            return
        for name in sorted(os.listdir(self.folder)):
            if name != ".lock" and not files.TEMPORARY.fullmatch(name):
                raise FileError(
                    f"run: {self.folder} is not a run, but has files ({name}); choose a new or an empty folder."
                )

    def claim(self, *paths: Path) -> None:
        """Records these files as made by a command; FileError if one exists that was not."""
        made = self.made()
        new = {path.name for path in paths} - made
        for name in sorted(new):
            if os.path.lexists(self.folder / name):
                raise _foreign(self.folder / name)
        if new:
            self._write_record(made | new)

    def claim_parts(self, names: Iterable[str], force: bool) -> None:
        """Creates the folder of Parquet files and records these names in it; existing ones are replaced by `force`."""
        if os.path.lexists(self.parts) and (self.parts.is_symlink() or not self.parts.is_dir()):
            raise _foreign(self.parts)
        made, new = self.made(), {f"codes/{name}" for name in names}
        for name in sorted(new):
            if os.path.lexists(self.folder / name) and name not in made:
                raise _foreign(self.folder / name)
            vacant(self.folder / name, force)
        self.parts.mkdir(exist_ok=True)
        if new - made:
            self._write_record(made | new)

    def forget(self, *paths: Path) -> None:
        """Deletes those of these files, and of the report, that commands have made."""
        made = self.made()
        gone = made & ({path.name for path in paths} | set(self._in_report()))
        if self.codes in paths:
            gone |= {name for name in made if name.startswith("codes/")}
        for name in gone:
            if not ("/" in name and (self.folder / name).parent.is_symlink()):
                (self.folder / name).unlink(missing_ok=True)
        for folder in (self.report, self.parts):
            with suppress(OSError):  # there is none, or it has files
                folder.rmdir()
        if gone:
            self._write_record(made - gone)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Creates the folder and locks it; raises BlockingIOError if another process holds the lock."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise type(error)(f"run: {self.folder} cannot be made: {error.strerror or error}.") from error
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise PermissionError(f"run: {self.folder} cannot be written to.")
        path = self.folder / ".lock"
        try:
            file = files.open_regular(path, "a", follow=False)
        except OSError as error:
            raise type(error)(f"run: {path} cannot be opened: {error.strerror or error}.") from error
        with file:
            lock(file, self.folder)
            files.remove_remains(self.folder)
            yield

    @contextmanager
    def locked_model(self) -> Iterator[RecurrentQuantizer]:
        """The model, loaded under the lock of `writing`, so that no other process replaces it or its codes."""
        self.need_model()  # `writing` would create a missing folder
        with self.writing():
            yield self.quantizer()

    def vacant(self, path: Path, force: bool) -> None:
        """Raises FileError if a file of the user has this name, or a result and `force` is not set."""
        if os.path.lexists(path) and path.name not in self.made():
            raise _foreign(path)
        vacant(path, force)

    def all_vacant(self, force: bool, what: str = "a run already") -> None:
        """The same for the model and all files that commands have made; what: the run that is there."""
        self.vacant(self.model, force=True)
        if not force and any(os.path.lexists(self.folder / name) for name in self.made()):
            network = " and network" if self.checkpoint.name in self.made() else ""
            replaced = f"--force replaces its model{network} and deletes its codes, index, metrics and report"
            raise FileError(f"run: {self.folder} holds {what}; {replaced}.")

    def trained(self) -> bool:
        """Whether `train` has made this run, finished or not."""
        return not self.made().isdisjoint({self.checkpoint.name, self.history.name})

    def not_trained(self) -> None:
        """Raises FileError if this is a trained run, whose network would be lost."""
        if self.trained():
            raise FileError(f"run: {self.folder} holds a training, which `fit` never replaces; choose another folder.")

    def report_vacant(self, force: bool) -> None:
        """The same for the report."""
        if os.path.lexists(self.report) and (self.report.is_symlink() or not self.report.is_dir()):
            raise _foreign(self.report)
        for name in self._in_report():
            if name not in self.made():
                raise _foreign(self.folder / name)
        vacant(self.report, force)

    def need(self, path: Path, maker: str) -> None:
        """Raises FileNotFoundError if `path` is missing; `maker` names the command that makes it."""
        self._not_file()
        if not self.folder.is_dir():
            raise FileNotFoundError(f"run: {self.folder} does not exist; `drq-fast fit` or `train` makes a run.")
        if not path.exists():
            raise FileNotFoundError(f"run: {path} does not exist; {maker} makes it.")

    def _not_file(self) -> None:
        """Raises NotADirectoryError if the folder is a file, as where arguments are swapped."""
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"run: {self.folder} is a file, not the folder of a run, which comes first.")

    def need_model(self) -> None:
        """Raises FileNotFoundError if there is no model."""
        unfinished = not self.model.exists() and self.folder.is_dir() and self.trained()
        resumes = "the same `drq-fast train` command, which resumes,"
        self.need(self.model, resumes if unfinished else "`drq-fast fit` or `train`")

    def need_codes(self) -> None:
        """Raises FileNotFoundError if there are no codes, or if those of Parquet files are all that there is."""
        if not self.codes.exists() and any(name.startswith("codes/") for name in self.made()):
            only = f"{self.folder} has codes of Parquet files only, which `index` and `evaluate` do not read"
            raise FileNotFoundError(f"run: {only}; {self._encoding()} makes {self.codes.name}.")
        self.need(self.codes, self._encoding())

    def need_index(self) -> None:
        """Raises FileNotFoundError, which names the commands that are left to do, if there is no index."""
        maker = f"`drq-fast index {self.folder}`"
        if self.folder.is_dir() and not self.index.exists():
            self.need_model()
            if not self.codes.exists():
                maker = f"{self._encoding()}, then {maker},"
        self.need(self.index, maker)

    def _encoding(self) -> str:
        """The command that makes the codes of this run."""
        return f"`drq-fast encode {self.folder}{'' if self.trained() else ' FILE.npy'}`"

    def write_json(self, path: Path, value: Any) -> None:
        """Writes a JSON file of the run, atomically."""
        self.claim(path)
        files.write_text(path, json.dumps(value, indent=1) + "\n")

    def read_json(self, path: Path, command: str) -> Any:
        """The object in a JSON file of the run, which `drq-fast command` makes."""
        self.need(path, f"`drq-fast {command} {self.folder}`")
        return files.read_object("run", path)

    def quantizer(self) -> RecurrentQuantizer:
        """The model, read from its file."""
        self.need_model()
        return RecurrentQuantizer.load(self.model)

    def experiment(self) -> Experiment:
        """The experiment of a trained run, from its config."""
        config = self.read_json(self.config, "train")
        if config.get("command") != "train":
            raise FileError(f"run: {self.folder} was fitted without labels, not trained; name the vectors to encode.")
        try:
            settings, training = Settings.of_run(config)
        except (KeyError, TypeError) as error:
            raise FileError(f"run: {self.config} does not describe a training ({error}).") from error
        for path in settings.data:
            if not Path(path).exists():
                what = f"{path}, on which {self.folder} was trained, does not exist"
                raise FileNotFoundError(f"run: {what}; if it has moved, make a link there.")
        return Experiment(settings, training)

    def replace_model(self, layer: RecurrentQuantizer, config: dict[str, Any]) -> None:
        """Writes model and config; deletes everything that was made with an earlier model."""
        self.claim(self.model, self.config)
        with files.temporary_folder(self.folder) as temporary:
            layer.save(temporary / "new")
            self.forget(*self.of_codes, self.ids)
            self.write_json(self.config, config)
            os.replace(temporary / "new", self.model)

    def replace_report(self, new: Path, force: bool) -> None:
        """Moves a folder of files to its place as the report."""
        self.report_vacant(force)
        others, old = {name for name in self.made() if not name.startswith("report/")}, new.with_name("old")
        names = {f"report/{name}" for name in os.listdir(new)}
        self._write_record({*others, *names, *self._in_report()})
        try:
            if self.report.exists():
                os.replace(self.report, old)
            os.replace(new, self.report)
        finally:
            if old.exists() and not self.report.exists():
                os.replace(old, self.report)
        self._write_record(others | names)

    def encode(self, layer: RecurrentQuantizer, source: Encodable, *, beam: int, force: bool) -> None:
        """Writes the codes of all vectors; resumes an interrupted call with the same model, vectors and beam.

        `layer` must be the model of this run.
        """
        if source.dim != layer.dim:
            checks.fail("encode", "vectors", f"of {layer.dim} dimensions, as the model is", source.dim)
        for path in (self.codes, self.index, self.metrics):
            self.vacant(path, force)
        if not self.made().isdisjoint(self._in_report()):
            vacant(self.report, force)
        made_by = {
            "model": self.fingerprint(),
            "beam": checks.beam("encode", beam),
            "source": json.loads(json.dumps(source.identity())),
            "rows": len(source),
            "levels": layer.levels,
            "codewords": layer.codewords,
        }
        self.claim(self.codes, self.made_by, self.partial, self.partial_state)
        try:
            checksum = self._encode(source, layer, made_by)
        except OSError as error:
            if error.filename is None and error.errno is not None:  # raised by a write
                raise type(error)(f"run: {self.partial} cannot be written: {error.strerror}.") from error
            raise
        self.forget(self.index, self.metrics)
        self.write_json(self.made_by, made_by | {"checksum": checksum})
        os.replace(self.partial, self.codes)
        self.forget(self.partial, self.partial_state)

    def _encode(self, source: Encodable, layer: RecurrentQuantizer, made_by: dict[str, Any]) -> str:
        """Completes the partial file with the codes that it does not have yet; returns its checksum."""
        dtype = np.dtype(np.uint8 if layer.codewords <= 256 else np.int32)
        header = _npy_header(dtype, (len(source), layer.levels))
        row, step, total = layer.levels * dtype.itemsize, block_rows(source.dim), len(source)
        done, digest = self._resume(made_by, header, row)
        if not done:
            self.partial.unlink(missing_ok=True)
        with (
            files.open_regular(self.partial, "r+b" if done else "xb", follow=False) as file,
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
        """The number of rows of the same encoding on disk, and the digest of header and these rows."""
        try:
            state = files.read_json(self.partial_state)
            done, checksum = state.pop("done"), state.pop("checksum")
            digest = _file_digest(self.partial, len(header) + done * row)
            if state == made_by and digest.hexdigest() == checksum:
                return done, digest
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        return 0, _digest(header)

    def load_codes(self) -> tuple[Tensor, dict[str, Any]]:
        """Codes [N, levels] and the content of codes.json; FileError unless the run's model made them."""
        self.need_codes()
        made_by = self.read_json(self.made_by, "encode")
        if made_by.get("model") != self.fingerprint():
            raise FileError(f"run: {self.codes} was made by another model; encode again with --force.")
        codes = np.ascontiguousarray(files.read_array("run", self.codes))
        digest = _digest(_npy_header(codes.dtype, codes.shape))
        digest.update(codes.data)
        if made_by.get("checksum") != digest.hexdigest():
            raise FileError(f"run: {self.codes} does not match {self.made_by}; encode again with --force.")
        return torch.from_numpy(codes), made_by

    def fingerprint(self) -> str:
        """The checksum of the model, read from the header of its file."""
        return files.fingerprint(self.model, "quantizer")


def lock(file: IO[Any], path: Path) -> None:
    """Locks an open file until it is closed; BlockingIOError, which names `path`, if another process has done so."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BlockingIOError(f"run: another process is writing to {path}.") from error


def vacant(path: Path, force: bool) -> None:
    """Raises FileError if `path` exists and `force` is not set."""
    if os.path.lexists(path) and not force:
        raise FileError(f"run: {path} exists already; --force replaces it.")


def _foreign(path: Path) -> FileError:
    return FileError(f"run: {path} is not a result of this run; move it to another folder.")


def _npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    text = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        text, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )
    return text.getvalue()


def _digest(content: bytes = b"") -> Any:
    return hashlib.blake2b(content, digest_size=16)


def _file_digest(path: Path, length: int) -> Any:
    """The digest of the first `length` bytes of a file."""
    digest, left = _digest(), length
    with files.open_regular(path, follow=False) as file:
        while left and (block := file.read(min(left, 1 << 24))):
            digest.update(block)
            left -= len(block)
    return digest
