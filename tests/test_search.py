"""search: the order (score, position), padding, filters, gradients; the same from every backend."""

from __future__ import annotations

import signal
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drq_fast import functional
from drq_fast.backends import torch as definition
from drq_fast.backends.native import extension
from drq_fast.backends.torch import scores
from drq_fast.backends.types import Parameters

METRICS = ["l2", "ip", "cosine"]
needs_native = pytest.mark.skipif(extension.native is None, reason="the extension is not built")
BACKENDS = ["torch", pytest.param("native", marks=needs_native)]


def coarse(*tensors):
    """Rounded to multiples of 1/32, whose products float32 adds up exactly: so the order of a sum does not matter."""
    return tuple((t * 32).round() / 32 for t in tensors)


def stable_sort(query, codes, codebook, scale, k, keep=None, **options):
    """The definition: score everything, sort stably, cut."""
    scores = functional.adc(query, codes, codebook, scale, backend="torch", **options)
    cost = scores if options.get("metric", "l2") == "l2" else -scores
    if keep is not None:
        cost = cost.masked_fill(~keep, float("inf"))
    order = cost.sort(dim=1, stable=True).indices[:, :k]
    return scores.gather(1, order), order


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("k", [1, 10, 400, 5000])
def test_equals_a_stable_sort_though_codes_tie(codec, backend, metric, k):
    x, codebook, scale, offset = codec(N=5000, D=4, K=5, M=2)  # 25 different codes
    x, codebook, offset = coarse(x, codebook, offset)
    codes = functional.encode(x, codebook, scale, offset=offset)
    options = {"offset": offset, "metric": metric}
    scores, positions = functional.search(x[:9], codes, codebook, scale, k=k, backend=backend, **options)
    expected_scores, expected_positions = stable_sort(x[:9], codes, codebook, scale, k, **options)
    assert torch.equal(positions, expected_positions)
    assert torch.equal(scores, expected_scores)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("metric", METRICS)
def test_filter_and_prefix(codec, backend, metric):
    x, codebook, scale, _ = codec(N=300, D=6, K=7, M=4)
    x, codebook = coarse(x, codebook)
    codes = functional.encode(x, codebook, scale)
    keep = torch.arange(300) % 3 == 1
    options = {"metric": metric, "levels": 2}
    scores, positions = functional.search(x[:5], codes, codebook, scale, k=20, keep=keep, backend=backend, **options)
    expected_scores, expected_positions = stable_sort(x[:5], codes, codebook, scale, 20, keep=keep, **options)
    assert torch.equal(positions, expected_positions)
    assert torch.equal(scores, expected_scores)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("metric", "worst"), [("l2", float("inf")), ("ip", -float("inf")), ("cosine", -float("inf"))])
def test_fewer_than_k(codec, backend, metric, worst):
    x, codebook, scale, _ = codec(N=4)
    codes = functional.encode(x, codebook, scale)
    keep = torch.tensor([False, True, False, True])
    scores, positions = functional.search(x, codes, codebook, scale, k=5, keep=keep, metric=metric, backend=backend)
    assert positions.shape == (4, 5)
    assert set(positions[:, :2].flatten().tolist()) == {1, 3}
    assert (positions[:, 2:] == -1).all()
    assert (scores[:, 2:] == worst).all()
    empty = functional.search(x, codes[:0], codebook, scale, k=2, metric=metric, backend=backend)
    assert (empty.positions == -1).all()
    assert functional.search(x[:0], codes, codebook, scale, k=2, metric=metric, backend=backend).scores.shape == (0, 2)


