"""The native scan: the bits and the order of plain torch, given the same tables, on every instruction set."""

from __future__ import annotations

import os
import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from drq_fast import checks, functional
from drq_fast.backends import native
from drq_fast.backends import torch as definition
from drq_fast.backends.native import extension
from drq_fast.backends.native.search import scan_given
from drq_fast.backends.types import Parameters, SearchResult

pytestmark = pytest.mark.skipif(extension.why_not("cpu") is not None, reason="the extension is not built")
ISAS = extension.supported_isas()
METRICS = ["l2", "ip", "cosine"]


class Case(NamedTuple):
    """A search over random codes; `distinct` limits how many different ones there are, `levels` cuts a prefix."""

    Q: int
    N: int
    K: int
    M: int
    k: int
    metric: str
    keep: float | None = None  # share of the codes that a filter keeps
    distinct: int | None = None
    levels: int | None = None
    offset: bool = True
    threads: int = 1
    seed: int = 0
    codebooks: int = 1


class Inputs(NamedTuple):
    prepared: definition.Prepared
    codes: Tensor
    codec: Parameters
    norms: Tensor | None
    keep: Tensor | None


def inputs_of(case: Case, D: int = 12) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)
    query, codebook = (torch.randn(n, D, generator=generator) for n in (case.Q, case.codebooks * case.K))
    offset = torch.randn(D, generator=generator) / 2 if case.offset else None
    scale = torch.tensor([(-1) ** (m // 2) * 0.7**m for m in range(case.M)])
    codes = torch.randint(case.K, (case.N, case.M), generator=generator)
    if case.distinct is not None and case.N:
        codes = codes[torch.randint(min(case.distinct, case.N), (case.N,), generator=generator)]
    codes = codes.to(torch.uint8 if case.K <= 256 else torch.int16)[:, : case.levels]
    codec = Parameters(codebook, scale, offset, checks.groups("test", case.codebooks, case.M))
    codec = codec.part(slice(0, codes.shape[1]))
    keep = None if case.keep is None else torch.rand(case.N, generator=generator) < case.keep
    norms = None
    if case.metric != "ip":
        norms = definition.squared_norms(codes, codec, case.metric)
    return Inputs(definition.prepare(query, codec.codebook, offset, case.metric), codes, codec, norms, keep)


def expected_of(case: Case, inputs: Inputs) -> SearchResult:
    """All scores, sorted: the definition."""
    rows = torch.arange(case.N) if inputs.keep is None else inputs.keep.nonzero().squeeze(1)
    chosen = inputs.codec.rows(inputs.codes[rows].int() & 0xFFFF)
    sums = definition.lookup(inputs.prepared.table, chosen, inputs.codec.scale)
    norms = None if inputs.norms is None else inputs.norms[rows]
    scores = definition.scores_of(sums, norms, inputs.prepared, case.metric)
    cost = scores if case.metric == "l2" else -scores
    order = cost.sort(dim=1, stable=True).indices[:, : case.k]
    return definition.pad_result(scores.gather(1, order), rows[order], case.k, case.metric)


def check(case: Case, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRQ_FAST_ISA", isa)
    inputs = inputs_of(case)
    scores = torch.full((case.Q, case.k), float("nan"))
    positions = torch.full((case.Q, case.k), -7)
    scan_given(
        inputs.prepared,
        inputs.codes,
        inputs.codec,
        scores,
        positions,
        case.metric,
        inputs.norms,
        inputs.keep,
        case.threads,
    )
    expected = expected_of(case, inputs)
    assert torch.equal(positions, expected.positions), (case, isa)
    assert torch.equal(scores, expected.scores), (case, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("Q", "N", "K", "M", "codebooks"),
    [
        (1, 20011, 256, 4, 4),
        (1, 20011, 256, 4, 2),
        (2, 9001, 200, 8, 8),
        (1, 20011, 256, 16, 16),
        (2, 20011, 16, 12, 3),
        (1, 9001, 256, 32, 32),
        (40, 20011, 256, 8, 4),
        (33, 9001, 300, 4, 4),  # two-byte codes
    ],
)
def test_levels_with_codewords_of_their_own(isa, metric, Q, N, K, M, codebooks, monkeypatch):
    check(Case(Q, N, K, M, 10, metric, codebooks=codebooks), isa, monkeypatch)
    check(Case(Q, N, K, M, 3, metric, keep=0.3, levels=M - 1, codebooks=codebooks), isa, monkeypatch)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("Q", "N", "K", "M", "k"),
    [
        (1, 0, 256, 4, 3),  # nothing to find
        (3, 1, 2, 1, 5),  # less than k
        (1, 20011, 256, 4, 10),  # one query
        (2, 20011, 16, 8, 10),
        (1, 20000, 256, 1, 7),  # one level: thousands of ties
        (2, 9001, 100, 2, 1),
        (1, 20011, 256, 3, 10),  # M is no power of two
        (40, 20011, 256, 4, 10),  # a batch, and part of one
        (130, 9001, 256, 8, 100),
        (33, 9001, 64, 16, 3),
        (40, 9001, 300, 4, 10),  # two-byte codes
        (33, 9001, 4096, 2, 5),
        (2, 3000, 256, 4, 3000),  # all of them
        (3, 9001, 256, 4, 2000),
        (1, 600, 65536, 2, 4),
        (2, 5000, 7, 20, 9),  # more than 16 levels
    ],
)
def test_shapes(monkeypatch, isa, metric, Q, N, K, M, k):
    check(Case(Q, N, K, M, k, metric, seed=N + K + k), isa, monkeypatch)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("Q", [1, 40])
def test_filters_ties_and_prefixes(monkeypatch, isa, metric, Q):
    case = Case(Q, 20001, 256, 4, 10, metric)
    for change in (
        {"keep": 0.5},
        {"keep": 0.1},
        {"keep": 0.0001},  # less than k
        {"distinct": 1},
        {"distinct": 3, "keep": 0.5},
        {"distinct": 500},
        {"levels": 1},
        {"levels": 2},
        {"levels": 3},
        {"offset": False},
        {"M": 8, "levels": 4},
        {"M": 8, "levels": 6},
    ):
        check(case._replace(**change), isa, monkeypatch)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("Q", "N"), [(1, 80001), (12, 200001), (40, 70001), (200, 9001)])
def test_threads(monkeypatch, isa, Q, N):
    for threads, metric in ((2, "ip"), (3, "l2")):
        check(Case(Q, N, 256, 4, 10, metric, threads=threads), isa, monkeypatch)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("Q", [1, 40])
def test_values_that_are_hard_to_bound(isa, metric, Q, monkeypatch):
    """Outliers, zeros, equal norms, huge, tiny and infinite numbers: dropped codes must still be worse."""
    monkeypatch.setenv("DRQ_FAST_ISA", isa)
    case = Case(Q, 20000, 256, 4, 10, metric)
    inputs = inputs_of(case)
    for change in (
        "zero query",
        "huge",
        "tiny",
        "one huge norm",
        "equal norms",
        "zero norms",
        "infinite",
        "NaN",
        "scale 0",
    ):
        table, constants, lengths = (None if t is None else t.clone() for t in inputs.prepared)
        norms, scale = None if inputs.norms is None else inputs.norms.clone(), inputs.codec.scale.clone()
        if change == "zero query":
            table[0] = constants[0] = 0
            if lengths is not None:
                lengths[0] = 0
        if change in ("huge", "tiny"):
            table *= 1e18 if change == "huge" else 1e-30
        if change == "infinite":
            table[0, 5], table[-1, 9] = float("inf"), float("-inf")
        if change == "NaN":
            table[0, 5] = float("nan")
        if change == "scale 0":
            scale[1:] = 0
        if norms is not None:
            if change == "one huge norm":
                norms[::7001] = 1e9
            if change == "equal norms":
                norms[:] = 2
            if change == "zero norms":
                norms[::3] = 0
                norms[1::5] = -1e-6
        codec = Parameters(inputs.codec.codebook, scale, None)
        changed = Inputs(definition.Prepared(table, constants, lengths), inputs.codes, codec, norms, None)
        scores, positions = torch.empty(Q, 10), torch.empty(Q, 10, dtype=torch.int64)
        scan_given(changed.prepared, changed.codes, codec, scores, positions, metric, norms)
        expected = expected_of(case, changed)
        assert torch.equal(positions, expected.positions), change
        assert torch.equal(scores.nan_to_num(nan=7), expected.scores.nan_to_num(nan=7)), change


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("size", [1e-8, 1e-5, 1e5])
def test_one_query_of_any_size(isa, metric, size, monkeypatch):
    monkeypatch.setenv("DRQ_FAST_ISA", isa)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (20000, 4), generator=generator, dtype=torch.uint8)
    codebook, scale = torch.randn(256, 16, generator=generator), 0.7 ** torch.arange(4)
    query = size * torch.randn(1, 16, generator=generator)
    norms = native.squared_norms(codes, Parameters(codebook, scale, None), "l2")
    given = {"k": 10, "metric": metric, "norms": None if metric == "ip" else norms}
    expected = functional.search(query, codes, codebook, scale, **given, backend="torch")
    found = functional.search(query, codes, codebook, scale, **given)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-5, atol=0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("stride", "M"), [(1, 2), (1, 4), (2, 4), (4, 8)])
