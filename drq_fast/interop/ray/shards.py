"""ShardedIndex: one index in many files, each searched by a Ray actor."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
import torch

from ... import checks, functional
from ...codec import Array
from ...files import FileError
from ...index import IndexResult, merge
from ...index.coarse import default_probes
from ...index.ids import checked_ids
from ...index.results import MOST_PADDED
from ...index.searched import of_moderate_length
from ..shard import Description, Shard, check_alike

_COMPARED = 1 << 24  # ids that one task looks for duplicates in
_CPU = torch.device("cpu")


class PartialResult(NamedTuple):
    """The result of the shards that answered, and the paths of the others."""

    scores: Any
    ids: Any
    missing: tuple[str, ...]


class ShardsMissing(RuntimeError):
    """Shards do not answer; missing: their paths."""

    def __init__(self, op: str, missing: dict[str, str]) -> None:
        self.op, self.reasons, self.missing = op, missing, tuple(missing)
        shards = ", ".join(f"{path} ({reason})" for path, reason in missing.items())
        super().__init__(f"{op}: no answer from {shards}.")

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardsMissing, (self.op, self.reasons)


class ShardedIndex:
    """One index whose vectors lie in several files, each mapped and searched by an actor, perhaps on other machines.

    paths: files that `Index.save` wrote, or folders of such files (`*.drq`), which every machine of the cluster must be
    able to read. All have the same codec, metric, lists and kind of vectors, and no id twice. A search returns the bits
    of one Index that has all vectors in the order of their ids; equal scores come in the order of ids. options: of the
    actors, as Ray takes them, such as num_cpus. at_once: how many shards are searched at the same time, all by default;
    the others are given the k-th best score so far, by which they drop codes early. timeout: seconds to wait for the
    answers of shards; start_timeout: at first, when machines and processes may have to be started, and for changes,
    which write files.

    Ray restarts an actor that dies, which maps its file again, and repeats its calls until they are answered. A search
    raises ShardsMissing if a shard stays away, or if its file is damaged or has another codec by then; with
    allow_partial=True it returns the others' results and names it.

    >>> index = ShardedIndex("shards/")
    >>> scores, ids = index.search(query, k=10)
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        options: dict[str, Any] | None = None,
        at_once: int | None = None,
        timeout: float = 60.0,
        start_timeout: float = 600.0,
    ) -> None:
        self.paths = _files(paths)
        self.timeout, self.start_timeout = timeout, start_timeout
        self.at_once = len(self.paths) if at_once is None else checks.integer("ShardedIndex", "at_once", at_once, 1)
        settings = {"max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": "SPREAD"} | (options or {})
        actor = ray.remote(Shard).options(**settings)
        self._actors = [actor.remote(path) for path in self.paths]
        try:
            self._describe()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return sum(shard.size for shard in self._shards)

    def __repr__(self) -> str:
        return f"ShardedIndex({len(self)} vectors in {len(self.paths)} shards, metric={self.metric!r})"

    def __enter__(self) -> ShardedIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the actors."""
        for actor in self._actors:
            ray.kill(actor)

    @property
    def metric(self) -> str:
        """What the index is searched by."""
        return self._shards[0].metric

    @property
    def dim(self) -> int:
        """D, of vectors and queries."""
        return self._shards[0].codec.dim

    @property
    def sizes(self) -> dict[str, int]:
        """The number of vectors in each file."""
        return {path: shard.size for path, shard in zip(self.paths, self._shards, strict=True)}

    def search(
        self,
        query: Array,
        k: int = 10,
        levels: int | None = None,
        keep: Array | Iterable[int] | None = None,
        *,
        probes: int | None = None,
        refine: int | None = None,
        threshold: float | Array | None = None,
        allow_partial: bool = False,
    ) -> IndexResult | PartialResult:
        """The k best for each query [Q, dim] (or [dim]), as `Index.search` returns them; see there for the arguments.

        With refine, the shards score the best candidates of all shards again, each those that it has. allow_partial:
        return PartialResult(scores, ids, missing) instead of raising ShardsMissing.
        """
        query = checks.listed("search", "query", query)
        single = getattr(query, "ndim", 2) == 1
        values = checks.array("search", "query", query[None] if single else query)
        if values.ndim != 2 or values.shape[1] != self.dim:
            checks.fail("search", "query", f"[Q, {self.dim}]", checks.shape_of(values))
        values = of_moderate_length(values) if self.metric == "cosine" else values
        checks.finite("search", "query", values, torch.float32)
        most = min(max(len(self), MOST_PADDED), checks.MAX_RESULTS)
        k = checks.integer("search", "k", k, 1, most)
        candidates = k if refine is None else checks.integer("search", "refine", refine, k, max(k, most))
        limits = checks.thresholds("search", threshold, len(values), _CPU)
        lists, missing = self._shards[0].lists, dict[str, str]()
        few_lists = lists is not None and probes is None and keep is None  # `probed` may have to look at all lists
        asked = _Asked(
            np.ascontiguousarray(values.detach().to(_CPU, torch.float32).numpy()),
            levels,
            None if keep is None else ray.put(checks.id_array("search", "keep", keep).cpu().numpy()),
            default_probes(lists) if few_lists and lists is not None else probes,
        )
        early = None if few_lists or refine is not None or limits is None else limits.numpy()
        found = self._best(asked, candidates, early, allow_partial, missing)
        last = found.ids[:, k - 1]
        if few_lists and len(last) and last.min() < 0:
            some = asked._replace(query=asked.query[last < 0], probes=lists)
            again = self._best(some, candidates, None, allow_partial, missing)
            found.scores[last < 0], found.ids[last < 0] = again
        if refine is not None:
            rows, ids = ray.put(asked.query), ray.put(found.ids)
            parts = self._all("search", "refine", rows, ids, missing=missing if allow_partial else None)
            nothing = IndexResult(found.scores, np.full_like(found.ids, -1))
            found = merge(parts or [nothing], k, metric=self.metric)
        scores, numbers = (torch.from_numpy(np.ascontiguousarray(part)) for part in found)
        if limits is not None:
            scores, numbers = functional.within(scores, numbers, limits, self.metric)
        result = IndexResult(*(checks.in_kind(v[0] if single else v, query) for v in (scores, numbers)))
        return PartialResult(*result, tuple(missing)) if allow_partial else result

    def add(self, x: Array, ids: Array | Iterable[int] | None = None, *, beam: int = 1) -> Array:
        """Adds x [N, dim] to the smallest shard and saves it; returns the ids [N] as `Index.add` does.

        The whole file is written again, so add many vectors at a time. Only one process at a time may change shards.
        """
        return self._put("add", x, ids, beam)

    def upsert(self, x: Array, ids: Array | Iterable[int], *, beam: int = 1) -> Array:
        """`add` that replaces the vectors whose ids are there already, each in its own shard."""
        if ids is None:
            checks.fail("upsert", "ids", "given", "None", error=TypeError)
        return self._put("upsert", x, ids, beam)

    def remove(self, ids: Array | Iterable[int]) -> None:
        """Takes vectors out of their shards by id and saves these. All ids must be there, else nothing is removed."""
        wanted = checked_ids("remove", ids, _CPU).numpy()
        owner = self._owners("remove", wanted)
        if (owner < 0).any():
            checks.fail("remove", "ids", "in the index", f"{int(wanted[owner < 0][0])}, which is not")
        self._change("remove", {s: ("remove", wanted[owner == s]) for s in np.unique(owner).tolist()})

    def _describe(self) -> None:
        """Asks the shards what they are, which must be parts of one index."""
        self._kind: str | None = None  # which shards may have any until all are known to have the same
        self._shards: list[Description] = self._all("ShardedIndex", "describe", timeout=self.start_timeout)
        check_alike(self.paths, self._shards)
        self._kind = self._shards[0].kind
        self._check_ids()

    def _put(self, op: str, x: Array, ids: Any, beam: int) -> Array:
        values = checks.array(op, "x", checks.listed(op, "x", x))
        if values.ndim != 2 or values.shape[1] != self.dim:
            checks.fail(op, "x", f"[N, {self.dim}]", checks.shape_of(values))
        checks.finite(op, "x", values, torch.float32)
        if ids is None:
            first = max(self._all(op, "next_id"))
            ids = np.arange(first, first + len(values))
        new = checked_ids(op, ids, _CPU).numpy()
        if len(new) != len(values):
            checks.fail(op, "ids", f"{len(values)} numbers, one per vector", len(new))
        owner = self._owners(op, new)
        if op == "add" and (owner >= 0).any():
            checks.fail(op, "ids", "new", f"{int(new[owner >= 0][0])}, which is in the index already")
        owner[owner < 0] = min(range(len(self.paths)), key=lambda s: self._shards[s].size)
        rows = values.detach().to(_CPU, torch.float32).numpy()
        calls = {s: ("upsert", rows[owner == s], new[owner == s], beam) for s in np.unique(owner).tolist()}
        self._change(op, calls)
        return checks.in_kind(torch.from_numpy(new), x)

    def _change(self, op: str, calls: dict[int, tuple[Any, ...]]) -> None:
        """Changes some shards and notes their new sizes."""
        started = {self._call(s, name, *arguments): s for s, (name, *arguments) in calls.items()}
        missing: dict[str, str] = {}
        for shard, answer in self._collect(started, missing, self.start_timeout):
            self._shards[shard] = answer
        if missing:
            raise ShardsMissing(op, missing)

    def _owners(self, op: str, ids: np.ndarray) -> np.ndarray:
        """The number of the shard that has each id [n], -1 if none has."""
        owner = np.full(len(ids), -1)
        for shard, has in enumerate(self._all(op, "contains", ray.put(ids))):
            owner[has] = shard
        return owner

    def _best(
        self, asked: _Asked, k: int, threshold: np.ndarray | None, allow_partial: bool, missing: dict[str, str]
    ) -> IndexResult:
        """The k best by codes of all shards; `at_once` of them at a time, the largest first."""
        shared = asked._replace(query=ray.put(asked.query))
        waiting = sorted(range(len(self.paths)), key=lambda s: self._shards[s].size)
        worst, sign = (np.inf, 1) if self.metric == "l2" else (-np.inf, -1)
        best = IndexResult(np.full((len(asked.query), 1), worst, np.float32), np.full((len(asked.query), 1), -1))
        started: dict[Any, int] = {}
        new: list[IndexResult] = []
        while waiting or started:
            if waiting and new:
                best, new = merge([best, *new], k, metric=self.metric), []
                kth = best.scores[:, -1]
                threshold = kth if threshold is None else sign * np.minimum(sign * kth, sign * threshold)
            limits = None if threshold is None else ray.put(threshold)
            while waiting and len(started) < self.at_once:
                shard = waiting.pop()
                started[self._call(shard, "search", shared.query, k, *shared[1:], limits)] = shard
            count = 1 if waiting else len(started)
            new += [answer for _, answer in self._collect(started, missing, self.timeout, count)]
        if missing and not allow_partial:
            raise ShardsMissing("search", missing)
        return merge([best, *new], k, metric=self.metric)

    def _all(
        self, op: str, method: str, *arguments: Any, missing: dict[str, str] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """What a method of all shards returns; if `missing` is given, of those that answer, and it names the others."""
        absent = dict[str, str]() if missing is None else missing
        started = {self._call(s, method, *arguments): s for s in range(len(self._actors))}
        found = self._collect(started, absent, self.timeout if timeout is None else timeout)
        if absent and missing is None:
            raise ShardsMissing(op, absent)
        return [answer for _, answer in sorted(found, key=lambda each: each[0])]

    def _call(self, shard: int, method: str, *arguments: Any) -> Any:
        return self._actors[shard].call.remote(self._kind, method, *arguments)

    def _collect(
        self, started: dict[Any, int], missing: dict[str, str], timeout: float, count: int | None = None
    ) -> list[tuple[int, Any]]:
        """(shard, answer) of `count` calls, or all; takes them out of `started` and notes shards that do not answer."""
        deadline, found = time.monotonic() + timeout, []
        left = len(started) if count is None else count
        while left > 0:
            done, _ = ray.wait(list(started), num_returns=left, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                for call in started:
                    missing[self.paths[started[call]]] = f"for {timeout:g} seconds"
                    ray.cancel(call)
                started.clear()
                break
            for call in done:
                shard, left = started.pop(call), left - 1
                try:
                    found.append((shard, ray.get(call)))
                except ray.exceptions.RayTaskError as error:
                    if not isinstance(error.cause, (OSError, FileError)):  # the fault is not the shard's
                        raise error.cause from None
                    missing[self.paths[shard]] = str(error.cause).rstrip(".")
                except ray.exceptions.RayError as error:  # its process has gone, and so has what it answered
                    missing[self.paths[shard]] = type(error).__name__
        return found

    def _check_ids(self) -> None:
        """No id in two shards. Compares ids only if their ranges overlap, some at a time, in tasks of the cluster."""
        filled = [s for s, shard in enumerate(self._shards) if shard.size]
        filled.sort(key=lambda s: self._shards[s].low)
        bounds = [(self._shards[s].low, self._shards[s].high) for s in filled]
        if all(a[1] < b[0] for a, b in itertools.pairwise(bounds)):
            return
        parts = -(-len(self) // _COMPARED)
        task = ray.remote(_twice).options(num_cpus=0)  # the actors may have all cores
        for part in range(parts):
            compared = task.remote(*(self._call(s, "ids_of", part, parts) for s in filled))
            twice = ray.get(compared, timeout=self.start_timeout)
            if twice is not None:
                id, *shards = twice
                a, b = (self.paths[filled[s]] for s in sorted(shards))
                checks.fail("ShardedIndex", b, f"without the ids of {a}", f"{id} in both")


class _Asked(NamedTuple):
    """What a search asks of every shard."""

    query: Any  # [Q, dim] float32
    levels: int | None
    keep: Any
    probes: int | None


def _twice(*ids: np.ndarray) -> tuple[int, int, int] | None:
    """(an id, and the two arrays that have it), or None if none is in two arrays."""
    joined = np.concatenate(ids)
    owner = np.repeat(np.arange(len(ids)), [len(each) for each in ids])
    order = np.argsort(joined, kind="stable")
    joined, owner = joined[order], owner[order]
    twice = np.flatnonzero(joined[1:] == joined[:-1])
    return (int(joined[twice[0]]), int(owner[twice[0]]), int(owner[twice[0] + 1])) if len(twice) else None


def _files(paths: Any) -> list[str]:
    """The files that are named, and those in the folders that are, as absolute paths."""
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    found: list[str] = []
    for path in map(Path, given):
        inside = sorted(path.glob("*.drq")) if path.is_dir() else [path]
        if not inside:
            checks.fail("ShardedIndex", str(path), "a folder with .drq files", "none")
        found += [str(each.resolve()) for each in inside]
    if not found:
        checks.fail("ShardedIndex", "paths", "at least one", "none")
    if len(set(found)) < len(found):
        checks.fail("ShardedIndex", "paths", "different", f"{max(found, key=found.count)} more than once")
    return found
