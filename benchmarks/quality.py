"""Held-out error of codes without labels at every length, beside faiss, and what each technique of fit contributes.

    python benchmarks/quality.py --data features.npz --train 20000 --name "CIFAR-10 features"
    python benchmarks/quality.py --data embeddings.npy --train 50000 --name GloVe

A .npz file holds `x` [N, D] and, where x is scaled, `step` [D]; a .npy file holds x. The table is printed, and written
between the marks of that name in docs/results.md; without a name, ours and faiss RQ are printed and nothing is written.
Rows of the table that the file of --keep holds already are not computed again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from provenance import provenance
from report import fill
from torch import Tensor

import drq_fast
from drq_fast import fit, refit

K, M = 256, 4
PAGE = Path(__file__).parents[1] / "docs" / "results.md"
Errors = list[float]  # at 8, 16, 24 and 32 bits


class Data:
    """x [train, D] to fit to, held_out [rows, D], and their squared error by the mean of x alone."""

    def __init__(self, path: Path, train: int, held_out: int, seed: int, skip: int) -> None:
        file = np.load(path, mmap_mode="r")
        values = file["x"] if path.suffix == ".npz" else file
        step = file["step"] if path.suffix == ".npz" and "step" in file else 1.0
        order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))[skip:]
        x = torch.tensor(values[order[: train + held_out].numpy()] * step, dtype=torch.float32)
        self.x, self.held_out, self.seed = x[:train], x[train:], seed
        self.total = (self.held_out - self.x.mean(dim=0)).square().sum()

    def error(self, decoded: Tensor) -> float:
        return float((self.held_out - decoded).square().sum() / self.total)


def faiss_error(data: Data, recipe: str, L: int) -> float:
    """Of a faiss codec made and trained for L levels; D is padded with zeros to a multiple of L."""
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    D = data.x.shape[1]
    pad = (0, -D % L)
    x, y = (np.ascontiguousarray(torch.nn.functional.pad(t, pad)) for t in (data.x, data.held_out))
    codec = faiss.index_factory(D + pad[1], recipe.format(L=L))
    codec.train(x)
    return data.error(torch.from_numpy(codec.sa_decode(codec.sa_encode(y)))[:, :D])


def ours(data: Data, beams: tuple[int, ...] = (16,), quick: bool = False, **options: Any) -> list[Errors]:
    """One layer for all lengths, fitted and encoded as a user would; the errors for every beam."""
    fit_options = {name: options.pop(name) for name in ("rounds", "beam") if name in options}
    layer = drq_fast.RecurrentQuantizer(data.x.shape[1], K, M, **options)
    if quick:
        layer.initialise(data.x, seed=data.seed)
    else:
        layer.fit(data.x, seed=data.seed, **fit_options)
    found = []
    for beam in beams:
        codes = layer.encode(data.held_out, beam=beam)
        found.append([data.error(layer.decode(codes, levels=L)) for L in range(1, M + 1)])
    return found


def replaced(data: Data, **names: Any) -> list[Errors]:
    """The same with something in fit.py replaced."""
    with mock.patch.multiple(fit, **names):
        return ours(data)


def without_refit(data: Data) -> list[Errors]:
    with mock.patch.object(refit, "codebook_of", lambda statistics, codes, codec, *_: codec.codebook):
        return replaced(data, NOISE=0.0)


PEERS = {  # faiss's names; its RQ has a beam of 5
    "faiss RQ, beam 5, trained for each length": "RQ{L}x8",
    "faiss PQ, trained for each length": "PQ{L}x8",
    "faiss OPQ, trained for each length": "OPQ{L},PQ{L}x8",
    "faiss LSQ, trained for each length": "LSQ{L}x8",
}
OURS = (
    "**`layer.fit(x)`**, `encode(x, beam=16)`",
    "`encode(x)`: greedy",
    "`encode(x, beam=4)`",
    "`encode(x, beam=64)`",
)
MEANS: dict[str, Callable[[Data], list[Errors]]] = {
    "no offset: `offset=False`": lambda data: ours(data, offset=False),
    "all lengths alike: `level_weights=(1, 1, 1, 1)`": lambda data: ours(data, level_weights=(1, 1, 1, 1)),
    "the full length alone: `level_weights=(0, 0, 0, 1)`": lambda data: ours(data, level_weights=(0, 0, 0, 1)),
    "no beam in `fit(x, beam=1)`": lambda data: ours(data, beam=1),
    "a quarter of the rounds: `fit(x, rounds=30)`": lambda data: ours(data, rounds=30),
    "twice the rounds: `fit(x, rounds=240)`": lambda data: ours(data, rounds=240),
    "no noise": lambda data: replaced(data, NOISE=0.0),
    "no further than the refitted codebook": lambda data: replaced(data, _STRIDE=1.0),
    "no refit and no noise: codewords as drawn": without_refit,
    'free scales: `scale="per_level"`': lambda data: ours(data, scale="per_level"),
    "the quick start: `layer.initialise(x)`": lambda data: ours(data, quick=True),
}


def measure(data: Data, known: dict[str, Errors], note: Callable[[], None]) -> None:
    """Adds to `known` what it lacks, and calls `note` after every step."""
    for name, recipe in PEERS.items():
        errors = known.setdefault(name, [])
        while len(errors) < M:
            errors.append(faiss_error(data, recipe, len(errors) + 1))
            note()
    if not all(name in known for name in OURS):
        known.update(zip(OURS, ours(data, beams=(16, 1, 4, 64)), strict=True))
        note()
    for name, means in MEANS.items():
        if name not in known:
            known[name] = means(data)[0]
            note()


def check(data: Data) -> None:
    """Ours and faiss RQ alone, and their ratio, at every length."""
    for L, error in enumerate(ours(data)[0], start=1):
        peer = faiss_error(data, PEERS[next(iter(PEERS))], L)
        print(f"{8 * L} bits: {error:.4f}, faiss RQ {peer:.4f}, ratio {error / peer:.3f}", flush=True)


def table(known: dict[str, Errors], title: str, data: Data, origin: dict[str, Any], command: str) -> str:
    """Errors, and in brackets relative to faiss RQ; markdown."""
    best = known[next(iter(PEERS))]
    versions = ", ".join(f"{name} {origin['versions'][name]}" for name in ("drq_fast", "torch", "numpy", "faiss-cpu"))
    lines = [
        f"### {title}",
        "",
        f"{len(data.x):,} rows of {data.x.shape[1]} dimensions to fit to, {len(data.held_out):,} others held out, seed "
        f"{data.seed}; {origin['processor']}, {origin['torch_threads']} threads; {versions}. Made by",
        f"`{command}`.",
        "",
        "| | 8 bits | 16 bits | 24 bits | 32 bits |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in (*PEERS, *OURS, *MEANS):
        cells = (f"{error:.4f} ({error / reference:.3f})" for error, reference in zip(known[name], best, strict=True))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """One data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--train", type=int, default=20_000)
    parser.add_argument("--held-out", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="rows to leave out: those that choices were made with")
    parser.add_argument("--name", help="of the table in docs/results.md; without it ours and faiss RQ are printed only")
    parser.add_argument("--keep", type=Path, help="JSON file of rows; read if it is there, written after every row")
    options = parser.parse_args()
    data = Data(options.data, options.train, options.held_out, options.seed, options.skip)
    if options.name is None:
        return check(data)
    known: dict[str, Errors] = {}
    if options.keep and options.keep.exists():
        known = json.loads(options.keep.read_text())

    def note() -> None:
        print(*(f"{error:.4f}" for error in list(known.values())[-1]), list(known)[-1], flush=True)
        if options.keep:
            options.keep.write_text(json.dumps(known, indent=1))

    measure(data, known, note)
    command = f"python benchmarks/quality.py --data {options.data.name} --train {options.train}"
    command += f' --held-out {options.held_out} --seed {options.seed} --name "{options.name}"'
    text = table(known, options.name, data, provenance(), command)
    print(text)
    PAGE.write_text(fill(PAGE.read_text(), "quality", {options.name: text}))


if __name__ == "__main__":
    main()
