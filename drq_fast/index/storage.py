"""What an index holds: rows that are added, removed, saved and verified, with the locks that this needs."""

from __future__ import annotations

import copy
import operator
import os
import threading
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import checks, devices, modes
from ..backends.torch import numbers
from ..codec import Array, Codec, directions
from . import file
from . import vectors as stored_vectors
from .coarse import Coarse
from .ids import MAX_ID, Places, checked_ids
from .norms import Norms, copied_norms
from .rows import Content, Rows
from .searched import Searched
from .tuning import Tuning

_indexes: weakref.WeakSet[Storage] = weakref.WeakSet()


def _unlock_in_child() -> None:
    """After a fork: a lock that a thread of the parent held would never be released. Rows are whole at any time."""
    for index in _indexes:
        index._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)


class Storage:
    """The rows of an index, with its codec, its metric and its lists."""

    _tuning: Tuning | None
    _warned_of: Tuning | None = None  # that it was measured with another number of vectors

    def _take(self, codec: Codec, metric: str, coarse: Coarse | None, rows: Rows, mapped: file.Mapped | None) -> None:
        self._codec, self._metric, self._coarse = codec, metric, coarse
        self._tuning = None
        self._make_lock()
        self._mapped = mapped
        self._places = Places()
        self._alive_is_read = False  # somebody may be reading rows.alive without the lock
        self._set_rows(rows)

    def _make_lock(self) -> None:
        # Held while rows change and while a reader notes which rows it will read; never while all of them are read.
        self._lock = threading.RLock()
        _indexes.add(self)

    def _set_rows(self, rows: Rows, known: Norms | None = None) -> None:
        """All that changes when rows come or go, in one step: an exception or Ctrl-C leaves the old rows or the new.

        known: norms of the first rows; all that was known if rows were only added. Codes that left a mapped file must
        come from `_in_memory`, which verifies them.
        """
        self._rows: Rows
        self._norms: Norms
        # length -> what a search without a filter of its own looks at. Searches get it without the lock; whoever enters
        # something has noted that marks are read.
        self._searched: dict[int, Searched]
        mapped = None if self._mapped is None else self._mapped.kept(rows)
        devices.finish(self.device)
        self.__dict__.update(_rows=rows, _norms=known or {}, _searched={}, _mapped=mapped)

    def __getstate__(self) -> dict[str, Any]:
        """Copies, made under the lock: a pickle or a copy shares no memory with an index that goes on changing."""
        with self._lock:
            state = {name: value for name, value in self.__dict__.items() if name != "_lock"}
            return state | {
                "_rows": self._in_memory("copy").copied(),
                "_mapped": None,
                "_norms": copied_norms(self._norms),
                "_searched": {},
                "_places": Places(),
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_lock()

    def __copy__(self) -> Storage:
        return copy.deepcopy(self)

    def __len__(self) -> int:
        return self._rows.living_count()

    def __contains__(self, id: Any) -> bool:
        """Whether the index has a vector of this id."""
        try:
            number = operator.index(id)
        except TypeError:
            checks.fail("Index", "an id", "an integer", repr(id), error=TypeError)
        if not 0 <= number <= MAX_ID:
            return False
        with self._lock, modes.plain(self.device):
            return bool(self._find(torch.tensor([number], device=self.device)) >= 0)

    def __repr__(self) -> str:
        settings = [f"metric={self.metric!r}"]
        settings += [] if self.lists is None else [f"{self.lists} lists"]
        settings += [] if self.vectors is None else [f"vectors={self.vectors!r}"]
        return f"Index({len(self)} vectors of {self.dim} dimensions in {self.bits} bits, {', '.join(settings)})"

    @property
    def codec(self) -> Codec:
        """What encodes and decodes the vectors."""
        return self._codec

    @property
    def metric(self) -> str:
        """What the index is searched by: "l2", "ip" or "cosine"."""
        return self._metric

    @property
    def dim(self) -> int:
        """D, of vectors and queries."""
        return self.codec.dim

    @property
    def codewords(self) -> int:
        """K."""
        return self.codec.codewords

    @property
    def levels(self) -> int:
        """M, of a full code."""
        return self.codec.levels

    @property
    def bits(self) -> int:
        """Length of a full code in bits."""
        return self.codec.bits

    @property
    def device(self) -> torch.device:
        """Where the codes are and the search runs."""
        return self.codec.device

    @property
    def vectors(self) -> str | None:
        """How the vectors are kept beside their codes: "float32", "float16", "int8", or None if they are not."""
        kept = self._rows.content.vectors
        return None if kept is None else checks.dtype_of(kept)

    @property
    def lists(self) -> int | None:
        """The number of inverted lists, or None if every search looks at all codes."""
        return None if self._coarse is None else len(self._coarse)

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each part of what `save` writes, as in memory: "codec", "centroids", "codes", "vectors", ...

        A file has 8 bytes per id. `nbytes` is more: it counts norms, look-up of ids, and room for rows to come.
        """
        codec = self.codec
        shared = {"codec": sum(t.nbytes for t in (codec.codebook, codec.scale, codec.offset) if t is not None)}
        shared |= {} if self._coarse is None else {"centroids": self._coarse.centroids.nbytes}
        rows = self._rows
        N = rows.living_count()
        return shared | {name: N * t.shape[1:].numel() * t.element_size() for name, t in rows.tensors().items()}

    @property
    def ids(self) -> Tensor:
        """All ids in the index [len], oldest first; with lists, in the order of lists."""
        rows = self._readable().codes_alone().living()
        return rows.ids_at(torch.arange(rows.size, device=self.device))

    @property
    def codes(self) -> Tensor:
        """All codes in the index [len, levels], in the order of `ids`, uint8 for K <= 256, else int32."""
        return numbers(self._readable().codes_alone().living().codes.clone())

    @property
    def nbytes(self) -> int:
        """All bytes of the index: those of `sizes`, norms, look-up of ids, removed rows, and room for rows to come.

        Of an index that was loaded with `mmap`, codes and vectors count too, although they are on disk.
        """
        with self._lock:
            rows, norms = self._rows, [known.values for known in self._norms.values()]
            runs = [tensor for run in self._places.runs for tensor in (run.ids, run.rows)]
        centroids = None if self._coarse is None else self._coarse.centroids
        tensors = [*self.codec.tensors(), centroids, *rows.content, rows.ids, rows.alive, *norms, *runs]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def reconstruct(self, ids: Array | Iterable[int], levels: int | None = None) -> Array:
        """ids [...], such as those that `search` found -> vectors [..., dim] float32, decoded from their codes.

        levels: use only the first so many levels. Vectors come from the codes even if the index keeps vectors, too.
        Where the codec encodes directions (`codec.unit`), they approximate directions.
        """
        shaped = isinstance(ids, (Tensor, np.ndarray))
        wanted = checks.id_array("reconstruct", "ids", ids.reshape(-1) if shaped else ids)  # type: ignore[union-attr]
        wanted = checks.integers("reconstruct", "ids", wanted).to(self.device, torch.int64)
        length = checks.levels("reconstruct", levels, self.levels)
        with modes.plain(self.device):
            with self._lock:
                rows, positions = self._rows, self._find(wanted)
            missing = wanted[positions < 0]
            if len(missing):
                checks.fail("reconstruct", "ids", "in the index", f"{int(missing[0])}, which is not")
            codes = rows.codes[positions]
            file.check_codes("reconstruct", codes, self.codewords)  # a mapped file may have others
            x_hat = self.codec.decode(numbers(codes), length)
            if self._coarse is not None and rows.content.lists is not None:
                x_hat = x_hat + self._coarse.centroids[rows.content.lists[positions].long()]
        shape = ids.shape if shaped else wanted.shape  # type: ignore[union-attr]
        return checks.in_kind(x_hat.reshape(*shape, self.dim), ids)

    def encode(self, x: Array, beam: int = 1) -> Array:
        """x [N, dim] -> codes [N, levels], uint8 for K <= 256, else int32."""
        if self._coarse is not None:
            raise RuntimeError("encode: the index has lists, and a code says nothing without its list; use add.")
        codes = self.codec.encode(self._vectors("encode", "x", x), beam)
        return checks.in_kind(codes, x)

    def add(self, x: Array, ids: Array | Iterable[int] | None = None, *, beam: int = 1) -> Array:
        """Encodes x [N, dim] and stores the codes; returns their ids [N] int64, in kind.

        ids: unique, not negative and not in the index; by default the numbers after the highest ever used, so that a
        removed id is never given to another vector.
        """
        return checks.in_kind(self._append("add", self._content("add", x, beam), ids), x)

    def upsert(self, x: Array, ids: Array | Iterable[int], *, beam: int = 1) -> Array:
        """`add` that replaces the vectors whose ids are in the index already; they count as new from then on."""
        if ids is None:
            checks.fail("upsert", "ids", "given", "None", error=TypeError)
        return checks.in_kind(self._append("upsert", self._content("upsert", x, beam), ids, replace=True), x)

    def add_codes(self, codes: Array, ids: Array | Iterable[int] | None = None) -> Array:
        """Stores codes [N, levels] that `encode` made; returns their ids as `add` does."""
        values = checks.array("add_codes", "codes", codes, integer=True).to(self.device)
        checks.codes("add_codes", values, self.codewords, self.levels, self.device)
        if values.shape[1] != self.levels:
            checks.fail("add_codes", "codes", f"[N, {self.levels}]", checks.shape_of(values))
        if self.vectors is not None or self._coarse is not None:
            what = "keeps vectors beside their codes" if self._coarse is None else "has lists"
            raise RuntimeError(f"add_codes: the index {what}; use add.")
        return checks.in_kind(self._append("add_codes", Content(values), ids), codes)

    def remove(self, ids: Array | Iterable[int]) -> None:
        """Takes vectors out by id. All ids must be in the index, else nothing is removed."""
        wanted = checked_ids("remove", ids, self.device)
        with self._lock, modes.plain(self.device):
            rows, positions = self._rows, self._find(wanted)
            missing = wanted[positions < 0]
            if len(missing):
                checks.fail("remove", "ids", "in the index", f"{int(missing[0])}, which is not")
            left = rows.living_count() - len(positions)
            compact = 2 * left < rows.size
            marks = rows.marks().clone() if compact or self._alive_is_read else rows.marks()
            if compact:
                rows = self._in_memory("remove")
                self._set_rows(rows._replace(alive=marks.index_fill_(0, positions, False), removed=None).compacted())
                return
            self._alive_is_read = False
            # Interrupted between these, the removal is done or not, and rows are counted when somebody asks.
            self._set_rows(rows._replace(alive=marks, removed=None), self._norms)
            marks.index_fill_(0, positions, False)
            self._set_rows(rows._replace(alive=marks, removed=rows.size - left), self._norms)

    def reset(self) -> None:
        """Removes all vectors. Codec, lists and what `tune` measured stay; ids are not given out again."""
        with self._lock, modes.plain(self.device):
            none = torch.zeros(self._rows.size, dtype=torch.bool, device=self.device)
            self._set_rows(self._rows._replace(alive=none, removed=None).compacted())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes codes, vectors, ids and codec to one safetensors file, atomically. Verifies a mapped index first.

        The same contents give the same bytes. A symbolic link is replaced by the file; what it points to stays. The
        last save wins: it replaces the whole file, also one that another object or process has saved since `load`.
        """
        with self._lock:
            mapped, rows = self._mapped, self._readable()
        if mapped is not None:
            mapped.verify("save", self.codewords)
        centroids = None if self._coarse is None else self._coarse.centroids
        file.write(path, self.codec, self.metric, centroids, self._tuning, rows)

    def verify(self) -> None:
        """Reads the codes and vectors of an index that was loaded with `mmap`; FileError if the file has changed.

        Does nothing for any other index, whose file `load` has verified. Adding to a mapped index, copying it,
        compacting it after many removals and saving it verify it too.
        """
        mapped = self._mapped
        if mapped is not None:
            mapped.verify("verify", self.codewords)

    def _readable(self) -> Rows:
        """The rows, to be read without the lock: removals from now on make marks of their own."""
        with self._lock:
            self._alive_is_read = True
            return self._rows

    def _in_memory(self, op: str, more: int = 0, names: tuple[str, ...] = file.MAPPED) -> Rows:
        """The rows; if they are mapped, verified copies of them that have room for `more` rows."""
        if self._mapped is None:
            return self._rows
        with modes.plain(self.device):
            rows = self._mapped.in_memory(op, self._rows, names, more)
        if "codes" in self._mapped.tensors:
            file.check_codes(op, rows.codes[: rows.size], self.codewords)
        return rows

    def _vectors(self, op: str, name: str, value: Any) -> Tensor:
        values = checks.array(op, name, checks.listed(op, name, value))
        if values.ndim != 2 or values.shape[1] != self._codec.dim:
            checks.fail(op, name, f"[N, {self.dim}]", checks.shape_of(values))
        return values

    def _content(self, op: str, x: Any, beam: int, first: int = 0) -> Content:
        """What is stored for vectors x [N, dim], which are checked; first: the number of the first row in an error."""
        values = self._vectors(op, "x", x)
        checks.finite(op, "x", values, torch.float32, range(first, first + len(values)))
        if self.metric == "cosine" and not self.codec.unit and self._rows.size == 0:
            _warn_of_lengths(op, values)
        kept = self._rows.content.stored()
        with torch.no_grad(), modes.plain(self.device):
            coded = (
                Content(self.codec.encode(values, beam)) if self._coarse is None else self._coarse.encode(values, beam)
            )
            values = directions(values.float()) if kept is not None and self.metric == "cosine" else values
            vectors = (None, None) if kept is None else stored_vectors.stored_as(op, values, kept, first)
        return Content(coded.codes, coded.lists, *vectors)

    def _append(self, op: str, new_rows: Content, new: Any, replace: bool = False) -> Tensor:
        """Stores checked rows under new ids, or under those that follow the highest one in use; returns the ids."""
        with self._lock, modes.plain(self.device):
            rows, count = self._rows, len(new_rows.codes)
            if new is None:
                if rows.next_id + count > MAX_ID + 1:
                    checks.fail(op, "ids", "given, since there are too few above the highest one in use", "None")
                new_ids = torch.arange(rows.next_id, rows.next_id + count, device=self.device)
                replaced = new_ids[:0]
            else:
                new_ids, replaced = self._new_ids(op, new, count, replace)
            rows = self._in_memory(op, count).appended(new_rows, new_ids, replaced)
            if 2 * rows.living_count() < rows.size:
                self._set_rows(rows.compacted())
            else:
                self._set_rows(rows, self._norms)
            return new_ids

    def _new_ids(self, op: str, new: Any, count: int, replace: bool) -> tuple[Tensor, Tensor]:
        """The user's ids [count], and the positions of those that are in the index and may be replaced."""
        new_ids = checked_ids(op, new, self.device)
        if len(new_ids) != count:
            checks.fail(op, "ids", f"{count} numbers, one per vector", len(new_ids))
        positions = self._find(new_ids)
        taken = new_ids[positions >= 0]
        if len(taken) and not replace:
            checks.fail(op, "ids", "new", f"{int(taken[0])}, which is in the index already")
        return new_ids, positions[positions >= 0]

    def _find(self, wanted: Tensor) -> Tensor:
        """The row of each id [n], -1 where it is not in the index."""
        self._places = self._places.extended(self._rows)
        return self._places.find(self._rows, wanted)

    def _put_in_order(self) -> None:
        """Puts all rows in the order of their lists."""
        with self._lock, modes.plain(self.device):
            self._set_rows(self._in_memory("search").in_lists())


def _warn_of_lengths(op: str, x: Tensor) -> None:
    """Warns if a codec spends bits on the lengths of x [N, dim], which a cosine ignores; judged by the first rows."""
    lengths = torch.linalg.vector_norm(x[:1000].float(), dim=1)
    if len(lengths) and float(lengths.max()) > 1.1 * float(lengths.min()):
        text = "the vectors differ in length, which a cosine ignores and this codec encodes; fit to and add vectors"
        warnings.warn(f'{op}: {text} of length 1, or use Index.build(x, metric="cosine").', stacklevel=4)
