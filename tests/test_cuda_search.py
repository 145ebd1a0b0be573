"""search in CUDA: every kernel and its host code, on a GPU or, where there is none, from their PTX in a simulator."""

from __future__ import annotations

import ctypes
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cuda_simulator import POINTERS, ROOT, SMALL_CONSTANTS, ProbedStruct, SearchStruct, Simulator, has_lists
from torch import Tensor

from drq_fast import checks
from drq_fast.backends import torch as definition
from drq_fast.backends.native.search import enqueue, native

METRICS = ["l2", "ip", "cosine"]


@dataclass
class Case:
    """A search as the kernels are given it, and what it must return."""

    Q: int
    N: int
    K: int
    M: int
    k: int
    metric: str = "l2"
    stride: int = 0  # codes from row to row; M if 0
    wide: bool = False
    keep: float = 1.0  # the fraction of codes that the filter keeps
    lead: int = 0  # distance of the first row from an aligned address, in codes
    seed: int = 0
    ties: bool = False  # few different scores
    codebooks: int = 1
    tensors: dict[str, Tensor] = field(init=False, repr=False)

    def __str__(self) -> str:
        simple = {name: value for name, value in vars(self).items() if isinstance(value, (int, float, str))}
        return " ".join(f"{name}={value}" for name, value in simple.items() if value)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.stride = self.stride or self.M
        self.wide = self.wide or self.K > 256
        self.dtype = torch.uint16 if self.wide else torch.uint8
        rows = torch.randint(self.K, (self.N, self.M), generator=generator)
        flat = torch.randint(self.K, (self.lead + self.N * self.stride,), generator=generator)
        flat = flat[: max(self.lead, len(flat) - self.stride + self.M)]  # nothing may be read beyond the last code
        for m in range(self.M if self.N else 0):
            flat[self.lead + m :: self.stride] = rows[:, m]
        coarse = lambda *shape: torch.randint(-2, 3, shape, generator=generator).float()  # noqa: E731
        make = coarse if self.ties else lambda *shape: torch.randn(*shape, generator=generator)
        bases = self.K * torch.tensor(checks.groups("test", self.codebooks, self.M))
        self.rows = rows + bases
        self.tensors = {
            "table": make(self.Q, self.codebooks * self.K),
            "scale": make(self.M),
            "bases": bases,
            "codes": flat.to(self.dtype),
            "constants": make(self.Q),
        }
        if self.metric != "ip":
            self.tensors["norms"] = make(self.N).square()
        if self.metric == "cosine":
            self.tensors["lengths"] = make(self.Q).abs()
        if self.keep < 1:
            self.tensors["keep"] = (torch.rand(self.N, generator=generator) < self.keep).to(torch.uint8)

    def expected(self) -> tuple[Tensor, Tensor]:
        """scores and positions [Q, k] by a stable sort of all scores."""
        given = self.tensors
        if self.N == 0:
            scores = torch.empty(self.Q, 0)
        else:
            sums, constants = definition.lookup(given["table"], self.rows, given["scale"]), given["constants"][:, None]
            scores = (given["norms"] - 2 * sums) + constants if self.metric == "l2" else sums + constants
        if self.metric == "cosine" and self.N:
            lengths = given["lengths"][:, None] * given["norms"].clamp_min(0).sqrt()
            scores = torch.where(lengths > 0, scores / torch.where(lengths > 0, lengths, 1), 0)
        kept = given["keep"].nonzero().squeeze(1) if "keep" in given else torch.arange(self.N)
        scores = scores[:, kept]
        cost = scores if self.metric == "l2" else -scores
        order = cost.sort(dim=1, stable=True).indices[:, : self.k]
        return definition.pad_result(scores.gather(1, order), kept[order], self.k, self.metric)

    def sizes(self) -> dict[str, int]:
        sizes = {name: getattr(self, name) for name in ("Q", "N", "K", "M", "k", "stride")}
        return sizes | {"T": self.codebooks * self.K, "metric": METRICS.index(self.metric), "wide": int(self.wide)}


