"""search(recall=): the settings that were measured, which one is taken, and what is refused."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch

from drq_fast import Index, files
from drq_fast.files import FileError
from drq_fast.index.tuning import true_neighbours
from tests.test_build import nearest, recall

N, D = 6000, 24


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(D, D, generator=generator) / torch.arange(1, D + 1).sqrt()
    return torch.randn(N, D, generator=generator) @ mix


@pytest.fixture(scope="module", params=["l2", "cosine"])
def index(request, x) -> Index:
    ids = torch.arange(N - 1000) * 2 + 1
    options = {"metric": request.param, "lists": 30, "vectors": "float16", "ids": ids}
    return Index.build(x[1000:], bits=32, sample=3000, beam=2, seed=0, **options)


@pytest.mark.parametrize("wanted", [0.5, 0.9, 0.95, 0.99])
def test_fresh_queries_find_what_was_asked_for(index, x, wanted):
    truth = 2 * nearest(x[:1000], x[1000:], index.metric) + 1
    assert recall(index.search(x[:1000], k=10, recall=wanted).ids, truth) > wanted - 0.02


def test_settings_cost_more_and_find_more(index, x):
    settings = index.tuning.settings
    assert (index.tuning.k, index.tuning.queries) == (10, 1000)
    assert len(settings) > 5
    for cheap, dear in itertools.pairwise(settings):
        assert cheap.cost < dear.cost
        assert cheap.recall < dear.recall
    for wanted in (0.6, 0.97):
        chosen = index.tuning.cheapest(wanted, 10)
        assert chosen.recall >= wanted
        safe = wanted + (1 - wanted) / 10
        assert chosen.recall >= safe
        assert all(each.recall < safe for each in settings if each.cost < chosen.cost)
        again = index.search(x[:5], k=10, probes=chosen.probes, refine=chosen.refine)
        assert torch.equal(index.search(x[:5], k=10, recall=wanted).ids, again.ids)
    most = settings[-1]
    assert index.tuning.cheapest(most.recall, 10) == most  # nothing is safer
    assert index.tuning.cheapest(0.6, 5).refine is not None
    wanted = np.float32(0.5)
    assert torch.equal(index.search(x[:5], recall=wanted).ids, index.search(x[:5], recall=0.5).ids)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_fewer_neighbours_are_found_as_often(index, x, k):
    truth = 2 * nearest(x[:1000], x[1000:], index.metric)[:, :k] + 1
    for wanted in (0.8, 0.95):
        assert recall(index.search(x[:1000], k=k, recall=wanted).ids, truth) > wanted - 0.02


def test_more_neighbours_need_another_measurement(index, x):
    with pytest.raises(ValueError, match="k must be at most 10 where a recall is asked for, unless `tune`"):
        index.search(x[:1], k=11, recall=0.5)
    other = copy.deepcopy(index)
    other.tune(x[:100], k=20)
    assert other.search(x[:1], k=20, recall=0.5).ids.shape == (1, 20)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("change", [lambda i, x: i.add(x[:3000]), lambda i, x: i.remove(i.ids[:2000])])
def test_an_index_of_another_size_is_searched_as_it_was_measured_with_one_warning(index, x, change):
    changed = copy.deepcopy(index)
    change(changed, x)
    setting = index.tuning.cheapest(0.5, 10)
    size = f"recall was measured with 5,000 vectors, and the index has {len(changed):,} now"
    words = rf"^search: {size}, so less may be found; call index\.tune\(queries\) or `drq-fast tune`\.$"
    with pytest.warns(UserWarning, match=words) as said:
        found = changed.search(x[:5], recall=0.5).ids
    assert said[0].filename == __file__
    assert torch.equal(found, changed.search(x[:5], probes=setting.probes, refine=setting.refine).ids)
    assert torch.equal(found, changed.search(x[:5], recall=0.5).ids)  # without another warning
    changed.tune(x[:100])
    changed.search(x[:5], recall=0.5)


def test_codes_alone_of_another_number_are_searched_with_a_warning(x):
    index = Index.build(x[:2000], bits=16, sample=1000, beam=1, seed=0)
    index.add(x[2000:4000])
    with pytest.warns(UserWarning, match=r"the index has 4,000 now, so less may be found; build it again\.$"):
        assert index.search(x[:2], recall=0.1).ids.shape == (2, 10)


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_true_neighbours(x, metric):
    found = true_neighbours(x[:50], x[1000:].split(700), metric, 10)
    assert recall(found, nearest(x[:50], x[1000:], metric)) > 0.999


def test_queries_of_the_user_and_indexes_without_lists(x):
    index = Index.build(x[1000:], bits=16, vectors="int8", sample=2000, beam=2, seed=0, tune=False)
    assert index.tuning is None
    with pytest.raises(RuntimeError, match="recall needs an index that was tuned"):
        index.search(x[:1], recall=0.9)
    index.tune(x[:500], k=5)
    assert (index.tuning.k, index.tuning.queries) == (5, 500)
    assert {each.probes for each in index.tuning.settings} == {None}
    truth = nearest(x[500:1000], x[1000:], "l2")[:, :5]
    assert recall(index.search(x[500:1000], k=5, recall=0.8).ids, truth) > 0.77


def test_files_and_copies_keep_it(index, x, tmp_path):
    index.save(tmp_path / "a.drq")
    for other in (Index.load(tmp_path / "a.drq"), Index.load(tmp_path / "a.drq", mmap=True), copy.deepcopy(index)):
        assert other.tuning == index.tuning
        assert torch.equal(other.search(x[:9], recall=0.9).ids, index.search(x[:9], recall=0.9).ids)
    tensors, config, _ = files.read(tmp_path / "a.drq", "index")
    for value in (
        {},
        {"k": 0, "queries": 5, "size": 1, "settings": []},
        [],
        {"k": 1, "queries": 1, "size": 1, "settings": [[99, 5, 0.5, 1.0]]},
        {"k": 1, "queries": 1, "size": 10**400, "settings": [[3, 5, 0.5, 1.0]]},
        {"k": 1, "queries": 1, "size": 1, "settings": [[3, 10**400, 0.5, 1.0]]},
    ):
        files.write(tmp_path / "b.drq", "index", tensors, config | {"tuning": value})
        with pytest.raises(FileError, match="does not describe an index"):
            Index.load(tmp_path / "b.drq")


def test_what_is_wrong_is_said_in_one_sentence(index, x):
    bare = Index(index.codec, index.metric)
    cases = [
        (lambda: index.search(x[:1], recall=0), ValueError, "recall must be above 0 and at most 1, got 0"),
        (lambda: index.search(x[:1], recall=1.5), ValueError, "recall must be above 0 and at most 1, got 1.5"),
        (lambda: index.search(x[:1], recall="high"), ValueError, "recall must be above 0"),
        (lambda: index.search(x[:1], recall=0.9, probes=3), ValueError, "given without levels, probes and refine, got"),
        (
            lambda: index.search(x[:1], recall=0.9, vectors=x),
            ValueError,
            r"recall must be left out with vectors of your own, which were not measured with \(give refine instead\)",
        ),
        (lambda: index.search(x[:1], recall=True), ValueError, "recall must be above 0 and at most 1, got True"),
        (lambda: index.search(x[:1], recall=float("nan")), ValueError, "recall must be above 0 and at most 1, got nan"),
        (lambda: bare.tune(x[:5]), ValueError, "query must be at least one, for an index that is not empty"),
        (lambda: index.tune(x[:0]), ValueError, "query must be at least one"),
        (lambda: index.tune(x[:5] * torch.nan), ValueError, "query must be finite"),
    ]
    for use, kind, words in cases:
        with pytest.raises(kind, match=words) as caught:
            use()
        assert "\n" not in str(caught.value)
    bare.add(x[:10])
    with pytest.raises(RuntimeError, match="tune: the index has codes only"):
        bare.tune(x[:5])


def test_few_queries_are_warned_of(index, x):
    other = copy.deepcopy(index)
    with pytest.warns(UserWarning, match="a recall of few queries is not reliable"):
        other.tune(x[:5])


def test_codes_alone_are_measured_for_one_k(x):
    index = Index.build(x[:3000], bits=16, seed=0)
    with pytest.raises(ValueError, match="k must be 10 where a recall is asked for, as codes alone were measured"):
        index.search(x[:2], k=5, recall=0.1)
    words = r"the highest that was measured by codes alone \(an index that keeps vectors finds more\), got 0\.99"
    with pytest.raises(ValueError, match=words):
        index.search(x[:2], recall=0.99)