def test_rows_that_overlap(isa, stride, M, monkeypatch):
    monkeypatch.setenv("DRQ_FAST_ISA", isa)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (20000,), generator=generator, dtype=torch.uint8).unfold(0, M, stride)
    codebook, scale = torch.randn(256, 16, generator=generator), 0.7 ** torch.arange(M)
    query = torch.randn(3, 16, generator=generator)
    expected = functional.search(query, codes.contiguous(), codebook, scale, k=10)
    assert torch.equal(functional.search(query, codes, codebook, scale, k=10).positions, expected.positions)


def random_case(r: random.Random) -> Case:
    N = r.choice([0, 1, 5, 100, 1000, 5000, 20000, 70000, 150000])
    return Case(
        Q=min(r.choice([1, 1, 2, 5, 19, 20, 33, 64, 65, 130]), max(1, 4_000_000 // max(N, 1))),
        N=N,
        K=r.choice([2, 3, 16, 64, 100, 256, 256, 256, 257, 512, 1000, 4096]),
        M=r.choice([1, 2, 3, 4, 4, 4, 5, 8, 8, 16]),
        k=r.choice([1, 2, 10, 10, 100, 1000, max(1, N)]),
        metric=r.choice(METRICS),
        keep=r.choice([None, None, 0.5, 0.1, 0.001]),
        distinct=r.choice([None, None, 1, 3, 100]),
        levels=r.choice([None, None, 1, 2]),
        offset=r.random() < 0.7,
        threads=r.choice([1, 2, 3]),
        seed=r.randrange(1 << 30),
    )


def test_random_cases(monkeypatch):
    """DRQ_FAST_CASES sets the number of cases, DRQ_FAST_SEED the first seed. A failure prints its case and seed."""
    r = random.Random(int(os.environ.get("DRQ_FAST_SEED", "0")))
    for _ in range(int(os.environ.get("DRQ_FAST_CASES", "40"))):
        check(random_case(r), r.choice(ISAS), monkeypatch)
