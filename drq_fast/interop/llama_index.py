"""A vector store of LlamaIndex; `pip install 'drq_fast[llama-index]'`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if importlib.util.find_spec("llama_index") is None:
    raise ModuleNotFoundError(
        "drq_fast.interop.llama_index: llama-index-core is missing; `pip install 'drq_fast[llama-index]'` installs it."
    )

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode, MetadataMode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    FilterCondition,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from llama_index.core.vector_stores.utils import (
    build_metadata_filter_fn,
    metadata_dict_to_node,
    node_to_metadata_dict,
)

from .. import checks
from ..index import Index
from .documents import FIT_AT, Documents, Record

_FILE = "__vector_store.json"  # behind a namespace, as a StorageContext names it
Condition = Callable[[Record], bool]


class DRQVectorStore(BasePydanticVectorStore):
    """Nodes with metadata, found by the codes of their embeddings.

    bits, metric, vectors, fit_at and index: see `drq_fast.interop.documents.Documents`. Fewer than `fit_at` nodes are
    searched exactly; then a codec is fitted. Similarities are cosines, inner products, or negative squared distances.

    >>> context = StorageContext.from_defaults(vector_store=DRQVectorStore())
    >>> index = VectorStoreIndex.from_documents(documents, storage_context=context)
    """

    stores_text: bool = True
    _documents: Documents = PrivateAttr()

    def __init__(
        self,
        *,
        bits: int = 128,
        metric: str = "cosine",
        vectors: str | None = "float16",
        fit_at: int | None = FIT_AT,
        index: Index | None = None,
    ) -> None:
        super().__init__()
        self._documents = Documents(bits=bits, metric=metric, vectors=vectors, fit_at=fit_at, index=index)

    @classmethod
    def class_name(cls) -> str:
        """The name in LlamaIndex's own files."""
        return "DRQVectorStore"

    @property
    def client(self) -> Index | None:
        """The index of the embeddings; None before the first one."""
        return self._documents.index

    @property
    def documents(self) -> Documents:
        """Where the nodes are."""
        return self._documents

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Stores nodes with their embeddings; those whose ids are here already are replaced. Returns the ids."""
        records = [_record(node) for node in nodes]
        self._documents.upsert(records, [node.get_embedding() for node in nodes])
        return [record.id for record in records]

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Removes all nodes of a source document."""
        found = self._documents.matching(lambda record: record.metadata["ref_doc_id"] == ref_doc_id)
        self._documents.remove(record.id for record in found)

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Removes the nodes that have one of these ids and pass the filters."""
        if node_ids is None and filters is None:
            checks.fail("delete_nodes", "node_ids or filters", "given (clear removes all)", "None", error=TypeError)
        self._documents.remove(record.id for record in self._some(node_ids, filters))

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """The nodes that have one of these ids and pass the filters."""
        return [_node(record) for record in self._some(node_ids, filters)]

    def clear(self) -> None:
        """Removes all nodes."""
        self._documents.clear()

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The nodes nearest to an embedding, or with mode MMR nodes that are near to it and unlike each other.

        refine and probes: see `Documents.search`. mmr_threshold: 1 is the order of similarity, 0 the greatest
        diversity, 0.5 by default; mmr_prefetch_factor: of how many times more nodes they are chosen, 4 by default.
        """
        where, k, options = _condition(query), query.similarity_top_k, dict(kwargs)
        threshold, factor = options.pop("mmr_threshold", query.mmr_threshold), options.pop("mmr_prefetch_factor", 4)
        if query.query_embedding is None:
            checks.fail("query", "query_embedding", "given", "None", error=TypeError)
        if query.mode == VectorStoreQueryMode.DEFAULT:
            found = self._documents.search(query.query_embedding, k, where, **options)
        elif query.mode == VectorStoreQueryMode.MMR:
            balance = 0.5 if threshold is None else threshold
            found = self._documents.diverse(query.query_embedding, k, int(factor * k), balance, where, **options)
        else:
            checks.fail("query", "mode", "DEFAULT or MMR", query.mode)
        sign = -1 if self._documents.metric == "l2" else 1
        return VectorStoreQueryResult(
            nodes=[_node(record) for record, _ in found],
            similarities=[sign * score for _, score in found],
            ids=[record.id for record, _ in found],
        )

    def fit(self) -> None:
        """Fits a codec to the embeddings that are here; see `Documents`."""
        self._documents.fit()

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Writes nodes to persist_path as lines of JSON, and the index beside it; replaces an earlier save at once."""
        _check_local("persist", fs)
        self._documents.save(persist_path)

    @classmethod
    def from_persist_path(cls, persist_path: str, fs: Any = None, *, mmap: bool = False) -> DRQVectorStore:
        """What `persist` wrote. mmap: codes and embeddings stay on disk, see `Index.load`."""
        _check_local("from_persist_path", fs)
        store = cls()
        store._documents = Documents.load(persist_path, mmap=mmap)
        return store

    @classmethod
    def from_persist_dir(
        cls, persist_dir: str | os.PathLike[str], namespace: str = "default", fs: Any = None, *, mmap: bool = False
    ) -> DRQVectorStore:
        """The store that `StorageContext.persist(persist_dir)` wrote."""
        return cls.from_persist_path(str(Path(persist_dir) / f"{namespace}{_FILE}"), fs, mmap=mmap)

    def _some(self, node_ids: list[str] | None, filters: MetadataFilters | None) -> list[Record]:
        where = _passes(filters)
        if node_ids is None:
            return self._documents.matching(where)
        return [record for record in self._documents.get(node_ids) if where(record)]


def _record(node: BaseNode) -> Record:
    text = node.get_content(metadata_mode=MetadataMode.NONE)
    return Record(node.node_id, text, node_to_metadata_dict(node, remove_text=True))


def _node(record: Record) -> BaseNode:
    return metadata_dict_to_node(record.metadata, text=record.text)


def _condition(query: VectorStoreQuery) -> Condition | None:
    """What a query says of a record."""
    where = _passes(query.filters)
    nodes, sources = set(query.node_ids or ()), set(query.doc_ids or ())  # LlamaIndex gives none for all
    if query.filters is None and not nodes and not sources:
        return None

    def condition(record: Record) -> bool:
        if nodes and record.id not in nodes:
            return False
        if sources and record.metadata["ref_doc_id"] not in sources:
            return False
        return where(record)

    return condition


def _passes(filters: MetadataFilters | None) -> Condition:
    """What filters, which may be nested, say of a record."""
    if filters is None or not filters.filters:
        return lambda record: True
    parts = [_passes(part) if isinstance(part, MetadataFilters) else _passes_one(part) for part in filters.filters]
    if filters.condition == FilterCondition.NOT:
        return lambda record: not any(part(record) for part in parts)
    some = any if filters.condition == FilterCondition.OR else all
    return lambda record: some(part(record) for part in parts)


def _passes_one(filter: Any) -> Condition:
    only = MetadataFilters(filters=[filter])
    return lambda record: build_metadata_filter_fn(lambda _: record.metadata, only)(record.id)


def _check_local(op: str, fs: Any) -> None:
    """Indexes are mapped and replaced atomically, which fsspec's other file systems cannot do."""
    if fs is not None and "file" not in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)):
        checks.fail(op, "fs", "None or a local file system", fs.protocol)
