"""Shard, which an actor runs: results of random shards, merged, are those of one index, bit by bit. Without Ray."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import random_shards
import torch
from hypothesis import given, settings

import drq_fast
from drq_fast.interop import shard

METRICS = ["l2", "ip", "cosine"]


def made(metric, lists, vectors, N=1200, dim=6, seed=0):
    """Vectors with many duplicates, and an index of them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N // 3, dim, generator=generator)
    x = x[torch.randint(len(x), (N,), generator=generator)]
    return x, drq_fast.Index.build(x, bits=16, metric=metric, lists=lists, vectors=vectors, seed=0, tune=False)


def divided(x, index, owner, folder):
    """Files of shards that have the rows whose owner they are, with the codec and the lists of the index."""
    index.save(folder / "all.index")
    paths = []
    for s in range(int(owner.max()) + 2):  # the last one is empty
        part = drq_fast.Index.load(folder / "all.index")
        part.reset()
        rows = (owner == s).nonzero().squeeze(1)
        order = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(s))]  # not in the order of ids
        part.add(x[order], ids=order, beam=16)
        paths.append(str(folder / f"{s}.drq"))
        part.save(paths[-1])
    return paths


def read_only(value):
    """As Ray hands arrays to an actor."""
    array = value.numpy().copy()
    array.flags.writeable = False
    return array


def owners(N, seed):
    """Shards of very different size."""
    return torch.from_numpy(np.random.default_rng(seed).choice(4, N, p=[0.6, 0.3, 0.095, 0.005]))


@pytest.mark.parametrize(("metric", "lists"), list(itertools.product(METRICS, [None, 6])))
def test_shards_by_codes(tmp_path, metric, lists):
    x, index = made(metric, lists, None)
    shards = [shard.Shard(path) for path in divided(x, index, owners(len(x), 1), tmp_path)]
    query = read_only(x[::150])
    for k, levels, probes in itertools.product([1, 7, 300], [None, 1], [None] if lists is None else [2, 6]):
        keep = None if k == 7 else torch.arange(len(x))[::3].numpy()
        threshold = None
        found = []
        for each in shards:
            found.append(each.search(query, k, levels, keep, probes, threshold))
            merged = drq_fast.merge(found, k, metric=metric)
            threshold = merged.scores[:, -1]  # which prunes the next shard
        expected = index.search(query, k, levels, keep, probes=probes)
        assert_same(merged, expected, metric)


@pytest.mark.parametrize("metric", METRICS)
def test_shards_refine_their_own_candidates(tmp_path, metric):
    x, index = made(metric, None, "int8")
    shards = [shard.Shard(path) for path in divided(x, index, owners(len(x), 2), tmp_path)]
    query = read_only(x[::150] * 1.1)
    codes = drq_fast.merge([each.search(query, 60, None, None, None, None) for each in shards], 60, metric=metric)
    ids = read_only(torch.from_numpy(codes.ids))
    found = drq_fast.merge([each.refine(query, ids) for each in shards], 5, metric=metric)
    assert_same(found, index.search(query, 5, refine=60), metric)


def assert_same(found, expected, metric):
    """Equal bits; the index has the order of lists for equal scores, shards that of ids."""
    ordered = drq_fast.merge([expected], metric=metric)
    np.testing.assert_array_equal(found.scores, ordered.scores)
    last = found.scores[:, -1:]
    np.testing.assert_array_equal(
        np.where(found.scores == last, 0, found.ids), np.where(found.scores == last, 0, ordered.ids)
    )


@settings(max_examples=60, deadline=None)
@given(case=random_shards.CASES)
def test_random_shards_by_codes(case, tmp_path_factory):
    """Each shard is given the k-th best score so far. Ties beyond the k-th go to the smallest ids, with lists, too."""
    folder = tmp_path_factory.mktemp("shards")
    one = random_shards.made(case, folder)
    asked = random_shards.random_search(case, one) | ({} if case.lists is None else {"probes": case.lists})
    k, levels, keep = (asked.get(name) for name in ("k", "levels", "keep"))
    whole, query = shard.Shard(str(folder / "all.index")), read_only(one.query)
    keep = None if keep is None else np.asarray(keep)
    threshold, found = None, []
    for path in one.paths:
        found.append(shard.Shard(str(path)).search(query, k, levels, keep, asked.get("probes"), threshold))
        merged = drq_fast.merge(found, k, metric=case.metric)
        threshold = merged.scores[:, -1]
    expected = whole.search(query, k, levels, keep, asked.get("probes"), None)
    expected = drq_fast.merge([expected], k, metric=case.metric)
    np.testing.assert_array_equal(merged.ids, expected.ids)
    np.testing.assert_array_equal(merged.scores, expected.scores)
    same = {"k": k, "levels": levels, "keep": keep} | ({} if case.lists is None else {"probes": case.lists})
    random_shards.assert_same(drq_fast.index.IndexResult(*map(torch.from_numpy, merged)), one.index, one.query, same)


