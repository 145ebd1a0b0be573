"""Semantic search with the arguments and results of sentence-transformers; does not import that library."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from torch import Tensor

from .. import checks
from ..index import Index

_OP = "semantic_search_drq"


def semantic_search_drq(
    query_embeddings: np.ndarray | Tensor,
    corpus_embeddings: np.ndarray | Tensor | None = None,
    *,
    corpus_index: Index | None = None,
    top_k: int = 10,
    bits: int = 128,
    rescore: bool = True,
    rescore_multiplier: int = 10,
    exact: bool = True,
    output_index: bool = False,
) -> tuple[Any, ...]:
    """`semantic_search_faiss` of sentence-transformers, by codes: (results, seconds) or (results, seconds, index).

    query_embeddings [Q, D] or [D], corpus_embeddings [N, D]. results: for each query a list of at most top_k
    {"corpus_id": int, "score": float}, best first, of the seconds that the search itself took. corpus_index: an index
    that was made before, by `Index.build` or with output_index=True; otherwise one of `bits` per vector, for cosine, is
    built. rescore: the top_k * rescore_multiplier best by codes are scored again by the vectors that corpus_index
    keeps, or else by those of corpus_embeddings, row i for corpus_id i. exact=False looks only at the inverted lists
    near to each query.

    >>> results, seconds, index = semantic_search_drq(query, corpus, output_index=True)
    >>> results, seconds = semantic_search_drq(query, corpus, corpus_index=index)
    """
    if corpus_index is None and corpus_embeddings is None:
        checks.fail(_OP, "corpus_embeddings", "given without corpus_index", "None", error=TypeError)
    if corpus_index is not None and not isinstance(corpus_index, Index):
        checks.fail(_OP, "corpus_index", "a drq_fast.Index", type(corpus_index).__name__, error=TypeError)
    top_k, multiplier = (
        checks.integer(_OP, "top_k", top_k, 1),
        checks.integer(_OP, "rescore_multiplier", rescore_multiplier, 1),
    )
    rescore, exact = checks.boolean(_OP, "rescore", rescore), checks.boolean(_OP, "exact", exact)
    index, corpus = corpus_index, checks.listed(_OP, "corpus_embeddings", corpus_embeddings)
    queries = checks.array(_OP, "query_embeddings", checks.listed(_OP, "query_embeddings", query_embeddings))
    if index is None:
        lists = None if exact else "auto"
        index = Index.build(corpus, bits=bits, metric="cosine", lists=lists, tune=False)
    if rescore and corpus is None and index.vectors is None:
        checks.fail(_OP, "rescore", "False for an index of codes alone, unless corpus_embeddings are given", "True")
    options: dict[str, Any] = {"probes": index.lists if exact else None}
    if rescore:
        options |= {"refine": top_k * multiplier, "vectors": corpus if index.vectors is None else None}
    start = time.perf_counter()
    scores, ids = index.search(queries[None] if queries.ndim == 1 else queries, top_k, **options)
    seconds = time.perf_counter() - start
    results = [
        [{"corpus_id": id, "score": score} for id, score in zip(*row, strict=True) if id >= 0]
        for row in zip(ids.tolist(), scores.tolist(), strict=True)
    ]
    return (results, seconds, index) if output_index else (results, seconds)
