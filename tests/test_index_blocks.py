"""An index takes queries in blocks: large ones, and without an effect on the results."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from drq_fast import Index, backends
from drq_fast import index as index_module
from tests.test_index_contents import LAYER, X


def test_blocks_of_queries_change_nothing(monkeypatch):
    index = Index(LAYER)
    index.add(X)
    whole = index.search(X[:50], k=7)
    monkeypatch.setattr(index_module.searched, "_QUERIES", 9)
    monkeypatch.setattr(index_module.searched, "_WORK", 1)
    parts = index.search(X[:50], k=7)
    assert torch.equal(whole.ids, parts.ids)
    torch.testing.assert_close(whole.scores, parts.scores)


def test_a_call_takes_a_thousand_queries_however_large_the_index_is(monkeypatch):
    """Fewer would leave most of a GPU idle."""
    index, counts, column = Index(LAYER, "ip"), [], backends.choose("search", "cpu")
    index.add(X)

    def search(query: torch.Tensor, *arguments: object, **options: object) -> object:
        counts.append(len(query))
        return column.search(query, *arguments, **options)

    monkeypatch.setattr(index_module.searched, "_WORK", 1)
    monkeypatch.setattr(backends, "choose", lambda *_: SimpleNamespace(search=search))
    index.search(X[:1].expand(2050, -1), k=3)
    assert counts == [1024, 1024, 2]
