"""One fixture for every benchmark: agreement with the definition, speed beside peers, peak memory, provenance.

    def inputs(N, device="cpu"):
        return torch.randn(N, 64, generator=torch.Generator().manual_seed(0)).to(device)

    def ours(N, device):  # a job: a module-level function that builds its inputs and returns what is timed
        x = inputs(N, device)
        return lambda: drq_fast.sums(x)

    def numpy(N, device):  # a peer, of which there may be many; where its import fails it is named as absent
        import numpy
        x = inputs(N).numpy()
        return lambda: numpy.sum(x, axis=1)

    def agrees(sums, N, device):  # is what ours returned right?
        return torch.allclose(sums.cpu(), inputs(N).sum(dim=1))

    def bench_sums(compare):
        compare(ours, {"numpy": numpy}, agrees, sizes={"N": 1000}, work=1000, unit="vectors")

Run: pytest benchmarks --benchmark-json=figures.json, with -m quick for a few of them, --device cuda on a GPU (where a
peer that raises NotImplementedError is named as absent). The file holds provenance and figures, for report.py.

All benchmarks run in three passes, each with inputs built anew: effects of memory layout and of other load differ from
pass to pass, and the intervals have to cover them. Benchmarks time public calls. What is expensive to build, such as
codes of fitted layers, is kept in the folder BENCH_FOLDER for the other passes and processes of the same run.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

Run = Callable[[], Any]
Job = Callable[..., Run]

FIGURES = pytest.StashKey[dict[str, dict[str, Any]]]()
TIMES = pytest.StashKey[dict[str, "Times"]]()
STUDENT = {2: 6.31, 3: 2.92, 4: 2.35, 5: 2.13}  # the 95 % quantile of Student's t by the number of passes
LEAST = 0.02  # seconds that are timed at a time
ENOUGH = 5.0  # seconds for all rounds, of which there are 7 at least
WIDEST = 0.25  # of a ratio: an interval that reaches further to a side is marked, and not published
PAUSE = 0.01  # seconds in which the OpenMP threads of the previous run stop spinning


@pytest.fixture
def compare(benchmark: Any, request: pytest.FixtureRequest, which_pass: int) -> Callable[..., None]:
    """compare(ours, peers, agrees, *, sizes, work, unit, quality=None, rounds=None): see the top of this file.

    agrees(result, **sizes) -> bool judges what ours returned, before anything is timed. work is how many `unit` one run
    gets done. quality(result, **sizes) -> {name: figure} says how good results are, ours and the peers'. Each round
    times every peer, then ours; a ratio is peer time / our time of the same round. rounds: how many in each pass, for
    what takes many seconds; by default there are 7 to 21 in all passes together.
    """
    config = request.config
    device, passes = config.getoption("device"), config.getoption("passes")
    name = re.sub(r"-?pass\d+", "", request.node.name).replace("[]", "").replace("[-", "[")

    def run_all(
        ours: Job,
        peers: dict[str, Job],
        agrees: Callable[..., bool],
        *,
        sizes: dict[str, Any],
        work: int,
        unit: str,
        quality: Callable[..., dict[str, float]] | None = None,
        rounds: int | None = None,
    ) -> None:
        place = {**sizes, "device": device}
        run = synchronised(ours(**place), device)
        times = config.stash.setdefault(TIMES, {})
        if which_pass == 0:
            result = run()
            assert agrees(result, **place), f"ours disagrees with the definition at {sizes}: nothing is timed"
            if benchmark.disabled:
                return
            runs, absent = prepare(peers, place)
            our_memory, *memories = peak_memories([ours, *(peers[peer] for peer in runs)], place)
            facts = {peer: dict(memory) for peer, memory in zip(runs, memories, strict=True)}
            if quality:
                our_memory["quality"] = quality(result, **place)
                for peer in runs:
                    facts[peer]["quality"] = quality(runs[peer](), **place)
            del result
            times[name] = Times(our_memory, facts, absent)
        elif name not in times:
            pytest.skip("its first pass has left nothing to add to")
        else:
            runs, _ = prepare(peers, place)
        total, others = time_pass(benchmark, run, runs, times[name], passes, rounds)
        config.stash.setdefault(FIGURES, {})[name] = {
            "group": Path(inspect.getfile(ours)).stem.removeprefix("bench_"),
            "quick": request.node.get_closest_marker("quick") is not None,
            "device": device,
            "sizes": sizes,
            "work": work,
            "unit": unit,
            "rounds": total,
            "passes": len(times[name].ours),
            **times[name].figures(work, list(peers)),
            "cores_used_by_others": others,
        }

    return run_all


@dataclasses.dataclass
class Times:
    """What is known of ours and the peers, and the seconds [rounds] of every pass."""

    ours_facts: dict[str, Any]
    facts: dict[str, dict[str, Any]]
    absent: dict[str, str]
    ours: list[npt.NDArray[np.float64]] = dataclasses.field(default_factory=list)
    peers: list[dict[str, npt.NDArray[np.float64]]] = dataclasses.field(default_factory=list)
    others: list[float | None] = dataclasses.field(default_factory=list)

    def figures(self, work: int, names: list[str]) -> dict[str, Any]:
        """Speed of ours and of all peers, and the ratios."""
        peers: dict[str, Any] = {}
        for name in names:
            if name in self.absent:
                peers[name] = {"absent": self.absent[name]}
                continue
            ratios = [peer[name] / ours for peer, ours in zip(self.peers, self.ours, strict=True)]
            rates = rate(work, [peer[name] for peer in self.peers])
            peers[name] = {**spread(ratios), **rates, **self.facts[name]}
        return {"ours": {**rate(work, self.ours), **self.ours_facts}, "peers": peers}


def time_pass(
    benchmark: Any, run: Run, runs: dict[str, Run], times: Times, passes: int, rounds: int | None = None
) -> tuple[int, float | None]:
    """Times one pass; (rounds of all passes, the most cores that others kept busy in one)."""
    prepared = repeated if rounds is None else once
    run, repeats, seconds = prepared(run)
    peer_times: dict[str, list[float]] = {name: [] for name in runs}
    timed = {name: prepared(peer) for name, peer in runs.items()}
    seconds += sum(peer.seconds for peer in timed.values())
    warm_ups = 1 if rounds is None else 0
    rounds = rounds or max(math.ceil(7 / passes), min(21 // passes, int(ENOUGH / passes / seconds)))

    def timing() -> None:
        setup = functools.partial(time_each, timed, peer_times)
        benchmark.pedantic(run, setup=setup, rounds=rounds, warmup_rounds=warm_ups)

    others = cores_used_by_others(timing)
    times.ours.append(np.array(benchmark.stats.stats.data) / repeats)
    of_rounds = slice(warm_ups, warm_ups + rounds)
    times.peers.append({name: np.array(seconds[of_rounds]) for name, seconds in peer_times.items()})
    times.others.append(others)
    known = [share for share in times.others if share is not None]
    return sum(map(len, times.ours)), max(known) if known else None


def synchronised(run: Run, device: str) -> Run:
    """The same, returning only when the GPU, if one is in use, is done."""

    def run_to_the_end() -> Any:
        result = run()
        if device == "cuda":
            torch.cuda.synchronize()
        return result

    return run_to_the_end


def prepare(peers: dict[str, Job], sizes: dict[str, Any]) -> tuple[dict[str, Run], dict[str, str]]:
    """(what to time for each peer, why there is nothing to time) by name."""
    runs, absent = {}, {}
    for name, job in peers.items():
        try:
            runs[name] = synchronised(job(**sizes), sizes["device"])
        except (ImportError, NotImplementedError) as error:
            absent[name] = str(error)
    return runs, absent


class Repeated(NamedTuple):
    """What is timed at a time: `repeats` runs, that take so many seconds together."""

    run: Run
    repeats: int
    seconds: float


def repeated(run: Run) -> Repeated:
    """The same as often as it takes to last LEAST seconds: waking up must not count."""
    for _ in range(2):  # the first may be the slower one
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        if seconds > 10 * LEAST:
            break
    repeats = math.ceil(LEAST / max(seconds, 1e-6))

    def run_repeatedly() -> None:
        for _ in range(repeats):
            run()

    return Repeated(run_repeatedly, repeats, repeats * seconds)


def once(run: Run) -> Repeated:
    """The same, for what takes so long that it is neither repeated nor run before it is timed."""
    return Repeated(run, 1, 0.0)


def time_each(runs: dict[str, Repeated], times: dict[str, list[float]]) -> None:
    for name, (run, repeats, _) in runs.items():
        time.sleep(PAUSE)
        start = time.perf_counter()
        run()
        times[name].append((time.perf_counter() - start) / repeats)
    time.sleep(PAUSE)


def spread(passes: list[npt.NDArray[np.float64]]) -> dict[str, Any]:
    """Median of the ratios of all passes, its 90 % interval, and is that wider than WIDEST?

    The interval is the bootstrap's, made wider where the passes lie further apart than their rounds do: Student's
    interval for the mean of their medians.
    """
    generator = np.random.default_rng(0)
    resampled = np.concatenate([generator.choice(ratios, size=(2000, len(ratios))) for ratios in passes], axis=1)
    low, high = np.quantile(np.median(resampled, axis=1), (0.05, 0.95)).tolist()
    ratio = float(np.median(np.concatenate(passes)))
    if len(passes) in STUDENT:
        medians = np.log([np.median(ratios) for ratios in passes])
        reach = STUDENT[len(passes)] * medians.std(ddof=1) / math.sqrt(len(passes))
        low = min(low, float(np.exp(medians.mean() - reach)))
        high = max(high, float(np.exp(medians.mean() + reach)))
    return {"ratio": ratio, "interval": [low, high], "wide": low < ratio * (1 - WIDEST) or high > ratio * (1 + WIDEST)}


def rate(work: int, passes: list[npt.NDArray[np.float64]]) -> dict[str, float]:
    return {"rate": work / float(np.median(np.concatenate(passes)))}


def cores_used_by_others(timed: Run) -> float | None:
    """Cores that other processes kept busy while `timed` ran; None where the system does not say."""
    start, before = time.perf_counter(), seconds_of_others()
    timed()
    after = seconds_of_others()
    return None if before is None or after is None else max(0.0, after - before) / (time.perf_counter() - start)


def seconds_of_others() -> float | None:
    """Processor time taken so far by all but this process."""
    if not Path("/proc/stat").exists():
        return None
    user, nice, system, _idle, _iowait, *interrupts_and_steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    ticks = user + nice + system + sum(interrupts_and_steal)
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def peak_memories(jobs: list[Job], sizes: dict[str, Any]) -> list[dict[str, Any]]:
    """peak_memory of each, as many at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count() if sizes["device"] == "cpu" else 1) as pool:
        return list(pool.map(lambda job: peak_memory(job, sizes), jobs))


