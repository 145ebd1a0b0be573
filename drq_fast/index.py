"""Index: codes in memory, searched at any prefix length, with stable ids."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from . import checks, files, fit, functional, modes, reference
from .codes import bits
from .quantizer import Array, RecurrentQuantizer

_SCORES = 1 << 24  # scores [queries, N] held in memory at a time
_MAX_ID = (1 << 62) - 1


class IndexResult(NamedTuple):
    """scores [Q, k], best first, and ids [Q, k] int64, -1 where there were fewer than k; in kind with the query."""

    scores: Any
    ids: Any


class Index:
    """Codes of many vectors, searched by queries that are not quantized themselves.

    metric: "l2" (squared distance, less is better), "ip" (inner product) or "cosine". The codec's parameters are copied
    when the index is made, so training the layer further does not change it. Everything takes torch or numpy and
    answers in kind. Several threads may search, add and remove at the same time: a search sees the index as it was when
    it began.

    >>> index = Index(layer, metric="l2")
    >>> ids = index.add(x)
    >>> scores, ids = index.search(query, k=10, levels=2)
    """

    def __init__(self, layer: RecurrentQuantizer, metric: str = "l2", device: torch.device | str | None = None) -> None:
        if not isinstance(layer, RecurrentQuantizer):
            checks.fail("Index", "layer", "a RecurrentQuantizer", type(layer).__name__, error=TypeError)
        layer._require_initialised("Index")
        checks.choice("Index", "metric", metric, checks.METRICS)
        place = checks.device("Index", device, layer.codebook.device)
        with modes.plain(place):
            self._set_codec(
                codebook=layer.codebook.to(place, torch.float32, copy=True),
                scale=layer.scale.to(place, torch.float32, copy=True),
                offset=None if layer.offset is None else layer.offset.to(place, torch.float32, copy=True),
            )
            codes = torch.empty(0, self.levels, dtype=self._storage, device=place)
            ids = torch.empty(0, dtype=torch.int64, device=place)
            alive = torch.empty(0, dtype=torch.bool, device=place)
        for name, value in self._codec().items():
            checks.finite("Index", name, value)
        self.metric, self.level_weights = metric, layer.level_weights
        self._lock = threading.RLock()  # held while rows change and while a search notes what it will scan
        self._mapped: Tensor | None = None  # codes that lie in a file
        self._unverified: tuple[Path, str] | None = None  # that file and the checksum of its codes
        self._set_rows(codes, ids, alive, size=0, removed=0, next_id=0)

    def _set_rows(self, codes: Tensor, ids: Tensor, alive: Tensor, *, size: int, removed: int, next_id: int) -> None:
        """All that changes when rows come or go, in one step: an exception or Ctrl-C leaves the old rows or the new.

        size: rows in use, removed ones among them; the tensors may be longer.
        """
        self._codes: Tensor
        self._ids: Tensor
        self._alive: Tensor
        self._size: int
        self._removed: int
        self._next_id: int
        self._norms: dict[int, Tensor]  # by length, of all rows in use
        self.__dict__.update(
            _codes=codes, _ids=ids, _alive=alive, _size=size, _removed=removed, _next_id=next_id, _norms={}
        )

    def _set_codec(self, codebook: Tensor, scale: Tensor, offset: Tensor | None) -> None:
        self.codebook, self.scale, self.offset = codebook, scale, offset
        self.codewords, self.dim = codebook.shape
        self.levels = len(scale)
        # Two-byte codes lie in int16 bit for bit: torch's uint16 has hardly any operations.
        self._storage = torch.uint8 if self.codewords <= 256 else torch.int16

    def _codec(self) -> dict[str, Tensor]:
        parts = {"codebook": self.codebook, "scale": self.scale, "offset": self.offset}
        return {name: value for name, value in parts.items() if value is not None}

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {name: value for name, value in self.__dict__.items() if name != "_lock"} | {
                "_norms": dict(self._norms)
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())

    def __len__(self) -> int:
        with self._lock:
            return self._size - self._removed

    def __repr__(self) -> str:
        return f"Index({len(self)} vectors of {self.dim} dimensions in {self.bits} bits, metric={self.metric!r})"

    @property
    def bits(self) -> int:
        """Length of a full code in bits."""
        return bits(self.codewords, self.levels)

    @property
    def device(self) -> torch.device:
        """Where the codes are and the search runs."""
        return self.codebook.device

    @property
    def ids(self) -> Tensor:
        """All ids in the index [len], oldest first."""
        with self._lock:
            return self._ids[: self._size][self._alive[: self._size]]

    @property
    def codes(self) -> Tensor:
        """All codes in the index [len, levels], oldest first, uint8 for K <= 256, else int32."""
        with self._lock:
            return self._wide(self._codes[: self._size][self._alive[: self._size]])

    def encode(self, x: Array, beam: int = 1) -> Array:
        """x [N, dim] -> codes [N, levels], uint8 for K <= 256, else int32."""
        values = self._vectors("encode", "x", x)
        return checks.in_kind(self._encode(values, beam), x)

    def add(self, x: Array, ids: Array | Iterable[int] | None = None, *, beam: int = 1) -> Array:
        """Encodes x [N, dim] and stores the codes; returns their ids [N] int64, in kind.

        ids: unique, not negative and not in the index; by default the numbers after the highest ever used, so that a
        removed id is never given to another vector.
        """
        values = self._vectors("add", "x", x)
        checks.finite("add", "x", values, torch.float32)
        return checks.in_kind(self._append("add", self._encode(values, beam), ids), x)

    def add_codes(self, codes: Array, ids: Array | Iterable[int] | None = None) -> Array:
        """Stores codes [N, levels] that `encode` made; returns their ids as `add` does."""
        values = checks.array("add_codes", "codes", codes, integer=True).to(self.device)
        checks.codes("add_codes", values, self.codewords, self.levels, self.device)
        if values.shape[1] != self.levels:
            checks.fail("add_codes", "codes", f"[N, {self.levels}]", checks.shape_of(values))
        return checks.in_kind(self._append("add_codes", values, ids), codes)

    def search(
        self,
        query: Array,
        k: int = 10,
        levels: int | None = None,
        keep: Array | Iterable[int] | None = None,
    ) -> IndexResult:
        """The k best for each query [Q, dim] (or [dim]): IndexResult(scores [Q, k], ids [Q, k]).

        levels: use only the first so many levels of every code. keep: only these ids, or a bool array indexed by id;
        ids that are not in the index are passed over. Equal scores come oldest first. Where fewer than k vectors
        remain: id -1 and score +inf (l2) or -inf.
        """
        single = getattr(query, "ndim", 2) == 1
        values = self._vectors("search", "query", query[None] if single else query)
        checks.finite("search", "query", values, torch.float32)
        k = checks.integer("search", "k", k, 1, checks.MAX_RESULTS)
        length = checks.levels("search", levels, self.levels)
        with self._lock:
            rows = self._alive[: self._size].clone()
            if keep is not None:
                rows &= self._kept(keep)
            stored = self._ids[: self._size]
            codes = self._checked_codes(length)
            norms = self._squared_norms(codes) if self.metric != "ip" else None
        scores, positions = self._scan(values, k, codes, norms, None if bool(rows.all()) else rows)
        ids = positions if len(stored) == 0 else stored[positions.clamp_min(0)].where(positions >= 0, -1)
        if single:
            scores, ids = scores[0], ids[0]
        return IndexResult(checks.in_kind(scores, query), checks.in_kind(ids, query))

    def remove(self, ids: Array | Iterable[int]) -> None:
        """Takes vectors out by id. All ids must be in the index, else nothing is removed."""
        wanted = self._as_ids("remove", ids)
        with self._lock:
            positions = self._positions(wanted)
            missing = wanted[positions < 0]
            if len(missing):
                checks.fail("remove", "ids", "in the index", f"{int(missing[0])}, which is not")
            alive, removed = self._alive.clone(), self._removed + len(positions)
            alive[positions] = False
            if removed <= self._size // 2:
                self.__dict__.update(_alive=alive, _removed=removed)
                return
            self._verify("remove")
            rows = alive[: self._size].nonzero().squeeze(1)  # in their old order
            self._set_rows(
                self._codes[rows], self._ids[rows], alive[rows], size=len(rows), removed=0, next_id=self._next_id
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes codes, ids and codec to one safetensors file, atomically. Verifies a mapped index first."""
        with self._lock:
            self._verify("save")
            alive = self._alive[: self._size]
            tensors = self._codec() | {"codes": self._codes[: self._size][alive], "ids": self._ids[: self._size][alive]}
            config = {"metric": self.metric, "level_weights": self.level_weights, "next_id": self._next_id}
        files.write(path, "index", tensors, config)

    @classmethod
    def load(cls, path: str | os.PathLike[str], mmap: bool = False, device: torch.device | str | None = None) -> Index:
        """The index that `save` wrote. With `mmap` codes stay on disk until they are searched and are verified only by
        `verify()`; everything else is always verified."""
        place = checks.device("load", device, torch.device("cpu"))
        unchecked = ("codes",) if mmap else ()
        index = cls.__new__(cls)
        with modes.plain(place):
            tensors, config, checksums = files.read(path, "index", mmap=mmap, unchecked=unchecked)
            try:
                index._restore(tensors, config, place)
                if not mmap:
                    checks.code_range("load", index._wide(index._codes), index.codewords)
            except (KeyError, TypeError, ValueError) as error:
                raise files.FileError(f"load: {path} does not describe an index ({error}).") from error
        index._mapped = index._codes if mmap else None
        index._unverified = (Path(path), checksums["codes"]) if mmap else None
        return index

    def verify(self) -> None:
        """After an mmap load: reads all codes and raises FileError if they are not what was saved.

        Adding to such an index, compacting it after many removals or saving it verifies it first.
        """
        with self._lock:
            self._verify("verify")

    def _verify(self, op: str) -> None:
        if self._unverified is not None:
            path, expected = self._unverified
            files.verify(op, path, "codes", self._codes.cpu(), expected)
            self._check_range(op, self._wide(self._codes))
            self._unverified = None

    def _check_range(self, op: str, codes: Tensor) -> None:
        """FileError where a mapped file holds others than codes."""
        try:
            checks.code_range(op, codes, self.codewords)
        except ValueError as error:
            raise files.FileError(str(error)) from None

    def _restore(self, tensors: dict[str, Tensor], config: dict[str, Any], device: torch.device) -> None:
        if tensors.keys() - {"offset"} != {"codebook", "scale", "codes", "ids"}:
            checks.fail("load", "tensors", "codebook, scale, codes, ids and perhaps offset", ", ".join(sorted(tensors)))
        codebook, scale = tensors["codebook"], tensors["scale"]
        offset, codes, ids = tensors.get("offset"), tensors["codes"], tensors["ids"]
        for name in ("codebook", "scale", "offset"):
            if name in tensors and tensors[name].dtype != torch.float32:
                checks.fail("load", name, "torch.float32", tensors[name].dtype, error=TypeError)
        _, _, M = checks.codec("load", codebook, scale, offset)
        for name in ("codebook", "scale", "offset"):
            if name in tensors:
                checks.finite("load", name, tensors[name])
        # Copies: a matrix product of the same numbers gives other bits where a mapped file has them at odd addresses.
        self._set_codec(
            codebook.to(device, copy=True),
            scale.to(device, copy=True),
            None if offset is None else offset.to(device, copy=True),
        )
        if codes.dtype != self._storage or codes.ndim != 2 or codes.shape[1] != M:
            checks.fail("load", "codes", f"{self._storage} [N, {M}]", f"{codes.dtype} {checks.shape_of(codes)}")
        if ids.dtype != torch.int64 or ids.shape != codes.shape[:1]:
            checks.fail("load", "ids", f"torch.int64 [{len(codes)}]", f"{ids.dtype} {checks.shape_of(ids)}")
        checks.choice("load", "metric", config["metric"], checks.METRICS)
        self.metric = config["metric"]
        self.level_weights = checks.level_weights("load", config["level_weights"], M)
        checks.integer("load", "next_id", config["next_id"], 0, _MAX_ID + 1)
        next_id, distinct = config["next_id"], ids.unique()
        if len(distinct) != len(ids) or (len(ids) and not 0 <= int(distinct[0]) <= int(distinct[-1]) < next_id):
            checks.fail("load", "ids", f"unique and in 0..{next_id - 1}", "others")
        self._lock = threading.RLock()
        alive = torch.ones(len(codes), dtype=torch.bool, device=device)
        self._set_rows(codes.to(device), ids.to(device, copy=True), alive, size=len(codes), removed=0, next_id=next_id)

    def _vectors(self, op: str, name: str, value: Any) -> Tensor:
        values = checks.array(op, name, value)
        if values.ndim != 2 or values.shape[1] != self.dim:
            checks.fail(op, name, f"[N, {self.dim}]", checks.shape_of(values))
        return values

    def _encode(self, x: Tensor, beam: int) -> Tensor:
        beam = checks.beam("encode", beam)
        return fit.encode(x, self.codebook, self.scale, self.offset, beam, self.level_weights)

    def _append(self, op: str, codes: Tensor, ids: Any) -> Tensor:
        """Stores checked codes; the arrays double when they are full, so adding one is O(1) on average, but for the
        search for repeats among own ids."""
        with self._lock, modes.plain(self.device):
            return self._append_locked(op, codes, ids)

    def _append_locked(self, op: str, codes: Tensor, ids: Any) -> Tensor:
        if ids is None and self._next_id + len(codes) > _MAX_ID + 1:
            checks.fail(op, "ids", "given, since there are too few above the highest one in use", "None")
        if ids is None:
            new_ids = torch.arange(self._next_id, self._next_id + len(codes), device=self.device)
        else:
            new_ids = self._new_ids(op, ids, len(codes))
        self._verify(op)
        size, end = self._size, self._size + len(codes)
        arrays = [self._codes, self._ids, self._alive]
        if end > len(self._codes):
            arrays = [_grown(array, size, max(end, 2 * len(self._codes))) for array in arrays]
        stored_codes, stored_ids, alive = arrays
        stored_codes[size:end] = codes.to(self._storage)  # nobody looks beyond `size` yet
        stored_ids[size:end] = new_ids
        alive[size:end] = True
        next_id = max(self._next_id, int(new_ids.max()) + 1) if len(new_ids) else self._next_id
        self._set_rows(stored_codes, stored_ids, alive, size=end, removed=self._removed, next_id=next_id)
        return new_ids.clone()

    def _new_ids(self, op: str, ids: Any, count: int) -> Tensor:
        new_ids = self._as_ids(op, ids)
        if len(new_ids) != count:
            checks.fail(op, "ids", f"{count} numbers, one per vector", len(new_ids))
        taken = new_ids[self._positions(new_ids) >= 0]
        if len(taken):
            checks.fail(op, "ids", "new", f"{int(taken[0])}, which is in the index already")
        return new_ids

    def _as_ids(self, op: str, ids: Any) -> Tensor:
        """User's ids as int64 [n]: in 0.._MAX_ID, no number twice."""
        values = checks.id_array(op, "ids", ids)
        values = checks.integers(op, "ids", values).to(self.device, torch.int64)
        for bound in torch.aminmax(values) if len(values) else ():
            checks.integer(op, "ids", int(bound), 0, _MAX_ID)
        ordered = values.sort().values
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            checks.fail(op, "ids", "unique", f"{int(twice[0])} more than once")
        return values

    def _positions(self, ids: Tensor) -> Tensor:
        """The row of each id [n], -1 where it is not in the index."""
        rows = self._alive[: self._size].nonzero().squeeze(1)
        if len(rows) == 0:
            return torch.full_like(ids, -1)
        stored = self._ids[rows]
        if bool((stored[1:] < stored[:-1]).any()):
            stored, order = stored.sort()
            rows = rows[order]
        place = torch.searchsorted(stored, ids).clamp_max(len(stored) - 1)
        return torch.where(stored[place] == ids, rows[place], -1)

    def _kept(self, keep: Any) -> Tensor:
        """The user's filter as a bool mask over rows [size]."""
        flags = checks.id_array("search", "keep", keep).to(self.device)
        if flags.dtype != torch.bool:
            return torch.isin(self._ids[: self._size], flags)
        if len(flags) < self._next_id:
            checks.fail("search", "keep", f"[{self._next_id}] or longer, one per id", checks.shape_of(flags))
        return flags[self._ids[: self._size]]

    def _checked_codes(self, length: int) -> Tensor:
        """The first levels of all rows in use, [size, length]; refused where a mapped file holds others than codes."""
        codes = self._wide(self._codes[: self._size, :length])
        if self._codes is self._mapped and self.codewords not in (256, 65536):  # with these every number is a code
            codes = codes.clone()  # the file could change after the check
            self._check_range("search", codes)
        return codes

    def _scan(
        self, query: Tensor, k: int, codes: Tensor, norms: Tensor | None, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(scores [Q, k], rows [Q, k]) by blocks of queries, so that memory stays bounded."""
        step = max(1, _SCORES // max(1, len(codes)))
        scores = torch.empty(len(query), k, dtype=torch.float32, device=self.device)
        rows = torch.empty(len(query), k, dtype=torch.int64, device=self.device)
        for first in tqdm(range(0, len(query), step), desc="search", delay=2, disable=None, leave=False):
            block = slice(first, min(first + step, len(query)))
            scores[block], rows[block] = functional.search(
                query[block].to(self.device, torch.float32),
                codes,
                self.codebook,
                self.scale,
                k=k,
                offset=self.offset,
                metric=self.metric,
                norms=norms,
                keep=keep,
            )
        return scores, rows

    def _squared_norms(self, codes: Tensor) -> Tensor:
        """What `functional.search` takes as norms, for all rows; kept until rows are added or moved."""
        length = codes.shape[1]
        if length not in self._norms:
            offset = self.offset if self.metric == "cosine" else None
            with modes.plain(self.device):
                self._norms[length] = reference.squared_norms(codes, self.codebook, self.scale, offset)
        return self._norms[length]

    def _wide(self, codes: Tensor) -> Tensor:
        """Stored codes as numbers 0..K-1: uint8 as they are, two-byte codes as int32."""
        return codes if codes.dtype == torch.uint8 else codes.to(torch.int32) & 0xFFFF


def _grown(tensor: Tensor, used: int, capacity: int) -> Tensor:
    grown = torch.empty(capacity, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
    grown[:used] = tensor[:used]
    return grown
