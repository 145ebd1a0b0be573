"""An index with inverted lists: what is probed, what changes, files, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch

from drq_fast import Codec, Index
from drq_fast.files import FileError
from drq_fast.index import coarse
from tests.test_build import nearest, recall

METRICS = ("l2", "ip", "cosine")
N, D, L = 4000, 16, 12


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(40, D, generator=generator)
    return 3 + centres[torch.randint(40, (N,), generator=generator)] + 0.3 * torch.randn(N, D, generator=generator)


@pytest.fixture(scope="module", params=METRICS)
def built(request, x) -> Index:
    return Index.build(x[:3000], bits=32, metric=request.param, lists=L, vectors="float32", sample=2000, beam=2, seed=0)


@pytest.fixture
def index(built) -> Index:
    return copy.deepcopy(built)


def decoded(index: Index) -> torch.Tensor:
    """What the index stands for [len, D], in the order of its ids."""
    rows = index._rows.living()
    plain = Codec(index.codec.codebook, index.codec.scale).decode(rows.codes)
    return plain + index.codec.offset + index._coarse.centroids[rows.content.lists.long()]


def test_with_all_lists_the_search_is_that_of_what_the_codes_stand_for(index, x):
    assert (index.lists, len(index)) == (L, 3000)
    assert "12 lists, vectors='float32'" in repr(index)
    query = x[3000:3100]
    found = index.search(query, k=10, probes=L)
    stands_for = decoded(index)
    wanted = index.ids[nearest(query, stands_for, index.metric)]
    assert (found.ids == wanted).float().mean() > 0.99  # but for rounding
    if index.metric == "l2":
        where = index.ids.argsort()[found.ids]
        torch.testing.assert_close(
            found.scores, (query[:, None] - stands_for[where]).square().sum(dim=2), rtol=1e-3, atol=1e-3
        )


def test_more_lists_find_more_and_refining_is_exact(index, x):
    query = x[3000:3200]
    wanted = nearest(query, x[:3000], index.metric)
    found = [recall(index.search(query, k=10, probes=p, refine=200).ids, wanted) for p in (1, 3, L)]
    assert found == sorted(found)
    assert found[-1] > 0.99
    every = index.search(query, k=10, probes=L, refine=3000)
    assert recall(every.ids, wanted) > 0.999  # but for rounding


def test_rows_that_were_added_later_are_found(index, x):
    """Behind the ordered rows, and after all were put in order: the same results, to the bit."""
    index.add(x[3000:3400])
    index.remove(range(0, 600, 2))
    index.upsert(x[3400:3500], ids=range(1000, 1100))
    keep = torch.arange(index._rows.next_id) % 3 > 0
    query = x[3500:3600]
    settings = [{"probes": p, "keep": k, "levels": m} for p in (2, L) for k in (None, keep) for m in (2, 4)]
    assert index._rows.ordered < index._rows.size
    before = [index.search(query, k=20, **each) for each in settings]
    index._set_rows(index._rows.in_lists())
    assert index._rows.ordered == index._rows.size
    for each, (scores, ids) in zip(settings, before, strict=True):
        again = index.search(query, k=20, **each)
        assert torch.equal(again.scores, scores)
        ties = scores[:, 1:] == scores[:, :-1]
        assert torch.equal(again.ids, ids) or bool(ties.any())
    living = set(index.ids.tolist())
    assert living == {i for i in range(3400) if i >= 600 or i % 2}
    assert set(before[-2].ids.flatten().tolist()) <= living


def test_many_late_rows_are_put_in_order_by_the_next_search(built, x, monkeypatch):
    monkeypatch.setattr(coarse, "_SHORT", 100)
    index = copy.deepcopy(built)
    wanted = index.search(x[:20], k=5, probes=L)
    index.add(x[3000:])
    assert index._rows.ordered == 3000
    index.search(x[:20], k=5)
    assert index._rows.ordered == 4000
    assert sorted(index.ids.tolist()) == list(range(4000))
    index.remove(range(3000, 4000))
    assert torch.equal(index.search(x[:20], k=5, probes=L).scores, wanted.scores)


def test_ids_that_were_replaced_are_found_in_lists(built, x, monkeypatch):
    """A replaced vector leaves a row with the same id, which may come behind the new one in the order of the lists."""
    monkeypatch.setattr(coarse, "_SHORT", 100)
    index = copy.deepcopy(built)
    index.upsert(x[:1000].flip(0), ids=range(1000))
    index.search(x[:1])
    assert index._rows.ordered == len(index) == 3000
    found = index.search(x[:1000].flip(0), k=1, refine=50, probes=L, keep=range(1000)).ids[:, 0]
    assert found.min() >= 0
    assert index.metric == "ip" or (found == torch.arange(1000)).float().mean() > 0.99
    index.upsert(x[:1000], ids=range(1000))
    assert sorted(index.ids.tolist()) == list(range(3000))
    index.remove(range(1000))
    assert sorted(index.ids.tolist()) == list(range(1000, 3000))


def test_equal_scores_come_in_the_order_of_the_lists():
    """Then those of rows that were added later, in the same order; a smaller k finds the first of them."""
    index = Index(Codec(torch.zeros(2, 1), torch.ones(1)), centroids=torch.tensor([[-1.0], [1.0]]))
    for ids in (range(6), range(6, 10)):
        index._put_in_order()
        index.add(torch.tensor([[(-1.0) ** i] for i in ids]), ids)
    index._put_in_order()
    index.add(torch.tensor([[1.0], [-1.0], [1.0]]))
    for k in (1, 7, 11, 13):
        assert index.search(torch.zeros(1), k=k).ids.tolist() == [1, 3, 5, 7, 9, 0, 2, 4, 6, 8, 11, 10, 12][:k]


@pytest.mark.parametrize("mmap", [False, True])
def test_files(index, x, tmp_path, mmap):
    index.search(x[:1])
    index.add(x[3000:3300])
    index.remove(range(500))
    wanted = index.search(x[:50], k=7, probes=5, refine=40)
    index.save(tmp_path / "a.drq")
    again = Index.load(tmp_path / "a.drq", mmap=mmap)
    assert (again.lists, again.vectors, again.codec == index.codec) == (L, "float32", True)
    found = again.search(x[:50], k=7, probes=5, refine=40)
    assert torch.equal(found.ids, wanted.ids)
    assert torch.equal(found.scores, wanted.scores)
    again.save(tmp_path / "b.drq")
    assert (tmp_path / "a.drq").read_bytes() == (tmp_path / "b.drq").read_bytes()
    again.add(x[3300:])
    assert len(again) == 3500


def test_damaged_lists_are_refused(index, x, tmp_path):
    from drq_fast import files

    index.search(x[:1])
    index.save(tmp_path / "a.drq")
    tensors, config, _ = files.read(tmp_path / "a.drq", "index")
    for change, words in (
        ({"lists": tensors["lists"] + 1}, "lists must be in 0..11"),
        ({"lists": tensors["lists"].flip(0)}, "lists must be ascending in the first 3000 rows"),
        ({"lists": tensors["lists"].int()}, "lists must be torch.int16"),
        ({"lists": None}, "centroids must be there if and only if lists are"),
        ({"centroids": tensors["centroids"] * torch.nan}, "centroids must be finite"),
        ({"centroids": tensors["centroids"][:, :3]}, r"centroids must be torch.float32 \[L, 16\]"),
    ):
        changed = {name: t.contiguous() for name, t in (tensors | change).items() if t is not None}
        files.write(tmp_path / "b.drq", "index", changed, config)
        with pytest.raises(FileError, match=words):
            Index.load(tmp_path / "b.drq")
    files.write(tmp_path / "b.drq", "index", tensors, config | {"ordered": 3001})
    with pytest.raises(FileError, match="ordered must be an integer from 0 to 3000"):
        Index.load(tmp_path / "b.drq")


def test_filters_and_large_k_look_at_all_lists(index, x):
    """Few of the ids to keep, or fewer than k vectors, may be in the lists nearest to a query."""
    query = -x[:40]
    for keep in ([10, 20, 30], torch.arange(3000) % 100 == 0):
        found = index.search(query, k=3, keep=keep)
        assert torch.equal(found.ids, index.search(query, k=3, keep=keep, probes=L).ids)
        assert found.ids.min() >= 0
    monkeyed = Index(
        index.codec, index.metric, centroids=index._coarse.centroids[:1].repeat(40, 1) + index.codec.offset
    )
    monkeyed.add(x[:100])  # all in the first list, and 16 of 40 lists are looked at
    assert monkeyed.search(query, k=100).ids.min() >= 0
    assert index.search(query, k=2500).ids.min() >= 0
    assert index.search(query, k=2500, probes=1).ids.min() == -1
    codec = Codec(index.codec.codebook, index.codec.scale)
    several = Index(codec, "l2", vectors="float32", centroids=x[:40])
    several.add(x[:1000])  # 16 of 40 lists have fewer than 900 candidates, but 100 results
    found, wanted, every = (several.search(query, k=100, refine=900, probes=probes) for probes in (None, 16, 40))
    assert not torch.equal(wanted.ids, every.ids)
    assert torch.equal(found.ids, wanted.ids)
    assert torch.equal(found.scores, wanted.scores)


def test_centroids_of_the_user(x):
    codec = Codec(torch.randn(16, D), 0.5 ** torch.arange(3), x.mean(dim=0))
    index = Index(codec, centroids=x[:5].numpy())
    ids = index.add(x[:100])
    assert torch.equal(index.search(x[:5], k=1, probes=1, keep=ids[:5]).ids[:, 0], ids[:5])


def test_what_is_wrong_is_said_in_one_sentence(index, x):
    codec, bare = index.codec, Index(Codec(index.codec.codebook, index.codec.scale))
    cases = [
        (lambda: index.search(x[:1], probes=0), ValueError, "probes must be an integer from 1 to 12, got 0"),
        (lambda: index.search(x[:1], probes=L + 1), ValueError, "probes must be an integer from 1 to 12, got 13"),
        (lambda: bare.search(x[:1], probes=1), RuntimeError, "probes needs lists, and the index has none"),
        (lambda: index.encode(x[:1]), RuntimeError, "a code says nothing without its list; use add"),
        (lambda: index.add_codes(codec.encode(x[:1])), RuntimeError, "the index has lists; use add"),
        (lambda: Index(codec, centroids=x[:3, :2]), ValueError, r"centroids must be \[L, 16\], got \[3, 2\]"),
        (lambda: Index(codec, centroids=x[:3] * torch.nan), ValueError, "centroids must be finite"),
        (lambda: Index.build(x[:20], lists=21), ValueError, "lists must be an integer from 1 to 20, got 21"),
        (lambda: Index.build(x[:20], lists="many"), ValueError, "lists must be one of"),
    ]
    for use, kind, words in cases:
        with pytest.raises(kind, match=words) as caught:
            use()
        assert "\n" not in str(caught.value)


def test_how_many_lists():
    assert [coarse.default_lists(n) for n in (10, 49_999, 50_000, 1_000_000, 10_000_000)] == [
        None,
        None,
        512,
        2048,
        8192,
    ]
    assert [coarse.default_probes(n) for n in (1, 16, 100, 1024)] == [1, 16, 16, 64]
