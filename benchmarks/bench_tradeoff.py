"""Recall against queries per second and memory: `Index.build` and `search(recall=)` beside the indexes of others.

    python benchmarks/bench_tradeoff.py [--data NAME=FILE.npy ...] [--images FOLDER] [--json FILE] [--quick]
    python benchmarks/bench_tradeoff.py --json benchmarks/tradeoff.json --publish  # docs/search.md and its plot

Data sets: 1,000,000 generated vectors of 128 dimensions (clustered), 1,000,000 generated unit vectors of 384 dimensions
(text-like), SIFT descriptors of the images in a folder with CIFAR-10's binary batches (--images, needs OpenCV), and
users' own arrays [N, D] (--data), the last 2,000 rows of which are the queries. Queries are never among the vectors.

Each method is built once, with all threads, and kept in the folder --keep for later runs. All settings of all methods
are then timed in turn, in several rounds: a batch of all queries, and queries one by one. Of many settings, those that
others beat in the first round are timed no more. Memory is what a process grows by from before it loads the index until
it has answered a batch, so that it includes the vectors. All of it takes about an hour.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drq_fast import Index

K = 10  # neighbours that are looked for
QUERIES, SINGLE = 2000, 300  # in a batch, and one by one
ROUNDS = 5
LEAST = 0.1  # seconds that are timed at a time
PAUSE = 0.01  # seconds in which the OpenMP threads of the previous run stop spinning
ASKED = (0.8, 0.9, 0.95, 0.98, 0.99, 0.995)  # of ours
SHOWN = (0.9, 0.95, 0.99)  # in the table
Array = np.ndarray[Any, np.dtype[Any]]
Search = Callable[[Array], Array]  # queries [Q, D] -> ids [Q, K]


class Data(NamedTuple):
    """Vectors [N, D], queries [Q, D] and the true neighbours of these [Q, K], by squared distance."""

    name: str
    x: Array
    query: Array
    truth: Array


def clustered(N: int, D: int, seed: int = 0) -> Tensor:
    """[N, D] around 1,000 centres, with standard deviations that fall as (j + 1)**-0.5 over dimensions j."""
    generator = torch.Generator().manual_seed(seed)
    centres, noise = (torch.randn(n, D, generator=generator) for n in (1000, N))
    return (centres[torch.randint(1000, (N,), generator=generator)] + 0.7 * noise) / torch.arange(1, D + 1).sqrt()


def text_like(N: int, D: int, seed: int = 0) -> Tensor:
    """[N, D] of length 1: topics within topics, which differ less and less, on one side of the origin."""
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.arange(1, D + 1).float() ** -0.5
    x = 0.5 * torch.randn(D, generator=generator).expand(N, D)
    topic = torch.zeros(N, dtype=torch.long)
    for count, size in ((30, 1.0), (30, 0.8), (30, 0.6)):
        topic = topic * count + torch.randint(count, (N,), generator=generator)
        centres = torch.randn(int(topic.max()) + 1, D, generator=generator)
        x = x + size * centres[topic]
    rotation = torch.linalg.qr(torch.randn(D, D, generator=generator)).Q
    return F.normalize((x + 0.7 * torch.randn(N, D, generator=generator)) * spectrum @ rotation, dim=1)


def sift(folder: Path, N: int) -> Tensor:
    """[N, 128]: SIFT descriptors of CIFAR-10's images, four times as large; the queries are those of test images."""
    import cv2

    detector, found = cv2.SIFT_create(), []
    for names, wanted in ((sorted(folder.glob("data_batch_*.bin")), N - QUERIES), (["test_batch.bin"], QUERIES)):
        pixels = np.concatenate([np.fromfile(folder / name, np.uint8).reshape(-1, 3073)[:, 1:] for name in names])
        parts: list[Array] = []
        for image in pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1):
            grey = cv2.cvtColor(cv2.resize(image, (128, 128), interpolation=cv2.INTER_CUBIC), cv2.COLOR_RGB2GRAY)
            descriptors = detector.detectAndCompute(grey, None)[1]
            if descriptors is not None:
                parts.append(descriptors)
            if len(parts) % 1000 == 0 and sum(map(len, parts)) >= wanted:
                break
        found.append(np.concatenate(parts)[:wanted])
    return torch.from_numpy(np.concatenate(found))


