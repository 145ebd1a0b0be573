"""Files written atomically: safetensors with a format version and checksums, text, and `.npy` arrays."""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from . import backends, checks
from .backends.native import extension

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows opens no folders: none is locked or synced, and remains of killed processes stay.
    fcntl = None

# Format version by kind of file; older versions can be read. Version 1 had BLAKE2b checksums of all bytes, version 2
# has those of `checksum`. Version 3 of a quantizer names its loss, version 4 how its codebook is trained. Version 3 of
# an index may have vectors.
VERSIONS = {"codec": 2, "index": 3, "quantizer": 4, "semantic_ids": 2, "training": 2}


def _name_update(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["update"] = "gradient"
    if config.get("loss") == "paper":
        config["commitment"] = None


# (kind, version) -> a function that converts tensors and config of that version to the next, in place. A version
# without an entry has the same contents as the next.
MIGRATIONS: dict[tuple[str, int], Callable[[dict[str, Tensor], dict[str, Any]], None]] = {
    ("quantizer", 2): lambda tensors, config: config.update(loss="paper"),
    ("quantizer", 3): _name_update,
}

# Names of temporary folders.
TEMPORARY = re.compile(r"\.drq_fast-[0-9a-f]{16}\.tmp")
_KEYS = 2048  # 32-bit words per sum
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class FileError(ValueError):
    """A file that is not of the requested kind, is of a newer version, truncated or corrupted."""


def write(path: str | os.PathLike[str], kind: str, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Writes `tensors` and the JSON-serialisable `config` to `path`, atomically; the same contents give the same bytes.

    A symbolic link is replaced by the file; what it points to stays.
    """
    target = _target("save", path)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            checks.fail("save", name, "of a dtype that safetensors stores", tensor.dtype, error=TypeError)
    header = {
        "kind": f"drq_fast.{kind}",
        "version": str(VERSIONS[kind]),
        "config": json.dumps(config, sort_keys=True),
        "checksums": json.dumps({name: checksum(tensor) for name, tensor in tensors.items()}, sort_keys=True),
    }
    header["header"] = header_checksum(header)
    _replace(target, lambda temporary: _write_tensors(temporary, tensors, header))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file, atomically: an existing file is kept until the new one is complete."""
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
    """The array of an `.npy` file; with `mmap` it stays on disk."""
    try:
        open_regular(path).close()
        array = np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False)
    except OSError as error:
        raise _same_kind(error, f"{op}: {path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # numpy raises many kinds of errors for damaged files
        if "Object arrays" in str(error) or "Python objects" in str(error):  # the second of memory maps
            raise FileError(f"{op}: {path} must hold numbers, got Python objects (dtype object).") from error
        hint = "; Parquet files are read by `drq-fast encode` alone" if Path(path).suffix == ".parquet" else ""
        raise FileError(f"{op}: {path} is not a complete .npy file of numbers{hint}.") from error
    if not isinstance(array, np.ndarray):
        raise FileError(f"{op}: {path} is an archive of arrays, not a .npy file.")
    return array


def read_json(path: str | os.PathLike[str]) -> Any:
    """The value in a JSON file; OSError if it cannot be read, ValueError if it is not JSON."""
    with open_regular(path) as file:
        try:
            return json.loads(file.read())
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


def read_object(op: str, path: str | os.PathLike[str]) -> dict[str, Any]:
    """The object in a JSON file; FileError if there is none."""
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise FileError(f"{op}: {path} cannot be read as JSON ({error}).") from error
    if not isinstance(value, dict):
        raise FileError(f"{op}: {path} must hold a JSON object.")
    return value


def open_regular(
    path: str | os.PathLike[str], mode: str = "rb", *, follow: bool = True, buffering: int = -1
) -> IO[Any]:
    """`open`; OSError for a FIFO, a socket or a device, and with `follow=False` for a symbolic link."""

    def opener(name: str, flags: int) -> int:
        link = 0 if follow else getattr(os, "O_NOFOLLOW", 0)
        handle = os.open(name, flags | link | getattr(os, "O_NONBLOCK", 0), 0o666)  # does not wait for a FIFO's writer
        kind = os.fstat(handle).st_mode
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):  # `open` itself refuses a folder
            os.close(handle)
            raise OSError(errno.EINVAL, "it is not a regular file", name)
        return handle

    return open(path, mode, buffering, opener=opener)


def fingerprint(path: str | os.PathLike[str], kind: str) -> str:
    """The checksum of a file's header, which identifies its contents; reads the header alone."""
    with _opened(_target("load", path), kind) as (_, header):
        return header["header"]


def read(
    path: str | os.PathLike[str], kind: str, *, mapped: Collection[str] = ()
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, str]]:
    """(tensors, config, checksums) of a file of this kind; raises FileError if it cannot be read.

    Tensors are copied, and the copies verified against their checksums. Those named in `mapped` stay on disk,
    unverified.
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
    tensors = {name: tensor if name in mapped else tensor.clone() for name, tensor in tensors.items()}
    for name in tensors.keys() - set(mapped):
        verify("load", target, name, tensors[name], checksums[name])
    for version in range(int(header["version"]), VERSIONS[kind]):
        MIGRATIONS.get((kind, version), lambda tensors, config: None)(tensors, config)
    return tensors, config, checksums


@contextmanager
def describing(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """A context in which errors about the contents of a file become a FileError."""
    try:
        yield
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise FileError(f"load: {path} does not describe {what} ({error}).") from error


def verify(op: str, path: Path, name: str, tensor: Tensor, expected: str) -> None:
    """Raises FileError unless the tensor's bytes match the stored checksum."""
    of = checksum if str(expected).startswith("sums:") else _checksum_of_version_1
    if of(tensor) != expected:
        raise FileError(f"{op}: {path} is corrupted (checksum of {name!r} does not match).")


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A new folder in `parent`, deleted at the end and locked until then, so that `remove_remains` leaves it alone."""
    folder, lock = _locked_folder(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A context that one process at a time is in; where the file system has no locks, any number of them."""
    if fcntl is None:
        yield
        return
    with _handle(folder) as handle:
        _flock(handle, wait=True)
        yield


