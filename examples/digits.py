"""Train once on handwritten digits, then search with 8, 16, 24 and 32 bits of the same codes.

    python examples/digits.py [--epochs 60] [--seed 0] [--out out/digits.png]

A small network learns features of 8 x 8 pixels, and the quantizer learns to code them, in the three stages of the
paper: features alone, then one level of codes, then all four.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

import drq_fast
from drq_fast.retrieval.evaluate import average_precision

QUERIES = 400
NEIGHBOURS = 10


class Row(NamedTuple):
    """One line of the table: bytes a vector takes, mAP over all of the database, recall of the exact neighbours."""

    name: str
    bytes: int
    mean_average_precision: float
    recall: float | None


def load(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,797 images of 8 x 8 pixels, shuffled: (database [N, 64], its labels, queries [400, 64], their labels)."""
    digits = load_digits()
    order = torch.randperm(len(digits.data), generator=torch.Generator().manual_seed(seed))
    x, label = torch.tensor(digits.data, dtype=torch.float32)[order], torch.tensor(digits.target)[order]
    return x[QUERIES:], label[QUERIES:], x[:QUERIES], label[:QUERIES]


class Model(nn.Module):
    """Pixels [N, 64] to features [N, 32], a quantizer for them, and a classifier that teaches both."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
        self.quantizer = drq_fast.RecurrentQuantizer(dim=32, codewords=256, levels=4, weights=(0.1, 0.1, 0.1))
        self.classifier = nn.Linear(32, 10)


def train(x: Tensor, label: Tensor, epochs: int, seed: int) -> Model:
    """A third of the epochs for each stage."""
    torch.manual_seed(seed)
    model = Model()
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    bar = tqdm(range(epochs), desc="train", unit="epoch", disable=None)
    for epoch in bar:
        levels = (0, 1, 4)[3 * epoch // epochs]
        if levels and not model.quantizer.initialised:
            model.quantizer.initialise(model.features(x).detach())  # from all data: a batch has fewer than 256 vectors
        for rows in torch.randperm(len(x)).split(128):
            features = model.features(x[rows])
            loss = F.cross_entropy(model.classifier(features), label[rows])
            if levels:
                loss = loss + model.quantizer(features, levels=levels, reconstruct=False).loss
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        bar.set_postfix(levels=levels, loss=f"{loss.item():.2f}")
    return model.eval()


@torch.no_grad()
def evaluate(model: Model, x: Tensor, label: Tensor, query: Tensor, wanted: Tensor) -> list[Row]:
    """mAP and recall by exact distances of pixels and of features, then by every prefix of the codes in one index."""
    relevant = wanted[:, None] == label
    by_pixels = average_precision(torch.cdist(query, x), relevant).mean().item()
    x, query = model.features(x), model.features(query)
    exact = torch.cdist(query, x)
    neighbours = exact.topk(NEIGHBOURS, largest=False).indices
    rows = [
        Row("pixels, exact", 4 * 64, by_pixels, None),
        Row("features, exact", 4 * x.shape[1], average_precision(exact, relevant).mean().item(), 1.0),
    ]
    index = drq_fast.Index(model.quantizer)
    index.add(x, beam=16)
    for levels in range(1, index.levels + 1):
        scores, ids = index.search(query, k=len(index), levels=levels)
        by_id = torch.empty_like(scores).scatter_(1, ids, scores)
        precision = average_precision(by_id, relevant).mean().item()
        recall = (ids[:, :NEIGHBOURS, None] == neighbours[:, None, :]).any(dim=2).float().mean().item()
        rows.append(Row(f"code, {8 * levels} bits", levels, precision, recall))
    return rows


def plot(rows: list[Row], model: Model, x: Tensor, label: Tensor, query: Tensor, wanted: Tensor, path: Path) -> None:
    """Quality by code length, and what some queries find with the shortest and the longest code."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(11, 4.4), layout="constrained")
    curves, pictures = figure.subfigures(1, 2, width_ratios=(5, 6))
    axes = curves.subplots()
    pixels, features, *codes = rows
    lengths = [8 * row.bytes for row in codes]
    axes.plot(lengths, [row.mean_average_precision for row in codes], "o-", color="tab:blue", label="mAP of the codes")
    axes.axhline(
        features.mean_average_precision, ls="--", color="tab:blue", label=f"exact, features ({features.bytes} bytes)"
    )
    axes.axhline(pixels.mean_average_precision, ls=":", color="gray", label=f"exact, pixels ({pixels.bytes} bytes)")
    axes.plot(
        lengths, [row.recall for row in codes], "s-", color="tab:orange", label=f"recall@{NEIGHBOURS} of the codes"
    )
    axes.set(xlabel="bits per image", xticks=lengths, ylim=(0, 1), title="one training, four code lengths")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")

    index = drq_fast.Index(model.quantizer)
    index.add(model.features(x).detach(), beam=16)
    shown, found = 5, 4
    grid = pictures.subplots(shown, 2 * found + 3)
    for i in range(shown):
        feature = model.features(query[i]).detach()
        nearest = [index.search(feature, k=found, levels=levels).ids.tolist() for levels in (1, index.levels)]
        cells = [(query[i], "black")]
        for row in nearest:
            cells += [None, *((x[n], "green" if label[n] == wanted[i] else "red") for n in row)]  # None: a gap
        for cell, picture in zip(cells, grid[i], strict=True):
            picture.set(xticks=[], yticks=[])
            if cell is None:
                picture.axis("off")
                continue
            picture.imshow(cell[0].reshape(8, 8), cmap="gray_r")
            picture.spines[:].set(color=cell[1], linewidth=2)
    grid[0][0].set_title("query", fontsize="small")
    grid[0][2].set_title(f"found with {lengths[0]} bits", fontsize="small", loc="left")
    grid[0][3 + found].set_title(f"found with {lengths[-1]} bits", fontsize="small", loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """The whole example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/digits.png"))
    options = parser.parse_args()
    x, label, query, wanted = load(options.seed)
    model = train(x, label, options.epochs, options.seed)
    rows = evaluate(model, x, label, query, wanted)
    print(f"\n{len(x)} digits, {len(query)} queries, one model of {model.quantizer.bits} bits\n")
    print(f"{'':18}{'bytes/vector':>13}{'mAP':>8}{f'recall@{NEIGHBOURS}':>12}")
    for row in rows:
        recall = "" if row.recall is None else f"{row.recall:.3f}"
        print(f"{row.name:18}{row.bytes:13}{row.mean_average_precision:8.3f}{recall:>12}")
    plot(rows, model, x, label, query, wanted, options.out)
    print(f"\nplot: {options.out}")


if __name__ == "__main__":
    main()
