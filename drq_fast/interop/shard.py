"""One shard of an index, as a process of a cluster holds it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import checks, files, modes
from ..codec import Codec
from ..index import Index, IndexResult, merge
from ..index.ids import MAX_ID
from ..index.searched import of_moderate_length
from ..index.vectors import refined


class Description(NamedTuple):
    """What all shards must have in common, and the size of this one; ids are in low..high."""

    codec: Codec
    metric: str
    vectors: str | None
    lists: int | None
    kind: str  # a summary of all these, and of the centroids
    size: int
    low: int
    high: int


class _Loaded(NamedTuple):
    content: Index
    fingerprint: str  # of the file
    kind: str  # see Description
    by_id: bool  # whether equal scores come in the order of ids


class Shard:
    """An index in a file, mapped. It is loaded by the first call, so that an error is that of a call.

    Changes are saved before they are answered: whoever starts the shard again finds them. They may be repeated.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._loaded: _Loaded | None = None

    def call(self, kind: str | None, method: str, *arguments: Any) -> Any:
        """What a method returns; FileError if the file is no longer of the kind that the caller knows."""
        if kind is not None and self.loaded.kind != kind:
            self._loaded = None  # the right file may come back
            raise files.FileError(f"{self.path} now has another codec, metric, lists or kind of vectors")
        return getattr(self, method)(*arguments)

    @property
    def loaded(self) -> _Loaded:
        """The file, loaded."""
        if self._loaded is None:
            fingerprint = files.fingerprint(self.path, "index")  # first: a file that is replaced now has another
            index = Index.load(self.path, mmap=True)
            ids = index._rows.used().ids
            ascending = ids is None or bool((ids[1:] > ids[:-1]).all())
            self._loaded = _Loaded(index, fingerprint, _kind(index), ascending and index.lists is None)
        return self._loaded

    @property
    def index(self) -> Index:
        """The index in the file."""
        return self.loaded.content

    def describe(self) -> Description:
        """See Description."""
        index, kind = self.index, self.loaded.kind
        ids = index.ids
        low, high = (int(bound) for bound in torch.aminmax(ids)) if len(ids) else (0, -1)
        return Description(
            codec=index.codec,
            metric=index.metric,
            vectors=index.vectors,
            lists=index.lists,
            kind=kind,
            size=len(index),
            low=low,
            high=high,
        )

    def search(
        self, query: np.ndarray, k: int, levels: int | None, keep: Any, probes: int | None, threshold: np.ndarray | None
    ) -> IndexResult:
        """`Index.search` by codes, with equal scores in the order of ids; [Q, n], where n is k or the shard's size."""
        index, by_id = self.index, self.loaded.by_id
        most = max(1, len(index))
        k, wanted = min(k, most), min(k if by_id else k + 1, most)
        if index.lists is not None and probes is None:
            probes = index.lists
        while True:
            scores, ids = index.search(query, wanted, levels, keep, probes=probes, threshold=threshold)
            # The last of the k may tie with others behind them, of which some may have smaller ids.
            tied = (scores[:, -1] == scores[:, k - 1]) & (ids[:, -1] >= 0) if len(ids) else np.zeros(0, bool)
            if wanted == most or by_id or not tied.any():
                return merge([(scores, ids)], k, metric=index.metric)
            wanted = min(2 * wanted, most)

    def refine(self, query: np.ndarray, ids: np.ndarray) -> IndexResult:
        """Those candidates ids [Q, n] that are in this shard, scored by the stored vectors: [Q, n]."""
        index = self.index
        candidates = checks.id_array("search", "ids", ids.ravel())
        with index._lock, modes.plain(index.device):
            rows, positions = index._readable(), index._find(candidates.clamp_min(0))
        positions = positions.where(candidates >= 0, -1).view(ids.shape)
        stored = rows.content.stored()
        if stored is None:
            raise RuntimeError(
                'search: refine needs vectors, and the index has codes only; make it with vectors="float16".'
            )
        values = checks.array("search", "query", query)
        values = of_moderate_length(values) if index.metric == "cosine" else values
        scores, found = refined(values, positions, stored, index.metric, ids.shape[1])
        found = rows.ids_at(found) if rows.size else found
        return merge([(scores.numpy(), found.numpy())], ids.shape[1], metric=index.metric)

    def next_id(self) -> int:
        """The id that `Index.add` would give next."""
        return self.index._rows.next_id

    def ids_of(self, part: int, parts: int) -> np.ndarray:
        """The ids that leave the remainder `part` when divided by `parts`."""
        ids = self.index.ids.numpy()
        return ids if parts == 1 else ids[ids % parts == part]

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """Which of ids [n] the shard has, before a change; FileError if another process has changed the file."""
        if files.fingerprint(self.path, "index") != self.loaded.fingerprint:
            raise files.FileError(f"{self.path} was changed by another process; open the shards again")
        index = self.index
        with index._lock, modes.plain(index.device):
            wanted = checks.id_array("contains", "ids", ids)
            return ((index._find(wanted.clamp(0, MAX_ID)) >= 0) & (wanted >= 0)).numpy()

    def upsert(self, x: np.ndarray, ids: np.ndarray, beam: int) -> Description:
        """`Index.upsert`, saved."""
        self.index.upsert(x, ids, beam=beam)
        return self._saved()

    def remove(self, ids: np.ndarray) -> Description:
        """`Index.remove` of those ids that are here, saved."""
        self.index.remove(ids[self.contains(ids)])
        return self._saved()

    def _saved(self) -> Description:
        try:
            self.index.save(self.path)
        finally:
            self._loaded = None  # mapped again, without the change if it could not be saved
        return self.describe()


def check_alike(paths: Sequence[str], shards: Sequence[Description]) -> None:
    """ValueError unless the shards in these files have codec, metric, lists and kind of vectors in common."""
    first, path = shards[0], paths[0]
    for name, shard in zip(paths, shards, strict=True):
        if shard.codec != first.codec:
            checks.fail("ShardedIndex", name, f"of the same codec as {path}", "another")
        for what in ("metric", "vectors", "lists"):
            expected, found = getattr(first, what), getattr(shard, what)
            if found != expected:
                checks.fail("ShardedIndex", name, f"of {what} {expected}, like {path}", found)
        if shard.kind != first.kind:
            checks.fail("ShardedIndex", name, f"of the same centroids as {path}", "others")


def _kind(index: Index) -> str:
    centroids = None if index._coarse is None else index._coarse.centroids
    sums = [None if tensor is None else files.checksum(tensor) for tensor in (*index.codec.tensors(), centroids)]
    return json.dumps([index.metric, index.vectors, index.codec.settings(), sums])
