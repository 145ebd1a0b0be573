"""Files that are whole or not there: safetensors with a version and checksums of everything, replaced atomically."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from . import checks

# The version of the format that is written, by kind of file. Older ones are read: see MIGRATIONS.
VERSIONS = {"codec": 1, "index": 1, "quantizer": 1, "training": 1}

# (kind, version) -> a function that turns the tensors and the config of that version into those of the next, in place.
MIGRATIONS: dict[tuple[str, int], Callable[[dict[str, Tensor], dict[str, Any]], None]] = {}


class FileError(ValueError):
    """A file that cannot be read as what it was asked to be: foreign, newer, truncated or corrupted."""


def write(path: str | os.PathLike[str], kind: str, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Writes `tensors` and the JSON-able `config` to `path`; an old file there is kept until the new one is whole."""
    target = _target("save", path)
    if target.is_dir():
        raise IsADirectoryError(f"save: {target} cannot be written: it is a folder.")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = {
        "kind": f"drq_fast.{kind}",
        "version": str(VERSIONS[kind]),
        "config": json.dumps(config, sort_keys=True),
        "checksums": json.dumps({name: checksum(tensor) for name, tensor in tensors.items()}, sort_keys=True),
    }
    _replace(
        target, lambda temporary: save_file(tensors, temporary, metadata=header | {"header": header_checksum(header)})
    )


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file that is whole or not there; an old one is kept until then."""
    write_bytes(path, text.encode())


def write_array(path: str | os.PathLike[str], array: np.ndarray) -> None:
    """The same for an `.npy` file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    write_bytes(path, file.getbuffer())


def write_bytes(path: str | os.PathLike[str], content: bytes | memoryview) -> None:
    """The same for any content."""
    _replace(Path(path), lambda temporary: temporary.write_bytes(content))


def read_array(op: str, path: str | os.PathLike[str], *, mmap: bool = False) -> np.ndarray:
    """The array of an `.npy` file, or an error in one sentence; with `mmap` it stays on disk."""
    try:
        array = np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False)
    except OSError as error:
        raise _same_kind(error, f"{op}: {path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # numpy has as many kinds as there are ways to damage a file
        raise FileError(f"{op}: {path} is not a whole .npy file of numbers.") from error
    if not isinstance(array, np.ndarray):
        raise FileError(f"{op}: {path} is an archive of arrays, not a .npy file.")
    return array


def fingerprint(path: str | os.PathLike[str], kind: str) -> str:
    """What tells the contents of a file of this kind from others, read from its header alone."""
    with _opened(_target("load", path), kind) as (_, header):
        return header["header"]


def read(
    path: str | os.PathLike[str], kind: str, *, mmap: bool = False, unchecked: Iterable[str] = ()
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, str]]:
    """(tensors, config, checksums) of a file of this kind, or FileError in one sentence.

    Every tensor is verified against its checksum except those named in `unchecked`. With `mmap` tensors stay on disk
    until they are used.
    """
    target = _target("load", path)
    with _opened(target, kind) as (file, header):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    try:
        config, checksums = json.loads(header["config"]), json.loads(header["checksums"])
        if not isinstance(config, dict) or not isinstance(checksums, dict) or checksums.keys() != tensors.keys():
            raise ValueError
    except (KeyError, ValueError, RecursionError) as error:
        raise FileError(f"load: {target} is corrupted (its header does not describe its tensors).") from error
    if not mmap:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    skipped = frozenset(unchecked)
    for name, tensor in tensors.items():
        if name not in skipped:
            verify("load", target, name, tensor, checksums[name])
    for version in range(int(header["version"]), VERSIONS[kind]):
        MIGRATIONS[kind, version](tensors, config)
    return tensors, config, checksums


