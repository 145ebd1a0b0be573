"""Error and recall against bytes: our codes for K, M and numbers of codebooks, beside codecs of faiss and turbovec.

    python benchmarks/choosing.py --data GloVe=glove.npy SIFT=sift.npy "CIFAR-10 features=features.npz" --json FILE
    python benchmarks/choosing.py --json benchmarks/choosing.json --publish  # docs/choosing.md and its plot

Each codec is fitted to --train rows of a file [N, D] and encodes --held-out others, 500 of which are queries. The error
is relative to that of the mean of the rows fitted to. Recall is the share of the ten nearest held-out rows that are
among the ten nearest decoded ones. "text-like" as a file generates 1536 dimensions (see bench_tradeoff.py). Runs that
are in FILE already are kept, so it can be interrupted. All of it takes hours; --only and --seeds run a part.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from bench_tradeoff import text_like
from provenance import provenance
from quality import Data
from report import fill
from torch import Tensor

import drq_fast

QUERIES, NEAREST, BEAM = 500, 10, 16
Run = dict[str, Any]  # bytes, as text -> {"error", "recall"}, and "seconds" of fitting


class Ours(NamedTuple):
    """A codec of ours: K codewords, M levels, G codebooks; beam: of encoding."""

    K: int
    M: int
    G: int
    beam: int = BEAM

    @property
    def name(self) -> str:
        sharing = (
            "one codebook" if self.G == 1 else "a codebook per level" if self.G == self.M else f"{self.G} codebooks"
        )
        return f"ours, {sharing}, K={self.K}" + (f", beam {self.beam}" if self.beam != BEAM else "")

    @property
    def bytes(self) -> float:
        return self.M * math.log2(self.K) / 8


class Peer(NamedTuple):
    """A codec of faiss by its recipe, or turbovec by the bits of a dimension."""

    name: str
    recipe: str
    bytes: float  # of a code; of RaBitQ and turbovec by dimension, where it is negative


OURS = [Ours(256, M, G) for M in (4, 8, 16, 32) for G in (1, 2, M)]
OTHERS = [Ours(16, 8, 8), Ours(16, 16, 16), Ours(16, 32, 32), Ours(1024, 4, 1), Ours(1024, 4, 4), Ours(4096, 4, 1)]
OTHERS += [Ours(4096, 4, 4), Ours(1024, 8, 8), Ours(256, 8, 2, beam=64)]
RECIPES = {"faiss RQ": "RQ{M}x8", "faiss OPQ": "OPQ{M},PQ{M}x8"}  # with a beam of 5
PEERS = [Peer(name, recipe.format(M=M), M) for name, recipe in RECIPES.items() for M in (4, 8, 16, 32)]
PEERS += [Peer("faiss LSQ", f"LSQ{M}x8", M) for M in (4, 8)]
PEERS += [Peer("faiss RQ, K=1024", "RQ4x10", 5), Peer("faiss RQ, K=4096", "RQ4x12", 6)]
SEARCHED = [Peer("faiss RaBitQ", "RaBitQ", -1 / 8), Peer("turbovec", "2", -2 / 8), Peer("turbovec", "4", -4 / 8)]
RESIDUAL = {peer.bytes: f"{peer.name}, {peer.bytes:g}" for peer in PEERS if peer.name.startswith("faiss RQ")}
METHODS = {f"{method.name}, {method.bytes:g}": method for method in (*OURS, *OTHERS, *PEERS, *SEARCHED)}


class Truth:
    """Queries, the rows that are searched, and the true neighbours."""

    def __init__(self, data: Data) -> None:
        self.query, self.rows = data.held_out[:QUERIES], data.held_out[QUERIES:]
        self.ids = self.nearest(self.rows)

    def nearest(self, rows: Tensor) -> Tensor:
        """The nearest rows of each query [Q, 10]; equal distances come in the order of rows."""
        found = []
        for part in self.query.double().split(50):
            distances = rows.double().square().sum(dim=1) - 2 * part @ rows.double().T
            found.append(distances.sort(dim=1, stable=True).indices[:, :NEAREST])
        return torch.cat(found)

    def recall(self, ids: Tensor) -> float:
        return float((self.ids[:, :, None] == ids[:, None]).any(dim=2).float().mean())

    def judge(self, data: Data, decoded: Tensor) -> dict[str, float]:
        """The figures of a codec that gives the held-out rows back like this."""
        return {"error": data.error(decoded), "recall": self.recall(self.nearest(decoded[QUERIES:]))}


def run_ours(data: Data, truth: Truth, method: Ours) -> Run:
    """One fit; the figures at each of the lengths in bytes that others have."""
    layer = drq_fast.RecurrentQuantizer(data.x.shape[1], method.K, method.M, codebooks=method.G)
    start = time.perf_counter()
    layer.fit(data.x, seed=data.seed)
    seconds = time.perf_counter() - start
    codes, found = layer.encode(data.held_out, beam=method.beam), {}
    for L in range(1, method.M + 1):
        length = L * math.log2(method.K) / 8
        if L == method.M or length in (4, 8, 16):
            found[f"{length:g}"] = truth.judge(data, layer.decode(codes, levels=L))
    return found | {"seconds": seconds}


def run_faiss(data: Data, truth: Truth, method: Peer) -> Run:
    """D is padded with zeros for OPQ, which divides dimensions among the parts of a code."""
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    D = data.x.shape[1]
    pad = (0, -D % int(method.bytes)) if method.recipe.startswith("OPQ") else (0, 0)
    x, y = (np.ascontiguousarray(torch.nn.functional.pad(part, pad)) for part in (data.x, data.held_out))
    codec = faiss.index_factory(D + pad[1], method.recipe)
    start = time.perf_counter()
    codec.train(x)
    seconds = time.perf_counter() - start
    if method.recipe == "RaBitQ":
        codec.add(y[QUERIES:])
        ids = torch.from_numpy(codec.search(y[:QUERIES], NEAREST)[1])
        return {f"{codec.code_size}": {"recall": truth.recall(ids)}, "seconds": seconds}
    decoded = torch.from_numpy(codec.sa_decode(codec.sa_encode(y)))[:, :D]
    return {f"{method.bytes:g}": truth.judge(data, decoded), "seconds": seconds}


def run_turbovec(data: Data, truth: Truth, method: Peer) -> Run:
    from turbovec import TurboQuantIndex

    D, bits = data.x.shape[1], int(method.recipe)
    index = TurboQuantIndex(dim=D, bit_width=bits)
    index.add(truth.rows.numpy())
    index.prepare()
    ids = torch.from_numpy(index.search(truth.query.numpy(), NEAREST)[1].astype("int64"))
    return {f"{D * bits / 8 + 4:g}": {"recall": truth.recall(ids)}, "seconds": 0.0}


def run(data: Data, truth: Truth, method: Ours | Peer) -> Run:
    if isinstance(method, Ours):
        return run_ours(data, truth, method)
    return (run_turbovec if method.name == "turbovec" else run_faiss)(data, truth, method)


def measure(file: str, options: argparse.Namespace, known: dict[str, Any], note: Callable[[str], None]) -> None:
    """Adds what `known`, seed -> method -> run, lacks for a file; calls note(sizes of the data) after each run."""
    for seed in range(options.seeds):
        runs = known.setdefault(str(seed), {})
        missing = [name for name in METHODS if name not in runs and re.search(options.only, name)]
        if not missing:
            continue
        data = data_of(file, options, seed)
        truth = Truth(data)
        for name in missing:
            try:
                runs[name] = run(data, truth, METHODS[name])
            except (
                ImportError,
                RuntimeError,
                ValueError,
            ) as error:  # a peer that is absent, or cannot take these sizes
                runs[name] = {"absent": str(error).strip().splitlines()[-1]}
            print(file, seed, name, json.dumps(runs[name]), file=sys.stderr, flush=True)
            note(sizes_of(data))


def sizes_of(data: Data) -> str:
    return f"{data.x.shape[1]:,} dimensions; fitted to {len(data.x):,} rows, measured on {len(data.held_out):,} others."


def data_of(file: str, options: argparse.Namespace, seed: int) -> Data:
    if file != "text-like":
        return Data(Path(file), options.train, options.held_out, seed, 0)
    made = Path(options.json).with_suffix(".text-like.npy")
    if not made.exists():
        np.save(made, text_like(100_000, 1536).numpy())
    return Data(made, options.train, options.held_out, seed, 0)


def figures(known: dict[str, Any], name: str, length: str, kind: str) -> list[float]:
    """One for each seed."""
    found = (runs.get(name, {}).get(length, {}).get(kind) for runs in known.values())
    return [figure for figure in found if figure is not None]


def text(values: list[float], digits: int = 4) -> str:
    if not values:
        return ""
    mean, spread = statistics.mean(values), f" [{min(values):.{digits}f}, {max(values):.{digits}f}]"
    return f"{mean:.{digits}f}{spread if len(values) > 1 else ''}"


def lengths_of(known: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """(bytes, method), ascending, of all that were measured."""
    found = {(max(float(key) for key in run if key[0].isdigit()), name)
             for runs in known.values() for name, run in runs.items() if "absent" not in run}  # fmt: skip
    yield from sorted(found)


def table(known: dict[str, Any]) -> str:
    """All codecs at their full lengths; in brackets the least and the most of the seeds."""
    lines = ["| bytes | codec | error | relative to faiss RQ | recall |", "| --- | --- | --- | --- | --- |"]
    for length, name in lengths_of(known):
        key = f"{length:g}"
        errors, peers = figures(known, name, key, "error"), figures(known, RESIDUAL.get(length, ""), key, "error")
        ratio = f"{statistics.mean(errors) / statistics.mean(peers):.3f}" if errors and peers else ""
        recalls = text(figures(known, name, key, "recall"), 3)
        lines.append(f"| {key} | {name.rpartition(',')[0]} | {text(errors)} | {ratio} | {recalls} |")
    return "\n".join(lines)


def prefixes(known: dict[str, Any]) -> str:
    """What a short code costs if it is the beginning of a longer one, relative to a codec fitted for that length."""
    lines = ["| codec | first 4 bytes | first 8 bytes | first 16 bytes |", "| --- | --- | --- | --- |"]
    for method in OURS:
        cells = []
        for M in (4, 8, 16):
            short = method._replace(M=M, G=M if method.G == method.M else method.G)
            values = figures(known, f"{method.name}, {method.bytes:g}", f"{M}", "error")
            own = figures(known, f"{short.name}, {M}", f"{M}", "error")
            cells.append(
                f"{statistics.mean(values) / statistics.mean(own):.3f}" if values and own and M < method.M else ""
            )
        if any(cells):
            lines.append(f"| {method.name}, {method.bytes:g} bytes | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(sets: dict[str, Any], footer: str, path: Path) -> None:
    """Error and recall against bytes, a row of panels for each."""
    import matplotlib
    from plots import STYLE

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update(STYLE)
    styles = {
        "ours, a codebook per level, K=256": ("C0", "o-"),
        "ours, 2 codebooks, K=256": ("C0", "s--"),
        "ours, one codebook, K=256": ("C0", "^:"),
        "faiss RQ": ("C1", "o-"),
        "faiss OPQ": ("C2", "o-"),
        "faiss LSQ": ("C3", "o-"),
    }
    sets = {title: known for title, known in sets.items() if len({length for length, _ in lengths_of(known)}) > 1}
    canvas, panels = pyplot.subplots(2, len(sets), figsize=(4.2 * len(sets), 6.4), squeeze=False)
    for column, (title, known) in zip(panels.T, sets.items(), strict=True):
        for panel, kind in zip(column, ("error", "recall"), strict=True):
            for label, (colour, style) in styles.items():
                points = []
                for length, name in lengths_of(known):
                    values = figures(known, name, f"{length:g}", kind)
                    if name.rpartition(",")[0] == label and values:
                        points.append((length, statistics.mean(values)))
                if points:
                    panel.plot(*zip(*points, strict=True), style, color=colour, label=label, markersize=4)
            panel.set_xscale("log", base=2)
            ticks = [length for length in (4, 8, 16, 32) if length <= max(length for length, _ in lengths_of(known))]
            panel.set_xticks(ticks, map(str, ticks))
            panel.set(xlabel="bytes", ylabel={"error": "relative error", "recall": "recall of 10 neighbours"}[kind])
            panel.grid(alpha=0.3)
        column[0].set_yscale("log")
        column[0].yaxis.set_major_formatter("{x:g}")
        column[0].yaxis.set_minor_formatter("{x:.2g}")
        column[0].set_title(title)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="lower center", ncols=3, frameon=False, bbox_to_anchor=(0.5, 0.02))
    canvas.text(0.01, 0.003, footer, fontsize=7, color="grey")
    canvas.tight_layout(rect=(0, 0.11, 1, 1))
    canvas.savefig(path, metadata={"Date": None})
    pyplot.close(canvas)


def publish(file: Path, root: Path) -> None:
    """Writes the tables of a file of results into docs/choosing.md, and the plot."""
    known, page = json.loads(file.read_text()), root / "docs/choosing.md"
    origin, sets = known["provenance"], known["sets"]
    versions = ", ".join(
        f"{name} {origin['versions'].get(name)}" for name in ("drq_fast", "torch", "faiss-cpu", "turbovec")
    )
    footer = f"{origin['processor']}, {versions}, {origin['date'][:10]}"
    head = "A short code that is the beginning of a longer one: its error relative to that of a codec fitted for it."
    tables = "\n\n".join(
        f"### {title}\n\n{known['sizes'][title]}\n\n{table(found)}\n\n{head}\n\n{prefixes(found)}"
        for title, found in sets.items()
    )
    page.write_text(fill(page.read_text(), "bench", {"choosing": f"{tables}\n\n{footer}."}))
    plot(sets, footer, root / "docs/plots/choosing.svg")


def main() -> None:
    """All data sets that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=[], metavar="NAME=FILE", help=".npy, .npz or text-like")
    parser.add_argument(
        "--json", type=Path, required=True, help="results; read if it is there, written after every run"
    )
    parser.add_argument("--train", type=int, default=20_000)
    parser.add_argument("--held-out", type=int, default=30_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="a regular expression of names of codecs")
    parser.add_argument("--publish", action="store_true", help="write docs/choosing.md and its plot instead")
    options = parser.parse_args()
    if options.publish:
        publish(options.json, Path(__file__).parents[1])
        return
    known = json.loads(options.json.read_text()) if options.json.exists() else {"sizes": {}, "sets": {}}
    known["provenance"] = provenance()
    for given in options.data:
        name, _, file = given.partition("=")
        found = known["sets"].setdefault(name, {})

        def note(sizes: str, name: str = name) -> None:
            if known["sizes"].setdefault(name, sizes) != sizes:
                parser.error(f"{options.json} has runs of {name} with other sizes: {known['sizes'][name]}")
            options.json.write_text(json.dumps(known, indent=1))

        measure(file, options, found, note)
        print(f"{name}\n\n{table(found)}\n\n{prefixes(found)}\n", flush=True)


if __name__ == "__main__":
    main()
