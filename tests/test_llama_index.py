"""The vector store of LlamaIndex, beside its own simple store and inside its own index."""

from __future__ import annotations

import asyncio
import copy
import pickle

import numpy as np
import pytest

pytest.importorskip("llama_index.core", reason="llama-index-core is not installed (drq_fast[frameworks])")

from llama_index.core import StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.indices.query.embedding_utils import get_top_k_mmr_embeddings
from llama_index.core.schema import ImageNode, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters, SimpleVectorStore, VectorStoreQuery
from llama_index.core.vector_stores.types import FilterCondition, FilterOperator, VectorStoreQueryMode

from drq_fast.interop.llama_index import DRQVectorStore

N, D = 300, 6


def node(i, x):
    metadata = {"n": i, "name": f"Name {i}", "tags": [f"t{i % 3}", f"u{i % 5}"]} | ({} if i % 4 else {"rare": "yes"})
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"doc{i // 10}")}
    return TextNode(id_=f"id{i}", text=f"text {i}", metadata=metadata, embedding=x.tolist(), relationships=source)


@pytest.fixture(scope="module")
def nodes():
    x = np.random.default_rng(0).standard_normal((N, D))
    return [node(i, row) for i, row in enumerate(x)]


@pytest.fixture
def store(nodes):
    store = DRQVectorStore()
    assert store.add(nodes[:60]) == [f"id{i}" for i in range(60)]
    return store


@pytest.fixture(scope="module")
def simple(nodes):
    store = SimpleVectorStore()
    store.add(nodes[:60])
    return store


def ask(nodes, i=0, k=5, **options):
    return VectorStoreQuery(query_embedding=nodes[i].embedding, similarity_top_k=k, **options)


def test_queries_are_those_of_the_simple_store(nodes, store, simple):
    for i in range(0, 100, 10):
        found, expected = store.query(ask(nodes, i)), simple.query(ask(nodes, i))
        assert found.ids == expected.ids
        np.testing.assert_allclose(found.similarities, expected.similarities, atol=1e-6)
    assert [each.node_id for each in found.nodes] == found.ids
    (best,) = store.query(ask(nodes, 7, 1)).nodes
    assert best.embedding is None
    assert best == nodes[7].model_copy(update={"embedding": None})
    assert DRQVectorStore().query(ask(nodes)).ids == []


CASES = [("n", 30, "EQ"), ("n", 30, "NE"), ("n", 30, "GT"), ("n", 30, "GTE"), ("n", 30, "LT"), ("n", 30, "LTE"),
         ("n", [1, 2, 30], "IN"), ("n", [1, 2, 30], "NIN"), ("tags", ["t1", "u1"], "ANY"),
         ("tags", ["t1", "u1"], "ALL"), ("tags", "t2", "CONTAINS"), ("name", "me 3", "TEXT_MATCH"),
         ("name", "NAME 3", "TEXT_MATCH_INSENSITIVE"), ("rare", None, "IS_EMPTY"), ("rare", "yes", "EQ")]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "operator"), CASES)
def test_every_operator_of_a_filter(nodes, store, simple, key, value, operator):
    one = MetadataFilter(key=key, value=value, operator=FilterOperator[operator])
    few = MetadataFilter(key="n", value=50, operator=FilterOperator.LT)
    for condition in FilterCondition:
        filters = MetadataFilters(filters=[one, few], condition=condition)
        expected = simple.query(ask(nodes, 100, 60, filters=filters)).ids
        assert store.query(ask(nodes, 100, 60, filters=filters)).ids == expected
        assert {each.node_id for each in store.get_nodes(filters=filters)} == set(expected)


def test_nested_filters_ids_and_sources(nodes, store):
    def small(n):
        return MetadataFilter(key="n", value=n, operator=FilterOperator.LT)

    either = MetadataFilters(filters=[small(3), MetadataFilter(key="n", value=40)], condition=FilterCondition.OR)
    both = MetadataFilters(filters=[either, MetadataFilter(key="rare", value="yes")])
    assert set(store.query(ask(nodes, k=9, filters=both)).ids) == {"id0", "id40"}
    assert set(store.query(ask(nodes, k=9, node_ids=["id3", "id59", "unknown"])).ids) == {"id3", "id59"}
    assert set(store.query(ask(nodes, k=99, doc_ids=["doc2"])).ids) == {f"id{i}" for i in range(20, 30)}
    assert store.query(ask(nodes, k=9, doc_ids=["doc2"], filters=both)).ids == []