@contextmanager
def describing(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Within it, what is wrong with the contents of a file becomes a FileError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FileError(f"load: {path} does not describe {what} ({error}).") from error


def verify(op: str, path: Path, name: str, tensor: Tensor, expected: str) -> None:
    """FileError unless the tensor's bytes have the checksum that was stored with them."""
    if checksum(tensor) != expected:
        raise FileError(f"{op}: {path} is corrupted (checksum of {name!r} does not match).")


def remove_remains(folder: Path) -> None:
    """Removes what a killed process has left of its temporary folders; nobody may be writing meanwhile."""
    for path in folder.glob(".*.tmp"):
        if re.fullmatch(r"\.[0-9a-f]{16}\.tmp", path.name):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def checksum(tensor: Tensor) -> str:
    """BLAKE2b of the bytes, dtype and shape of a CPU tensor."""
    digest = hashlib.blake2b(f"{tensor.dtype}{list(tensor.shape)}".encode(), digest_size=16)
    if tensor.numel():
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def header_checksum(header: dict[str, str]) -> str:
    """BLAKE2b of all entries of a header but "header", which holds it."""
    entries = sorted((name, value) for name, value in header.items() if name != "header")
    return hashlib.blake2b(json.dumps(entries).encode(), digest_size=16).hexdigest()


@contextmanager
def _opened(target: Path, kind: str) -> Iterator[tuple[Any, dict[str, str]]]:
    """The file and its checked header; errors in one sentence."""
    try:
        target.open("rb").close()  # here an error has the class that Python gives it
        with safe_open(target, framework="pt") as file:
            header = file.metadata() or {}
            _check_header(target, kind, header)
            yield file, header
    except SafetensorError as error:
        raise FileError(f"load: {target} is not a whole safetensors file ({error}).") from error
    except OSError as error:
        raise _same_kind(error, f"load: {target} cannot be read: {error.strerror or error}.") from error


def _replace(target: Path, write: Callable[[Path], Any]) -> None:
    """Writes into a temporary folder, syncs, and renames; nothing is left behind by an error."""
    folder = target.with_name(f".{secrets.token_hex(8)}.tmp")  # safetensors has temporary files of its own
    try:
        try:
            folder.mkdir()
            temporary = folder / "new"
            temporary.touch()
            mode = temporary.stat().st_mode
            write(temporary)
            temporary.chmod(mode)  # safetensors leaves a file that nobody else may read
            _sync(temporary)
            os.replace(temporary, target)
            _sync(target.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except SafetensorError as error:
        raise OSError(f"save: {target} cannot be written: {error}.") from error
    except OSError as error:
        raise _same_kind(error, f"save: {target} cannot be written: {error.strerror or error}.") from error


def _check_header(path: Path, kind: str, header: dict[str, str]) -> None:
    found = header.get("kind", "")
    if not found.startswith("drq_fast."):
        raise FileError(f"load: {path} was not written by drq_fast.")
    if found != f"drq_fast.{kind}":
        raise FileError(f"load: {path} holds {_a(found.removeprefix('drq_fast.'))}, not {_a(kind)}.")
    version = header.get("version", "")
    if not version.isdecimal() or len(version) > 9 or int(version) < 1:
        raise FileError(f"load: {path} is corrupted (its version is {version[:20]!r}).")
    if int(version) > VERSIONS[kind]:
        raise FileError(
            f"load: {path} has format version {version}, newer than the {VERSIONS[kind]} that this drq_fast reads; "
            "upgrade drq_fast."
        )
    if header.get("header") != header_checksum(header):
        raise FileError(f"load: {path} is corrupted (checksum of its header does not match).")


def _a(noun: str) -> str:
    return f"an {noun}" if noun[:1] in "aeiou" else f"a {noun}"


def _target(op: str, path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    try:
        str(target).encode()
    except UnicodeEncodeError:
        checks.fail(op, "path", "valid UTF-8, as safetensors wants it", ascii(str(target)))
    return target


def _same_kind(error: OSError, message: str) -> OSError:
    """An error of the same class, so that `except FileNotFoundError` works, with one sentence as its text."""
    return type(error)(message)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
