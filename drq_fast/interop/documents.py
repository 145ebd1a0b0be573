"""Texts and their metadata beside an index: what the vector stores of LangChain and LlamaIndex share."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import checks, files, modes
from ..codec import Codec, directions
from ..constants import METRICS, VECTORS
from ..index import Index
from ..index.vectors import empty, stored_as

FIT_AT = 10_000  # embeddings with which the codec is fitted where nobody says
_BEAM = 16  # of the encoder
_KIND, _VERSION = "drq_fast.documents", 1


class Record(NamedTuple):
    """A text with its id; metadata is a JSON object."""

    id: str
    text: str
    metadata: dict[str, Any]


class Documents:
    """Texts and metadata by id, and an index of their embeddings.

    Embeddings are kept as float32 and searched exactly until there are `fit_at` of them. The call that adds the last of
    these fits a codec of `bits` per vector to all (`Index.build`), and it encodes those to come; `fit` does so earlier
    or again, and fit_at=None leaves it to you. From then on a search takes candidates by codes and scores them again by
    the embeddings, which are kept as `vectors`: "float32", "float16", "int8", or None, by which codes alone decide.
    index: an empty index of your own; bits, metric and vectors are then those of the index.
    """

    def __init__(
        self,
        *,
        bits: int = 128,
        metric: str = "cosine",
        vectors: str | None = "float16",
        fit_at: int | None = FIT_AT,
        index: Index | None = None,
    ) -> None:
        op = "Documents"
        if index is not None:
            _check_index(op, index)
            bits, metric, vectors = -(-index.bits // 8) * 8, index.metric, index.vectors  # bits: if fitted again
        elif checks.integer(op, "bits", bits, 8) % 8:
            checks.fail(op, "bits", "a multiple of 8", bits)
        checks.choice(op, "metric", metric, METRICS)
        if vectors is not None:
            checks.choice(op, "vectors", vectors, VECTORS)
        if fit_at is not None:
            fit_at = checks.integer(op, "fit_at", fit_at, 1)
        self.bits, self.metric, self.vectors, self.fit_at = bits, metric, vectors, fit_at
        self._index = index
        self._records: dict[int, Record] = {}  # by their id in the index
        self._numbers: dict[str, int] = {}
        self._next = 0  # numbers of removed records are not given out again
        self._lock = threading.RLock()  # held by changes, not by searches

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, id: object) -> bool:
        return id in self._numbers

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            copies = {name: copy.copy(self.__dict__[name]) for name in ("_index", "_records", "_numbers")}
            return {name: value for name, value in self.__dict__.items() if name != "_lock"} | copies

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())

    @property
    def index(self) -> Index | None:
        """The index of the embeddings; None before the first one."""
        return self._index

    @property
    def fitted(self) -> bool:
        """Whether embeddings are encoded; until then they are searched as they are."""
        return self._index is not None and not _is_exact(self._index)

    def upsert(self, records: Sequence[Record], embeddings: Any) -> None:
        """Adds records with embeddings [n, D], replacing those whose ids are here; of equal ids the last one counts."""
        records = [_checked(record) for record in records]
        if not records:
            return
        x = _as_array("add", embeddings)
        if len(x) != len(records):
            checks.fail("add", "embeddings", f"{len(records)}, one per text", len(x))
        last = list({record.id: i for i, record in enumerate(records)}.values())
        if self.vectors is not None and self.metric != "cosine" and not self.fitted:  # else `fit` would refuse them
            stored_as("upsert", torch.from_numpy(x), empty(self.vectors, x.shape[1], torch.device("cpu")))
        with self._lock:
            index = _exact(x.shape[1], self.metric) if self._index is None else self._index
            new = [records[i].id for i in last if records[i].id not in self._numbers]
            numbers = {id: self._next + i for i, id in enumerate(new)}
            found = {self._numbers.get(r.id, numbers.get(r.id, -1)): r for r in (records[i] for i in last)}
            index.upsert(x[last], np.array(list(found), np.int64), beam=_BEAM)
            self._index = index
            self._records.update(found)
            self._numbers.update(numbers)
            self._next += len(new)
            if self.fit_at is not None and len(self) >= self.fit_at and not self.fitted:
                self.fit()

    def remove(self, ids: Iterable[str]) -> None:
        """Removes records; ids that are not here are passed over."""
        with self._lock:
            numbers = [self._numbers[id] for id in dict.fromkeys(ids) if id in self._numbers]
            if self._index is None or not numbers:
                return
            self._index.remove(numbers)
            for number in numbers:
                del self._numbers[self._records.pop(number).id]

    def clear(self) -> None:
        """Removes all records; the codec stays."""
        with self._lock:
            self._records, self._numbers = {}, {}
            if self._index is not None and self.fitted:
                self._index.reset()
            else:
                self._index = None

    def get(self, ids: Iterable[str]) -> list[Record]:
        """The records of these ids, in their order; ids that are not here are passed over."""
        found = (self._records.get(self._numbers.get(id, -1)) for id in ids)
        return [record for record in found if record is not None]

    def matching(self, where: Callable[[Record], bool]) -> list[Record]:
        """The records for which `where` is true, in the order in which they were added."""
        found = (self._records.get(number) for number in self._numbers_where(where))
        return [record for record in found if record is not None]

    def search(
        self,
        query: Any,
        k: int,
        where: Callable[[Record], bool] | None = None,
        *,
        refine: int | None = None,
        probes: int | None = None,
    ) -> list[tuple[Record, float]]:
        """The k records nearest to a query [D], best first, with the scores of `Index.search`.

        where: only the records for which it is true. refine: how many candidates by codes are scored again by the
        embeddings; 10 k, and at least 100, if None. probes: as in `Index.search`.
        """
        index = self._index
        if index is None or len(index) == 0:
            return []
        k = min(checks.integer("search", "k", k, 1), len(index))
        keep = None
        if where is not None:
            keep = self._numbers_where(where)
            if not keep:
                return []
        if _is_exact(index):
            refine, probes = max(k, len(index)), None
        elif refine is None and index.vectors is not None:
            refine = max(100, 10 * k)
        x = _as_array("search", [query])
        scores, ids = index.search(x, k, keep=keep, refine=refine, probes=probes)
        pairs = ((self._records.get(id), score) for id, score in zip(ids[0].tolist(), scores[0].tolist(), strict=True))
        return [(record, score) for record, score in pairs if record is not None]

    def _numbers_where(self, where: Callable[[Record], bool]) -> list[int]:
        records = self._records.copy()  # in one step, so that a change or a fit does not make a search wait
        return [number for number, record in records.items() if where(record)]

    def diverse(
        self,
        query: Any,
        k: int,
        fetch: int,
        balance: float,
        where: Callable[[Record], bool] | None = None,
        *,
        refine: int | None = None,
        probes: int | None = None,
    ) -> list[tuple[Record, float]]:
        """Maximal marginal relevance: k of the `fetch` records that `search` finds, with their scores there.

        Each is the one of the largest balance cos(query, x) - (1 - balance) max cos(x, those before it).
        """
        while True:
            near = self.search(query, fetch, where, refine=refine, probes=probes)
            with suppress(KeyError):  # one of them was removed meanwhile
                x = self.embeddings(record.id for record, _ in near)
                return [near[i] for i in marginal_relevance(_as_array("search", [query]), x, k, balance)]

    def embeddings(self, ids: Iterable[str]) -> np.ndarray:
        """Their embeddings [n, D] as they are kept, or decoded from codes; for cosine of length 1, or about that."""
        index, numbers = self._index, [self._numbers[id] for id in ids]
        if index is None:
            return np.empty((0, 1), np.float32)
        with index._lock, modes.plain(index.device):
            rows = index._find(torch.tensor(numbers, dtype=torch.int64, device=index.device))
            if bool((rows < 0).any()):
                raise KeyError("embeddings: a record was removed meanwhile")
            stored = index._readable().content.stored()
            if stored is None:
                return index.reconstruct(np.array(numbers, np.int64))
            return stored.floats(rows).cpu().numpy()

    def fit(self) -> None:
        """Fits codec and inverted lists to the embeddings that are here, and encodes them all; searches go on."""
        with self._lock:
            index = self._index
            if index is None or len(index) == 0:
                raise RuntimeError("fit: there is nothing to fit a codec to; add texts first.")
            rows = index._readable().living()
            stored = rows.content.stored()
            if stored is None:
                raise RuntimeError('fit: the index has codes only; make the store with vectors="float16".')
            ids = rows.ids_at(torch.arange(rows.size, device=index.device))
            options: dict[str, Any] = {"bits": self.bits, "metric": self.metric, "vectors": self.vectors}
            floats = stored.floats(slice(0, rows.size))
            self._index = Index.build(floats, ids=ids, beam=_BEAM, device=index.device, tune=False, **options)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes texts and metadata as lines of JSON to `path`, and the index to a new file beside it.

        The file of texts names the file of its index and is replaced last, so that an interrupted save changes nothing.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, files.locked(target.parent):
            index, made = self._index, f"{target.name}-{secrets.token_hex(8)}.drq"
            earlier = [each for each in target.parent.iterdir() if re.fullmatch(_index_names(target), each.name)]
            body = "".join(_line([number, *record]) for number, record in self._records.items())
            header = {"kind": _KIND, "version": _VERSION, "checksum": _checksum(body), "next": self._next}
            header |= {name: getattr(self, name) for name in ("bits", "metric", "vectors", "fit_at")}
            header["index"] = None if index is None else made
            try:
                if index is not None:
                    index.save(target.parent / made)
                files.write_text(target, _line(header) + body)
            except BaseException:
                if _named_index(target) != target.parent / made:  # else only what follows the replacement failed
                    (target.parent / made).unlink(missing_ok=True)
                raise
            for each in earlier:  # that of the last save, and those of saves that were killed
                each.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, mmap: bool = False) -> Documents:
        """What `save` wrote; mmap: as in `Index.load`."""
        target = Path(path)
        while True:
            header, body = _read(target)
            try:
                return cls._described(target, header, body, mmap)
            except FileNotFoundError:
                if _read(target)[0] == header:  # else another save replaced both files meanwhile
                    raise

    @classmethod
    def _described(cls, target: Path, header: dict[str, Any], body: str, mmap: bool) -> Documents:
        with files.describing(target, "texts with an index"):
            options = {name: header[name] for name in ("bits", "metric", "vectors", "fit_at")}
            found = cls(**options)
            for line in body.split("\n")[:-1]:
                number, *values = json.loads(line)
                record = _checked(Record(*values))
                found._records[checks.integer("load", "number", number, 0)] = record
                found._numbers[record.id] = number
            found._next = checks.integer("load", "next", header["next"], max(found._records, default=-1) + 1)
            name = header["index"]
            if name is not None:
                if re.fullmatch(_index_names(target), name) is None:
                    checks.fail("load", "index", "the name of a file beside it", repr(name))
                found._index = Index.load(target.parent / name, mmap=mmap)
            ids = [] if found._index is None else found._index.ids.tolist()
            if len(found._numbers) != len(found._records) or set(ids) != found._records.keys():
                checks.fail("load", "ids", f"those of {name}", "others")
        return found


def marginal_relevance(query: np.ndarray, x: np.ndarray, k: int, balance: float) -> list[int]:
    """The rows of x [n, D] that `Documents.diverse` chooses for query [1, D], at most k, in their order."""
    if len(x) == 0:
        return []
    unit = directions(torch.from_numpy(x)).numpy()
    relevance, chosen = unit @ directions(torch.from_numpy(query)).numpy()[0], list[int]()
    likeness = np.zeros(len(x), np.float32)  # of nothing chosen yet
    for _ in range(min(k, len(x))):
        value = balance * relevance - (1 - balance) * likeness
        value[chosen] = -np.inf
        chosen.append(int(value.argmax()))
        likeness = (unit @ unit[chosen].T).max(axis=1)
    return chosen


def _exact(dim: int, metric: str) -> Index:
    """An index whose codes say nothing, so that all vectors are candidates, which float32 vectors then decide."""
    return Index(Codec(torch.zeros(2, dim), torch.ones(1), None, unit=metric == "cosine"), metric, vectors="float32")


def _is_exact(index: Index) -> bool:
    return index.bits == 1


def _check_index(op: str, index: Any) -> None:
    if not isinstance(index, Index):
        checks.fail(op, "index", "a drq_fast.Index", type(index).__name__, error=TypeError)
    if len(index):
        checks.fail(op, "index", "empty", f"{len(index)} vectors without texts")
    if index.bits < 8:
        checks.fail(op, "index", "of at least 8 bits", index.bits)


def _checked(record: Record) -> Record:
    """A copy whose metadata is what a file will give back."""
    id, text, metadata = record
    for name, value in (("ids", id), ("texts", text)):
        if not isinstance(value, str):
            checks.fail("add", name, "strings", type(value).__name__, error=TypeError)
    try:
        plain = json.loads(json.dumps(metadata, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        checks.fail("add", f"metadata of {id!r}", "JSON", f"something else ({error})", error=TypeError)
    if not isinstance(plain, dict):
        checks.fail("add", f"metadata of {id!r}", "a dict", type(metadata).__name__, error=TypeError)
    return Record(id, text, plain)


def _as_array(op: str, embeddings: Any) -> np.ndarray:
    """Lists of numbers, an array or a tensor as float32 [n, D]."""
    x = checks.array(op, "embeddings", checks.listed(op, "embeddings", embeddings))
    if x.ndim != 2 or x.shape[1] == 0:
        checks.fail(op, "embeddings", "[n, D]", checks.shape_of(x))
    return x.detach().float().cpu().numpy()


def _line(value: Any) -> str:
    return json.dumps(value) + "\n"


def _checksum(body: str) -> str:
    return hashlib.blake2b(body.encode(), digest_size=16).hexdigest()


def _index_names(path: Path) -> str:
    return re.escape(path.name) + r"-[0-9a-f]{16}\.drq"


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """The header of a file that `save` wrote, and its other lines, verified."""
    try:
        with files.open_regular(path) as file:
            first, _, body = file.read().decode().partition("\n")
        header = json.loads(first)
    except OSError as error:
        raise type(error)(f"load: {path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise files.FileError(f"load: {path} was not written by drq_fast.") from error
    if not isinstance(header, dict) or header.get("kind") != _KIND:
        raise files.FileError(f"load: {path} was not written by drq_fast.")
    if header.get("version") != _VERSION:
        raise files.FileError(
            f"load: {path} is of version {header.get('version')}, and this drq_fast reads {_VERSION}."
        )
    if header.get("checksum") != _checksum(body):
        raise files.FileError(f"load: {path} is corrupted (its checksum does not match).")
    return header, body


def _named_index(path: Path) -> Path | None:
    """The index that a file of an earlier save names."""
    try:
        name = _read(path)[0].get("index")
    except (OSError, files.FileError):
        return None
    return path.parent / name if isinstance(name, str) and re.fullmatch(_index_names(path), name) else None