def data_of(name: str, values: Tensor | Array, folder: Path) -> Data:
    """Splits vectors and queries; the true neighbours are kept in a file."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    x, query = values[:-QUERIES], values[-QUERIES:]
    file = folder / f"{name}-truth.npy"
    if not file.exists():
        np.save(file, nearest(torch.from_numpy(query), torch.from_numpy(x)).numpy())
    return Data(name, x, query, np.load(file))


def nearest(query: Tensor, x: Tensor) -> Tensor:
    """The K nearest rows of x [N, D] for each query [Q, K], by float64 among the 4 K nearest by float32."""
    norms, found = x.square().sum(dim=1), []
    for part in query.split(100):
        close = (norms - 2 * part @ x.T).topk(4 * K, largest=False).indices
        exact = (x[close].double() - part[:, None].double()).square().sum(dim=2)
        found.append(close.gather(1, exact.topk(K, largest=False).indices))
    return torch.cat(found)


class Method(NamedTuple):
    """build(x) -> index; save(index, path); load(path) -> index; settings(index) -> (name, search) to be timed."""

    build: Callable[[Array], Any]
    save: Callable[[Any, str], None]
    load: Callable[[str], Any]
    settings: Callable[[Any], Iterator[tuple[str, Search]]]


def ours(bits: int, vectors: str) -> Method:
    def build(x: Array) -> Index:
        return Index.build(x, bits=bits, vectors=vectors, seed=0)

    def settings(index: Index) -> Iterator[tuple[str, Search]]:
        assert index.tuning is not None
        for recall in ASKED:
            if recall <= index.tuning.settings[-1].recall:
                yield f"recall={recall}", lambda query, recall=recall: index.search(query, K, recall=recall).ids
        for setting in index.tuning.settings:
            given = {"probes": setting.probes, "refine": setting.refine}
            if setting.recall >= SHOWN[0] - 0.02:
                name = ", ".join(f"{key}={value}" for key, value in given.items())
                yield name, lambda query, given=given: index.search(query, K, **given).ids

    return Method(build, lambda index, path: index.save(path), Index.load, settings)


def faiss_threads() -> Any:
    import faiss  # after torch: each brings an OpenMP runtime

    faiss.omp_set_num_threads(torch.get_num_threads())
    return faiss


def write_faiss(index: Any, path: str) -> None:
    faiss_threads().write_index(index, path)


def read_faiss(path: str) -> Any:
    return faiss_threads().read_index(path)


def faiss_lists(code: str, refine: str) -> Method:
    """An inverted file of as many lists as ours, with short codes, whose best results are scored again."""

    def build(x: Array) -> Any:
        faiss, lists = faiss_threads(), 1 << round(0.5 * np.log2(4.0 * len(x)))
        index = faiss.index_factory(x.shape[1], f"IVF{lists},{code},Refine({refine})")
        index.train(x[np.random.default_rng(0).permutation(len(x))[: 64 * lists]])
        index.add(x)
        return index

    def settings(index: Any) -> Iterator[tuple[str, Search]]:
        inverted = faiss_threads().extract_index_ivf(index)
        for probes, factor in itertools.product((1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 2, 4, 8, 16, 32)):
            if probes < inverted.nlist:

                def search(query: Array, probes: int = probes, factor: int = factor) -> Array:
                    inverted.nprobe, index.k_factor = probes, factor
                    return index.search(query, K)[1]

                yield f"nprobe={probes}, k_factor={factor}", search

    return Method(build, write_faiss, read_faiss, settings)


def faiss_hnsw() -> Method:
    def build(x: Array) -> Any:
        index = faiss_threads().index_factory(x.shape[1], "HNSW32_SQfp16")
        index.train(x[:100_000])
        index.add(x)
        return index

    def settings(index: Any) -> Iterator[tuple[str, Search]]:
        for width in (10, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512):

            def search(query: Array, width: int = width) -> Array:
                index.hnsw.efSearch = width
                return index.search(query, K)[1]

            yield f"efSearch={width}", search

    return Method(build, write_faiss, read_faiss, settings)


def usearch() -> Method:
    def build(x: Array) -> Any:
        from usearch.index import Index as Graph

        index = Graph(ndim=x.shape[1], metric="l2sq", dtype="f16")
        index.add(np.arange(len(x)), x, threads=torch.get_num_threads())
        return index

    def load(path: str) -> Any:
        from usearch.index import Index as Graph

        return Graph.restore(path)

    def settings(index: Any) -> Iterator[tuple[str, Search]]:
        for width in (16, 32, 64, 128, 256, 512):

            def search(query: Array, width: int = width) -> Array:
                index.expansion_search = width
                return index.search(query, K, threads=min(len(query), torch.get_num_threads())).keys.reshape(-1, K)

            yield f"expansion={width}", search

    return Method(build, lambda index, path: index.save(path), load, settings)


def methods(D: int) -> dict[str, Method]:
    """By name; codes of the peers take as many bytes as ours, twice and four times as many."""
    return {
        **{f"drq_fast, {n} bytes + float16": ours(8 * n, "float16") for n in (8, 16)},
        "drq_fast, 16 bytes + int8": ours(128, "int8"),
        **{f"faiss IVF, PQ{n}x4fs, Refine(SQfp16)": faiss_lists(f"PQ{n}x4fs", "SQfp16") for n in (16, 32, 64)},
        "faiss IVF, PQ32x4fs, Refine(SQ8)": faiss_lists("PQ32x4fs", "SQ8"),
        "faiss IVF, RaBitQfs, Refine(SQfp16)": faiss_lists("RaBitQfs", "SQfp16"),
        "faiss HNSW32, SQfp16": faiss_hnsw(),
        "usearch, f16": usearch(),
    }


class Point(NamedTuple):
    """What one setting of a method gave: recall, and queries per second in a batch and one by one."""

    setting: str
    recall: float
    batch: float
    single: float


def recall_of(ids: Array, truth: Array) -> float:
    return float((ids[:, :, None] == truth[:, None]).any(axis=2).mean())


def seconds(run: Callable[[], object]) -> float:
    """Of one run, after one that is not timed; the mean of as many as take LEAST seconds."""
    time.sleep(PAUSE)
    run()
    start, runs = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < LEAST:
        run()
        runs += 1
    return spent / runs


def one_by_one(search: Search, query: Array) -> None:
    for row in query:
        search(row[None])


def best(points: list[Point], recall: float, rate: Callable[[Point], float]) -> Point | None:
    """The fastest that reached a recall."""
    return max((point for point in points if point.recall >= recall), key=rate, default=None)


def worth_timing(points: list[Point]) -> set[str]:
    """Settings that are the fastest of a method at their recall, and those that ask for a recall."""
    rates = (lambda point: point.batch, lambda point: point.single)
    fastest = {found.setting for p in points for rate in rates if (found := best(points, p.recall, rate)) is not None}
    return fastest | {point.setting for point in points if point.setting.startswith("recall=")}


def timed(settings: dict[str, dict[str, Search]], data: Data, rounds: int) -> dict[str, list[Point]]:
    """All settings of all methods once, then those that are worth it in several rounds, each in turn."""
    singles = data.query[:SINGLE]
    found: dict[str, list[Point]] = {}
    for name, searches in settings.items():
        points = []
        for setting, search in searches.items():
            start = time.perf_counter()
            recall = recall_of(search(data.query), data.truth)
            middle = time.perf_counter()
            one_by_one(search, singles)
            spent = middle - start, time.perf_counter() - middle
            points.append(Point(setting, recall, len(data.query) / spent[0], len(singles) / spent[1]))
        chosen = worth_timing(points)
        found[name] = [point for point in points if point.setting in chosen]
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, points in found.items():
            for point in points:
                search = settings[name][point.setting]
                batch = seconds(lambda search=search: search(data.query))
                single = seconds(lambda search=search: one_by_one(search, singles))
                taken.setdefault((name, point.setting), []).append((len(data.query) / batch, len(singles) / single))

    def measured(name: str, point: Point) -> Point:
        batch, single = (statistics.median(rates) for rates in zip(*taken[name, point.setting], strict=True))
        return point._replace(batch=batch, single=single)

    return {name: [measured(name, point) for point in points] for name, points in found.items()}


def memory(method: Method, path: str, query: Array) -> float:
    """Bytes by which this process grows."""
    before = resident()
    *_, (_, search) = method.settings(method.load(path))
    search(query)
    return resident() - before


def resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096.0


def run(data: Data, folder: Path, rounds: int, only: str) -> dict[str, Any]:
    """Builds, measures memory in processes of their own, and times; by method."""
    found: dict[str, Any] = {}
    settings: dict[str, dict[str, Search]] = {}
    for name, method in methods(data.x.shape[1]).items():
        if only not in name:
            continue
        path = folder / f"{data.name}-{name.replace(' ', '_').replace(',', '')}"
        built = path.with_suffix(".seconds")
        try:
            if not built.exists():
                start = time.process_time()
                index = method.build(data.x)
                spent = time.process_time() - start
                method.save(index, str(path))
                built.write_text(str(spent))
            index = method.load(str(path))
        except ImportError as error:
            found[name] = {"absent": str(error)}
            continue
        settings[name] = dict(method.settings(index))
        command = [sys.executable, __file__, "--memory", str(data.x.shape[1]), name, str(path)]
        grown = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        found[name] = {"build, CPU seconds": float(built.read_text()), "bytes per vector": grown / len(data.x)}
    for name, points in timed(settings, data, rounds).items():
        found[name]["points"] = [point._asdict() for point in points]
    return found


def markdown(title: str, found: dict[str, Any]) -> str:
    """A row for each method: the fastest setting that reached each recall."""
    columns = [f"{kind}, recall {r}" for r in SHOWN for kind in ("batch", "one by one")]
    lines = [
        f"### {title}",
        "",
        f"| queries/s | {' | '.join(columns)} | highest recall | bytes per vector | build, CPU s |",
    ]
    lines.append(f"|{' --- |' * (len(columns) + 4)}")
    for name, row in found.items():
        if "absent" in row:
            lines.append(f"| {name} | absent: {row['absent']} |{' |' * (len(columns) + 2)}")
            continue
        points = [Point(**point) for point in row["points"]]
        cells = []
        for recall, rate in itertools.product(SHOWN, (lambda point: point.batch, lambda point: point.single)):
            fastest = best(points, recall, rate)
            cells.append("" if fastest is None else f"{rate(fastest):,.0f}")
        most = max(point.recall for point in points)
        cells += [f"{most:.3f}", f"{row['bytes per vector']:.0f}", f"{row['build, CPU seconds']:.0f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def asked(found: dict[str, Any]) -> str:
    """What `search(recall=)` was asked for, and what it found."""
    rows = {name: row["points"] for name, row in found.items() if name.startswith("drq_fast") and "points" in row}
    lines = [
        f"| recall of {K} neighbours, asked for | {' | '.join(map(str, ASKED))} |",
        f"|{' --- |' * (len(ASKED) + 1)}",
    ]
    for name, points in rows.items():
        got = {point["setting"]: f"{point['recall']:.3f}" for point in points}
        lines.append(f"| {name} | {' | '.join(got.get(f'recall={r}', '') for r in ASKED)} |")
    return "\n".join(lines)


def plot(runs: dict[str, dict[str, Any]], origin: str, file: Path) -> None:
    """A diagram for each data set: queries per second in batches over recall, a line for each method."""
    import matplotlib
    from matplotlib.figure import Figure
    from plots import COLOURS, STYLE, save, tick

    matplotlib.rcParams.update(STYLE)
    canvas = Figure(figsize=(4.6 * len(runs), 4.6))
    handles: dict[str, Any] = {}
    for axes, (title, found) in zip(canvas.subplots(1, len(runs), squeeze=False)[0], runs.items(), strict=True):
        reds, others = iter(("#c00020", "#e8590c", "#f59f9f")), iter((*COLOURS[:1], *COLOURS[2:], "#555555", "#bcbd22"))
        for name, row in found.items():
            front = frontier([Point(**point) for point in row.get("points", ())])
            own = name.startswith("drq_fast")
            style = {"linewidth": 2.5, "marker": "o", "zorder": 3} if own else {"linewidth": 1.2, "marker": "s"}
            xy = [point.recall for point in front], [point.batch for point in front]
            handles[name] = axes.plot(*xy, **style, markersize=4, color=next(reds if own else others))[0]
        axes.set(xlim=(0.8, 1.0), yscale="log", xlabel=f"recall of the {K} nearest", title=title)
        axes.set_xticks((0.8, 0.85, 0.9, 0.95, 1.0))
        axes.yaxis.set_major_formatter(lambda y, _: tick(y))
        axes.grid(color="#e5e5e5")
    canvas.axes[0].set_ylabel("queries / s in a batch")
    canvas.legend(handles.values(), handles.keys(), loc="lower center", ncols=3, frameon=False)
    canvas.text(0.5, 0.005, origin, ha="center", va="bottom", fontsize=6, color="#777777")
    canvas.tight_layout(rect=(0, 0.2, 1, 1))
    save(canvas, file)


def frontier(points: list[Point]) -> list[Point]:
    """Those that no other one beats in both recall and speed, by ascending recall."""
    found: list[Point] = []
    for point in sorted(points, key=lambda each: each.recall, reverse=True):
        if not found or point.batch > found[-1].batch:
            found.append(point)
    return found[::-1]


def main() -> None:
    """Runs what was asked for; prints tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5,000 vectors: tests the script")
    parser.add_argument("--data", action="append", default=[], metavar="NAME=FILE.npy", help="vectors of your own")
    parser.add_argument("--images", type=Path, help="folder of CIFAR-10's binary batches, for SIFT descriptors")
    parser.add_argument("--sets", nargs="*", default=["clustered", "text-like"], help="generated data sets to run")
    parser.add_argument("--only", default="", help="methods whose names contain this")
    parser.add_argument("--keep", type=Path, default=Path("out/tradeoff"), help="folder of built indexes")
    parser.add_argument("--json", type=Path, help="file of results; data sets that it holds already are not run again")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how many times everything is timed")
    parser.add_argument("--publish", action="store_true", help="write the tables and the plot of --json into docs/")
    parser.add_argument("--memory", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        D, name, path = options.memory
        query = clustered(QUERIES, int(D)).numpy()
        print(memory(methods(int(D))[name], path, query))
        return
    from provenance import provenance

    origin, N = provenance(), 5_000 if options.quick else 1_000_000
    options.keep.mkdir(parents=True, exist_ok=True)
    sets: dict[str, Callable[[], Any]] = {
        "clustered": lambda: clustered(N + QUERIES, 128),
        "text-like": lambda: text_like(N + QUERIES, 384),
    }
    sets = {name: sets[name] for name in options.sets}
    if options.images:
        sets["SIFT"] = lambda: sift(options.images, N + QUERIES)
    sets |= {text.partition("=")[0]: lambda text=text: np.load(text.partition("=")[2]) for text in options.data}
    if options.publish:
        publish(options.json, Path(__file__).parents[1])
        return
    runs = json.loads(options.json.read_text())["runs"] if options.json and options.json.exists() else {}
    for name, values in sets.items():
        if name not in runs:
            data = data_of(name, values(), options.keep)
            title = f"{name}, {data.x.shape[0]:,} x {data.x.shape[1]}"
            runs[name] = {"title": title, "methods": run(data, options.keep, options.rounds, options.only)}
            if options.json:
                options.json.write_text(json.dumps({"provenance": origin, "runs": runs}, indent=1))
        print(f"{page_of(runs[name])}\n", flush=True)
    print(f"{machine(origin)}.")


def page_of(found: dict[str, Any]) -> str:
    """The tables of a data set."""
    return f"{markdown(found['title'], found['methods'])}\n\n{asked(found['methods'])}"


def publish(file: Path, root: Path) -> None:
    """Writes the tables of a file of results into docs/search.md, and the plot."""
    from report import fill

    known, page = json.loads(file.read_text()), root / "docs/search.md"
    runs, origin = known["runs"].values(), machine(known["provenance"])
    tables = "\n\n".join(map(page_of, runs))
    page.write_text(fill(page.read_text(), "bench", {"tradeoff": f"{tables}\n\n{origin}."}))
    plot({found["title"]: found["methods"] for found in runs}, origin, root / "docs/plots/tradeoff.svg")


def machine(origin: dict[str, Any]) -> str:
    libraries = ("drq_fast", "torch", "faiss-cpu", "usearch")
    versions = ", ".join(f"{library} {origin['versions'].get(library) or 'absent'}" for library in libraries)
    commit = (origin["commit"] or "unknown")[:9]
    return (
        f"{origin['processor']}, {origin['torch_threads']} threads, {versions}, commit {commit}, {origin['date'][:10]}"
    )


if __name__ == "__main__":
    main()