def test_maximal_marginal_relevance_is_llama_indexes(nodes, store):
    for threshold in (0.2, 0.5, 0.9):
        near = store.query(ask(nodes, 3, 24)).ids
        x = [nodes[int(id[2:])].embedding for id in near]
        query = ask(nodes, 3, 2, mode=VectorStoreQueryMode.MMR, mmr_threshold=threshold)
        _, expected = get_top_k_mmr_embeddings(nodes[3].embedding, x, None, 2, near, mmr_threshold=threshold)
        assert store.query(query, mmr_prefetch_factor=12).ids == expected
    assert store.query(ask(nodes, 3, 4, mode=VectorStoreQueryMode.MMR), mmr_threshold=1).ids == near[:4]
    with pytest.raises(ValueError, match="query: mode must be DEFAULT or MMR"):
        store.query(ask(nodes, mode=VectorStoreQueryMode.SPARSE))


def test_removal(nodes, store):
    store.delete("doc1")
    assert len(store.documents) == 50
    store.delete("unknown")
    store.delete_nodes(["id0", "unknown"])
    store.delete_nodes(["id1", "id2"], MetadataFilters(filters=[MetadataFilter(key="n", value=2)]))
    assert store.get_nodes(["id0", "id2", "id10"]) == []
    assert store.query(ask(nodes, 1, 1)).ids == ["id1"]
    store.delete_nodes(filters=MetadataFilters(filters=[MetadataFilter(key="rare", value="yes")]))
    assert len(store.documents) == 48 - 12  # 4, 8, 20, 24, ..., 56
    with pytest.raises(TypeError, match=r"delete_nodes: node_ids or filters must be given \(clear removes all\)"):
        store.delete_nodes()
    store.add([nodes[10]])
    assert len(store.get_nodes()) == 37
    store.clear()
    assert store.get_nodes() == []


def test_codes_and_files(nodes, tmp_path):
    store = DRQVectorStore(bits=8, fit_at=N)
    store.add(nodes)
    assert (store.client.bits, store.client.vectors, len(store.client)) == (8, "float16", N)
    assert store.query(ask(nodes, 5, 1)).ids == ["id5"]
    StorageContext.from_defaults(vector_store=store).persist(tmp_path)
    again = DRQVectorStore.from_persist_dir(tmp_path)
    for mode in (VectorStoreQueryMode.DEFAULT, VectorStoreQueryMode.MMR):
        assert again.query(ask(nodes, 5, mode=mode)) == store.query(ask(nodes, 5, mode=mode))
    assert again.query(ask(nodes, 5), refine=N, probes=None).ids[0] == "id5"
    import fsspec

    with pytest.raises(ValueError, match="persist: fs must be None or a local file system, got memory"):
        store.persist("a", fs=fsspec.filesystem("memory"))
    again.persist(str(tmp_path / "other.json"), fs=fsspec.filesystem("file"))
    assert len(DRQVectorStore.from_persist_path(str(tmp_path / "other.json")).documents) == N


def test_copies(nodes, store):
    """LlamaIndex leaves out what cannot be pickled, with no more than a line in the log."""
    for again in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert again.query(ask(nodes, 7)) == store.query(ask(nodes, 7))


def test_squared_distances_are_negative_similarities(nodes):
    store = DRQVectorStore(metric="l2")
    store.add(nodes[:10])
    found = store.query(ask(nodes, 4, 3))
    assert found.ids[0] == "id4"
    assert 0 >= found.similarities[0] >= found.similarities[1] >= found.similarities[2]


def test_other_nodes_are_given_back():
    image = ImageNode(id_="image", image="aGk=", text="a caption", embedding=[1.0, 0.0])
    store = DRQVectorStore()
    store.add([image])
    assert store.get_nodes(["image"]) == [image.model_copy(update={"embedding": None})]


class Lengths(BaseEmbedding):
    """A direction in the plane, by the length of a text."""

    def _get_text_embedding(self, text):
        return [float(np.cos(len(text) / 10)), float(np.sin(len(text) / 10))]

    def _get_query_embedding(self, query):
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query):
        return self._get_text_embedding(query)


def test_inside_an_index_of_llama_index(tmp_path):
    texts = [TextNode(id_=str(n), text="x" * n) for n in (1, 5, 9)]
    context = StorageContext.from_defaults(vector_store=DRQVectorStore())
    index = VectorStoreIndex(texts, storage_context=context, embed_model=Lengths())
    retriever = index.as_retriever(similarity_top_k=2)
    assert [hit.node.node_id for hit in retriever.retrieve("x" * 6)] == ["5", "9"]
    assert [hit.node.text for hit in asyncio.run(retriever.aretrieve("x"))] == ["x", "xxxxx"]
    index.insert_nodes([TextNode(id_="6", text="x" * 6)])
    index.delete_nodes(["9"])
    index.storage_context.persist(tmp_path)
    context = StorageContext.from_defaults(
        vector_store=DRQVectorStore.from_persist_dir(tmp_path), persist_dir=str(tmp_path)
    )
    again = load_index_from_storage(context, embed_model=Lengths())
    assert [hit.node.node_id for hit in again.as_retriever(similarity_top_k=9).retrieve("x" * 9)] == ["6", "5", "1"]
