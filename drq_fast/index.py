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

from . import checks, files, fit, functional, modes
from .codes import bits
from .quantizer import Array, RecurrentQuantizer

_SCORES = 1 << 24  # scores [queries, N] held in memory at a time
_MAX_ID = (1 << 62) - 1


class IndexResult(NamedTuple):
    """scores [Q, k], best first, and ids [Q, k] int64, -1 where there were fewer than k; in kind with the query."""

    scores: Any
    ids: Any


class _Rows(NamedTuple):
    """The rows of an index; its tensors may be longer than the rows in use."""

    codes: Tensor  # [>= size, levels]
    ids: Tensor | None  # [>= size] int64; None while every id is the number of its row
    alive: Tensor | None  # [>= size] bool; None while nothing has been removed
    size: int  # rows in use, removed ones among them
    removed: int | None  # how many of those; None: to be counted
    next_id: int

    def living_count(self) -> int:
        """Rows that have not been removed."""
        if self.removed is None and self.alive is not None:
            return int(self.alive[: self.size].sum())
        return self.size - (self.removed or 0)

    def used(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """codes, ids and alive of the rows in use."""
        codes, ids, alive = self[:3]
        return (
            codes[: self.size],
            None if ids is None else ids[: self.size],
            None if alive is None else alive[: self.size],
        )

    def living(self) -> tuple[Tensor, Tensor | None]:
        """codes and ids of the rows that have not been removed, in their order."""
        codes, ids, alive = self.used()
        if alive is None:
            return codes, ids
        rows = alive.nonzero().squeeze(1)
        return codes[rows], rows if ids is None else ids[rows]

    def compacted(self) -> _Rows:
        """The same without the removed rows."""
        codes, ids = self.living()
        return _Rows(codes, ids, None, size=len(codes), removed=0, next_id=self.next_id)


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
        for name, value in self._codec().items():
            checks.finite("Index", name, value)
        self.metric, self.level_weights = metric, layer.level_weights
        self._lock = threading.RLock()  # held while rows change and while a search notes what it will scan
        self._mapped: Tensor | None = None  # codes that lie in a file
        self._unverified: tuple[Path, str] | None = None  # that file and the checksum of its codes
        self._set_rows(_Rows(codes, None, None, size=0, removed=0, next_id=0))

    def _set_rows(self, rows: _Rows, norms: dict[int, Tensor] | None = None) -> None:
        """All that changes when rows come or go, in one step: an exception or Ctrl-C leaves the old rows or the new.

        norms: by length, of the first rows; all that was known if rows were only added.
        """
        self._rows: _Rows
        self._norms: dict[int, Tensor]
        self.__dict__.update(_rows=rows, _norms=norms or {})

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
        return self._rows.living_count()

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
            codes, ids = self._rows.living()
            return torch.arange(len(codes), device=self.device) if ids is None else ids.clone()

    @property
    def codes(self) -> Tensor:
        """All codes in the index [len, levels], oldest first, uint8 for K <= 256, else int32."""
        with self._lock:
            return functional.two_bytes(self._rows.living()[0].clone())

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

    def upsert(self, x: Array, ids: Array | Iterable[int], *, beam: int = 1) -> Array:
        """`add` that replaces the vectors whose ids are in the index already; they count as new from then on."""
        values = self._vectors("upsert", "x", x)
        checks.finite("upsert", "x", values, torch.float32)
        return checks.in_kind(self._append("upsert", self._encode(values, beam), ids, replace=True), x)

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
        with self._lock, modes.plain(self.device):
            rows = self._rows
            mask = self._mask(rows, keep)
            codes = self._checked_codes(rows, length)
            norms = self._squared_norms(codes) if self.metric != "ip" else None
        scores, ids = self._scan(values, k, codes, norms, mask)
        if rows.ids is not None and rows.size:
            ids = rows.ids[ids.clamp_min(0)].where(ids >= 0, -1)
        if single:
            scores, ids = scores[0], ids[0]
        return IndexResult(checks.in_kind(scores, query), checks.in_kind(ids, query))

    def remove(self, ids: Array | Iterable[int]) -> None:
        """Takes vectors out by id. All ids must be in the index, else nothing is removed."""
        wanted = self._as_ids("remove", ids)
        with self._lock, modes.plain(self.device):
            rows = self._rows
            positions = self._positions(wanted)
            missing = wanted[positions < 0]
            if len(missing):
                checks.fail("remove", "ids", "in the index", f"{int(missing[0])}, which is not")
            left = rows.living_count() - len(positions)
            if 2 * left >= rows.size:
                alive = _all_alive(rows) if rows.alive is None else rows.alive
                # Interrupted between these, it is done or not, and counted when somebody asks.
                self._set_rows(rows._replace(alive=alive, removed=None), self._norms)
                alive.index_fill_(0, positions, False)
                self._set_rows(rows._replace(alive=alive, removed=rows.size - left), self._norms)
                return
            self._verify("remove")
            alive = _all_alive(rows) if rows.alive is None else rows.alive.clone()
            alive.index_fill_(0, positions, False)
            self._set_rows(rows._replace(alive=alive).compacted())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes codes, ids and codec to one safetensors file, atomically. Verifies a mapped index first."""
        with self._lock:
            self._verify("save")
            codes, ids = self._rows.living()
            tensors = self._codec() | {"codes": codes} | ({} if ids is None else {"ids": ids})
            config = {"metric": self.metric, "level_weights": self.level_weights, "next_id": self._rows.next_id}
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
                    checks.code_range("load", functional.two_bytes(index._rows.codes), index.codewords)
            except (KeyError, TypeError, ValueError) as error:
                raise files.FileError(f"load: {path} does not describe an index ({error}).") from error
        index._mapped = index._rows.codes if mmap else None
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
            files.verify(op, path, "codes", self._rows.codes.cpu(), expected)
            self._check_range(op, self._rows.codes)
            self._unverified = None

    def _check_range(self, op: str, codes: Tensor) -> None:
        """FileError where a mapped file holds others than codes."""
        try:
            checks.code_range(op, functional.two_bytes(codes), self.codewords)
        except ValueError as error:
            raise files.FileError(str(error)) from None

    def _restore(self, tensors: dict[str, Tensor], config: dict[str, Any], device: torch.device) -> None:
        if tensors.keys() - {"offset", "ids"} != {"codebook", "scale", "codes"}:
            expected = "codebook, scale, codes and perhaps offset and ids"
            checks.fail("load", "tensors", expected, ", ".join(sorted(tensors)))
        codebook, scale = tensors["codebook"], tensors["scale"]
        offset, codes, ids = tensors.get("offset"), tensors["codes"], tensors.get("ids")
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
        checks.choice("load", "metric", config["metric"], checks.METRICS)
        self.metric = config["metric"]
        self.level_weights = checks.level_weights("load", config["level_weights"], M)
        checks.integer("load", "next_id", config["next_id"], 0, _MAX_ID + 1)
        next_id = config["next_id"]
        if ids is None and next_id != len(codes):
            checks.fail("load", "next_id", f"{len(codes)}, as there are no ids", next_id)
        if ids is not None:
            if ids.dtype != torch.int64 or ids.shape != codes.shape[:1]:
                checks.fail("load", "ids", f"torch.int64 [{len(codes)}]", f"{ids.dtype} {checks.shape_of(ids)}")
            distinct = ids.unique()
            if len(distinct) != len(ids) or (len(ids) and not 0 <= int(distinct[0]) <= int(distinct[-1]) < next_id):
                checks.fail("load", "ids", f"unique and in 0..{next_id - 1}", "others")
            ids = ids.to(device, copy=True)
        self._lock = threading.RLock()
        self._set_rows(_Rows(codes.to(device), ids, None, size=len(codes), removed=0, next_id=next_id))

    def _vectors(self, op: str, name: str, value: Any) -> Tensor:
        values = checks.array(op, name, value)
        if values.ndim != 2 or values.shape[1] != self.dim:
            checks.fail(op, name, f"[N, {self.dim}]", checks.shape_of(values))
        return values

    def _encode(self, x: Tensor, beam: int) -> Tensor:
        beam = checks.beam("encode", beam)
        return fit.encode(x, self.codebook, self.scale, self.offset, beam, self.level_weights)

    def _append(self, op: str, codes: Tensor, ids: Any, replace: bool = False) -> Tensor:
        """Stores checked codes; the arrays double when they are full, so adding one is O(1) on average, but for the
        search for repeats among own ids."""
        with self._lock, modes.plain(self.device):
            rows, count = self._rows, len(codes)
            if ids is None and rows.next_id + count > _MAX_ID + 1:
                checks.fail(op, "ids", "given, since there are too few above the highest one in use", "None")
            if ids is None:
                new_ids = torch.arange(rows.next_id, rows.next_id + count, device=self.device)
                replaced = new_ids[:0]
            else:
                new_ids, replaced = self._new_ids(op, ids, count, replace)
            self._verify(op)
            rows = self._with(rows, codes, new_ids, replaced)
            if 2 * rows.living_count() < rows.size:
                self._set_rows(rows.compacted())
            else:
                self._set_rows(rows, self._norms)
            return new_ids

    def _with(self, rows: _Rows, codes: Tensor, ids: Tensor, replaced: Tensor) -> _Rows:
        """The rows with new ones behind them, and those at the positions `replaced` removed."""
        size, end = rows.size, rows.size + len(codes)
        numbered = rows.ids is None and (
            len(ids) == 0 or bool((ids == torch.arange(size, end, device=ids.device)).all())
        )
        stored_ids = None if numbered else torch.arange(size, device=ids.device) if rows.ids is None else rows.ids
        stored_codes = _with_room(rows.codes, size, end)
        stored_codes[size:end] = codes.to(self._storage)  # nobody looks beyond `size` yet
        if stored_ids is not None:
            stored_ids = _with_room(stored_ids, size, end)
            stored_ids[size:end] = ids
        alive = rows.alive
        if len(replaced):
            alive = _all_alive(rows) if alive is None else alive.clone()
            alive.index_fill_(0, replaced, False)
        if alive is not None:
            alive = _with_room(alive, size, end)
            alive[size:end] = True
        next_id = max(rows.next_id, int(ids.max()) + 1) if len(ids) else rows.next_id
        removed = rows.size - rows.living_count() + len(replaced)
        return _Rows(stored_codes, stored_ids, alive, size=end, removed=removed, next_id=next_id)

    def _new_ids(self, op: str, ids: Any, count: int, replace: bool) -> tuple[Tensor, Tensor]:
        """The user's ids [count], and the positions of those that are in the index and may be replaced."""
        new_ids = self._as_ids(op, ids)
        if len(new_ids) != count:
            checks.fail(op, "ids", f"{count} numbers, one per vector", len(new_ids))
        positions = self._positions(new_ids)
        taken = new_ids[positions >= 0]
        if len(taken) and not replace:
            checks.fail(op, "ids", "new", f"{int(taken[0])}, which is in the index already")
        return new_ids, positions[positions >= 0]

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
        rows = self._rows
        _, stored, alive = rows.used()
        if rows.size == 0:
            return torch.full_like(ids, -1)
        if stored is None:
            places = ids.clamp_max(rows.size - 1)
            found = ids < rows.size
        else:
            order = self._order(stored)
            # The last of equal ids: those before it have been removed or replaced.
            places = torch.searchsorted(stored, ids.contiguous(), right=True, sorter=order).sub_(1).clamp_min_(0)
            places = places if order is None else order[places]
            found = stored[places] == ids
        if alive is not None:
            found &= alive[places]
        return torch.where(found, places, -1)

    def _order(self, ids: Tensor) -> Tensor | None:
        """What sorts the ids, equal ones by age; None where they are sorted. Kept until rows are added."""
        known = self.__dict__.get("_sorted")
        if known is None or known[0] is not self._rows.ids or known[1] != len(ids):
            order = None if bool((ids[1:] >= ids[:-1]).all()) else ids.sort(stable=True).indices
            known = self._sorted = (self._rows.ids, len(ids), order)
        return known[2]

    def _mask(self, rows: _Rows, keep: Any) -> Tensor | None:
        """The rows to look at [size] bool, a copy where they may change; None for all."""
        _, ids, alive = rows.used()
        if keep is None:
            return None if alive is None else alive.clone()
        flags = checks.id_array("search", "keep", keep).to(self.device)
        if flags.dtype == torch.bool:
            if len(flags) < rows.next_id:
                checks.fail("search", "keep", f"[{rows.next_id}] or longer, one per id", checks.shape_of(flags))
            mask = flags[: rows.size] if ids is None else flags[ids]
        else:
            positions = self._positions(checks.integers("search", "keep", flags).to(torch.int64).clamp_min(0))
            negative = flags < 0
            mask = torch.zeros(rows.size, dtype=torch.bool, device=self.device)
            mask.index_fill_(0, positions[(positions >= 0) & ~negative], True)
        return mask if alive is None else mask & alive

    def _checked_codes(self, rows: _Rows, length: int) -> Tensor:
        """The first levels of all rows in use, [size, length]; refused where a mapped file holds others than codes."""
        codes = rows.codes[: rows.size, :length]
        if rows.codes is self._mapped and self.codewords not in (256, 65536):  # with these every number is a code
            codes = codes.clone()  # the file could change after the check
            self._check_range("search", codes)
        return codes

    def _scan(
        self, query: Tensor, k: int, codes: Tensor, norms: Tensor | None, keep: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(scores [Q, k], rows [Q, k]) by blocks of queries, so that memory stays bounded and progress shows."""
        step = max(64, _SCORES // max(1, len(codes)))
        scores = torch.empty(len(query), k, dtype=torch.float32, device=self.device)
        rows = torch.empty(len(query), k, dtype=torch.int64, device=self.device)
        quick = True if len(query) <= step else None
        with tqdm(total=len(query), desc="search", unit="queries", delay=2, disable=quick, leave=False) as bar:
            for first in range(0, len(query), step):
                block = query[first : first + step].to(self.device, torch.float32)
                found = functional.search_unchecked(
                    block, codes, self.codebook, self.scale[: codes.shape[1]], k, self.offset, self.metric, norms, keep
                )
                scores[first : first + step], rows[first : first + step] = found
                bar.update(len(block))
        return scores, rows

    def _squared_norms(self, codes: Tensor) -> Tensor:
        """What the search takes as norms, for all rows; kept, and extended when rows are added."""
        length = codes.shape[1]
        known = self._norms.get(length, codes.new_empty(0, dtype=torch.float32))
        if len(known) < len(codes):
            offset = self.offset if self.metric == "cosine" else None
            new = functional.squared_norms(codes[len(known) :], self.codebook, self.scale[:length], offset)
            known = self._norms[length] = torch.cat([known, new])
        return known


def _with_room(tensor: Tensor, used: int, needed: int) -> Tensor:
    """The tensor itself where it has room for so many rows, else a copy of the used ones with twice the room."""
    if needed <= len(tensor):
        return tensor
    grown = torch.empty(max(needed, 2 * len(tensor)), *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
    grown[:used] = tensor[:used]
    return grown


def _all_alive(rows: _Rows) -> Tensor:
    return torch.ones(len(rows.codes), dtype=torch.bool, device=rows.codes.device)
