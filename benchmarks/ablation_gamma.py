"""How sharp should the soft assignment be? Held-out error at every code length after training, for several GAMMA_C.

    python benchmarks/ablation_gamma.py [--data features.npz] [--rows 8000] [--steps 150]

The file holds `x` [N, D] and, where x is scaled, `step` [D]; without one, scikit-learn's digits are used.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import drq_fast
from drq_fast import quantizer


def load(path: Path | None, rows: int) -> Tensor:
    """Vectors [up to rows, D], in the file's order."""
    if path is None:
        from sklearn.datasets import load_digits

        x = load_digits().data
    else:
        with np.load(path) as file:
            x = file["x"][:rows] * file["step"] if "step" in file else file["x"][:rows]
    return torch.tensor(x[:rows], dtype=torch.float32)


def errors(layer: drq_fast.RecurrentQuantizer, x: Tensor, mean: Tensor) -> list[float]:
    """Squared error of x at every prefix length, relative to that of the mean alone."""
    codes, total = layer.encode(x), (x - mean).square().sum()
    return [float((x - layer.decode(codes, levels=m)).square().sum() / total) for m in range(1, layer.levels + 1)]


def main() -> None:
    """One line per constant; the first is the k-means start, which all of them share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    x = load(options.data, options.rows)
    train, held_out = x.split([len(x) * 3 // 4, len(x) - len(x) * 3 // 4])
    for constant in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0):
        quantizer.GAMMA_C = constant
        torch.manual_seed(0)
        layer = drq_fast.RecurrentQuantizer(dim=x.shape[1], loss="paper")
        layer.initialise(train, seed=0)
        if constant == 0.5:
            print("start ", *(f"{error:.3f}" for error in errors(layer, held_out, train.mean(0))))
        optimiser = torch.optim.Adam(layer.parameters(), lr=1e-3 * float(train.std()))
        for _ in range(options.steps):
            optimiser.zero_grad()
            layer(train[torch.randint(len(train), (512,))], reconstruct=False).loss.backward()
            optimiser.step()
        print(f"{constant:<6}", *(f"{error:.3f}" for error in errors(layer, held_out, train.mean(0))), flush=True)


if __name__ == "__main__":
    main()
