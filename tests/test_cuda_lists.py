"""Inverted lists in CUDA: the kernels in a simulator, or on a GPU, give the bits and the order of plain torch."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cuda_simulator import SMALL_CONSTANTS, ProbedStruct, SearchStruct, Simulator, has_lists
from test_lists import METRICS, Case, assert_same, inputs_of, needs_native
from torch.utils._python_dispatch import TorchDispatchMode

from drq_fast import backends
from drq_fast.backends import torch as definition
from drq_fast.backends.types import Database, Lists, Parameters, SearchResult, Stored

pytestmark = needs_native
search = importlib.import_module("drq_fast.backends.native.search")  # not the function
Search = Callable[..., SearchResult]


def search_by(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> Search:
    """The search of a GPU, for tensors of the CPU: the job is copied to the simulator, its results are copied back."""
    options: dict[str, object] = {}

    def enqueue(job: dict[str, int], probed: dict[str, int] | None, device: torch.device) -> None:
        Q, N, T, M, k, chosen = *(job[name] for name in ("Q", "N", "T", "M", "k")), probed or {"L": 1, "probes": 0}
        sizes = {"table": 4 * Q * T, "scale": 4 * M, "bases": 8 * M, "norms": 4 * N, "lengths": 4 * Q, "keep": N}
        sizes["codes"] = max(0, (N - 1) * job["stride"] + M) * (1 + job["wide"])
        sizes |= {"constants": 4 * Q * chosen["L"], "scores": 4 * Q * k, "positions": 8 * Q * k}
        sizes |= {"starts": 8 * (chosen["L"] + 1), "lists": 8 * Q * chosen["probes"], "ends": 8 * Q * chosen["probes"]}
        simulator.clear()

        def on_device(fields: dict[str, int]) -> dict[str, int]:
            """Fields of a job whose addresses are those of copies in the simulator."""
            copies = {
                name: simulator.device.to(np.frombuffer(ctypes.string_at(address, sizes[name]), np.uint8))
                for name, address in fields.items()
                if name in sizes and address
            }
            return fields | copies

        struct = None if probed is None else ProbedStruct(**on_device(probed))
        scores, positions = simulator.run(SearchStruct(**on_device(job)), struct, **options)
        ctypes.memmove(job["scores"], scores.contiguous().data_ptr(), 4 * Q * k)
        ctypes.memmove(job["positions"], positions.contiguous().data_ptr(), 8 * Q * k)

    monkeypatch.setattr(search.native, "Search", dict)
    monkeypatch.setattr(search.native, "Probed", dict)
    monkeypatch.setattr(search, "enqueue", enqueue)

    def searched(case: Case, database: Database, query: torch.Tensor, **launch: object) -> SearchResult:
        options.clear()
        options.update(launch)
        return search._scan_cuda(query, database, case.k, True, case.probes)

    return searched


@pytest.fixture
def simulated(simulator, monkeypatch) -> Search:
    return search_by(simulator, monkeypatch)


@pytest.fixture
def simulated_in_rounds(in_rounds, monkeypatch) -> Search:
    return search_by(in_rounds, monkeypatch)


def check(simulator: Simulator, searched: Search, case: Case, **launch: object) -> None:
    query, database, _ = inputs_of(case)
    expected = definition.search(query, database, case.k, probes=case.probes)
    assert_same(searched(case, database, query, racecheck=True, **launch), expected, case)
    assert not simulator.warnings


# One list, some, all; empty lists; k larger than a list, and than all of them; prefixes, two-byte codes, filters, ties.
CASES = [
    Case(1, 900, 7, 16, 3, 10, 1, "l2"),
    Case(3, 900, 7, 16, 3, 10, 3, "l2"),
    Case(17, 700, 9, 16, 4, 5, 9, "l2"),  # no batch, though there are many queries
    Case(2, 400, 30, 256, 4, 60, 4, "l2", empty=0.7),
    Case(2, 60, 9, 16, 2, 100, 9, "l2"),
    Case(2, 500, 5, 16, 8, 10, 2, "l2", levels=3),
    Case(2, 500, 5, 300, 3, 10, 2, "l2"),
    Case(2, 900, 5, 16, 3, 10, 3, "l2", keep=0.3),
    Case(2, 900, 5, 16, 3, 20, 3, "l2", keep=0.01),
    Case(3, 900, 7, 4, 2, 30, 3, "l2", distinct=3, coarse=True),
    Case(2, 900, 5, 16, 3, 10, 3, "l2", offset=False, signs=True),
    Case(2, 1500, 6, 16, 3, 300, 4, "l2"),  # k > 256
    Case(2, 900, 9, 4, 2, 300, 4, "l2", distinct=3, keep=0.6, coarse=True),
]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_of_the_definition(simulator, simulated, case, metric):
    check(simulator, simulated, case._replace(metric=metric))


SMALL = [
    Case(5, 300, 9, 16, 3, 5, 3, "l2", distinct=20),
    Case(5, 300, 9, 16, 3, 270, 4, "cosine", distinct=20, keep=0.8),
]


@pytest.mark.parametrize("case", [SMALL[0], pytest.param(SMALL[1], marks=pytest.mark.slow)], ids=str)
def test_slices_that_begin_and_end_within_lists(in_rounds, simulated_in_rounds, case):
    for seed in range(6):  # orders of warps, or of single lanes
        check(in_rounds, simulated_in_rounds, case._replace(seed=seed), seed=seed, lanes=seed % 2 == 1)
    assert sum("emit_kernel" in name or "merge_kernel" in name for name in in_rounds.launches) > 1  # rounds of queries


def test_every_kernel_of_lists_was_executed(simulator, simulated):
    """Tables that are copied for each bank, that are not, and that stay in the cache."""
    executed: set[str] = set()
    for k in (9, 300):
        for K, codewords in ((256, 256), (2000, 2000), (30000, 30000), (256, 30000)):
            case = Case(2, 400, 5, K, 2, k, 3, "cosine", D=3)
            query, database, lists = inputs_of(case)
            if codewords > K:  # more than a byte can name
                codec = Parameters(database.codec.codebook.repeat(118, 1)[:codewords], *database.codec.tensors()[1:])
                database = Database(database.codes, codec, "cosine", database.norms, lists=lists)
            expected = definition.search(query, database, k, probes=3)
            assert_same(simulated(case, database, query, shared=64 * 1024), expected)
            executed |= simulator.launched
    assert {name for name in executed if has_lists(name)} == {name for name in simulator.entries if has_lists(name)}


def test_nan_infinity_and_nothing_to_look_at(simulator, simulated):
    case = Case(3, 300, 6, 16, 2, 200, 4, "l2")
    query, database, _ = inputs_of(case)
    assert database.norms is not None
    database.norms[::3], database.norms[1::7] = float("nan"), float("inf")
    assert_same(simulated(case, database, query), definition.search(query, database, 200, probes=4))
    codec, none = Parameters(torch.randn(4, 6), torch.ones(2), None), torch.zeros(0, 2, dtype=torch.uint8)
    for L in (0, 3):
        lists = Lists(torch.zeros(L + 1, dtype=torch.int64), torch.randn(L, 6))
        for Q in (0, 2):
            found = simulated(
                case._replace(k=2, probes=None), Database(none, codec, "ip", lists=lists), torch.ones(Q, 6)
            )
            assert found.positions.tolist() == [[-1, -1]] * Q


def test_some_queries_at_a_time(simulated, monkeypatch):
    """Numbers are such that float32 adds them up exactly: products have the same bits for any number of queries."""
    case = Case(7, 200, 6, 16, 3, 5, 2, "l2", coarse=True)
    query, database, _ = inputs_of(case)
    monkeypatch.setattr(search, "_PRODUCTS", 18)  # three queries
    assert_same(simulated(case, database, query), definition.search(query, database, 5, probes=2))


def test_lists_are_searched_by_compiled_code_on_a_gpu():
    query, database, _ = inputs_of(Case(1, 5, 2, 16, 1, 1, 1, "ip"))
    assert backends.cannot_search(query, database.codes, database.codec, None) is None
    assert backends.FASTER["search", "cuda"] == "native"


class Operations(TorchDispatchMode):
    """Records the operations of torch that make the host wait for a GPU, since they return numbers or sizes."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "unique_dim", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype is torch.bool for index in args[1]
        )
        if name in self.WAITING or masks:
            self.waiting.append(name)
        return func(*args, **(kwargs or {}))


