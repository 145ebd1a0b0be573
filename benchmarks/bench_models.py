"""Quantizers inside models, ours beside vector-quantize-pytorch's: error at every number of levels, usage, time.

    python benchmarks/bench_models.py [--quick] [--seeds 3] [--tables images ids step] [--data FOLDER] [--json FILE]

images: a convolutional autoencoder of Fashion-MNIST, from a folder with its idx .gz files (Debian's package
dataset-fashion-mnist is found by itself; without it, scikit-learn's digits or generated images are used, and the output
says so). ids: an RQ-VAE that gives generated text-like embeddings semantic ids. step: forward and backward of the
quantizer alone. Tables are printed in Markdown: the mean over seeds and, in brackets, the least and the most. --json
stores every run; runs that the file holds already are not repeated. All tables take about three hours; --quick takes
seconds, on sizes so small that only the script is tested.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drq_fast import RecurrentQuantizer

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
Metrics = dict[str, float]  # by column


class Sizes(NamedTuple):
    """What --quick changes; shapes are (D, K, M), of images with the number of steps, and (N, D, K, M) of the step."""

    steps: int = 1000
    rounds: int = 20
    items: int = 20_000
    test_images: int = 2000
    image_shapes: tuple[tuple[int, int, int, int], ...] = (
        (64, 512, 4, 1000),
        (8, 1024, 4, 1000),
        (256, 2048, 4, 100),  # few steps, because peers take a second for each
    )
    image_rates: tuple[float, ...] = (1e-3, 3e-4)
    id_shape: tuple[int, int, int] = (32, 256, 3)
    id_rates: tuple[float, ...] = (1e-3, 3e-4, 1e-4)
    step_shapes: tuple[tuple[int, int, int, int], ...] = (
        (2048, 1024, 256, 4),
        (3136, 64, 512, 4),
        (4096, 128, 1024, 8),
        (4096, 8, 1024, 9),
        (4096, 256, 2048, 8),
        (512, 256, 16384, 4),
    )


QUICK = Sizes(3, 2, 300, 20, ((8, 16, 2, 3),), (1e-3,), (32, 16, 3), (1e-3,), ((64, 8, 16, 2),))


class Ours(nn.Module):
    """RecurrentQuantizer: z [N, T, D] -> (quantized [N, T, D], codes [N, T, M], loss)."""

    def __init__(self, D: int, K: int, M: int, **options: Any) -> None:
        super().__init__()
        self.layer = RecurrentQuantizer(D, K, M, **options)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer(z)

    def decode(self, codes: Tensor, L: int) -> Tensor:
        """From the first L levels."""
        return self.layer.decode(codes, levels=L)

    def draw_codewords(self, x: Tensor) -> None:
        """Rows of x as codewords: a start for timing that takes no time."""
        with torch.no_grad():
            self.layer.codebook.copy_(x[: self.layer.codewords] - x.mean(dim=0))
        self.layer.initialise(x)


class Peer(nn.Module):
    """ResidualVQ of vector-quantize-pytorch, the same way; its losses of the levels are added up."""

    def __init__(self, D: int, K: int, M: int, **options: Any) -> None:
        super().__init__()
        from vector_quantize_pytorch import ResidualVQ

        self.layer = ResidualVQ(dim=D, codebook_size=K, num_quantizers=M, **options)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        quantized, codes, losses = self.layer(z)
        return quantized, codes, losses.sum()

    def decode(self, codes: Tensor, L: int) -> Tensor:
        """From the first L levels."""
        return self.layer.get_codes_from_indices(codes)[:L].sum(dim=0)

    def draw_codewords(self, x: Tensor) -> None:
        """Nothing: its codewords are random from the start."""


STARTED = {"kmeans_init": True, "threshold_ema_dead_code": 2}
QUANTIZERS: dict[str, Callable[..., Ours | Peer] | None] = {
    "no quantizer": None,
    "ours": Ours,
    "ResidualVQ, shared codebook": partial(Peer, shared_codebook=True),
    "ResidualVQ, separate codebooks, k-means, revival": partial(Peer, **STARTED),
}
VARIANTS: dict[str, Callable[..., Ours | Peer]] = {  # in the first table of images and of ids only
    "ours, `pull=0`": partial(Ours, pull=0.0),
    'ours, `update="gradient"`': partial(Ours, update="gradient"),
    'ours, `loss="paper"`': partial(Ours, loss="paper"),
    "ResidualVQ, shared codebook, k-means, revival": partial(Peer, shared_codebook=True, **STARTED),
}
STEPS: dict[str, Callable[..., Ours | Peer]] = {  # that are timed alone
    "ours": partial(Ours, init="random"),
    'ours, `loss="paper"`': partial(Ours, init="random", loss="paper"),
    "ResidualVQ, shared codebook": partial(Peer, shared_codebook=True),
}


class Convolutional(nn.Module):
    """Images [N, 1, 28, 28] <-> latents [N, 98, D]."""

    def __init__(self, D: int) -> None:
        super().__init__()
        down, wide = nn.Conv2d(1, 32, 4, stride=2, padding=1), nn.Conv2d(32, 64, (4, 3), stride=(2, 1), padding=1)
        self.encoder = nn.Sequential(down, nn.ReLU(), wide, nn.ReLU(), nn.Conv2d(64, D, 1))
        narrow = nn.ConvTranspose2d(64, 32, (4, 3), stride=(2, 1), padding=1)
        up = nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1)
        self.decoder = nn.Sequential(nn.Conv2d(D, 64, 3, padding=1), nn.ReLU(), narrow, nn.ReLU(), up)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x).flatten(2).movedim(1, 2)

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z.movedim(2, 1).unflatten(2, (7, 14)))


class Perceptron(nn.Module):
    """Embeddings [N, 768] <-> latents [1, N, D]."""

    def __init__(self, D: int) -> None:
        super().__init__()
        widths = (768, 256, 128, D)
        self.encoder, self.decoder = stack(widths), stack(widths[::-1])

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)[None]

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z[0])


def stack(widths: tuple[int, ...]) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


Model = Convolutional | Perceptron


def train(
    model: Model, quantizer: Ours | Peer | None, x: Tensor, *, steps: int, batch: int, rate: float, seed: int
) -> Metrics:
    """Minimises the mean squared error plus the quantizer's loss by Adam; returns the median time of a step."""
    parameters = [*model.parameters(), *(quantizer.parameters() if quantizer else ())]
    optimiser = torch.optim.Adam(parameters, lr=rate)
    generator = torch.Generator().manual_seed(seed)
    times = []
    for _ in range(steps):
        rows = x[torch.randint(len(x), (batch,), generator=generator)]
        start = time.perf_counter()
        z, loss = model.encode(rows), torch.tensor(0.0)
        if quantizer:
            z, _, loss = quantizer(z)
        total = F.mse_loss(model.decode(z), rows) + loss
        optimiser.zero_grad()
        total.backward()
        optimiser.step()
        times.append(time.perf_counter() - start)
    return {"ms per step": 1e3 * statistics.median(times[1:])}  # the first one initialises


