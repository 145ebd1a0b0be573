"""merge: the k best of several results by (score, id); and search with a threshold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import drq_fast
from drq_fast import functional
from drq_fast.backends.native import extension

METRICS = ["l2", "ip", "cosine"]
BACKENDS = ["torch", *extension.supported_isas()]  # those of native


def by_definition(results, k, metric):
    """All candidates of each query, sorted by Python."""
    sign, worst = (1, float("inf")) if metric == "l2" else (-1, -float("inf"))
    scores, ids = [], []
    for q in range(len(results[0][0])):
        all_of_q = [(s, i) for r in results for s, i in zip(r[0][q].tolist(), r[1][q].tolist(), strict=True) if i >= 0]
        best = sorted(all_of_q, key=lambda each: (sign * each[0], each[1]))[:k]
        best += [(worst, -1)] * (k - len(best))
        scores.append([s for s, _ in best])
        ids.append([i for _, i in best])
    return np.array(scores, np.float32).reshape(-1, k), np.array(ids).reshape(-1, k)


def random_result(generator, Q, n, metric, first_id, distinct):
    """Sorted by (score, id), with ties and missing results."""
    scores = generator.integers(-distinct, distinct, (Q, n)).astype(np.float32) / 4
    ids = first_id + np.argsort(generator.random((Q, n)), axis=1)
    missing = np.arange(n) >= generator.integers(0, n + 1, (Q, 1))
    worst = np.inf if metric == "l2" else -np.inf
    order = np.lexsort((ids, scores if metric == "l2" else -scores), axis=1)
    scores, ids = np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)
    return np.where(missing, np.float32(worst), scores), np.where(missing, -1, ids)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("seed", range(10))
def test_merge_equals_a_sort_of_all(metric, seed):
    generator = np.random.default_rng(seed)
    Q, shards = int(generator.integers(0, 5)), int(generator.integers(1, 40))
    widths = generator.integers(1, 30, shards)
    distinct = int(generator.choice([1, 4, 1000]))
    results = [random_result(generator, Q, n, metric, 100 * s, distinct) for s, n in enumerate(widths)]
    for k in (1, 7, 50):
        scores, ids = drq_fast.merge(results, k, metric=metric)
        expected_scores, expected_ids = by_definition(results, k, metric)
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_array_equal(scores, expected_scores)


def test_merge_in_kind_of_one_query_and_with_signed_zeros():
    results = [(torch.tensor([0.0, 2.0]), torch.tensor([7, 1])), (torch.tensor([-0.0]), torch.tensor([3]))]
    scores, ids = drq_fast.merge(results, 2)
    assert isinstance(scores, torch.Tensor)
    assert ids.tolist() == [3, 7]
    assert scores.tolist() == [0.0, 0.0]
    assert drq_fast.merge(results).ids.shape == (2,)


def test_merge_of_float64_keeps_its_precision():
    results = [(np.array([[1.0 + 1e-12]]), np.array([[1]])), (np.array([[1.0]]), np.array([[2]]))]
    assert drq_fast.merge(results, 2).ids.tolist() == [[2, 1]]


def test_merge_refuses():
    one, two = np.zeros((1, 2)), np.zeros((2, 2))
    with pytest.raises(ValueError, match=r"^merge: results must be at least one, got none\.$"):
        drq_fast.merge([])
    with pytest.raises(ValueError, match=r"^merge: results must be scores \[Q, k\] and ids \[Q, k\], got float64"):
        drq_fast.merge([(one, two)])
    with pytest.raises(ValueError, match=r"^merge: results must be of the same 1 queries, got 2\.$"):
        drq_fast.merge([(one, one), (two, two)])
    with pytest.raises(ValueError, match=r"^merge: k must be an integer from 1"):
        drq_fast.merge([(one, one)], 0)


def test_merged_shards_equal_one_index(codec):
    x, codebook, scale, offset = codec(N=500, D=6, K=7, M=2)  # 49 different codes: many ties
    index = drq_fast.Index(drq_fast.Codec(codebook, scale, offset))
    shards = [drq_fast.Index(index.codec) for _ in range(3)]
    index.add(x)
    for s, shard in enumerate(shards):
        shard.add(x[s::3], ids=range(s, 500, 3))
    scores, ids = drq_fast.merge([shard.search(x[:20], k=30) for shard in shards], k=30)
    assert torch.equal(ids, index.search(x[:20], k=30).ids)
    assert torch.equal(scores, index.search(x[:20], k=30).scores)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("Q", "k"), [(1, 3), (1, 200), (5, 10), (70, 3), (70, 30)])
def test_threshold_leaves_out_what_is_worse(codec, backend, metric, Q, k, monkeypatch):
    """By every scan: one query, some, a batch, and a batch that guesses its thresholds (k = 30)."""
    if backend in extension.supported_isas():
        monkeypatch.setenv("DRQ_FAST_ISA", backend)
        backend = "native"
    x, codebook, scale, offset = codec(N=20_000, D=6, K=16, M=3)
    codes, query = functional.encode(x, codebook, scale, offset=offset), x[:Q]
    options = {"k": k, "offset": offset, "metric": metric, "backend": backend}
    scores, positions = functional.search(query, codes, codebook, scale, **options)
    limits = scores[torch.arange(Q), torch.arange(Q) * 7 % k]  # equal to a score, which stays
    limits[::5] = scores[::5, 0] - (1 if metric == "l2" else -1)  # better than all
    good = scores <= limits[:, None] if metric == "l2" else scores >= limits[:, None]
    found = functional.search(query, codes, codebook, scale, threshold=limits, **options)
    assert torch.equal(found.positions, positions.where(good, -1))
    assert torch.equal(found.scores, scores.where(good, float("inf") if metric == "l2" else -float("inf")))
    one = functional.search(query, codes, codebook, scale, threshold=float(limits[0]), **options)
    assert torch.equal(one.positions[0], found.positions[0])


@pytest.mark.parametrize("lists", [None, 8])
@pytest.mark.parametrize("refine", [None, 40])
@pytest.mark.parametrize("metric", METRICS)
def test_threshold_of_an_index(lists, refine, metric):
    torch.manual_seed(0)
    x = torch.randn(3000, 8)
    index = drq_fast.Index.build(x, bits=16, metric=metric, lists=lists, vectors="float32", tune=False, seed=0)
    options = {"k": 20, "refine": refine} | ({} if lists is None else {"probes": 4})
    scores, ids = index.search(x[:30].numpy(), **options)
    limits = scores[:, 5]
    found = index.search(x[:30].numpy(), threshold=limits, **options)
    good = scores <= limits[:, None] if metric == "l2" else scores >= limits[:, None]
    np.testing.assert_array_equal(found.ids, np.where(good, ids, -1))
    assert (index.search(x[0], threshold=limits[:1], **options).ids.numpy() == found.ids[0]).all()


def test_threshold_refuses(codec):
    x, codebook, scale, offset = codec(N=20, D=6, K=7, M=2)
    index = drq_fast.Index(drq_fast.Codec(codebook, scale, offset))
    index.add(x)
    with pytest.raises(ValueError, match=r"search: threshold must be a number or \[3\], one per query, got \[2\]"):
        index.search(x[:3], threshold=[1.0, 2.0])
    with pytest.raises(ValueError, match="search: threshold must be numbers, got NaN"):
        index.search(x[:3], threshold=float("nan"))
