"""Search in inverted lists: the native scan gives the bits and the order of plain torch, given the same products."""

from __future__ import annotations

import os
import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from drq_fast.backends import native
from drq_fast.backends import torch as definition
from drq_fast.backends.native import extension
from drq_fast.backends.native.search import scan_given
from drq_fast.backends.torch import inverted
from drq_fast.backends.types import Database, Lists, Parameters, SearchResult

needs_native = pytest.mark.skipif(extension.why_not("cpu") is not None, reason="the extension is not built")
ISAS = extension.supported_isas()
METRICS = ["l2", "ip", "cosine"]
BACKENDS = ["torch", pytest.param("native", marks=needs_native)]
COLUMNS = {"torch": definition, "native": native}


class Case(NamedTuple):
    """A search in lists of random codes; `distinct` limits how many different codes there are."""

    Q: int
    N: int
    L: int
    K: int
    M: int
    k: int
    probes: int
    metric: str
    D: int = 12
    levels: int | None = None  # a prefix
    keep: float | None = None  # share of the codes that a filter keeps
    distinct: int | None = None
    empty: float = 0.2  # share of lists without codes
    signs: bool = False  # scales of both signs
    offset: bool = True
    coarse: bool = False  # numbers whose products float32 adds up exactly: so the order of a sum does not matter
    threads: int = 1
    seed: int = 0


class Inputs(NamedTuple):
    query: Tensor
    database: Database
    lists: Lists