@torch.no_grad()
def evaluate(model: Model, quantizer: Ours | Peer | None, x: Tensor, M: int) -> tuple[Metrics, Tensor | None]:
    """The sum of squared errors of x at every number of levels, codewords used at every level, and codes [..., M].

    Without a quantizer the error stands in the column of all levels.
    """
    model.eval()
    if quantizer is None:
        total = sum(float((model.decode(model.encode(part)) - part).square().sum()) for part in x.split(500))
        return {f"error, {M} of {M} levels": total}, None
    quantizer.eval()
    totals, found = [0.0] * M, []
    for part in x.split(500):
        codes = quantizer(model.encode(part))[1]
        found.append(codes.reshape(-1, M))
        for L in range(1, M + 1):
            totals[L - 1] += float((model.decode(quantizer.decode(codes, L)) - part).square().sum())
    codes = torch.cat(found)
    used = {f"used, level {L}": float(len(codes[:, L - 1].unique())) for L in range(1, M + 1)}
    return {**{f"error, {L} of {M} levels": total for L, total in enumerate(totals, start=1)}, **used}, codes


def of_images(name: str, seed: int, shape: tuple[int, int, int], rate: float, steps: int, data: Images) -> Metrics:
    """Test MSE of the autoencoder, codewords used on test images, time."""
    torch.manual_seed(seed)
    D, K, M = shape
    make = (QUANTIZERS | VARIANTS)[name]
    model, quantizer = Convolutional(D), make(D, K, M) if make else None
    timed = train(model, quantizer, data.train, steps=steps, batch=32, rate=rate, seed=seed)
    found, _ = evaluate(model, quantizer, data.test, M)
    return {key: value / (data.test.numel() if "error" in key else 1) for key, value in found.items()} | timed


