"""The vector store of LangChain: its own standard tests, and what they leave out."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

pytest.importorskip("langchain_core", reason="langchain-core is not installed (drq_fast[frameworks])")
pytest.importorskip("langchain_tests", reason="langchain-tests is not installed (drq_fast[frameworks])")

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores.utils import maximal_marginal_relevance
from langchain_tests.integration_tests import VectorStoreIntegrationTests

from drq_fast.interop.langchain import DRQVectorStore

standard = [pytest.mark.asyncio, pytest.mark.filterwarnings("ignore:.*marked with '@pytest.mark.asyncio' but")]


class TestStandard(VectorStoreIntegrationTests):
    pytestmark = standard

    @pytest.fixture
    def vectorstore(self):
        return DRQVectorStore(self.get_embeddings())


class TestStandardWithCodes(VectorStoreIntegrationTests):
    """The same for a store whose codec is fitted already, so that every text is encoded."""

    pytestmark = standard

    @pytest.fixture
    def vectorstore(self, fitted):
        fitted.documents.clear()
        assert fitted.documents.fitted
        return fitted


@pytest.fixture(scope="module")
def fitted():
    store = DRQVectorStore(VectorStoreIntegrationTests.get_embeddings(), bits=8, vectors="float32", fit_at=300)
    store.add_texts([str(i) for i in range(300)])
    assert store.documents.fitted
    assert store.documents.index.sizes["codes"] == 300
    return store


class Axes(Embeddings):
    """Directions in the plane: the angle in degrees is the text."""

    def embed_documents(self, texts):
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text):
        angle = np.deg2rad(float(text))
        return [float(np.cos(angle)), float(np.sin(angle))]


@pytest.fixture
def store():
    texts = ["0", "10", "20", "90", "180"]
    return DRQVectorStore.from_texts(texts, Axes(), [{"n": i, "even": i % 2 == 0} for i in range(5)], ids=list("abcde"))


def ids(documents):
    return "".join(document.id for document in documents)


def test_filters(store):
    assert ids(store.similarity_search("1", k=5)) == "abcde"
    assert ids(store.similarity_search("1", k=5, filter={"even": False})) == "bd"
    assert ids(store.similarity_search("1", k=5, filter={"n": [1, 2, 4], "even": True})) == "ce"
    assert ids(store.similarity_search("1", k=1, filter=lambda document: document.page_content > "3")) == "d"
    assert store.similarity_search("1", filter={"unknown": 1}) == []
    with pytest.raises(TypeError, match="filter must be a dict or a function of a Document, got str"):
        store.similarity_search("1", filter="n")


def test_scores(store):
    found = store.similarity_search_with_score("0", k=5)
    np.testing.assert_allclose([score for _, score in found], np.cos(np.deg2rad([0, 10, 20, 90, 180])), atol=1e-6)
    relevance = [score for _, score in store.similarity_search_with_relevance_scores("0", k=5)]
    np.testing.assert_allclose(relevance, np.cos(np.deg2rad([0, 10, 20, 90, 90])), atol=1e-6)
    assert 0 <= min(relevance) <= max(relevance) <= 1
    with pytest.raises(ValueError, match="metric must be 'cosine', got 'ip'"):
        DRQVectorStore(Axes(), metric="ip").similarity_search_with_relevance_scores("0")


def test_by_vector_and_retrievers(store):
    assert ids(store.similarity_search_by_vector([0.0, 1.0], k=2)) == "dc"
    retriever = store.as_retriever(search_kwargs={"k": 2, "filter": {"even": True}})
    assert ids(retriever.invoke("85")) == "ca"
    thresholded = store.as_retriever(search_type="similarity_score_threshold", search_kwargs={"score_threshold": 0.98})
    assert ids(thresholded.invoke("0")) == "ab"


def test_maximal_marginal_relevance_is_langchains(store):
    vectors = Axes().embed_documents(["0", "10", "20", "90", "180"])
    for balance in (0.0, 0.3, 0.5, 1.0):
        chosen = maximal_marginal_relevance(np.array(Axes().embed_query("5")), vectors, balance, 4)
        found = store.max_marginal_relevance_search("5", k=4, lambda_mult=balance)
        assert ids(found) == "".join("abcde"[i] for i in chosen)
    assert ids(store.max_marginal_relevance_search("5", k=4, fetch_k=2)) in ("ab", "ba")
    assert ids(store.as_retriever(search_type="mmr", search_kwargs={"filter": {"n": [3]}}).invoke("0")) == "d"


def test_results_do_not_share_metadata(store):
    store.similarity_search("0", k=1)[0].metadata["n"] = 99
    assert store.get_by_ids(["a"])[0].metadata == {"n": 0, "even": True}


def test_files(store, tmp_path):
    store.delete(["b"])
    store.save(tmp_path / "store")
    again = DRQVectorStore.load(tmp_path / "store", Axes())
    assert again.similarity_search_with_score("1", k=9) == store.similarity_search_with_score("1", k=9)
    assert again.add_texts(["11"], ids=["b"]) == ["b"]
    again.save(tmp_path / "store")
    assert ids(DRQVectorStore.load(tmp_path / "store", Axes()).similarity_search("11", k=2)) == "bc"


def test_wrong_arguments(store):
    with pytest.raises(ValueError, match=r"add_texts: ids must be 2, one per text, got 1\."):
        store.add_texts(["1", "2"], ids=["a"])
    with pytest.raises(ValueError, match=r"add_texts: metadatas must be 1, one per text, got 2\."):
        store.add_texts(["1"], [{}, {}])
    with pytest.raises(TypeError, match=r"delete: ids must be given, got None\."):
        store.delete()
    assert store.add_texts([]) == []


def test_async_defaults(store):
    async def found():
        added = await store.aadd_documents([Document(page_content="45", metadata={"n": 9}, id="f")])
        return added, await store.asimilarity_search("45", k=1), await store.amax_marginal_relevance_search("0", k=1)

    assert asyncio.run(found()) == (["f"], store.get_by_ids(["f"]), store.get_by_ids(["a"]))