class Largest(TorchDispatchMode):
    """The largest number of elements that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        made = [] if func.is_view else tree_leaves(found)
        self.elements = max([self.elements, *(t.numel() for t in made if torch.is_tensor(t))])
        return found


@pytest.mark.parametrize("metric", METRICS)
def test_plain_torch_scores_codes_in_parts(codec, monkeypatch, metric):
    """Memory must not grow with the number of codes, which may be 50 million, but for their norms."""
    x, codebook, scale, offset = coarse(*codec(N=3000, D=4, K=6, M=3))
    codes = functional.encode(x, codebook, scale)
    parameters = Parameters(codebook, scale, offset)
    norms = None if metric == "ip" else definition.squared_norms(codes, parameters, metric)

    def search():
        return functional.search(
            x[:3], codes, codebook, scale, k=7, offset=offset, metric=metric, norms=norms, backend="torch"
        )

    whole = search()
    monkeypatch.setattr(scores, "_MAX_SCORES", 500)  # 100 codes at a time
    with Largest() as largest:
        parts = search()
    assert largest.elements <= 3 * 500
    assert torch.equal(parts.positions, whole.positions)
    assert torch.equal(parts.scores, whole.scores)
    if norms is not None:
        with Largest() as largest:
            assert torch.equal(definition.squared_norms(codes, parameters, metric), norms)
        assert largest.elements <= len(codes)


def test_norms_may_be_given(codec):
    x, codebook, scale, offset = codec()
    codes = functional.encode(x, codebook, scale, offset=offset)
    for metric, norms in (
        ("l2", definition.squared_norms(codes[:, :2], Parameters(codebook, scale, None), "l2")),
        ("cosine", definition.squared_norms(codes[:, :2], Parameters(codebook, scale, offset), "cosine")),
    ):
        options = {"k": 7, "offset": offset, "metric": metric, "levels": 2}
        plain = functional.search(x[:3], codes, codebook, scale, **options)
        given = functional.search(x[:3], codes, codebook, scale, norms=norms, **options)
        assert torch.equal(plain.positions, given.positions)
        assert torch.equal(plain.scores, given.scores)


@pytest.mark.parametrize("metric", METRICS)
def test_scores_are_differentiable_in_the_query(codec, metric):
    x, codebook, scale, offset = codec(20, 3, 5, 2, torch.float64)
    codes = functional.encode(x, codebook, scale)
    query = x[:3].clone().requires_grad_()
    search = lambda q: functional.search(q, codes, codebook, scale, k=6, offset=offset, metric=metric).scores  # noqa: E731
    assert torch.autograd.gradcheck(search, query)


def test_rank_keeps_nan_last():
    scores = torch.tensor([[3.0, float("nan"), 1.0, float("nan"), 2.0] + [9.0] * 20])
    assert definition.rank(scores, 3, "l2").tolist() == [[2, 4, 0]]
    assert definition.rank(scores[:, :5], 5, "ip").tolist() == [[0, 4, 2, 1, 3]]


@needs_native
def test_an_interruption_ends_a_search_between_batches(monkeypatch):
    """A signal that arrives during the scan of a batch is noticed when that batch is done."""
    scanned, scan = [], extension.native.search_cpu

    def interrupted_scan(*arguments: Any) -> int:
        odd = scan(*arguments)
        scanned.append(arguments[4])  # queries of this batch
        if len(scanned) == 2:
            signal.raise_signal(signal.SIGINT)
        return odd

    monkeypatch.setattr(extension.native, "search_cpu", interrupted_scan)
    monkeypatch.setattr(sys.modules["drq_fast.backends.native.search"], "_QUERIES", 8)  # of a batch
    query, codebook = torch.randn(64, 16), torch.randn(256, 16)
    with pytest.raises(KeyboardInterrupt):
        functional.search(query, torch.zeros(9, 1, dtype=torch.uint8), codebook, torch.ones(1), k=1, metric="ip")
    assert scanned == [8, 8]


@needs_native
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("D", [7, 64, 300])
def test_scores_depend_neither_on_the_batch_nor_on_strides_and_threads(codec, metric, D):
    x, codebook, scale, offset = codec(N=3000, D=D, K=64, M=3)
    codes, query = functional.encode(x, codebook, scale, offset=offset), x[:150] + 0.1
    options = {"k": 5, "metric": metric, "offset": offset}
    whole = functional.search(query, codes, codebook, scale, **options)
    strided = torch.empty(150, 2 * D)[:, ::2].copy_(query)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        others = [functional.search(strided, codes, codebook, scale, **options)]
        alone = [functional.search(query[q : q + 1], codes, codebook, scale, **options) for q in range(150)]
        others.append(type(whole)(*(torch.cat(part) for part in zip(*alone, strict=True))))
    finally:
        torch.set_num_threads(threads)
    for other in others:
        assert torch.equal(other.scores, whole.scores)
        assert torch.equal(other.positions, whole.positions)