def of_ids(name: str, seed: int, shape: tuple[int, int, int], rate: float, steps: int, x: Tensor) -> Metrics:
    """Error relative to the variance of x, codewords used, the share of items whose id no other item has, time."""
    torch.manual_seed(seed)
    D, K, M = shape
    make = (QUANTIZERS | VARIANTS)[name]
    model, quantizer = Perceptron(D), make(D, K, M) if make else None
    timed = train(model, quantizer, x, steps=steps, batch=1024, rate=rate, seed=seed)
    found, codes = evaluate(model, quantizer, x, M)
    variance = float((x - x.mean(dim=0)).square().sum())
    found = {key: value / (variance if "error" in key else 1) for key, value in found.items()}
    if codes is not None:
        counts = codes.unique(dim=0, return_counts=True)[1]
        found["items with an id of their own"] = float((counts == 1).sum()) / len(codes)
    return found | timed


def of_steps(name: str, seed: int, shapes: tuple[tuple[int, int, int, int], ...], rounds: int) -> Metrics:
    """Milliseconds of forward and backward, with gradients of `quantized` and of the loss; the median of rounds."""
    found = {}
    for N, D, K, M in shapes:
        torch.manual_seed(seed)
        data = clustered(max(N, K), D, seed)
        quantizer = STEPS[name](D, K, M).train()
        quantizer.draw_codewords(data)
        x, upstream, times = data[:N].clone().requires_grad_(), torch.randn(1, N, D) / N, []
        for _ in range(rounds + 1):
            x.grad = None
            quantizer.zero_grad()
            start = time.perf_counter()
            quantized, _, loss = quantizer(x[None])
            ((quantized * upstream).sum() + loss).backward()
            times.append(time.perf_counter() - start)
        found[f"{N}, {D}, {K}, {M}"] = 1e3 * statistics.median(times[1:])
    return found


class Images(NamedTuple):
    """[N, 1, 28, 28] from 0 to 1, and what they are."""

    name: str
    train: Tensor
    test: Tensor