def inputs_of(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator)
        return (values * 4).round() / 4 if case.coarse else values

    query, codebook, centroids = normal(case.Q, case.D), normal(case.K, case.D), 2 * normal(case.L, case.D)
    offset = normal(case.D) if case.offset else None
    factor = 0.5 if case.coarse else 0.7
    scale = torch.tensor([(-1) ** (m // 2 if case.signs else 0) * factor ** min(m, 6) for m in range(case.M)])
    codes = torch.randint(case.K, (case.N, case.M), generator=generator)
    if case.distinct is not None and case.N:
        codes = codes[torch.randint(min(case.distinct, case.N), (case.N,), generator=generator)]
    codes = codes.to(torch.uint8 if case.K <= 256 else torch.int16)[:, : case.levels]
    share = torch.rand(case.L, generator=generator).where(torch.rand(case.L, generator=generator) >= case.empty, 0)
    ends = (share.cumsum(0) / share.sum().clamp_min(1e-9) * case.N).long()
    ends[-1] = case.N
    lists = Lists(torch.cat([ends.new_zeros(1), ends]), centroids)
    keep = None if case.keep is None else torch.rand(case.N, generator=generator) < case.keep
    codec = Parameters(codebook, scale[: codes.shape[1]], offset)
    norms = None if case.metric == "ip" else definition.squared_norms(codes, codec, case.metric, lists)
    return Inputs(query, Database(codes, codec, case.metric, norms, keep, lists), lists)


def scan(case: Case, inputs: Inputs, prepared: definition.Prepared, products: Tensor) -> SearchResult:
    database = inputs.database
    found = SearchResult(torch.full((case.Q, case.k), float("nan")), torch.full((case.Q, case.k), -7))
    scan_given(
        prepared,
        database.codes,
        database.codec,
        *found,
        case.metric,
        database.norms,
        database.keep,
        case.threads,
        (inputs.lists, products, case.probes),
    )
    return found


def assert_same(found: SearchResult, expected: SearchResult, *context: object) -> None:
    assert torch.equal(found.positions, expected.positions), context
    assert torch.equal(found.scores.nan_to_num(nan=7), expected.scores.nan_to_num(nan=7)), context


def check(case: Case, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan by one instruction set, given the products of torch."""
    monkeypatch.setenv("DRQ_FAST_ISA", isa)
    inputs = inputs_of(case)
    codec = inputs.database.codec
    prepared = definition.prepare(inputs.query, codec.codebook, codec.offset, case.metric)
    products = inverted.products_of(inputs.query, inputs.lists.centroids, codec.offset, case.metric)
    expected = definition.search_given_lists(prepared, products, inputs.database, inputs.lists, case.k, case.probes)
    assert_same(scan(case, inputs, prepared, products), expected, case, isa)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("Q", "N", "L", "K", "M", "k", "probes"),
    [
        (1, 0, 3, 256, 4, 3, 2),  # nothing to find
        (3, 5, 9, 16, 1, 8, 9),  # fewer than k
        (1, 20011, 20, 256, 8, 10, 5),
        (3, 20011, 20, 256, 8, 10, 20),
        (40, 20011, 20, 256, 8, 10, 7),
        (40, 5003, 50, 256, 4, 10, 7),
        (3, 5003, 3, 256, 2, 1, 2),
        (3, 20011, 5, 16, 16, 10, 3),
        (40, 5003, 50, 100, 3, 100, 9),  # rows that no scan by bytes takes
        (3, 9001, 9, 256, 12, 700, 4),  # more than 512 results, which are sorted in another way
        (2, 9001, 9, 300, 4, 10, 4),  # two-byte codes
        (2, 900, 9, 4096, 2, 5, 4),
        (2, 5000, 9, 7, 20, 9, 9),
        (2, 5000, 9, 256, 1, 7, 9),  # thousands of ties
        (300, 3000, 30, 256, 8, 10, 30),
    ],
)
def test_shapes(monkeypatch, isa, metric, Q, N, L, K, M, k, probes):
    check(Case(Q, N, L, K, M, k, probes, metric, seed=N + K + k), isa, monkeypatch)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("Q", [1, 40])
def test_filters_ties_and_prefixes(monkeypatch, isa, metric, Q):
    case = Case(Q, 9001, 12, 256, 8, 10, 5, metric)
    for change in (
        {"keep": 0.5},
        {"keep": 0.01},
        {"keep": 0.0005},  # fewer than k
        {"distinct": 1},
        {"distinct": 1, "empty": 0, "coarse": True, "D": 1, "L": 40, "probes": 40},  # centroids that tie
        {"distinct": 3, "keep": 0.5},
        {"levels": 1},
        {"levels": 4},
        {"levels": 6},
        {"offset": False},
        {"signs": True},
        {"threads": 2},
        {"N": 63, "levels": 5},
        {"N": 100, "levels": 5, "probes": 12},
    ):
        check(case._replace(**change), isa, monkeypatch)


def random_case(r: random.Random) -> Case:
    N, L, M = r.choice([0, 1, 5, 63, 64, 65, 500, 3000, 20000]), r.choice([1, 2, 7, 40]), r.randint(1, 20)
    return Case(
        Q=r.choice([1, 1, 3, 40]),
        N=N,
        L=L,
        K=r.choice([16, 100, 256, 256, 256, 300]),
        M=r.choice([M, 4, 8, 16]),
        k=r.choice([1, 2, 10, 10, 100, r.randint(1, N + 3), N + 3]),
        probes=r.randint(1, L),
        metric=r.choice(METRICS),
        levels=r.choice([None, None, 1, 2, 4, 5]),
        keep=r.choice([None, None, 0.5, 0.1, 0.001]),
        distinct=r.choice([None, None, 1, 3, 100]),
        empty=r.choice([0, 0.2, 0.9]),
        signs=r.random() < 0.2,
        offset=r.random() < 0.7,
        coarse=r.random() < 0.3,
        threads=r.choice([1, 2]),
        seed=r.randrange(1 << 30),
    )


@needs_native
def test_random_cases(monkeypatch):
    """DRQ_FAST_CASES sets the number of cases, DRQ_FAST_SEED the first seed. A failure prints its case and seed."""
    r = random.Random(int(os.environ.get("DRQ_FAST_SEED", "0")))
    for _ in range(int(os.environ.get("DRQ_FAST_CASES", "60"))):
        check(random_case(r), r.choice(ISAS), monkeypatch)


def length(x: Tensor) -> Tensor:
    """||x|| [N] of x [N, D], correctly rounded."""
    return x.double().square().sum(dim=1).sqrt().float()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("keep", [None, 0.7, 0.01])
def test_all_lists_are_the_whole_collection(backend, metric, keep):
    """Scores by the vectors themselves, with numbers that float32 adds up exactly, where no list is left out."""
    case = Case(5, 700, 9, 16, 4, 20, 9, metric, coarse=True, keep=keep)
    query, database, lists = inputs_of(case)
    offset = database.codec.offset
    assert offset is not None
    x_hat = definition.decode(database.codes, database.codec) + lists.centroids[lists.of(torch.arange(700))]
    scores = {
        "l2": lambda: ((query - offset)[:, None] - (x_hat - offset)).square().sum(dim=2),
        "ip": lambda: query @ x_hat.T,
        "cosine": lambda: (query @ x_hat.T) / (length(query)[:, None] * length(x_hat)),
    }[metric]()
    rows = torch.arange(700) if database.keep is None else database.keep.nonzero().squeeze(1)
    order = definition.rank(scores[:, rows], 20, metric)
    expected = definition.pad_result(scores[:, rows].gather(1, order), rows[order], 20, metric)
    for probes in (9, None):
        assert_same(COLUMNS[backend].search(query, database, 20, probes=probes), expected)


@needs_native
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("change", [{}, {"keep": 0.3}, {"keep": 0.005}, {"K": 300}, {"offset": False}, {"levels": 3}])
def test_native_search_is_the_definition(metric, change):
    """Products are part of the search here; numbers are such that float32 adds them up exactly."""
    case = Case(70, 3000, 17, 256, 8, 10, 4, metric, coarse=True)._replace(**change)
    query, database, _ = inputs_of(case)
    expected = definition.search(query, database, case.k, probes=case.probes)
    assert_same(native.search(query, database, case.k, probes=case.probes), expected)
    unknown = Database(database.codes, database.codec, metric, None, database.keep, database.lists)
    assert_same(native.search(query, unknown, case.k, probes=case.probes), expected)


@needs_native
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("D", [7, 64, 300])
def test_scores_depend_neither_on_the_batch_nor_on_threads_and_instructions(monkeypatch, metric, D):
    query, database, _ = inputs_of(Case(150, 9000, 21, 256, 8, 10, 6, metric, D=D))
    whole, threads = native.search(query, database, 10, probes=6), torch.get_num_threads()
    for isa in ISAS:
        monkeypatch.setenv("DRQ_FAST_ISA", isa)
        assert_same(native.search(query, database, 10, probes=6), whole, isa)
        try:
            torch.set_num_threads(3 - min(threads, 2))
            assert_same(native.search(query, database, 10, probes=6), whole, isa)
        finally:
            torch.set_num_threads(threads)
        alone = [native.search(query[q : q + 1], database, 10, probes=6) for q in range(150)]
        assert_same(SearchResult(*(torch.cat(part) for part in zip(*alone, strict=True))), whole, isa)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("Q", [1, 40])
def test_queries_that_are_hard_to_bound(monkeypatch, isa, metric, Q):
    monkeypatch.setenv("DRQ_FAST_ISA", isa)
    case = Case(Q, 9000, 12, 256, 8, 10, 5, metric)
    for change in ("zero", "huge", "tiny", "infinite", "NaN", "NaN list", "infinite list", "zero norms"):
        inputs = inputs_of(case)
        (query, database, lists), codec = inputs, inputs.database.codec
        if change in ("zero", "huge", "tiny"):
            query = query * {"zero": 0, "huge": 1e18, "tiny": 1e-30}[change]
        prepared = definition.prepare(query, codec.codebook, codec.offset, metric)
        products = inverted.products_of(query, lists.centroids, codec.offset, metric)
        if change == "infinite":
            prepared.table[0, 5], prepared.table[-1, 9] = float("inf"), float("-inf")
        if change == "NaN":
            prepared.table[0, 5] = prepared.constants[-1] = float("nan")
        if change.endswith("list"):
            products[0, ::2] = float("nan" if change == "NaN list" else "inf")
        if change == "zero norms" and database.norms is not None:
            database.norms[::3], database.norms[1::5] = 0, -1e-6
        expected = definition.search_given_lists(prepared, products, database, lists, case.k, case.probes)
        assert_same(scan(case, inputs, prepared, products), expected, change)


@needs_native
@pytest.mark.parametrize("metric", ["l2", "cosine"])
@pytest.mark.parametrize("K", [16, 300])
def test_norms(metric, K):
    _, database, lists = inputs_of(Case(1, 3000, 9, K, 5, 1, 1, metric))
    codes, codec = database.codes, database.codec
    norms = definition.squared_norms(codes, codec, metric, lists)
    x_hat = definition.decode(definition.numbers(codes), codec) + lists.centroids[lists.of(torch.arange(3000))]
    x_hat = x_hat if metric == "cosine" else x_hat - codec.offset
    torch.testing.assert_close(norms, x_hat.square().sum(dim=1), rtol=1e-5, atol=1e-5)
    assert torch.equal(native.squared_norms(codes, codec, metric, lists), norms)
    assert torch.equal(
        native.squared_norms(codes[:0], codec, metric, Lists(lists.starts * 0, lists.centroids)), norms[:0]
    )


@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_norms_without_inner_products_and_some_lists_at_a_time(monkeypatch, metric):
    _, database, lists = inputs_of(Case(1, 500, 9, 16, 5, 1, 1, metric, coarse=True))
    expected = definition.squared_norms(database.codes, database.codec, metric, lists)
    monkeypatch.setattr(inverted, "_MAX_INNER", 40)  # two lists
    assert torch.equal(definition.squared_norms(database.codes, database.codec, metric, lists), expected)
    monkeypatch.setattr("drq_fast.backends.torch.scores._MAX_GRAM", 8)
    assert torch.equal(definition.squared_norms(database.codes, database.codec, metric, lists), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("metric", METRICS)
def test_scores_are_differentiable_in_the_query(backend, metric):
    query, database, lists = inputs_of(Case(4, 300, 6, 16, 4, 5, 3, metric, empty=0))
    query.requires_grad_()
    found = COLUMNS[backend].search(query, database, 5, probes=3)
    assert found.positions.min() >= 0
    x_hat = definition.decode(database.codes, database.codec) + lists.centroids[lists.of(torch.arange(300))]
    chosen = x_hat[found.positions]
    scores = {
        "l2": lambda: (query[:, None] - chosen).square().sum(dim=2),
        "ip": lambda: (query[:, None] * chosen).sum(dim=2),
        "cosine": lambda: torch.nn.functional.cosine_similarity(query[:, None], chosen, dim=2),
    }[metric]()
    torch.testing.assert_close(found.scores, scores, rtol=1e-4, atol=1e-4)
    (gradient,), (expected,) = (torch.autograd.grad(s.sum(), query, retain_graph=True) for s in (found.scores, scores))
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)


def test_queries_look_at_the_nearest_lists():
    lists = Lists(torch.arange(5), torch.tensor([[0.0, 0], [3, 0], [0, 1], [3, 0]]))
    codec = Parameters(torch.zeros(2, 2), torch.ones(1), torch.tensor([1.0, 1]))
    codes = torch.zeros(4, 1, dtype=torch.uint8)
    l2 = definition.search(
        torch.tensor([[4.0, 1.0], [1.0, 1.75]]), Database(codes, codec, "l2", lists=lists), 3, probes=2
    )
    assert l2.positions.tolist() == [[1, 3, -1], [2, 0, -1]]
    assert l2.scores.tolist() == [[0, 0, float("inf")], [0.0625, 0.5625, float("inf")]]
    ip = definition.search(torch.tensor([[-1.0, 2.0]]), Database(codes, codec, "ip", lists=lists), 1, probes=1)
    assert (ip.positions.item(), ip.scores.item()) == (2, 3.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("Q", [0, 1, 3])
def test_nothing_to_look_at(backend, metric, Q):
    codec = Parameters(torch.randn(4, 6), torch.ones(2), None)
    nothing = torch.zeros(0, 2, dtype=torch.uint8)
    for L in (0, 3):
        lists = Lists(torch.zeros(L + 1, dtype=torch.int64), torch.randn(L, 6))
        found = COLUMNS[backend].search(torch.randn(Q, 6), Database(nothing, codec, metric, lists=lists), 2)
        assert found.positions.tolist() == [[-1, -1]] * Q
        assert found.scores.tolist() == [[float("inf" if metric == "l2" else "-inf")] * 2] * Q


def test_lists_of_a_selection_of_rows():
    lists = Lists(torch.tensor([0, 0, 3, 3, 7]), torch.zeros(4, 2))
    assert lists.of(torch.arange(7)).tolist() == [1, 1, 1, 3, 3, 3, 3]
    assert lists.rows(torch.tensor([1, 2, 6])).starts.tolist() == [0, 0, 2, 2, 3]
