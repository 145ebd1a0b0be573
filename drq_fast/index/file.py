"""The file of an index: what it holds, and the checks that a foreign or damaged one fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks, files
from ..backends.torch import numbers
from ..codec import Codec, from_file
from .ids import MAX_ID
from .rows import Rows, with_room


class Contents(NamedTuple):
    """What a file holds; checksum: of the codes."""

    codec: Codec
    metric: str
    rows: Rows
    checksum: str


class Mapped(NamedTuple):
    """Codes [N, levels] that lie in a file, with its path and the checksum of the codes.

    Another process may write to the file at any time, so that only a copy of the codes stays as it was verified.
    """

    codes: Tensor
    path: Path
    checksum: str

    def copied(self, op: str, codewords: int, more: int) -> Tensor:
        """A verified copy in memory, with room for at least `more` rows."""
        codes = with_room(self.codes, len(self.codes), len(self.codes) + more) if more else self.codes.clone()
        self.verify(op, codewords, codes[: len(self.codes)])
        return codes

    def verify(self, op: str, codewords: int, codes: Tensor | None = None) -> None:
        """FileError if the codes, or this copy of them, are not those that were saved."""
        codes = self.codes if codes is None else codes
        files.verify(op, self.path, "codes", codes.cpu(), self.checksum)
        try:
            checks.code_range(op, numbers(codes), codewords)
        except ValueError as error:
            raise files.FileError(str(error)) from None


def storage(codewords: int) -> torch.dtype:
    """How codes are stored: two-byte codes lie in int16 bit for bit, because torch's uint16 has few operations."""
    return torch.uint8 if codewords <= 256 else torch.int16


def write(path: str | os.PathLike[str], codec: Codec, metric: str, rows: Rows) -> None:
    """Writes one safetensors file, atomically."""
    codes, ids = rows.living()
    tensors = {"codebook": codec.codebook, "scale": codec.scale, "offset": codec.offset, "codes": codes, "ids": ids}
    config = {"metric": metric, "level_weights": codec.level_weights, "next_id": rows.next_id}
    files.write(path, "index", {name: t for name, t in tensors.items() if t is not None}, config)


def read(path: str | os.PathLike[str], mmap: bool, device: torch.device) -> Contents:
    """The contents of a file; with `mmap` the codes stay on disk, unverified."""
    tensors, config, checksums = files.read(path, "index", mapped=("codes",) if mmap else ())
    with files.describing(path, "an index"):
        if tensors.keys() - {"offset", "ids"} != {"codebook", "scale", "codes"}:
            expected = "codebook, scale, codes and perhaps offset and ids"
            checks.fail("load", "tensors", expected, ", ".join(sorted(tensors)))
        codec, codes = from_file(tensors, config, device), tensors["codes"]
        wanted = storage(codec.codewords)
        if codes.dtype != wanted or codes.ndim != 2 or codes.shape[1] != codec.levels:
            checks.fail("load", "codes", f"{wanted} [N, {codec.levels}]", f"{codes.dtype} {checks.shape_of(codes)}")
        if not mmap:
            checks.code_range("load", numbers(codes), codec.codewords)
        checks.choice("load", "metric", config["metric"], checks.METRICS)
        rows = _rows(codes.to(device), tensors.get("ids"), config)
        return Contents(codec, config["metric"], rows, checksums["codes"])


def _rows(codes: Tensor, ids: Tensor | None, config: dict[str, Any]) -> Rows:
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
    return Rows(codes, ids, None, size=len(codes), removed=0, next_id=next_id, generation=0)
