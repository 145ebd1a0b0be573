"""The constants of docs/scale.md, measured on this machine, and what they say about 1 and 100 billion vectors.

    python benchmarks/bench_scale.py [--quick] [--json FILE]     # measures; needs drq_fast[ray] and an idle machine
    python benchmarks/bench_scale.py --json FILE --part shards   # measures a part and adds it to FILE
    python benchmarks/bench_scale.py --json FILE --publish       # writes the tables of FILE to docs/scale.md
    make bench-scale                                             # measures everything and publishes it

Public calls are timed, on clustered vectors and the codes of a codec that is fitted to them, with one thread per
process, because a cost per core is wanted; `encode_threads` has two. Rates of a core are by CPU time, all else by the
clock. The simulation starts a Ray cluster of two nodes
on this machine, which searches all codes in shards.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_worker_niceness", "0")  # that of this process, with which workers are compared

import numpy as np
import torch
from bench_tradeoff import clustered
from provenance import provenance
from torch import Tensor

import drq_fast
from drq_fast import Codec, Index
from drq_fast import fit as fitting
from drq_fast.blocks import Blocks

DIM, LEVELS, K = 128, 16, 256
SHARDS = 32
ROUNDS = 40  # of the fit that is timed
LISTS, PROBES = 64, 8
PARTS = ("core", "shards", "files")  # rates of a core; search in shards; encoding of files by two workers
PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
Found = dict[str, float]


def seconds(call: Callable[[], Any], repeats: int = 5, clock: Callable[[], float] = time.perf_counter) -> float:
    """The median time of a call, after one that is not timed."""
    call()
    times = []
    for _ in range(repeats):
        start = clock()
        call()
        times.append(clock() - start)
    return statistics.median(times)


def core_seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    """CPU time of a call, which runs in one thread: other processes hardly change it."""
    return seconds(call, repeats, time.process_time)


def fitted(x: Tensor) -> tuple[Codec, Found]:
    """A codec of x [N, D], and the vectors that a core fits in a second, times rounds."""
    layer = drq_fast.RecurrentQuantizer(DIM, codewords=K, levels=LEVELS)
    start = time.process_time()
    layer.fit(x, rounds=ROUNDS, seed=0, sample=len(x))
    return layer.codec(), {"fit_rounds": ROUNDS * len(x) / (time.process_time() - start)}


def many_codes(known: Tensor, N: int, seed: int = 0) -> Tensor:
    """[N, M]: the first half of one of the known codes [n, M], and the second half of another."""
    generator, half = torch.Generator().manual_seed(seed), known.shape[1] // 2
    pick = lambda: torch.randint(len(known), (N,), generator=generator)  # noqa: E731
    return torch.cat([known[pick(), :half], known[pick(), half:]], dim=1)


def measured(codec: Codec, x: Tensor, codes: Tensor) -> Found:
    """Rates of one core for vectors x [n, D] and their codes, N codes [N, M] being searched."""
    N, query = len(codes), x[:256] + 0.1
    index = Index(codec)
    index.add_codes(codes, ids=torch.arange(1 << 33, (1 << 33) + N))  # ids of 8 bytes
    last = index.search(query, k=10).scores[:, -1]
    found = {
        "scan_one": N / core_seconds(lambda: index.search(query[0], k=10)),
        "scan_batch": 256 * N / core_seconds(lambda: index.search(query, k=10), 2),
        "scan_batch_threshold": 256 * N / core_seconds(lambda: index.search(query, k=10, threshold=last), 2),
        "bytes_per_code": (index.nbytes - sum(t.nbytes for t in codec.tensors() if t is not None)) / N,
    }
    lists = Index(codec, centroids=x[:LISTS])
    lists.add(x)
    looked_at = PROBES / LISTS * len(x)
    found["scan_lists"] = looked_at / core_seconds(lambda: lists.search(query[0], k=10, probes=PROBES), 50)
    found |= {f"encode_beam_{beam}": encoded_per_second(codec, x, beam) for beam in (1, 16)}
    found["fit_bytes"] = bytes_of_fit(x[: 1 << 13])
    for shards, queries, k in ((100, 1000, 100), (100, 1, 10), (1000, 1, 10)):
        results = random_results(shards, queries, k)
        found[f"merge_{shards}x{queries}x{k}"] = core_seconds(lambda results=results, k=k: drq_fast.merge(results, k))
    return found


def encoded_per_second(codec: Codec, x: Tensor, beam: int) -> float:
    """Vectors that a core encodes."""
    some = x[: 1 << 14]
    return len(some) / core_seconds(lambda: codec.encode(some, beam), 3)


def random_results(shards: int, queries: int, k: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Results of shards that have vectors at random."""
    generator = np.random.default_rng(0)
    shape = queries, k
    return [
        (np.sort(generator.random(shape, dtype=np.float32), axis=1), generator.integers(0, 1 << 40, shape))
        for _ in range(shards)
    ]