def images(folder: Path | None, test: int) -> Images:
    """Fashion-MNIST of a folder, else digits, else noise; `test` images to test with."""
    folder = folder or (DEBIAN if DEBIAN.exists() else None)
    if folder is not None:
        train, held_out = (read_idx(folder / f"{name}-images-idx3-ubyte.gz") for name in ("train", "t10k"))
        return Images("Fashion-MNIST", train, held_out[:test])
    try:
        from sklearn.datasets import load_digits

        name, small = "scikit-learn's digits, enlarged", torch.tensor(load_digits().images).float()[:, None] / 16
        small = small[torch.randperm(len(small), generator=torch.Generator().manual_seed(0))]
    except ModuleNotFoundError:
        name, small = "generated images", torch.rand(5000, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    large = F.interpolate(small, size=(28, 28), mode="bilinear")
    test = min(test, len(large) // 6)
    return Images(f"{name} (no Fashion-MNIST here)", large[test:], large[:test])


def read_idx(path: Path) -> Tensor:
    """Images [N, 1, 28, 28] float32 from 0 to 1."""
    raw = gzip.decompress(path.read_bytes())
    sizes = np.frombuffer(raw, ">i4", 3, offset=4)
    pixels = np.frombuffer(raw, np.uint8, offset=16).reshape(sizes[0], 1, sizes[1], sizes[2])
    return torch.from_numpy(pixels.astype(np.float32) / 255)


def clustered(N: int, D: int, seed: int, clusters: int = 1000) -> Tensor:
    """[N, D] around random centres, with standard deviations that fall as (j + 1)**-0.5 over dimensions j."""
    generator = torch.Generator().manual_seed(seed)
    centres, noise = (torch.randn(n, D, generator=generator) for n in (clusters, N))
    return (centres[torch.randint(clusters, (N,), generator=generator)] + 0.7 * noise) / torch.arange(1, D + 1).sqrt()


def embeddings(N: int, size: float) -> Tensor:
    """[N, 768] of length `size`, clustered and all on one side of the origin, as those of texts are."""
    x = clustered(N, 768, seed=0)
    return size * F.normalize(x + torch.linspace(0.5, 0.0, 768), dim=1)


class Table(NamedTuple):
    """A title, the names of its rows, and run(name, seed) for each of them."""

    title: str
    rows: list[str]
    run: Callable[[str, int], Metrics]


def of_all_images(sizes: Sizes, folder: Path | None) -> Iterator[Table]:
    data = images(folder, sizes.test_images)
    rows = [*QUANTIZERS, *VARIANTS]
    for D, K, M, steps in sizes.image_shapes:
        for rate in sizes.image_rates:
            title = f"Autoencoder: MSE on test images, {data.name}; D {D}, K {K}, M {M}, "
            title += f"{steps} steps of 32, lr {rate:g}"
            given = {"shape": (D, K, M), "rate": rate, "steps": steps, "data": data}
            yield Table(title, rows, partial(of_images, **given))
            rows = list(QUANTIZERS)


def of_all_ids(sizes: Sizes, folder: Path | None) -> Iterator[Table]:
    rows = [*QUANTIZERS, *VARIANTS]
    for length in (1, 10):
        x, (D, K, M) = embeddings(sizes.items, length), sizes.id_shape
        for rate in sizes.id_rates:
            title = f"RQ-VAE: squared error relative to the variance, {sizes.items} embeddings of length {length}; "
            title += f"D {D}, K {K}, M {M}, {sizes.steps} steps of 1024, lr {rate:g}"
            given = {"shape": sizes.id_shape, "rate": rate, "steps": sizes.steps, "x": x}
            yield Table(title, rows, partial(of_ids, **given))
            rows = list(QUANTIZERS)


def of_all_steps(sizes: Sizes, folder: Path | None) -> Iterator[Table]:
    title = f"Quantizer alone, forward and backward: ms by N, D, K, M; {sizes.rounds} rounds"
    yield Table(title, list(STEPS), partial(of_steps, shapes=sizes.step_shapes, rounds=sizes.rounds))


TABLES = {"images": of_all_images, "ids": of_all_ids, "step": of_all_steps}


def markdown(title: str, rows: dict[str, list[Metrics] | str]) -> str:
    """A row for each quantizer: mean [least, most] over seeds of every metric, or why it is absent."""
    columns = list(max((found[0] for found in rows.values() if isinstance(found, list)), key=len))
    lines = [f"### {title}", "", f"| | {' | '.join(columns)} |", f"|{' --- |' * (len(columns) + 1)}"]
    for name, found in rows.items():
        if isinstance(found, str):
            cells = [f"absent: {found}", *[""] * (len(columns) - 1)]
        else:
            cells = [spread([run[key] for run in found]) if key in found[0] else "" for key in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    mean, least, most = (f"{value:.4g}" for value in (statistics.mean(values), min(values), max(values)))
    return f"{mean} [{least}, {most}]"


def main() -> None:
    """Prints the tables that were asked for."""
    from provenance import provenance  # here, because pytest imports this file without the folder in its path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few steps: tests the script")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST's idx .gz files")
    parser.add_argument("--json", type=Path, help="file of runs; read if it is there, written after every run")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "initialise: .* vectors are few")  # a first batch, as users have it
    origin, file = provenance(), options.json
    runs: dict[str, Metrics] = json.loads(file.read_text())["runs"] if file and file.exists() else {}

    def find(table: Table, name: str, seed: int) -> Metrics:
        key = f"{table.title} | {name} | seed {seed}"
        if key not in runs:
            runs[key] = table.run(name, seed)
            if file:
                file.write_text(json.dumps({"provenance": origin, "runs": runs}, indent=1))
        return runs[key]

    versions = ", ".join(f"{library} {origin['versions'][library]}" for library in ("drq_fast", "torch"))
    peer = origin["versions"]["vector-quantize-pytorch"] or "absent"
    print(f"{origin['processor']}, {origin['torch_threads']} threads, {versions}, vector-quantize-pytorch {peer}.")
    print(f"Mean [least, most] over seeds, of which there are {options.seeds}.", flush=True)
    sizes = QUICK if options.quick else Sizes()
    for table in (table for name in options.tables for table in TABLES[name](sizes, options.data)):
        rows: dict[str, list[Metrics] | str] = {}
        for name in table.rows:
            try:
                rows[name] = [find(table, name, seed) for seed in range(options.seeds)]
            except ImportError as error:
                rows[name] = str(error)
        print(f"\n{markdown(table.title, rows)}", flush=True)


if __name__ == "__main__":
    main()