def test_ties_beyond_the_last_result_go_to_the_smallest_ids(tmp_path):
    x = torch.zeros(50, 3)
    index = drq_fast.Index(drq_fast.Codec(torch.zeros(2, 3), torch.ones(1), None))
    index.add(x, ids=torch.arange(49, -1, -1))
    index.save(tmp_path / "a.drq")
    found = shard.Shard(str(tmp_path / "a.drq")).search(x[:2].numpy(), 3, None, None, None, None)
    assert found.ids.tolist() == [[0, 1, 2]] * 2


def test_changes_are_saved_and_may_be_repeated(tmp_path):
    x, index = made("l2", None, "float32", N=60)
    index.save(tmp_path / "a.drq")
    one = shard.Shard(str(tmp_path / "a.drq"))
    for _ in range(2):
        assert one.upsert(x[:5].numpy() + 9, np.array([3, 70, 71, 72, 73]), 1).size == 64
    for _ in range(2):
        assert one.remove(np.array([0, 1, 999])).size == 62
    restarted = shard.Shard(str(tmp_path / "a.drq"))
    again = restarted.describe()
    assert (again.size, restarted.next_id(), again.low, again.high) == (62, 74, 2, 73)
    asked = read_only(torch.tensor([0, 2, 3, 73, 74, -1]))
    assert one.contains(asked).tolist() == [False, True, True, True, False, False]
    assert sorted(np.concatenate([one.ids_of(part, 3) for part in range(3)]).tolist()) == sorted(one.index.ids.tolist())


def test_a_change_that_cannot_be_saved_is_not_made(tmp_path, monkeypatch):
    x, index = made("l2", None, None, N=60)
    index.save(tmp_path / "a.drq")
    one = shard.Shard(str(tmp_path / "a.drq"))

    def no_space(*_):
        raise OSError("no space")

    monkeypatch.setattr(drq_fast.Index, "save", no_space)
    with pytest.raises(OSError, match="no space"):
        one.upsert(x[:1].numpy(), np.array([70]), 1)
    assert not one.contains(np.array([70])).any()


def test_changes_of_others_are_not_undone(tmp_path):
    """Two that have a file open and change it: the second is told, and knows the first change when it opens again."""
    x, index = made("l2", None, None, N=60)
    index.save(tmp_path / "a.drq")
    one, two = (shard.Shard(str(tmp_path / "a.drq")) for _ in range(2))
    assert not one.contains(np.array([70])).any()
    assert not two.contains(np.array([70])).any()
    one.upsert(x[:1].numpy(), np.array([70]), 1)
    assert one.contains(np.array([70])).all()
    with pytest.raises(drq_fast.FileError, match=r"a\.drq was changed by another process; open the shards again$"):
        two.contains(np.array([70]))
    assert shard.Shard(two.path).contains(np.array([70])).all()


def test_a_file_that_another_codec_takes_the_place_of(tmp_path):
    """A shard that is started again must not answer with scores that those of other shards cannot be compared with."""
    index = made("l2", None, None, N=60)[1]
    index.save(tmp_path / "a.drq")
    kind = shard.Shard(str(tmp_path / "a.drq")).describe().kind
    drq_fast.Index(index.codec, "ip").save(tmp_path / "a.drq")
    one = shard.Shard(str(tmp_path / "a.drq"))
    with pytest.raises(drq_fast.FileError, match=r"a\.drq now has another codec, metric, lists or kind of vectors$"):
        one.call(kind, "next_id")
    index.save(tmp_path / "a.drq")
    assert one.call(kind, "next_id") == 60


def test_shards_that_are_not_of_one_index(tmp_path):
    x = made("l2", None, None)[0]
    codecs = [drq_fast.Index.build(x, bits=16, seed=seed, tune=False).codec for seed in range(2)]
    centroids = [x[:4], x[4:8]]
    indexes = {
        "a": drq_fast.Index(codecs[0]),
        "b": drq_fast.Index(codecs[1]),
        "c": drq_fast.Index(codecs[0], "ip"),
        "d": drq_fast.Index(codecs[0], vectors="int8"),
        "e": drq_fast.Index(codecs[0], centroids=centroids[0]),
        "f": drq_fast.Index(codecs[0], centroids=centroids[1]),
    }
    for name, index in indexes.items():
        index.save(tmp_path / name)
    known = {name: shard.Shard(str(tmp_path / name)).describe() for name in indexes}
    for first, second, message in (
        ("a", "b", "b must be of the same codec as a, got another."),
        ("a", "c", "c must be of metric l2, like a, got ip."),
        ("a", "d", "d must be of vectors None, like a, got int8."),
        ("a", "e", "e must be of lists None, like a, got 4."),
        ("e", "f", "f must be of the same centroids as e, got others."),
    ):
        with pytest.raises(ValueError, match=f"^ShardedIndex: {re.escape(message)}$"):
            shard.check_alike([first, second], [known[first], known[second]])
    shard.check_alike(["a", "a"], [known["a"], known["a"]])
