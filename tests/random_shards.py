"""Random indexes, the same rows in random shards, and searches of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

import drq_fast

SHARDS = 4


class Case(NamedTuple):
    """What is drawn; everything else follows from the seed."""

    metric: str
    N: int
    dim: int
    codewords: int
    levels: int
    codebooks: int
    lists: int | None
    vectors: str | None
    distinct: int  # vectors; the others are copies, whose scores tie
    skew: float  # the larger, the more shards differ in size
    removed: bool
    own_ids: bool
    queries: int
    seed: int


CASES = st.builds(
    lambda sizes, **drawn: Case(levels=sizes[0], codebooks=sizes[1], **drawn),
    sizes=st.sampled_from(
        [(levels, books) for levels in range(1, 5) for books in range(1, levels + 1) if levels % books == 0]
    ),
    metric=st.sampled_from(["l2", "ip", "cosine"]),
    N=st.integers(0, 300),
    dim=st.integers(1, 6),
    codewords=st.sampled_from([2, 3, 16, 256, 300]),
    lists=st.sampled_from([None, 3, 40]),
    vectors=st.sampled_from([None, "float32", "float16", "int8"]),
    distinct=st.sampled_from([1, 20, 1000]),
    skew=st.floats(0, 8),
    removed=st.booleans(),
    own_ids=st.booleans(),
    queries=st.integers(0, 5),
    seed=st.integers(0, 1 << 32),
)


class Made(NamedTuple):
    """One index, the same rows in the files of shards, and queries [Q, D]."""

    index: drq_fast.Index
    paths: list[Path]
    query: torch.Tensor
    generator: np.random.Generator


def made(case: Case, folder: Path) -> Made:
    """Writes 0.drq, 1.drq and so on, some of them perhaps empty, and all.index."""
    generator = np.random.default_rng(case.seed)
    normal = lambda *shape: torch.from_numpy(generator.standard_normal(shape).astype(np.float32))  # noqa: E731
    codebook = normal(case.codebooks * case.codewords, case.dim)
    centroids = None if case.lists is None else normal(case.lists, case.dim)
    codec = drq_fast.Codec(codebook, 0.6 ** torch.arange(case.levels), normal(case.dim) / 3, codebooks=case.codebooks)
    x = normal(case.distinct, case.dim)[torch.from_numpy(generator.integers(case.distinct, size=case.N))]
    ids = np.arange(case.N)
    if case.own_ids:
        ids = np.sort(generator.choice(max(1, 3 * case.N), case.N, replace=False)) * 1_000_003
    share = generator.random(SHARDS) ** case.skew
    owner = generator.choice(SHARDS, case.N, p=share / share.sum())
    gone = ids[generator.random(case.N) < 0.3] if case.removed else ids[:0]

    index = drq_fast.Index(codec, case.metric, vectors=case.vectors, centroids=centroids)
    index.add(x, ids=ids, beam=4)
    index.remove(gone)
    index.save(folder / "all.index")
    paths = [folder / f"{s}.drq" for s in range(SHARDS)]
    for s, path in enumerate(paths):
        _shard(index, ids, owner == s, generator).save(path)
    query = x[: case.queries] + 0.1 * normal(min(case.N, case.queries), case.dim)
    return Made(index, paths, query, generator)


def _shard(index: drq_fast.Index, ids: np.ndarray, own: np.ndarray, generator: np.random.Generator) -> drq_fast.Index:
    """Some rows of an index with their codes, since encoding other batches may give other codes."""
    if index.lists is None and index.vectors is None:  # in any order
        shard = drq_fast.Index(index.codec, index.metric)
        order = generator.permutation(np.flatnonzero(np.isin(index.ids.numpy(), ids[own])))
        shard.add_codes(index.codes[order], ids=index.ids[order])
        return shard
    shard = copy.deepcopy(index)
    shard.remove(np.intersect1d(ids[~own], index.ids.numpy()))
    return shard


def random_search(case: Case, one: Made) -> dict[str, Any]:
    """Arguments of `search` beside the query."""
    draw, chance = one.generator.integers, one.generator.random
    asked: dict[str, Any] = {"k": int(draw(1, case.N + 6)) if chance() < 0.3 else int(draw(1, 20))}
    if chance() < 0.5:
        asked["levels"] = int(draw(1, case.levels + 1))
    if chance() < 0.5:
        some = one.generator.choice(one.index.ids.numpy(), len(one.index) // 3, replace=False)
        asked["keep"] = some if case.own_ids else torch.from_numpy(np.isin(np.arange(case.N), some))
    if case.lists is not None and chance() < 0.5:
        asked["probes"] = int(draw(1, case.lists + 1))
    if case.vectors is not None and chance() < 0.5:
        asked["refine"] = asked["k"] + int(draw(0, 30))
    if chance() < 0.5 and len(one.query) and len(one.index):
        scores = one.index.search(one.query, **asked).scores
        limits = scores[:, int(draw(0, scores.shape[1]))]  # a score, which stays with those that tie with it
        asked["threshold"] = limits if chance() < 0.5 else float(limits[0])
    return asked


def assert_same(found: Any, index: drq_fast.Index, query: torch.Tensor, asked: dict[str, Any]) -> None:
    """Equal bits of scores and ids. Equal scores come in the order of ids, in an index with lists that of the lists."""
    expected = index.search(query, **asked)
    if index.lists is None:
        assert torch.equal(found.ids, expected.ids)
        assert torch.equal(found.scores, expected.scores)
        return
    if "refine" in asked and _ties(index, query, asked):
        return  # which candidates are refined depends on the order of ties
    expected = drq_fast.merge([expected], metric=index.metric)
    assert torch.equal(found.scores, expected.scores)
    last = found.scores == found.scores[:, -1:]  # of those that tie with the last result others may be left out
    assert torch.equal(found.ids.masked_fill(last, 0), expected.ids.masked_fill(last, 0))
    assert torch.equal((found.ids < 0).sum(dim=1), (expected.ids < 0).sum(dim=1))


def _ties(index: drq_fast.Index, query: torch.Tensor, asked: dict[str, Any]) -> bool:
    scores = index.search(query, max(1, len(index)), asked.get("levels"), probes=index.lists).scores
    return bool((scores[:, 1:] == scores[:, :-1]).any())
