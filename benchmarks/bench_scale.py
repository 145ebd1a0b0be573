"""The constants of docs/scale.md, measured on this machine, and what they say about 1 and 100 billion vectors.

    python benchmarks/bench_scale.py [--quick] [--json FILE]  # measures; needs drq_fast[ray] and an idle machine
    python benchmarks/bench_scale.py --json FILE --publish    # writes the tables of FILE to docs/scale.md

All is measured with one thread per process, because a cost per core is wanted, except that `encode_threads` has two.
The simulation starts a Ray cluster of two nodes on this machine and searches random codes in shards.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from provenance import provenance

import drq_fast
from drq_fast import Codec, Index
from drq_fast.fit import Block

DIM, LEVELS, K = 128, 16, 256
SHARDS = 8
PAGE = Path(__file__).parents[1] / "docs" / "scale.md"


def seconds(call: Callable[[], Any], repeats: int = 5) -> float:
    """The median time of a call, after one that is not timed."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def codec(levels: int = LEVELS) -> Codec:
    generator = torch.Generator().manual_seed(0)
    return Codec(torch.randn(K, DIM, generator=generator), 0.7 ** torch.arange(levels), None)


def random_index(made: Codec, N: int, first: int = 0) -> Index:
    """An index of random codes, without their vectors."""
    index = Index(made)
    generator = torch.Generator().manual_seed(first)
    for start in range(0, N, 1 << 22):
        codes = torch.randint(K, (min(1 << 22, N - start), made.levels), generator=generator, dtype=torch.uint8)
        index.add_codes(codes, ids=torch.arange(first + start, first + start + len(codes)))
    return index


def measured(N: int) -> dict[str, float]:
    """Rates of one core, N codes being searched."""
    made, query = codec(), torch.randn(256, DIM)
    index = random_index(made, N, 1 << 33)  # ids of 8 bytes
    found = {
        "scan_one": N / seconds(lambda: index.search(query[0], k=10)),
        "scan_batch": 256 * N / seconds(lambda: index.search(query, k=10), 3),
        "bytes_per_code": (index.nbytes - sum(t.nbytes for t in made.tensors() if t is not None)) / N,
    }
    best = index.search(query, k=10).scores[:, -1]
    found["scan_one_threshold"] = N / seconds(lambda: index.search(query[0], k=10, threshold=float(best[0])))
    x = torch.randn(1 << 15, DIM)
    for beam in (1, 16):
        found[f"encode_beam_{beam}"] = len(x) / seconds(lambda beam=beam: made.encode(x, beam), 3)
    block = Block(x)
    block.divide(False)
    arguments = 0, made.codebook, made.scale, 1, tuple([1.0] * LEVELS)
    found["fit_round"] = len(x) / seconds(lambda: block.statistics(*arguments), 3)
    sums = block.statistics(*arguments)
    tensors = [sums.energy, sums.inner, sums.cross, sums.sums, sums.used, *sums.pairs.values()]
    found["fit_bytes"] = sum(t.nbytes for t in tensors if t is not None)
    for shards, queries, k in ((100, 1000, 100), (100, 1, 10), (1000, 1, 10)):
        generator = np.random.default_rng(0)
        results = [
            (
                np.sort(generator.random((queries, k), dtype=np.float32), axis=1),
                generator.integers(0, 1 << 40, (queries, k)),
            )
            for _ in range(shards)
        ]
        found[f"merge_{shards}x{queries}x{k}"] = seconds(lambda results=results, k=k: drq_fast.merge(results, k))
    return found