def bytes_of_fit(x: Tensor) -> float:
    """What a worker sends in a round of a fit, if its blocks fill one subtree."""

    class Counted(Blocks):
        sent = 0

        def nodes(self, method: str, *arguments: Any) -> Any:
            made = super().nodes(method, *arguments)
            self.sent += len(pickle.dumps(made))
            return made

    counted = Counted([fitting.Block(x)])
    fitting.fit(counted, K, LEVELS, rounds=4, seed=0)
    return counted.sent / 5  # the last one is computed for its errors


def on_cluster(measure: Callable[[Path], Found]) -> Found:
    """What is measured on a cluster of two nodes, given an empty folder."""
    import ray
    from ray.cluster_utils import Cluster

    settings = {"num_cpus": 2, "object_store_memory": 200 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**settings, "include_dashboard": False})
    cluster.add_node(**settings)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return measure(Path(folder))
    finally:
        ray.shutdown()
        cluster.shutdown()


def searching(codec: Codec, query: Tensor, codes: Tensor, folder: Path) -> Found:
    """Times of searches [256, D] of all codes in SHARDS shards; their results are those of one index."""
    from drq_fast.interop.ray import ShardedIndex

    found, one, first = Found(), Index(codec), 0
    one.add_codes(codes)
    for s, part in enumerate(codes.chunk(SHARDS)):
        shard = Index(codec)
        shard.add_codes(part, ids=range(first, first + len(part)))
        shard.save(folder / f"{s}.drq")
        first += len(part)
    with ShardedIndex(folder, timeout=600) as index:
        expected, result = one.search(query, k=10), index.search(query, k=10)
        assert torch.equal(result.ids, expected.ids)
        assert torch.equal(result.scores, expected.scores)
        for at_once in (SHARDS, 2):
            index.at_once = at_once
            found[f"search_one_at_once_{at_once}"] = seconds(lambda: index.search(query[0], k=10), 20)
            found[f"search_256_at_once_{at_once}"] = seconds(lambda: index.search(query, k=10), 2)
        index.at_once = SHARDS
        found[f"call_{SHARDS}_shards"] = seconds(lambda: index.search(query[:0], k=10), 100)
    with ShardedIndex(folder / "0.drq") as index:
        found["call_1_shard"] = seconds(lambda: index.search(query[:0], k=10), 100)
    return found


