"""An autoencoder with a quantized bottleneck: swapping the quantizer changes one line.

    python examples/autoencoder.py [--steps 1000] [--seeds 3]

Needs `pip install 'drq_fast[demo]'` (scikit-learn).

Trains the same network with vector-quantize-pytorch's ResidualVQ(shared_codebook=True), where that is installed, and
with RecurrentQuantizer, then prints the reconstruction error on held-out digits and how many codewords are in use.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f"examples/autoencoder.py: {error.name} is missing; `pip install 'drq_fast[demo]'` installs it.")

from drq_fast import RecurrentQuantizer

DIM, CODEWORDS, LEVELS = 16, 256, 4


def ours() -> nn.Module:
    """RecurrentQuantizer: the one line to change."""
    return RecurrentQuantizer(dim=DIM, codewords=CODEWORDS, levels=LEVELS)


def peer() -> nn.Module:
    """ResidualVQ of vector-quantize-pytorch, for comparison."""
    from vector_quantize_pytorch import ResidualVQ

    return ResidualVQ(dim=DIM, codebook_size=CODEWORDS, num_quantizers=LEVELS, shared_codebook=True)


class Autoencoder(nn.Module):
    """Images [N, 64] -> reconstructions [N, 64], codes [N, LEVELS] and the quantizer's loss."""

    def __init__(self, quantizer: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, DIM))
        self.quantizer = quantizer
        self.decoder = nn.Sequential(nn.Linear(DIM, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One pass. ResidualVQ returns a loss per level, ours a scalar; sum() handles both."""
        quantized, codes, loss = self.quantizer(self.encoder(image))
        return self.decoder(quantized), codes, loss.sum()


def run(make_quantizer: Callable[[], nn.Module], seed: int, steps: int) -> tuple[float, int]:
    """Trains for `steps` batches of 256; returns (MSE on 297 held-out digits, codewords used on the other 1,500)."""
    torch.manual_seed(seed)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    train, held_out = images[torch.randperm(len(images))].split([1500, len(images) - 1500])
    model = Autoencoder(make_quantizer())
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in tqdm(range(steps), desc=f"{make_quantizer.__name__}, seed {seed}", leave=False, disable=None):
        batch = train[torch.randint(len(train), (256,))]
        image, _, loss = model(batch)
        total = F.mse_loss(image, batch) + loss
        optimiser.zero_grad()
        total.backward()
        optimiser.step()
    model.eval()
    with torch.no_grad():
        return F.mse_loss(model(held_out)[0], held_out).item(), len(model(train)[1].unique())


def main() -> None:
    """Trains with both quantizers and prints averages over seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print(f"{'quantizer':20}{'error':>10}{'codewords used':>16}")
    for name, make_quantizer in (("ResidualVQ", peer), ("RecurrentQuantizer", ours)):
        try:
            results = [run(make_quantizer, seed, options.steps) for seed in range(options.seeds)]
        except ModuleNotFoundError:
            print(f"{name:20}{'not installed: pip install vector-quantize-pytorch':>10}")
            continue
        print(f"{name:20}{mean(e for e, _ in results):10.5f}{mean(u for _, u in results):12.0f}/{CODEWORDS}")


if __name__ == "__main__":
    main()