def on_cluster(N: int, rows: int) -> dict[str, float]:
    """Shards of N random codes in all, and Parquet files of `rows` vectors in all, on a cluster of two nodes."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import ray
    from ray.cluster_utils import Cluster

    from drq_fast.interop.ray import ShardedIndex

    settings = {"num_cpus": 2, "object_store_memory": 200 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**settings, "include_dashboard": False})
    cluster.add_node(**settings)
    ray.init(address=cluster.address, log_to_driver=False)
    made, query, found = codec(), torch.randn(256, DIM), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        for s in range(SHARDS):
            random_index(made, N // SHARDS, s * (N // SHARDS)).save(f"{folder}/{s}.drq")
            random_index(made, 100, s * 100).save(f"{folder}/{s}.small")
        for at_once in (SHARDS, 2, 1):
            with ShardedIndex(folder, at_once=at_once) as index:
                found[f"search_one_at_once_{at_once}"] = seconds(lambda index=index: index.search(query[0], k=10), 20)
                found[f"search_256_at_once_{at_once}"] = seconds(lambda index=index: index.search(query, k=10), 3)
        with ShardedIndex([f"{folder}/{s}.small" for s in range(SHARDS)]) as index:
            found[f"call_{SHARDS}_shards"] = seconds(lambda: index.search(query[0], k=10), 100)
        with ShardedIndex([f"{folder}/0.small"]) as index:
            found["call_1_shard"] = seconds(lambda: index.search(query[0], k=10), 100)
        x = np.random.default_rng(0).standard_normal((rows // 16, DIM)).astype(np.float32)
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), DIM)
        sources = [f"{folder}/{i}.parquet" for i in range(16)]
        for source in sources:
            pq.write_table(pa.table({"embedding": vectors}), source)
        for name in ("threads", "workers"):
            times = [_encoding(made, sources[:count], Path(folder, f"{name}{count}"), name) for count in (4, 16)]
            found[f"encode_{name}"] = 12 / 16 * rows / (times[1] - times[0])  # without the start of the workers
    ray.shutdown()
    cluster.shutdown()
    return found


def _encoding(made: Codec, sources: list[str], out: Path, by: str) -> float:
    """The seconds in which two threads of this process, or two workers of a cluster, encode files."""
    from drq_fast.interop import parquet
    from drq_fast.interop.ray import encode_files

    out.mkdir()
    start = time.perf_counter()
    if by == "workers":
        encode_files(made, sources, out, beam=16, workers=2)
    else:
        torch.set_num_threads(2)
        parquet.encode_files(made, parquet.tasks(made, sources, out, beam=16))
        torch.set_num_threads(1)
    return time.perf_counter() - start


def model(found: dict[str, float], N: float, codes_per_shard: float = 2e8, cores: int = 32) -> list[tuple[str, str]]:
    """What N vectors of DIM dimensions in LEVELS bytes need, by the measured constants; machines of so many cores."""
    bytes_per_code = found["bytes_per_code"]
    shards = math.ceil(N / codes_per_shard)
    per_query = shards * 10 * (4 + 8)
    probed = 1 / 64
    return [
        ("shards of 200 million", f"{shards:,}"),
        ("memory, codes and ids", f"{N * bytes_per_code / 1e12:,.2f} TB"),
        ("memory of a shard", f"{codes_per_shard * bytes_per_code / 1e9:,.1f} GB"),
        ("full scan of one query, core-seconds", f"{N / found['scan_one']:,.2f}"),
        ("full scan in batches of 256, core-seconds per query", f"{N / found['scan_batch']:,.3f}"),
        (
            f"latency of a full scan, {cores} cores per shard",
            f"{codes_per_shard / found['scan_one'] / cores * 1e3:,.1f} ms",
        ),
        ("lists, 1/64 of the codes, core-seconds per query", f"{probed * N / found['scan_one']:,.3f}"),
        ("sent per query and shard: query, k 10", f"{DIM * 4} + {10 * 12} bytes"),
        ("received per query by the merging process, k 10", f"{per_query / 1e3:,.1f} kB"),
        ("encode, beam 16, core-hours", f"{N / found['encode_beam_16'] / 3600:,.0f}"),
        ("encode, beam 1, core-hours", f"{N / found['encode_beam_1'] / 3600:,.0f}"),
        ("fit to 1 in 100, 120 rounds, core-hours", f"{120 * 0.7 * N / 100 / found['fit_round'] / 3600:,.1f}"),
        ("sums of a worker and a round of the fit", f"{found['fit_bytes'] / 1e6:,.1f} MB"),
    ]


def tables(figures: dict[str, Any]) -> str:
    """Markdown."""
    found, units = figures["found"], {"scan": "codes/s", "encode": "vectors/s", "fit_round": "vectors/s"}
    lines = ["| constant | measured |", "| --- | --- |"]
    for name, value in found.items():
        unit = next((unit for start, unit in units.items() if name.startswith(start)), "s")
        unit = "bytes" if "bytes" in name else unit
        lines.append(f"| `{name}` | {value:,.0f} {unit} |" if value >= 100 else f"| `{name}` | {value:.3g} {unit} |")
    lines += ["", "| | 1 billion | 100 billion |", "| --- | --- | --- |"]
    for (what, small), (_, large) in zip(model(found, 1e9), model(found, 1e11), strict=True):
        lines.append(f"| {what} | {small} | {large} |")
    facts = figures["provenance"]
    lines += ["", f"{facts['processor']}, {figures['codes']:,} codes, drq_fast {facts['versions']['drq_fast']}, "]
    lines[-1] += f"commit {str(facts['commit'])[:9]}, {facts['date'][:10]}{', under load' if figures['rough'] else ''}."
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the codes")
    parser.add_argument("--json", type=Path, help="file to write, or to publish")
    parser.add_argument("--publish", action="store_true")
    parser.add_argument("--rough", action="store_true", help="say that the machine was not idle")
    options = parser.parse_args()
    if options.publish:
        head, _, rest = PAGE.read_text().partition("<!-- bench: scale -->\n")
        text = tables(json.loads(options.json.read_text()))
        PAGE.write_text(f"{head}<!-- bench: scale -->\n{text}\n{rest[rest.index('<!-- end -->') :]}")
        return
    N = 2_000_000 if options.quick else 20_000_000
    found = measured(N) | on_cluster(N, 1 << 16 if options.quick else 1 << 19)
    figures = {"codes": N, "rough": options.rough, "found": found, "provenance": provenance()}
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(tables(figures))


if __name__ == "__main__":
    main()