def peak_memory(job: Job, sizes: dict[str, Any]) -> dict[str, Any]:
    """What memory.py finds for this job in a fresh process; fails where Triton's interpreter would be timed."""
    report = script("memory.py", inspect.getfile(job), job.__name__, json.dumps(sizes))
    if report.pop("interpreted"):
        pytest.fail(f"{job.__name__} runs in Triton's interpreter (TRITON_INTERPRET=1), whose timings mean nothing")
    return report


@functools.cache
def provenance() -> dict[str, Any]:
    return script("provenance.py")


def script(name: str, *arguments: str) -> dict[str, Any]:
    """The JSON that a script beside this file prints last."""
    command = [sys.executable, str(Path(__file__).with_name(name)), *arguments]
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode != 0:
        pytest.fail(f"{name} {' '.join(arguments)} failed:\n{child.stderr}")
    return json.loads(child.stdout)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passes", type=int, default=3, help="how many times all benchmarks run")
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where benchmarks run")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every benchmark once per pass; by the scope, one pass is over before the next begins."""
    if "which_pass" in metafunc.fixturenames:
        passes = range(metafunc.config.getoption("passes"))
        metafunc.parametrize("which_pass", passes, ids=lambda number: f"pass{number}", scope="session")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("python_files", "bench_*.py")
    config.addinivalue_line("python_functions", "bench_*")
    config.addinivalue_line("markers", "quick: one of the few benchmarks of `make bench-quick`")
    folder = tempfile.TemporaryDirectory()  # what the processes of one run share
    config.add_cleanup(folder.cleanup)
    os.environ["BENCH_FOLDER"] = folder.name
    if config.getoption("device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no CUDA device")


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Leaves what report.py needs, and nothing that names the machine or its user."""
    output_json.clear()
    output_json.update(provenance=provenance(), figures=config.stash.get(FIGURES, {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = [("benchmark", "peer", "peer time / ours [90 %]", "ours per second", "peak MiB: ours", "peer")]
    notes = []
    for name, info in config.stash.get(FIGURES, {}).items():
        for peer, figures in info["peers"].items():
            if "absent" in figures:
                rows.append((name, peer, f"absent: {figures['absent']}", "", "", ""))
                continue
            low, high = figures["interval"]
            ratio = f"{figures['ratio']:.2f} [{low:.2f}, {high:.2f}]{' too wide' * figures['wide']}"
            speed = f"{info['ours']['rate']:,.0f} {info['unit']}"
            rows.append((name, peer, ratio, speed, mib(info["ours"]), mib(figures)))
        if (info["cores_used_by_others"] or 0) > 0.1:
            notes.append(f"{name}: not alone, other processes kept {info['cores_used_by_others']:.1f} cores busy")
    if len(rows) > 1:
        terminalreporter.section("ours and the peers")
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            terminalreporter.line("  ".join(map(str.ljust, row, widths)).rstrip())
        for line in notes:
            terminalreporter.line(line)


def mib(figures: dict[str, Any]) -> str:
    return "unknown" if figures["peak_mib"] is None else f"{figures['peak_mib']:.1f}"