def remove_remains(folder: Path) -> None:
    """Deletes temporary folders of killed processes: those whose lock nobody holds."""
    if fcntl is None:
        return
    with suppress(OSError):
        found = [entry.path for entry in os.scandir(folder) if TEMPORARY.fullmatch(entry.name)]
        for path in found:
            with suppress(OSError), _handle(path, os.O_NOFOLLOW | os.O_DIRECTORY) as handle:
                if _flock(handle, wait=False):
                    shutil.rmtree(path, ignore_errors=True)


def checksum(tensor: Tensor) -> str:
    """A checksum of the bytes, dtype and shape of a CPU tensor; it detects damage, not forgery.

    Each block of 32-bit words is reduced to a sum, every word times its own odd 64-bit key. The checksum is BLAKE2b of
    these sums. BLAKE2b of all bytes, at a gigabyte per second, would take most of the loading time.
    """
    column = backends.plain_torch if extension.native is None else backends.native
    sums = column.block_sums(_bytes(tensor), _keys()).numpy().astype("<i8", copy=False)
    return "sums:" + _blake2b(tensor, sums.data)


def _checksum_of_version_1(tensor: Tensor) -> str:
    return _blake2b(tensor, _bytes(tensor).numpy().data)


def _blake2b(tensor: Tensor, content: memoryview) -> str:
    digest = hashlib.blake2b(f"{tensor.dtype}{list(tensor.shape)}".encode(), digest_size=16)
    if tensor.numel():
        digest.update(content)
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


@functools.cache
def _keys() -> Tensor:
    """Odd 64-bit keys [_KEYS], the same in every version of this package: BLAKE2b of their position."""
    digests = (hashlib.blake2b(str(i).encode(), digest_size=8).digest() for i in range(_KEYS))
    return torch.from_numpy(np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64) | 1)


def header_checksum(header: dict[str, str]) -> str:
    """BLAKE2b of all entries of a header except "header", which stores it."""
    entries = sorted((name, value) for name, value in header.items() if name != "header")
    return hashlib.blake2b(json.dumps(entries).encode(), digest_size=16).hexdigest()


@contextmanager
def _opened(target: Path, kind: str) -> Iterator[tuple[Any, dict[str, str]]]:
    """The open file and its verified header."""
    try:
        open_regular(target).close()  # raises FileNotFoundError, PermissionError, ... where safetensors would not
        with safe_open(target, framework="pt") as file:
            header = file.metadata() or {}
            _check_header(target, kind, header)
            yield file, header
    except SafetensorError as error:
        raise FileError(f"load: {target} is not a complete safetensors file ({error}).") from error
    except OSError as error:
        raise _same_kind(error, f"load: {target} cannot be read: {error.strerror or error}.") from error


def _replace(target: Path, write: Callable[[Path], Any]) -> None:
    """Writes into a temporary folder, syncs, and renames; an error leaves nothing behind."""
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if target.exists() and not target.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file")
        remove_remains(target.parent)
        with temporary_folder(target.parent) as folder:
            temporary = folder / "new"
            write(temporary)
            _sync(temporary)
            os.replace(temporary, target)
            _sync(target.parent)
    except OSError as error:
        raise _same_kind(error, f"save: {target} cannot be written: {error.strerror or error}.") from error


def _write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file. `safetensors.torch.save_file` writes the metadata in random order."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so every tensor is aligned
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name in order:
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in order:
            file.write(_bytes(tensors[name]).numpy().data)


def _locked_folder(parent: Path) -> tuple[Path, int]:
    """A new temporary folder and the handle that holds its lock."""
    while True:
        folder = parent / f".drq_fast-{secrets.token_hex(8)}.tmp"
        folder.mkdir()
        with suppress(FileNotFoundError):  # `remove_remains` of another process deleted it before it was locked
            lock = os.open(os.devnull if fcntl is None else folder, os.O_RDONLY)
            _flock(lock, wait=True)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _flock(handle: int, *, wait: bool) -> bool:
    """Locks an open file or folder; False if another process has it, or if the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (OSError, AttributeError):  # AttributeError: there is no fcntl
        return False
    return True


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
        checks.fail(op, "path", "valid UTF-8, as safetensors requires", ascii(str(target)))
    return target


def _same_kind(error: OSError, message: str) -> OSError:
    """An error of the same class, so that `except FileNotFoundError` works, with this message."""
    return type(error)(message)


def _sync(path: Path) -> None:
    if fcntl is not None:
        with _handle(path) as handle:
            os.fsync(handle)


@contextmanager
def _handle(path: str | os.PathLike[str], flags: int = 0) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY | flags)
    try:
        yield handle
    finally:
        os.close(handle)