def assert_right(case: Case, scores: Tensor, positions: Tensor) -> None:
    """To the bit, but for the payload of NaN."""
    expected_scores, expected_positions = case.expected()
    assert torch.equal(positions, expected_positions)
    number = ~expected_scores.isnan()
    assert torch.equal(scores.isnan(), ~number)
    assert torch.equal(scores[number].view(torch.int32), expected_scores[number].view(torch.int32))


def put(simulator: Simulator, case: Case) -> SearchStruct:
    """Copies the case to device memory."""
    simulator.clear()
    pointers = {name: simulator.device.to(tensor.numpy()) for name, tensor in case.tensors.items()}
    pointers["codes"] += case.lead * case.dtype.itemsize
    pointers["scores"] = simulator.device.alloc(max(1, case.Q * case.k * 4))
    pointers["positions"] = simulator.device.alloc(max(1, case.Q * case.k * 8))
    return SearchStruct(**pointers, **case.sizes())


def simulate(simulator: Simulator, case: Case, **options: Any) -> tuple[Tensor, Tensor]:
    return simulator.run(put(simulator, case), **options)


def on_gpu(case: Case, search: Callable[[dict[str, int]], None]) -> tuple[Tensor, Tensor]:
    """The results of search(job) on the GPU for the case."""
    given = {name: tensor.cuda() for name, tensor in case.tensors.items()}
    scores = torch.empty(case.Q, case.k, device="cuda")
    positions = torch.empty(case.Q, case.k, dtype=torch.int64, device="cuda")
    job = {name: given[name].data_ptr() if name in given else 0 for name in POINTERS}
    job["codes"] += case.lead * case.dtype.itemsize
    search(job | {"scores": scores.data_ptr(), "positions": positions.data_ptr()} | case.sizes())
    return scores.cpu(), positions.cpu()


# Few queries and many; tables that are copied for each bank, that are not, and that stay in the cache.
CASES = [
    Case(1, 1, 2, 1, 1),
    Case(1, 0, 8, 2, 3),
    Case(17, 0, 8, 2, 300, metric="ip"),
    Case(1, 5003, 256, 4, 10),
    Case(1, 2503, 256, 4, 10, codebooks=4),
    Case(40, 2503, 100, 6, 10, codebooks=3, metric="cosine"),
    Case(2, 2100, 300, 4, 33, codebooks=2, metric="ip"),
    Case(3, 2503, 256, 16, 33, metric="cosine"),
    Case(2, 2100, 300, 3, 100, metric="ip"),
    Case(1, 1300, 2000, 2, 5),
    Case(1, 700, 65536, 2, 7, metric="cosine"),
    Case(33, 1000, 256, 4, 10, metric="ip"),
    Case(16, 600, 17, 7, 256, metric="cosine"),
    Case(40, 300, 500, 5, 3),
    Case(18, 200, 3000, 3, 20),
    Case(2, 3001, 256, 4, 257),
    Case(1, 2000, 2000, 3, 2000, metric="ip"),
    Case(1, 300, 65536, 1, 400, metric="cosine"),
    Case(20, 500, 256, 2, 500, metric="cosine"),
    Case(17, 300, 1000, 2, 280),
    Case(16, 4500, 16, 3, 1100, metric="ip"),
]
# Prefixes of longer rows, unaligned codes, filters, ties.
ODD_CASES = [
    Case(1, 1500, 256, 4, 10, stride=16),
    Case(2, 900, 256, 3, 10, stride=7, lead=5, metric="ip"),
    Case(1, 700, 40, 2, 12, stride=40),
    Case(17, 300, 300, 3, 12, stride=33, lead=1),
    Case(17, 500, 20, 5, 12, stride=5, lead=3, wide=True, metric="cosine"),
    Case(1, 600, 256, 1, 4, lead=15),
    Case(3, 2500, 64, 4, 10, keep=0.1),
    Case(17, 600, 64, 4, 10, keep=0.01),
    Case(3, 2500, 64, 4, 300, keep=0.1),
    Case(17, 400, 64, 4, 300, keep=0.5, metric="ip"),
    Case(1, 4000, 4, 2, 50, ties=True),
    Case(17, 700, 4, 2, 50, ties=True, metric="cosine"),
    Case(2, 3000, 4, 2, 700, ties=True, metric="ip"),
    Case(17, 600, 4, 2, 300, ties=True),
]


