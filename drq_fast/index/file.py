"""The file of an index: what it holds, and the checks that a foreign or damaged one fails."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks, files
from ..backends.torch import numbers
from ..backends.types import Stored
from ..codec import Codec, from_file
from .ids import MAX_ID
from .rows import Rows, with_room
from .vectors import DTYPES

MAPPED = ("codes", "vectors", "steps")  # tensors that can stay on disk


class Contents(NamedTuple):
    """What a file holds, and the checksums of its tensors by name."""

    codec: Codec
    metric: str
    rows: Rows
    checksums: dict[str, str]


class Mapped(NamedTuple):
    """Tensors of rows that lie in a file, by name, with its path and the checksums of its tensors.

    Another process may write to the file at any time, so that only a copy of a tensor stays as it was verified.
    """

    tensors: dict[str, Tensor]
    path: Path
    checksums: dict[str, str]

    def kept(self, rows: Rows) -> Mapped | None:
        """What of it these rows still have."""
        used = rows.tensors()
        tensors = {name: tensor for name, tensor in self.tensors.items() if used.get(name) is tensor}
        return self._replace(tensors=tensors) if tensors else None

    def in_memory(self, op: str, rows: Rows, names: Collection[str], more: int) -> Rows:
        """The rows with verified copies of tensors that are mapped, with room for at least `more` rows."""
        copies = {name: self._copied(op, rows, name, more) for name in self.tensors.keys() & names}
        stored = rows.vectors
        if stored is not None:
            stored = Stored(copies.get("vectors", stored.values), copies.get("steps", stored.steps))
        return rows._replace(codes=copies.get("codes", rows.codes), vectors=stored)

    def _copied(self, op: str, rows: Rows, name: str, more: int) -> Tensor:
        mapped = self.tensors[name]
        copy = with_room(mapped, len(mapped), len(mapped) + more) if more else mapped.clone()
        self._verify(op, name, copy[: len(mapped)])
        return copy

    def verify(self, op: str, codewords: int) -> None:
        """FileError if the tensors in the file are not those that were saved."""
        for name, tensor in self.tensors.items():
            self._verify(op, name, tensor)
            if name == "codes":
                check_codes(op, tensor, codewords)

    def _verify(self, op: str, name: str, tensor: Tensor) -> None:
        files.verify(op, self.path, name, tensor.cpu(), self.checksums[name])


def check_codes(op: str, codes: Tensor, codewords: int) -> None:
    """FileError if a file has a code that no codeword has."""
    try:
        checks.code_range(op, numbers(codes), codewords)
    except ValueError as error:
        raise files.FileError(str(error)) from None


def storage(codewords: int) -> torch.dtype:
    """How codes are stored: two-byte codes lie in int16 bit for bit, because torch's uint16 has few operations."""
    return torch.uint8 if codewords <= 256 else torch.int16


def write(path: str | os.PathLike[str], codec: Codec, metric: str, rows: Rows) -> None:
    """Writes one safetensors file, atomically."""
    of_codec = {"codebook": codec.codebook, "scale": codec.scale, "offset": codec.offset}
    tensors = {name: t for name, t in of_codec.items() if t is not None} | rows.living().tensors()
    config = {"metric": metric, **codec.settings(), "next_id": rows.next_id}
    files.write(path, "index", tensors, config)


def read(path: str | os.PathLike[str], mmap: bool, device: torch.device) -> Contents:
    """The contents of a file; with `mmap` codes and vectors stay on disk, unverified."""
    tensors, config, checksums = files.read(path, "index", mapped=MAPPED if mmap else ())
    with files.describing(path, "an index"):
        if tensors.keys() - {"offset", "ids", "vectors", "steps"} != {"codebook", "scale", "codes"}:
            expected = "codebook, scale, codes and perhaps offset, ids, vectors and steps"
            checks.fail("load", "tensors", expected, ", ".join(sorted(tensors)))
        codec, codes = from_file(tensors, config, device), tensors["codes"]
        wanted = storage(codec.codewords)
        if codes.dtype != wanted or codes.ndim != 2 or codes.shape[1] != codec.levels:
            checks.fail("load", "codes", f"{wanted} [N, {codec.levels}]", f"{codes.dtype} {checks.shape_of(codes)}")
        if not mmap:
            checks.code_range("load", numbers(codes), codec.codewords)
        checks.choice("load", "metric", config["metric"], checks.METRICS)
        vectors = _vectors(tensors, [len(codes), codec.dim], device)
        for name in ("vectors", "steps") if vectors is not None and not mmap else ():
            if tensors.get(name) is not None:
                checks.finite("load", name, tensors[name])
        rows = _rows(codes.to(device), vectors, tensors.get("ids"), config)
        return Contents(codec, config["metric"], rows, checksums)


def _vectors(tensors: dict[str, Tensor], shape: list[int], device: torch.device) -> Stored | None:
    """The vectors of a file whose codes are those of [N, D] vectors."""
    values, steps = tensors.get("vectors"), tensors.get("steps")
    if values is None:
        if steps is not None:
            checks.fail("load", "steps", "absent, as there are no vectors", checks.shape_of(steps))
        return None
    if values.dtype not in DTYPES.values() or list(values.shape) != shape:
        wanted = f"float32, float16 or int8 {shape}"
        checks.fail("load", "vectors", wanted, f"{values.dtype} {checks.shape_of(values)}")
    if (steps is not None) != (values.dtype is torch.int8):
        checks.fail("load", "steps", "there if and only if vectors are int8", f"vectors of {values.dtype}")
    if steps is not None and (steps.dtype != torch.float32 or list(steps.shape) != shape[:1]):
        checks.fail("load", "steps", f"torch.float32 {shape[:1]}", f"{steps.dtype} {checks.shape_of(steps)}")
    return Stored(values.to(device), None if steps is None else steps.to(device))


def _rows(codes: Tensor, vectors: Stored | None, ids: Tensor | None, config: dict[str, Any]) -> Rows:
    next_id = checks.integer("load", "next_id", config["next_id"], 0, MAX_ID + 1)
    if ids is None and next_id != len(codes):
        checks.fail("load", "next_id", f"{len(codes)}, as there are no ids", next_id)
    if ids is not None:
        if ids.dtype != torch.int64 or ids.shape != codes.shape[:1]:
            checks.fail("load", "ids", f"torch.int64 [{len(codes)}]", f"{ids.dtype} {checks.shape_of(ids)}")
        distinct = ids.unique()
        if len(distinct) != len(ids) or (len(ids) and not 0 <= int(distinct[0]) <= int(distinct[-1]) < next_id):
            checks.fail("load", "ids", f"unique and in 0..{next_id - 1}", "others")
        ids = ids.to(codes.device)
    return Rows(codes, vectors, ids, None, size=len(codes), removed=0, next_id=next_id, generation=0)