def encoding(codec: Codec, x: Tensor, rate: float, folder: Path) -> Found:
    """Vectors per second, beam 16, of two threads of a process and of two workers of one core, without their start.

    rate: the vectors that a core encodes in a second.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = min(len(x), int(2 * rate))  # of a file, which takes two cores a second
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(x[:rows].flatten().numpy()), DIM)
    sources = [f"{folder}/{i}.parquet" for i in range(24)]
    for source in sources:
        pq.write_table(pa.table({"embedding": vectors}), source)
    found = Found()
    for by in (by_threads, by_workers):
        times = []
        for count in (4, 24):
            out = Path(folder, f"{by.__name__}{count}")
            out.mkdir()
            start = time.perf_counter()
            assert by(codec, sources[:count], out) == count * rows
            times.append(time.perf_counter() - start)
        found[by.__name__.replace("by", "encode")] = 20 * rows / (times[1] - times[0])
    return found


def by_threads(codec: Codec, sources: list[str], out: Path) -> int:
    """Encodes files with two threads of this process."""
    from drq_fast.interop import parquet

    torch.set_num_threads(2)
    try:
        return parquet.encode_files(codec, parquet.tasks(codec, sources, out, beam=16))
    finally:
        torch.set_num_threads(1)


def by_workers(codec: Codec, sources: list[str], out: Path) -> int:
    """Encodes files with two workers of the cluster."""
    from drq_fast.interop.ray import encode_files

    return encode_files(codec, sources, out, beam=16, workers=2)


def model(found: Found, N: float, per_shard: float = 2e8, cores: int = 32) -> list[tuple[str, str]]:
    """What N vectors of DIM dimensions in LEVELS bytes need, by the measured constants; machines of so many cores."""
    shards, size = math.ceil(N / per_shard), found["bytes_per_code"]
    call = (found[f"call_{SHARDS}_shards"] - found["call_1_shard"]) / (SHARDS - 1)  # of one more shard
    merge = found["merge_1000x1x10"] * max(1, shards / 1000)
    return [
        ("shards of 200 million", f"{shards:,}"),
        ("memory, codes and ids", f"{N * size / 1e12:,.2f} TB"),
        ("memory of a shard", f"{per_shard * size / 1e9:,.1f} GB"),
        ("full scan of one query, core-seconds", f"{N / found['scan_one']:,.2f}"),
        ("full scan in batches of 256, core-seconds per query", f"{N / found['scan_batch']:,.3f}"),
        (f"latency of a full scan, {cores} cores per shard", f"{per_shard / found['scan_one'] / cores * 1e3:,.1f} ms"),
        ("lists, 1/64 of the codes, core-seconds per query", f"{N / 64 / found['scan_lists']:,.3f}"),
        ("sent per query and shard: query, k 10", f"{DIM * 4} + {10 * 12} bytes"),
        ("sent per query by all shards, k 10", f"{shards * 10 * 12 / 1e3:,.1f} kB"),
        ("calls of all shards for one search, at most", f"{1e3 * call * shards:,.1f} ms"),
        ("merge of the results of one query, at most", f"{1e3 * merge:,.2f} ms"),
        ("encode, beam 16, core-hours", f"{N / found['encode_beam_16'] / 3600:,.1f}"),
        ("encode, beam 1, core-hours", f"{N / found['encode_beam_1'] / 3600:,.1f}"),
        ("fit to 1 in 100, 120 rounds, core-hours", f"{120 * N / 100 / found['fit_rounds'] / 3600:,.1f}"),
        ("memory of a fit to 1 in 100, twice the vectors", f"{2 * N / 100 * DIM * 4 / 1e9:,.0f} GB"),
        ("sent by a worker in a round of the fit", f"{found['fit_bytes'] / 1e6:,.1f} MB"),
    ]


UNITS = {
    "scan": "codes/s",
    "encode": "vectors/s",
    "fit_rounds": "vectors/s, times rounds",
    "fit": "bytes",
    "bytes": "bytes",
}


def tables(figures: dict[str, Any]) -> str:
    """Markdown."""
    found, lines = figures["found"], ["| constant | measured |", "| --- | --- |"]
    for name, value in found.items():
        unit = next((unit for start, unit in UNITS.items() if name.startswith(start)), "s")
        lines.append(f"| `{name}` | {value:,.0f} {unit} |" if value >= 100 else f"| `{name}` | {value:.3g} {unit} |")
    share = found["encode_workers"] / found["encode_threads"]
    lines += ["", f"Two workers of one core each encode {share:.0%} of what one process with two threads does."]
    lines += ["", "| | 1 billion | 100 billion |", "| --- | --- | --- |"]
    for (what, small), (_, large) in zip(model(found, 1e9), model(found, 1e11), strict=True):
        lines.append(f"| {what} | {small} | {large} |")
    facts = figures["provenance"]
    taken = f"{figures['codes']:,} codes in {SHARDS} shards, drq_fast {facts['versions']['drq_fast']}"
    rough = ", under load" if figures["rough"] else ""
    lines += ["", f"{facts['processor']}, {taken}, commit {str(facts['commit'])[:9]}, {facts['date'][:10]}{rough}."]
    return "\n".join(lines)


def measure(parts: Sequence[str], quick: bool) -> dict[str, Any]:
    """The figures of some parts."""
    N = 2_000_000 if quick else 20_000_000
    x = clustered(1 << 15 if quick else 1 << 16, DIM)
    codec, rounds = fitted(x)
    codes, found = many_codes(codec.encode(x), N), Found()
    if "core" in parts:
        found |= rounds | measured(codec, x, codes)
    if "shards" in parts:
        found |= on_cluster(lambda folder: searching(codec, x[:256] + 0.1, codes, folder))
    if "files" in parts:
        rate = encoded_per_second(codec, x, 16) / (10 if quick else 1)
        found |= on_cluster(lambda folder: encoding(codec, x, rate, folder))
    return {"codes": N, "found": found, "provenance": provenance()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the codes")
    parser.add_argument("--json", type=Path, help="file to write, or to publish")
    parser.add_argument("--part", choices=PARTS, help="measure only this, and add it to FILE")
    parser.add_argument("--publish", action="store_true")
    parser.add_argument("--rough", action="store_true", help="say that the machine was not idle")
    options = parser.parse_args()
    if options.publish:
        head, _, rest = PAGE.read_text().partition("<!-- bench: scale -->\n")
        text = tables(json.loads(options.json.read_text()))
        PAGE.write_text(f"{head}<!-- bench: scale -->\n{text}\n{rest[rest.index('<!-- end -->') :]}")
        return
    figures = measure(PARTS if options.part is None else [options.part], options.quick) | {"rough": options.rough}
    if options.part is not None and options.json is not None and options.json.exists():
        figures["found"] = json.loads(options.json.read_text())["found"] | figures["found"]
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures["found"], indent=1) if options.part else tables(figures))


if __name__ == "__main__":
    main()
