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
from ..codec import Codec, from_file
from .coarse import list_dtype
from .ids import MAX_ID
from .rows import Content, Rows, id_dtype, no_rows, with_room
from .tuning import Tuning, from_json
from .vectors import DTYPES

MAPPED = ("codes", "vectors", "steps")  # tensors that can stay on disk


class Contents(NamedTuple):
    """What a file holds, and the checksums of its tensors by name."""

    codec: Codec
    metric: str
    centroids: Tensor | None
    tuning: Tuning | None
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
        copies = {name: self._copied(op, name, more) for name in self.tensors.keys() & names}
        return rows._replace(content=rows.content._replace(**copies))

    def _copied(self, op: str, name: str, more: int) -> Tensor:
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


def code_dtype(codewords: int) -> torch.dtype:
    """How codes are stored: two-byte codes lie in int16 bit for bit, because torch's uint16 has few operations."""
    return torch.uint8 if codewords <= 256 else torch.int16


def write(
    path: str | os.PathLike[str],
    codec: Codec,
    metric: str,
    centroids: Tensor | None,
    tuning: Tuning | None,
    rows: Rows,
) -> None:
    """Writes one safetensors file, atomically."""
    parts = {"codebook": codec.codebook, "scale": codec.scale, "offset": codec.offset, "centroids": centroids}
    rows = rows.living()
    tensors = {name: t for name, t in parts.items() if t is not None} | rows.tensors()
    tensors |= {} if rows.ids is None else {"ids": rows.ids.long()}
    config = {"metric": metric, **codec.settings(), "next_id": rows.next_id, "ordered": rows.ordered}
    config |= {} if tuning is None else {"tuning": tuning.as_json()}
    files.write(path, "index", tensors, config)


def read(path: str | os.PathLike[str], mmap: bool, device: torch.device) -> Contents:
    """The contents of a file; with `mmap` codes and vectors stay on disk, unverified."""
    tensors, config, checksums = files.read(path, "index", mapped=MAPPED if mmap else ())
    with files.describing(path, "an index"):
        names = ("offset", "ids", "vectors", "steps", "centroids", "lists")
        if tensors.keys() - set(names) != {"codebook", "scale", "codes"}:
            expected = f"codebook, scale, codes and perhaps {', '.join(names[:-1])} and {names[-1]}"
            checks.fail("load", "tensors", expected, ", ".join(sorted(tensors)))
        codec, codes = from_file(tensors, config, device), tensors["codes"]
        wanted = code_dtype(codec.codewords)
        if codes.dtype != wanted or codes.ndim != 2 or codes.shape[1] != codec.levels:
            checks.fail("load", "codes", f"{wanted} [N, {codec.levels}]", f"{codes.dtype} {checks.shape_of(codes)}")
        if not mmap:
            checks.code_range("load", numbers(codes), codec.codewords)
        checks.choice("load", "metric", config["metric"], checks.METRICS)
        _check_vectors(tensors, [len(codes), codec.dim])
        for name in ("vectors", "steps") if not mmap else ():
            if tensors.get(name) is not None:
                checks.finite("load", name, tensors[name])
        ordered = _check_lists(tensors, config, codec.dim)
        named = {name: tensors[name].to(device) for name in (*MAPPED, "lists") if name in tensors}
        rows = _rows(Content(**named), ordered, tensors.get("ids"), config)
        centroids = tensors.get("centroids")
        centroids = None if centroids is None else centroids.to(device)
        tuning = (
            from_json(config["tuning"], None if centroids is None else len(centroids)) if "tuning" in config else None
        )
        return Contents(codec, config["metric"], centroids, tuning, rows, checksums)


def _check_lists(tensors: dict[str, Tensor], config: dict[str, Any], dim: int) -> int:
    """Checks centroids and the lists of rows; returns how many rows are in the order of their lists."""
    centroids, lists, N = tensors.get("centroids"), tensors.get("lists"), len(tensors["codes"])
    if centroids is None or lists is None:
        if centroids is not lists:
            checks.fail("load", "centroids", "there if and only if lists are", "one of them")
        return 0
    if centroids.dtype != torch.float32 or centroids.ndim != 2 or centroids.shape[1] != dim or len(centroids) == 0:
        wanted = f"torch.float32 [L, {dim}]"
        checks.fail("load", "centroids", wanted, f"{centroids.dtype} {checks.shape_of(centroids)}")
    checks.finite("load", "centroids", centroids)
    if lists.dtype != list_dtype(len(centroids)) or list(lists.shape) != [N]:
        wanted = f"{list_dtype(len(centroids))} [{N}]"
        checks.fail("load", "lists", wanted, f"{lists.dtype} {checks.shape_of(lists)}")
    ordered = checks.integer("load", "ordered", config["ordered"], 0, N)
    if N and not 0 <= int(lists.min()) <= int(lists.max()) < len(centroids):
        checks.fail("load", "lists", f"in 0..{len(centroids) - 1}", "others")
    if bool((lists[1:ordered] < lists[: max(0, ordered - 1)]).any()):
        checks.fail("load", "lists", f"ascending in the first {ordered} rows", "others")
    return ordered


def _check_vectors(tensors: dict[str, Tensor], shape: list[int]) -> None:
    """Checks the vectors of a file whose codes are those of [N, D] vectors."""
    values, steps = tensors.get("vectors"), tensors.get("steps")
    if values is None:
        if steps is not None:
            checks.fail("load", "steps", "absent, as there are no vectors", checks.shape_of(steps))
        return
    if values.dtype not in DTYPES.values() or list(values.shape) != shape:
        wanted = f"float32, float16 or int8 {shape}"
        checks.fail("load", "vectors", wanted, f"{values.dtype} {checks.shape_of(values)}")
    if (steps is not None) != (values.dtype is torch.int8):
        checks.fail("load", "steps", "there if and only if vectors are int8", f"vectors of {values.dtype}")
    if steps is not None and (steps.dtype != torch.float32 or list(steps.shape) != shape[:1]):
        checks.fail("load", "steps", f"torch.float32 {shape[:1]}", f"{steps.dtype} {checks.shape_of(steps)}")


def _rows(content: Content, ordered: int, ids: Tensor | None, config: dict[str, Any]) -> Rows:
    codes = content.codes
    next_id = checks.integer("load", "next_id", config["next_id"], 0, MAX_ID + 1)
    if ids is None and next_id != len(codes):
        checks.fail("load", "next_id", f"{len(codes)}, as there are no ids", next_id)
    if ids is not None:
        if ids.dtype != torch.int64 or ids.shape != codes.shape[:1]:
            checks.fail("load", "ids", f"torch.int64 [{len(codes)}]", f"{ids.dtype} {checks.shape_of(ids)}")
        distinct = ids.unique()
        if len(distinct) != len(ids) or (len(ids) and not 0 <= int(distinct[0]) <= int(distinct[-1]) < next_id):
            checks.fail("load", "ids", f"unique and in 0..{next_id - 1}", "others")
        ids = ids.to(codes.device, id_dtype(next_id))
    return no_rows(content)._replace(ids=ids, size=len(codes), ordered=ordered, next_id=next_id)