@pytest.mark.parametrize("case", CASES + ODD_CASES, ids=str)
def test_bits_of_the_reference(simulator, case):
    assert_right(case, *simulate(simulator, case, racecheck=True))
    assert not simulator.warnings


def test_an_error_is_reported_once(simulator):
    """CUDA keeps an error until somebody asks for it: the next launch must not report that of an earlier call."""
    case = Case(1, 300, 256, 4, 10)
    with pytest.raises(AssertionError, match=r"shim error 1\b"):
        simulate(simulator, case, granted=0)
    assert_right(case, *simulate(simulator, case))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_bits_of_the_reference_for_random_shapes(simulator, seed):
    case = random_case(seed)
    for shared in (99 * 1024, 64 * 1024):
        assert_right(case, *simulate(simulator, case, shared=shared, racecheck=True, seed=seed, lanes=seed % 3 == 0))
        assert not simulator.warnings


def random_case(seed: int) -> Case:
    choose = random.Random(seed)
    K = choose.choice([2, 16, 100, 256, 257, 640, 1500, 30000])
    M, N = choose.randint(1, 16), choose.choice([1, 50, 333, 2500])
    return Case(
        Q=choose.choice([1, 2, 15, 16, 35]),
        N=N,
        K=K,
        M=M,
        k=choose.choice([1, 9, 60, 200, 256, 257, max(1, N - 1), N, N + 5]),
        metric=choose.choice(METRICS),
        stride=M + choose.choice([0, 0, 1, 5, 40]),
        wide=choose.random() < 0.3,
        keep=choose.choice([1.0, 1.0, 0.5, 0.02]),
        lead=choose.randint(0, 15),
        ties=choose.random() < 0.5,
        seed=seed,
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("case", CASES + ODD_CASES, ids=str)
def test_bits_of_the_reference_on_a_gpu(case):
    assert_right(case, *on_gpu(case, lambda job: enqueue(native.Search(**job), None, torch.device("cuda"))))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("k", [10, 300])
def test_graphs_on_a_stream_of_their_own(k):
    graph = torch.cuda.CUDAGraph()

    def capture_and_replay(job: dict[str, int]) -> None:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            enqueue(native.Search(**job), None, torch.device("cuda"))
        graph.replay()
        torch.cuda.synchronize()

    case = Case(20, 5000, 256, 4, k)
    assert_right(case, *on_gpu(case, capture_and_replay))


def test_nan_comes_last(simulator):
    for Q, k in ((1, 200), (17, 200), (1, 300)):
        case = Case(Q, 300, 8, 2, k)
        case.tensors["norms"][torch.arange(300) % 2 == 0] = float("nan")
        assert_right(case, *simulate(simulator, case))


SMALL = [
    Case(1, 600, 9, 3, 60, ties=True),
    Case(17, 200, 9, 3, 5, ties=True),
    Case(1, 300, 9, 3, 270, ties=True),
    Case(17, 300, 9, 3, 270, ties=True),
]


@pytest.mark.parametrize("case", [*SMALL[:3], pytest.param(SMALL[3], marks=pytest.mark.slow)], ids=str)
def test_ten_shuffled_orders(in_rounds, case):
    for seed in range(10):  # of warps, or of single lanes
        assert_right(case, *simulate(in_rounds, case, racecheck=True, seed=seed, lanes=seed % 2 == 1))
        assert not in_rounds.warnings


def test_every_kernel_without_lists_was_executed(simulator):
    executed: set[str] = set()
    for Q, k in ((1, 3), (17, 3), (1, 1100), (17, 1100)):
        for wide in (False, True):
            for K in (256, 30000):  # with more codewords than a byte can name, if need be
                case = Case(Q, 100, 256, 2, k, wide=wide)
                case.K, case.tensors["table"] = K, case.tensors["table"].repeat(1, -(-K // 256))[:, :K]
                assert_right(case, *simulate(simulator, case))
                executed |= simulator.launched
    assert executed == {name for name in simulator.entries if not has_lists(name)}


def counted(simulator: Simulator, case: Case, kernel: str) -> Counter[tuple[str, str]]:
    """(what, "requests" or "parts") -> how many: wavefronts of shared memory, 32-byte sectors of global memory."""
    import ptxsim

    counts: Counter[tuple[str, str]] = Counter()
    original = ptxsim.Run.where

    def where(run, space, addresses, selected, size, instruction, write):
        stats = run.stats
        before = stats.shared_req + stats.global_req, stats.shared_wavefronts + stats.global_sectors
        found = original(run, space, addresses, selected, size, instruction, write)
        if space in ("shared", "global") and kernel in run.fn.name:
            what = f"{instruction.op} {space} {size}"
            counts[what, "requests"] += stats.shared_req + stats.global_req - before[0]
            counts[what, "parts"] += stats.shared_wavefronts + stats.global_sectors - before[1]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ptxsim.Run, "where", where)
        simulate(simulator, case, profile=True)
    return counts


@pytest.mark.parametrize("M", [1, 4, 8, 16])
@pytest.mark.parametrize("Q", [1, 32])
@pytest.mark.parametrize("wide", [False, True])
def test_lookups_without_conflicts_and_coalesced_loads(simulator, Q, M, wide):
    """Where the table fits, each look-up is one wavefront, and each byte of the codes is loaded once."""
    case = Case(Q, 2048, 256, M, 10, wide=wide)
    counts = counted(simulator, case, "queue_kernel")
    batches = case.N if Q == 32 else case.N // 32  # a warp looks up a code for 32 queries, or 32 codes for one
    steps = batches * (M + -(-M // (2 if wide else 4)))  # entries, and words of codes
    reads = counts["ld shared 4", "requests"]
    assert steps + batches * M // 2 <= reads <= steps + batches * M // 2 + 2000  # scales, bases, queues
    assert counts["ld shared 4", "parts"] == reads
    code_sectors = case.N * M * (1 + wide) // 32
    table_sectors = 32 * 256 * 4 // 32 if Q == 32 else 0
    assert counts["ld global 16", "parts"] == code_sectors + table_sectors
    assert counts["ld global 16", "parts"] == 16 * counts["ld global 16", "requests"]
    assert counts["ld global 1", "requests"] == counts["ld global 2", "requests"] == 0


def test_wavefronts_of_tables_that_are_not_copied(simulator):
    """4096 codewords: the lanes of one query meet in a bank, 3 or 4 wavefronts each; a batch reads whole lines."""
    one = counted(simulator, Case(1, 4096, 4096, 4, 10), "queue_kernel")
    lookups, others = 4096 // 32 * 4, 4096 // 32 * (2 + 1)
    conflicts = (one["ld shared 4", "parts"] - one["ld shared 4", "requests"] + lookups) / lookups
    assert 3 < conflicts < 4
    assert others < one["ld shared 4", "requests"] - lookups < others + 500
    batch = counted(simulator, Case(32, 512, 4096, 4, 10), "queue_kernel")
    lookups = 512 * 4
    assert batch["ld global 4", "requests"] - lookups < 512 + 100  # norms, scales
    assert 4 * lookups <= batch["ld global 4", "parts"] < 4 * lookups + 512 + 200


DOCUMENTED = re.findall(
    r"\| (\d+) \| (\d+) \| (\d+) \| [^|]* \| (\d+) / (\d+) = ", (ROOT / "docs/gpu_search.md").read_text()
)


@pytest.mark.slow
@pytest.mark.parametrize("row", DOCUMENTED, ids=" ".join)
def test_counts_of_the_documentation(simulator, row):
    Q, K, M, wavefronts, reads = map(int, row)
    counts = counted(simulator, Case(Q, 2048 if Q == 32 else 16384, K, M, 10), "queue_kernel")
    assert (counts["ld shared 4", "parts"], counts["ld shared 4", "requests"]) == (wavefronts, reads)


def test_rounds_of_queries_and_slices_of_codes(in_rounds):
    for case in (Case(70, 700, 8, 2, 5), Case(5, 900, 8, 2, 5, metric="cosine"), Case(40, 400, 8, 2, 270)):
        assert_right(case, *simulate(in_rounds, case, racecheck=True))
        rounds = [name for name, *_ in in_rounds.host.log if "merge_kernel" in name or "emit_kernel" in name]
        assert len(rounds) > 1
        assert not in_rounds.warnings


def test_more_than_two_to_the_31_bytes(in_rounds):
    case, stride, device = Case(1, 44, 256, 4, 20), (1 << 26) + 1, in_rounds.device
    job = put(in_rounds, case)
    job.codes, job.stride = device.alloc(case.N * stride), stride
    for n, row in enumerate(case.rows.to(torch.uint8).numpy()):
        device.mem[device.starts[-1] + n * stride :][: case.M] = row
    assert_right(case, *in_rounds.run(job))
    device.top = 4096  # so that nobody overwrites all of it


def test_nothing_to_do_and_what_cannot_be_done(simulator):
    job = put(simulator, Case(0, 5, 4, 2, 3))
    assert simulator.workspace(ctypes.byref(job), ctypes.byref(ProbedStruct())) == 0
    simulator.run(job)
    assert not simulator.launched
    job = put(simulator, Case(2, 5, 4, 2, 3))
    arguments = ctypes.byref(job), ctypes.byref(ProbedStruct()), None, None
    job.N = 2**32 - 1
    assert simulator.enqueue(*arguments) == b"more than 2^32 - 2 codes: search them in parts"
    job.N, job.M = 5, 65
    assert simulator.enqueue(*arguments) == b"more than 64 levels"


def test_errors_of_the_runtime_are_reported(simulator):
    job = put(simulator, Case(2, 5, 4, 2, 3))
    job.codes += 1 << 40
    with pytest.raises(AssertionError, match="shim error 700"):
        simulator.run(job)


SOURCE = "".join(file.read_text() for file in sorted((ROOT / "csrc/cuda").iterdir()) if file.name != "adc.cu")
BARRIERS = re.findall(r"(?:Group::sync|__syncthreads)\(\); +// .*", SOURCE)


def test_every_barrier_says_what_it_is_for():
    assert len(re.findall(r"(?:Group::sync|__syncthreads)\(\);", SOURCE)) == len(BARRIERS) + 1  # Sorters::sync
    assert len(set(BARRIERS)) == len(BARRIERS)


@pytest.mark.parametrize(
    "barrier",
    [
        pytest.param(b, marks=[] if "the tile is there" in b else pytest.mark.slow)
        for b in BARRIERS
        if "the part is known" not in b  # of lists, see test_cuda_lists.py
    ],
)
def test_without_a_barrier_the_simulator_complains(host, ptxsim_folder, barrier):
    simulator = Simulator(host, ptxsim_folder, f"without_{BARRIERS.index(barrier)}", SMALL_CONSTANTS | {barrier: ""})

    def complains(case: Case, seed: int) -> bool:
        try:
            assert_right(case, *simulate(simulator, case, racecheck=True, seed=seed, lanes=seed % 2 == 1))
        except AssertionError:
            return True
        return bool(simulator.warnings)

    assert any(complains(case, seed) for seed in range(10) for case in SMALL)


def test_instructions_of_one_query(host, ptxsim_folder):
    """Of a thread, for each code, in slices as long as those of a million codes: see docs/gpu_search.md."""
    simulator = Simulator(host, ptxsim_folder, "long_slices", {"kMinSliceRows = 2048": "kMinSliceRows = 4096"})
    case = Case(1, 4 * 4096, 256, 4, 10)
    assert_right(case, *simulate(simulator, case))
    scan, merge = (stats.thread_ins for *_, stats, _ in simulator.host.log)
    assert scan / case.N <= 160
    assert merge / 1e6 <= 1
