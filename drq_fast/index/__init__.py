"""Index: codes in memory, searched at any prefix length, with stable ids."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import checks, devices, functional, modes
from ..backends.torch import pad_result
from ..backends.types import SearchResult
from ..codec import Array, Codec
from ..quantizer import RecurrentQuantizer
from . import file, tuning
from . import vectors as stored_vectors
from .build import fitted
from .coarse import Coarse, default_probes, is_late
from .ids import checked_ids
from .results import MOST_PADDED
from .results import IndexResult as IndexResult
from .results import merge as merge
from .rows import Content, Rows, no_rows
from .searched import Searched, of_moderate_length, searched_rows
from .source import Source, as_source, in_blocks
from .storage import Storage
from .tuning import Tuning

_ENOUGH = 100  # queries to tune by


class Index(Storage):
    """Codes of many vectors, searched by queries that are not quantized themselves.

    codec: a Codec, or a layer, of whose parameters a copy is taken, so that training it further does not change the
    index. metric: "l2" (squared distance, less is better), "ip" (inner product) or "cosine". vectors: "float32",
    "float16" or "int8" keeps the vectors too, for `search(refine=)`. Everything takes torch or numpy and answers in
    kind; lists of numbers are answered in torch. centroids [L, dim]: vectors are divided into L lists, by the nearest
    centroid, and a search looks at the lists near to the query; the codec encodes what the centroid leaves of a vector
    (`Index.build` fits both). `id in index` tells whether a vector is there. Several threads may search, add and remove
    at the same time: a search sees the index as it was when it began.

    >>> index = Index(layer, metric="l2")
    >>> ids = index.add(x)
    >>> scores, ids = index.search(query, k=10, levels=2)
    """

    def __init__(
        self,
        codec: Codec | RecurrentQuantizer,
        metric: str = "l2",
        device: torch.device | str | None = None,
        *,
        vectors: str | None = None,
        centroids: Tensor | np.ndarray | None = None,
    ) -> None:
        if not isinstance(codec, (Codec, RecurrentQuantizer)):
            checks.fail("Index", "codec", "a Codec or a RecurrentQuantizer", type(codec).__name__, error=TypeError)
        checks.choice("Index", "metric", metric, checks.METRICS)
        if vectors is not None:
            checks.choice("Index", "vectors", vectors, tuple(stored_vectors.DTYPES))
        if isinstance(codec, RecurrentQuantizer):
            codec.require_initialised("Index")
            codec = codec.codec()
        codec = codec.to(checks.device("Index", device, codec.device))
        with modes.plain(codec.device):
            coarse = None if centroids is None else Coarse(_centroids(centroids, codec), codec)
            codes = torch.empty(0, codec.levels, dtype=file.code_dtype(codec.codewords), device=codec.device)
            lists = None if coarse is None else torch.empty(0, dtype=coarse.dtype, device=codec.device)
            kept = () if vectors is None else stored_vectors.empty(vectors, codec.dim, codec.device)
        self._take(codec, metric, coarse, no_rows(Content(codes, lists, *kept)), None)

    @classmethod
    def build(
        cls,
        x: Array | Source,
        *,
        bits: int = 64,
        codebooks: int = 1,
        metric: str = "l2",
        lists: int | str | None = "auto",
        vectors: str | None = None,
        ids: Array | Iterable[int] | None = None,
        beam: int = 16,
        sample: int | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        tune: bool = True,
    ) -> Index:
        """Fits a codec of `bits` per vector to x [N, dim], which may be a memory map, and adds x to a new index.

        x is read in blocks; an object that reads them from elsewhere will do too (`drq_fast.index.source.Source`).
        bits: a multiple of 8, 8 for each level. codebooks: as in `RecurrentQuantizer`; more of them have less error.
        metric: for "cosine" the codec encodes directions. lists: how many inverted lists; by default about 2 sqrt(N),
        and none for fewer than 50,000 vectors. vectors and ids: as in the constructor and in `add`. beam: the width of
        the encoder's. sample and seed: see `RecurrentQuantizer.fit`. tune: measure what `search(recall=)` needs, with
        vectors of x as queries; `index.tune` does the same with queries of your own.

        >>> index = Index.build(x, bits=64, metric="cosine", vectors="float16")
        >>> scores, ids = index.search(query, k=10, recall=0.95)
        """
        x, place = checks.listed("build", "x", x), checks.device("build", device, torch.device("cpu"))
        tune = checks.boolean("build", "tune", tune)
        if vectors is not None:
            checks.choice("build", "vectors", vectors, tuple(stored_vectors.DTYPES))
        source = as_source("build", x)
        given = None if ids is None else checked_ids("build", ids, place)
        if given is not None and len(given) != len(source):
            checks.fail("build", "ids", f"{len(source)} numbers, one per vector", len(given))
        codec, centroids = fitted(source, bits, codebooks, metric, lists, beam, sample, seed, place)
        index = cls(codec, metric, vectors=vectors, centroids=centroids)
        for block in in_blocks(source.read, len(source), source.dim, "add"):
            first = len(index)
            content = index._content("build", block, beam, first)
            index._append("build", content, None if given is None else given[first : first + len(block)])
        if index._coarse is not None:
            index._put_in_order()
        if tune and len(source) > 1:
            index._tuning = tuning.by_own_vectors(index, source, given, seed)
        return index

    def tune(self, query: Array, k: int = 10) -> None:
        """Measures what `search(recall=)` needs with queries [Q, dim] like those to come; the index must keep vectors.

        The true neighbours are found by comparing the queries with all vectors. Warns of fewer than 100 queries.
        """
        values = self._vectors("tune", "query", query).to(self.device, torch.float32)
        if len(values) == 0 or len(self) == 0:
            checks.fail("tune", "query", "at least one, for an index that is not empty", len(values))
        k = checks.integer("tune", "k", k, 1, len(self))
        if self.vectors is None:
            raise RuntimeError('tune: the index has codes only; make it with vectors="float16".')
        checks.finite("tune", "query", values)
        if len(values) < _ENOUGH:
            warnings.warn(f"tune: a recall of few queries is not reliable; give at least {_ENOUGH}.", stacklevel=2)
        self._tuning = tuning.by_queries(self, values, self._readable().living(), k)

    @property
    def tuning(self) -> Tuning | None:
        """The settings of `search` that paid, with the recall that was measured; None before `tune`."""
        return self._tuning

    def search(
        self,
        query: Array,
        k: int = 10,
        levels: int | None = None,
        keep: Array | Iterable[int] | None = None,
        *,
        recall: float | None = None,
        probes: int | None = None,
        refine: int | None = None,
        vectors: Any = None,
        threshold: float | Array | None = None,
    ) -> IndexResult:
        """The k best for each query [Q, dim] (or [dim]): IndexResult(scores [Q, k], ids [Q, k]).

        levels: use only the first so many levels of every code. keep: only these ids, or a bool array indexed by id;
        ids that are not in the index are passed over. recall: the share of the true k nearest to be found, above 0 and
        up to 1; takes the cheapest probes and refine that reached it on sample queries (see `tuning`), and warns once
        if the index has 1.5 times as many vectors since, or fewer than two thirds. It cannot be given with `vectors`.
        probes: how many lists each query looks at, the nearest ones; by default a sixteenth of them, at least 16, and
        all of them with `keep` or where these have fewer than k vectors. refine: the so many best by codes are scored
        again by the vectors themselves, those of the index or, if it has none, the rows of `vectors` [n, dim], by id,
        which may be a memory map. threshold: a score, or one per query [Q]; vectors with a worse score are left out.
        Equal scores come oldest first, with lists in the order of the lists. Where fewer than k vectors remain: id -1
        and score +inf (l2) or -inf. k: at most 1,048,576, or the number of vectors if that is more.
        """
        query = checks.listed("search", "query", query)
        single = getattr(query, "ndim", 2) == 1
        values = self._vectors("search", "query", query[None] if single else query)
        values = of_moderate_length(values) if self._metric == "cosine" else values
        k = checks.integer("search", "k", k, 1, min(max(self._rows.size, MOST_PADDED), checks.MAX_RESULTS))
        chosen = probes is not None
        if recall is not None:
            probes, refine = self._setting(recall, k, vectors, levels, probes, refine)
        if vectors is not None and self.vectors is not None:
            checks.fail("search", "vectors", f"left out, as the index keeps {self.vectors} vectors itself", "others")
        given = None if vectors is None else stored_vectors.Given(vectors, self.dim)
        candidates = k if refine is None and given is None else self._candidates(refine, k, given)
        limits = checks.thresholds("search", threshold, len(values), self.device)
        probes = self._probes(probes) if keep is None or chosen else self.lists  # a filter may leave little in a list
        searched = self._snapshot(checks.levels("search", levels, self._codec.levels), keep)
        rows = searched.rows
        devices.read_here(searched.tensors(), self.device)
        most = min(candidates, max(rows.size, 1))
        certain = limits is not None and refine is None and (chosen or probes == self.lists)  # scans once, by codes
        scores, found = searched.scan(values, most, probes, limits if certain else None)
        last = found[:, min(k, most) - 1]
        if not chosen and probes != self.lists and len(last) and int(last.min()) < 0:  # the lists had too few
            few = last < 0
            again = searched.scan(values[few.to(values.device)], most, self.lists)
            scores, found = (
                scores.masked_scatter(few[:, None], again.scores),
                found.masked_scatter(few[:, None], again.positions),
            )
        if refine is not None and rows.size:
            scores, found = self._refined(values, found, rows, min(k, found.shape[1]), given)
        if limits is not None:
            scores, found = functional.within(scores, found, limits, self._metric)
        if found.shape[1] < k:
            scores, found = pad_result(scores, found, k, self._metric)
        if rows.size:
            found = rows.ids_at(found)
        if single:
            scores, found = scores[0], found[0]
        return IndexResult(checks.in_kind(scores, query), checks.in_kind(found, query))

    @classmethod
    def load(cls, path: str | os.PathLike[str], mmap: bool = False, device: torch.device | str | None = None) -> Index:
        """The index that `save` wrote, on `device` (CPU by default).

        With `mmap` codes and vectors stay on disk and are verified only by `verify()`; all else is always verified.
        Searches read the codes from the file if there are 256 or 65536 codewords. Otherwise not every number is a code,
        so the first search copies all codes to memory and verifies them. Do not shorten or overwrite a mapped file:
        reading beyond its end kills the process (SIGBUS), and other codes give other results. `save` to the same path
        is safe, because it makes a new file.
        """
        place, mmap = checks.device("load", device, torch.device("cpu")), checks.boolean("load", "mmap", mmap)
        index = cls.__new__(cls)
        with modes.plain(place):
            codec, metric, centroids, known, rows, checksums = file.read(path, mmap, place)
            coarse = None if centroids is None else Coarse(centroids, codec)
            mapped = {name: tensor for name, tensor in rows.tensors().items() if name in file.MAPPED}
        index._take(codec, metric, coarse, rows, file.Mapped(mapped, Path(path), checksums) if mmap else None)
        index._tuning = known
        return index

    def to_faiss(self) -> Any:
        """The same codes in an IndexResidualQuantizer of faiss or, with lists, in an IndexIVFResidualQuantizer.

        It finds what this index finds by codes. Where ids are not 0, 1, 2, ..., an IndexIDMap2 has those of an index
        without lists. metric: "l2" or "ip". Vectors beside the codes and `tuning` stay behind.

        >>> faiss.write_index(index.to_faiss(), "vectors.faiss")
        """
        from ..interop.faiss import to_faiss

        return to_faiss(self)

    @classmethod
    def from_faiss(cls, index: Any, device: torch.device | str | None = None) -> Index:
        """An index with codes, ids and lists of a faiss IndexResidualQuantizer or IndexIVFResidualQuantizer.

        It may be in an IndexIDMap. The codec has a codebook for each level (`Codec.from_faiss`).

        >>> index = Index.from_faiss(faiss.read_index("vectors.faiss"))
        """
        from ..interop.faiss import from_faiss

        return from_faiss(index, device)

    def _snapshot(self, length: int, keep: Any) -> Searched:
        """What a search reads: the rows, and their first `length` levels with norms and the rows to look at."""
        known = self._searched.get(length) if keep is None else None
        if known is not None:
            return known
        with self._lock:
            mapped = self._mapped is not None and "codes" in self._mapped.tensors
            if mapped and self.codewords not in (256, 65536):  # not every number is a code
                self._set_rows(self._in_memory("search", names=("codes",)), self._norms)
            if self._coarse is not None and is_late(self._rows):
                self._put_in_order()
            searched = self._searched.get(length)
            if searched is None:
                with modes.plain(self.device):
                    rows = self._readable()
                    searched = searched_rows(rows, length, self.codec, self.metric, self._coarse, self._norms)
                devices.finish(self.device)
                self._searched[length] = searched
            if keep is None:
                return searched
            flags, positions = self._wanted(searched.rows, keep)
        return searched.filtered(self._mask(searched.rows, flags, positions))

    def _wanted(self, rows: Rows, keep: Any) -> tuple[Tensor, Tensor | None]:
        """The user's filter as a tensor, and the rows of its ids, -1 where there is none, unless it is a bool array."""
        with modes.plain(self.device):
            flags = checks.id_array("search", "keep", keep).to(self.device)
            if flags.dtype == torch.bool:
                if len(flags) < rows.next_id:
                    checks.fail("search", "keep", f"[{rows.next_id}] or longer, one per id", checks.shape_of(flags))
                return flags, None
            flags = checks.integers("search", "keep", flags).to(torch.int64)
            return flags, self._find(flags.clamp_min(0)).where(flags >= 0, -1)

    def _mask(self, rows: Rows, flags: Tensor, positions: Tensor | None) -> Tensor:
        """The rows to look at [size] bool."""
        used = rows.used()
        stored, alive = used.ids, used.alive
        with modes.plain(self.device):
            if positions is None:
                mask = flags[: rows.size] if stored is None else flags[stored]
            else:
                mask = torch.zeros(rows.size, dtype=torch.bool, device=self.device)
                mask.index_fill_(0, positions[positions >= 0], True)
            return mask if alive is None else mask & alive

    def _setting(self, recall: float, k: int, vectors: Any, *others: Any) -> tuple[int | None, int | None]:
        """(probes, refine) for a recall. Warns once if the index has another size than when it was tuned."""
        if not isinstance(recall, Real) or isinstance(recall, bool) or not 0 < recall <= 1:
            checks.fail("search", "recall", "above 0 and at most 1", repr(recall))
        if vectors is not None:
            unknown = "left out with vectors of your own, which were not measured with (give refine instead)"
            checks.fail("search", "recall", unknown, recall)
        if any(other is not None for other in others):
            checks.fail("search", "recall", "given without levels, probes and refine", "one of them too")
        if self._tuning is None:
            raise RuntimeError("search: recall needs an index that was tuned (index.tune, `drq-fast tune`).")
        setting = self._tuning.cheapest(recall, k)
        if self._warned_of is not self._tuning and not self._tuning.holds_for(len(self)):
            changed = f"recall was measured with {self._tuning.size:,} vectors, and the index has {len(self):,} now"
            again = "build it again" if self.vectors is None else "call index.tune(queries) or `drq-fast tune`"
            warnings.warn(f"search: {changed}, so less may be found; {again}.", stacklevel=3)
            self._warned_of = self._tuning
        return setting.probes, setting.refine

    def _candidates(self, refine: int | None, k: int, given: stored_vectors.Given | None) -> int:
        """The checked number of candidates to score again."""
        if refine is None:
            checks.fail("search", "refine", "given with vectors", "None", error=TypeError)
        if given is None and self.vectors is None:
            raise RuntimeError(
                "search: refine needs vectors, and the index has codes only; give `vectors`, or make the index with "
                'vectors="float16".'
            )
        return checks.integer("search", "refine", refine, k, max(k, self._rows.size, MOST_PADDED))

    def _refined(
        self, query: Tensor, found: Tensor, rows: Rows, k: int, given: stored_vectors.Given | None
    ) -> SearchResult:
        """The k best of the rows that a scan found [Q, n], by the vectors themselves."""
        query = query.to(self.device, torch.float32)
        if given is not None:
            return given.refined(query, found, rows.ids_at, self.metric, k)
        stored = rows.content.stored()
        assert stored is not None
        return stored_vectors.refined(query, found, stored, self.metric, k)

    def _probes(self, probes: int | None) -> int | None:
        """The checked number of lists to look at."""
        if self._coarse is None:
            if probes is not None:
                raise RuntimeError("search: probes needs lists, and the index has none.")
            return None
        lists = len(self._coarse)
        return default_probes(lists) if probes is None else checks.integer("search", "probes", probes, 1, lists)


def _centroids(value: Tensor | np.ndarray, codec: Codec) -> Tensor:
    """A user's centroids [L, D], relative to the offset of the codec."""
    centroids = checks.array("Index", "centroids", value)
    if centroids.ndim != 2 or centroids.shape[1] != codec.dim or len(centroids) == 0:
        checks.fail("Index", "centroids", f"[L, {codec.dim}]", checks.shape_of(centroids))
    checks.finite("Index", "centroids", centroids, torch.float32)
    centroids = centroids.detach().to(codec.device, torch.float32)
    return centroids.clone() if codec.offset is None else centroids - codec.offset