def test_the_operations_that_wait_are_recorded():
    with Operations() as operations:
        assert len(torch.arange(3)[torch.tensor([True, False, True])]) == int(torch.tensor(2))
    assert operations.waiting == ["index", "_local_scalar_dense"]


@pytest.mark.parametrize("metric", METRICS)
def test_nothing_waits_for_the_gpu(simulated, metric):
    case = Case(3, 300, 6, 16, 3, 20, 2, metric, keep=0.9)
    query, database, _ = inputs_of(case)
    stored = [Stored(torch.randn(300, 12)), Stored(torch.randn(300, 12).half())]
    stored += [Stored(torch.randint(-127, 128, (300, 12)).to(torch.int8), torch.rand(300))]
    with Operations() as operations:
        found = search._scan_cuda(query, database, case.k, False, case.probes)
        for vectors in stored:
            definition.refine(query, found.positions, vectors, metric, 5)
    assert operations.waiting == []


@pytest.mark.slow
def test_without_the_barrier_of_a_part_the_simulator_complains(host, ptxsim_folder, monkeypatch):
    barrier = "__syncthreads();  // the part is known, and the tile before is done with"
    simulator = Simulator(host, ptxsim_folder, "without_part", SMALL_CONSTANTS | {barrier: ""})
    searched = search_by(simulator, monkeypatch)

    def complains(seed: int) -> bool:
        try:
            check(simulator, searched, SMALL[0], seed=seed, lanes=seed % 2 == 1)
        except AssertionError:
            return True
        return False

    assert any(complains(seed) for seed in range(10))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_of_the_definition_on_a_gpu(case, metric):
    query, database, lists = inputs_of(case._replace(metric=metric, coarse=True))
    expected = definition.search(query, database, case.k, probes=case.probes)
    codec = Parameters(*(None if t is None else t.cuda() for t in database.codec.tensors()))  # type: ignore[arg-type]
    norms, keep = (None if t is None else t.cuda() for t in (database.norms, database.keep))
    there = Lists(lists.starts.cuda(), lists.centroids.cuda())
    found = search.search(
        query.cuda(), Database(database.codes.cuda(), codec, metric, norms, keep, there), case.k, probes=case.probes
    )
    assert_same(SearchResult(*(t.cpu() for t in found)), expected)
