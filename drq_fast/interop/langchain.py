"""A vector store of LangChain; `pip install 'drq_fast[langchain]'`."""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

if importlib.util.find_spec("langchain_core") is None:
    raise ModuleNotFoundError(
        "drq_fast.interop.langchain: langchain-core is missing; `pip install 'drq_fast[langchain]'` installs it."
    )

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from .. import checks
from ..index import Index
from .documents import FIT_AT, Documents, Record

_FILE = "documents.jsonl"
Filter = dict[str, Any] | Callable[[Document], bool]


class DRQVectorStore(VectorStore):
    """Texts with metadata, found by the codes of their embeddings.

    bits, metric, vectors, fit_at and index: see `drq_fast.interop.documents.Documents`. Fewer than `fit_at` texts are
    searched exactly; then a codec is fitted. Every search takes filter, a dict of metadata (a list: one of these
    values) or a function of a Document, and refine and probes, see `Documents.search`.

    >>> store = DRQVectorStore.from_texts(texts, embedding, metadatas)
    >>> store.similarity_search("a question", k=4, filter={"language": "en"})
    """

    def __init__(
        self,
        embedding: Embeddings,
        *,
        bits: int = 128,
        metric: str = "cosine",
        vectors: str | None = "float16",
        fit_at: int | None = FIT_AT,
        index: Index | None = None,
    ) -> None:
        self.documents = Documents(bits=bits, metric=metric, vectors=vectors, fit_at=fit_at, index=index)
        self._embedding = embedding

    @property
    def embeddings(self) -> Embeddings:
        """What makes embeddings of texts."""
        return self._embedding

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **options: Any,
    ) -> DRQVectorStore:
        """A store of these texts; options: those of the constructor."""
        store = cls(embedding, **options)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Embeds and stores texts; those whose ids are here already are replaced. Returns the ids."""
        texts = list(texts)
        given = [None] * len(texts) if ids is None else list(ids)
        metadatas = [{} for _ in texts] if metadatas is None else metadatas
        for name, values in (("ids", given), ("metadatas", metadatas)):
            if len(values) != len(texts):
                checks.fail("add_texts", name, f"{len(texts)}, one per text", len(values))
        found = [str(uuid.uuid4()) if id is None else id for id in given]
        if texts:
            records = [Record(*each) for each in zip(found, texts, metadatas, strict=True)]
            self.documents.upsert(records, self._embedding.embed_documents(texts))
        return found

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Removes texts by id; ids that are not here are passed over."""
        if ids is None:
            checks.fail("delete", "ids", "given", "None", error=TypeError)
        self.documents.remove(ids)
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """The documents of these ids, in their order; ids that are not here are passed over."""
        return [_document(record) for record in self.documents.get(ids)]

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """The k documents nearest to a text."""
        return [document for document, _ in self.similarity_search_with_score(query, k, **kwargs)]

    def similarity_search_with_score(self, query: str, k: int = 4, **kwargs: Any) -> list[tuple[Document, float]]:
        """The same with scores: cosine, inner product or squared distance."""
        return self.similarity_search_with_score_by_vector(self._embedding.embed_query(query), k, **kwargs)

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        """The k documents nearest to an embedding."""
        return [document for document, _ in self.similarity_search_with_score_by_vector(embedding, k, **kwargs)]

    def similarity_search_with_score_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """The same with scores."""
        found = self.documents.search(embedding, k, _condition(filter), **kwargs)
        return [(_document(record), score) for record, score in found]

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Of the fetch_k documents nearest to a text, k that are near to it and unlike each other."""
        embedding = self._embedding.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(embedding, k, fetch_k, lambda_mult, **kwargs)

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """The same for an embedding. lambda_mult: 1 is the order of similarity, 0 the greatest diversity."""
        found = self.documents.diverse(embedding, k, fetch_k, lambda_mult, _condition(filter), **kwargs)
        return [_document(record) for record, _ in found]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        if self.documents.metric != "cosine":
            checks.fail("similarity_search_with_relevance_scores", "metric", "'cosine'", repr(self.documents.metric))
        return lambda score: min(max(score, 0.0), 1.0)

    def fit(self) -> None:
        """Fits a codec to the embeddings that are here; see `Documents`."""
        self.documents.fit()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes texts, metadata and index to a folder, as JSON and safetensors; replaces an earlier save at once."""
        self.documents.save(Path(folder) / _FILE)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], embedding: Embeddings, *, mmap: bool = False) -> DRQVectorStore:
        """What `save` wrote. mmap: codes and embeddings stay on disk, see `Index.load`."""
        store = cls(embedding)
        store.documents = Documents.load(Path(folder) / _FILE, mmap=mmap)
        return store


def _document(record: Record) -> Document:
    return Document(id=record.id, page_content=record.text, metadata=dict(record.metadata))


def _condition(filter: Filter | None) -> Callable[[Record], bool] | None:
    """What a filter says of a record."""
    if filter is None:
        return None
    if callable(filter):
        return lambda record: bool(filter(_document(record)))
    if not isinstance(filter, dict):
        kind = type(filter).__name__
        checks.fail("similarity_search", "filter", "a dict or a function of a Document", kind, error=TypeError)
    allowed = {key: value if isinstance(value, list) else [value] for key, value in filter.items()}
    return lambda record: all(key in record.metadata and record.metadata[key] in allowed[key] for key in allowed)
