"""RecurrentQuantizer in four kinds of models: each adapter is short enough to copy.

    python examples/adapters.py [--steps 200]

`DropIn` has the call of vector-quantize-pytorch's ResidualVQ, `RQVAE` makes semantic ids for recommenders,
`ImageQuantizer` projects to few dimensions of unit length, and `AudioQuantizer` has a bandwidth, as in EnCodec. The
script trains a small autoencoder around each of them on generated data and prints its error before and after.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drq_fast import RecurrentQuantizer, SemanticIds

Output = tuple[Tensor, Tensor, Tensor]  # quantized or reconstructed, codes, loss


class DropIn(nn.Module):
    """Called like ResidualVQ: x [B, T, dim], or [B, dim, H, W] with accept_image_fmap, to (quantized, indices, losses).

    quantized has the shape of x, indices are [B, T, M] or [B, H, W, M], losses [M] add up to the layer's loss.
    """

    def __init__(
        self, *, dim: int, codebook_size: int, num_quantizers: int, accept_image_fmap: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.layer = RecurrentQuantizer(dim, codebook_size, num_quantizers, **options)
        self.axis = 1 if accept_image_fmap else -1

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Output:
        quantized, indices, losses = self.layer(x.movedim(self.axis, -1), mask=mask, reduction="level")
        return quantized.movedim(-1, self.axis), indices, losses / self.layer.levels

    def get_output_from_indices(self, indices: Tensor) -> Tensor:
        """indices [..., L], any number of levels -> vectors of the layout of x."""
        return self.layer.decode(indices).movedim(-1, self.axis)


class Autoencoder(nn.Module):
    """x -> (reconstruction like x, codes, loss scalar), for any quantizer that returns (quantized, codes, loss)."""

    def __init__(self, encoder: nn.Module, quantizer: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.quantizer, self.decoder = encoder, quantizer, decoder

    def forward(self, x: Tensor) -> Output:
        quantized, codes, loss = self.quantizer(self.encoder(x))
        return self.decoder(quantized), codes, loss.sum()


class RQVAE(Autoencoder):
    """An RQ-VAE of embeddings [N, dim]; `ids` names items for a generative recommender."""

    def __init__(self, dim: int, latent: int = 32, codewords: int = 256, levels: int = 3) -> None:
        encoder = nn.Sequential(nn.Linear(dim, 128), nn.ReLU(), nn.Linear(128, latent))
        decoder = nn.Sequential(nn.Linear(latent, 128), nn.ReLU(), nn.Linear(128, dim))
        super().__init__(encoder, RecurrentQuantizer(latent, codewords, levels), decoder)

    @torch.no_grad()
    def ids(self, x: Tensor) -> SemanticIds:
        """Unique codes of the items, with tokens and look-up by prefix: see docs/semantic_ids.md."""
        return SemanticIds.build(self.quantizer, self.encoder(x))


class ImageQuantizer(nn.Module):
    """Feature maps [B, channels, H, W] -> (quantized like them, tokens [B, H, W, levels], loss).

    Codewords have few dimensions, and vectors have unit length before and after quantization: they differ in direction
    alone.
    """

    def __init__(self, channels: int, dim: int = 8, codewords: int = 1024, levels: int = 2) -> None:
        super().__init__()
        self.project_in, self.project_out = nn.Linear(channels, dim), nn.Linear(dim, channels)
        self.layer = RecurrentQuantizer(dim, codewords, levels)

    def forward(self, x: Tensor) -> Output:
        quantized, tokens, loss = self.layer(F.normalize(self.project_in(x.movedim(1, -1)), dim=-1))
        return self.project_out(F.normalize(quantized, dim=-1)).movedim(-1, 1), tokens, loss

    def decode(self, tokens: Tensor) -> Tensor:
        """tokens [B, H, W, L], any number of levels -> feature maps [B, channels, H, W]."""
        return self.project_out(F.normalize(self.layer.decode(tokens), dim=-1)).movedim(-1, 1)


class AudioQuantizer(nn.Module):
    """Frames [B, dim, T] -> (quantized like them, codes [B, levels, T], loss); bandwidth in bits per second.

    In training every clip of a batch has a random number of levels, so one model serves every bandwidth.
    """

    def __init__(self, dim: int, frame_rate: float, codewords: int = 1024, levels: int = 8) -> None:
        super().__init__()
        self.layer, self.frame_rate = RecurrentQuantizer(dim, codewords, levels), frame_rate

    def levels(self, bandwidth: float | None) -> int:
        """How many levels fit into the bandwidth, at least one; all of them if it is None."""
        of_a_level = self.frame_rate * self.layer.bits / self.layer.levels
        return self.layer.levels if bandwidth is None else min(max(1, int(bandwidth / of_a_level)), self.layer.levels)

    def forward(self, x: Tensor, bandwidth: float | None = None) -> Output:
        most = self.levels(bandwidth)
        drawn = torch.randint(1, most + 1, (len(x), 1), device=x.device).expand(-1, x.shape[2])
        quantized, codes, loss = self.layer(x.movedim(1, -1), levels=drawn if self.training else most)
        return quantized.movedim(-1, 1), codes.movedim(-1, 1), loss

    def decode(self, codes: Tensor) -> Tensor:
        """codes [B, L, T], any number of levels -> frames [B, dim, T]."""
        return self.layer.decode(codes.movedim(1, -1)).movedim(-1, 1)


def models() -> dict[str, tuple[nn.Module, Tensor]]:
    """A small autoencoder around each adapter, and data for it with a few directions that matter."""
    sequence, image = {"dim": 8, "codebook_size": 64, "num_quantizers": 4}, {"codewords": 64, "levels": 2}
    audio = AudioQuantizer(16, frame_rate=50, codewords=64, levels=4)
    vectors = torch.randn(512, 4) @ torch.randn(4, 32)
    squares = F.interpolate(torch.rand(64, 1, 4, 4), size=(16, 16), mode="bilinear")
    waves = torch.sin(torch.rand(32, 1, 1) * torch.arange(320) + torch.rand(32, 1, 1))
    patches = [nn.Conv2d(1, 16, 4, stride=4), nn.ConvTranspose2d(16, 1, 4, stride=4)]
    frames = [nn.Conv1d(1, 16, 16, stride=8, padding=4), nn.ConvTranspose1d(16, 1, 16, stride=8, padding=4)]
    lines = [nn.Linear(32, 8), nn.Linear(8, 32)]
    return {
        "DropIn": (Autoencoder(lines[0], DropIn(**sequence), lines[1]), vectors.view(16, 32, 32)),
        "RQVAE": (RQVAE(32, latent=8, codewords=64), vectors),
        "ImageQuantizer": (Autoencoder(patches[0], ImageQuantizer(16, **image), patches[1]), squares),
        "AudioQuantizer": (Autoencoder(frames[0], audio, frames[1]), waves),
    }


def train(model: nn.Module, x: Tensor, steps: int) -> tuple[float, float]:
    """Trains on all of x; returns the mean squared error of the first and of the last step."""
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    errors = []
    for _ in range(steps):
        x_hat, _, loss = model(x)
        error = F.mse_loss(x_hat, x)
        optimiser.zero_grad()
        (error + loss).backward()
        optimiser.step()
        errors.append(error.item())
    return errors[0], errors[-1]


def main() -> None:
    """Trains all four and prints their errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{'':16}{'error before':>14}{'after':>10}")
    for name, (model, x) in models().items():
        first, last = train(model, x, options.steps)
        print(f"{name:16}{first:14.4f}{last:10.4f}")


if __name__ == "__main__":
    main()
