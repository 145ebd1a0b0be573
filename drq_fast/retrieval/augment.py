"""Random augmentation of training images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks


def augment(images: Tensor, size: int, smallest: float = 0.5, colour: float = 0.3, hole: float = 0.4) -> Tensor:
    """Pixels [N, 3, H, W] -> float [N, 3, size, size]: a random crop of each image, mirrored with probability 1/2.

    A crop has a fraction of the area between `smallest` and 1 and an aspect ratio between 3:4 and 4:3. It is resampled
    bilinearly, so images more than twice as large as `size` should be reduced first. Brightness, contrast and
    saturation change by up to `colour`. Half of the results get a grey square with side `hole` * size.
    """
    checks.integer("augment", "size", size, 1)
    views = _parts(images.float(), size, smallest)
    if colour:
        views = _coloured(views, colour)
    return _with_holes(views, hole) if hole else views


def _parts(images: Tensor, size: int, smallest: float) -> Tensor:
    """A random crop of each image, mirrored with probability 1/2."""
    N = len(images)
    area = torch.empty(N).uniform_(smallest, 1)
    ratio = torch.empty(N).uniform_(-1, 1).mul(torch.log(torch.tensor(4 / 3))).exp().sqrt()
    half = torch.stack([area.sqrt() * ratio, area.sqrt() / ratio], dim=1).clamp_max(1)  # of width and height
    centre = (2 * torch.rand(N, 2) - 1) * (1 - half)
    mirror = torch.where(torch.rand(N) < 0.5, -1.0, 1.0)
    theta = torch.zeros(N, 2, 3)
    theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = half[:, 0] * mirror, half[:, 1], centre
    grid = F.affine_grid(theta, [N, 3, size, size], align_corners=False).to(images.device)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _coloured(images: Tensor, colour: float) -> Tensor:
    """Scales brightness, contrast and saturation of each image by factors from 1 - colour to 1 + colour."""
    factors = torch.empty(3, len(images), 1, 1, 1).uniform_(1 - colour, 1 + colour).to(images.device)
    brightness, contrast, saturation = factors
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    grey = images.mean(dim=1, keepdim=True)
    saturated = grey + saturation * (images - grey)
    return (brightness * (mean + contrast * (saturated - mean))).clamp(0, 255)


def _with_holes(images: Tensor, hole: float) -> Tensor:
    """A grey square in half of the images."""
    N, size = len(images), images.shape[-1]
    side = round(hole * size)
    corner = (torch.rand(N, 2) * (size - side + 1)).long()
    corner[torch.rand(N) < 0.5] = size  # outside the image: no square
    place = torch.arange(size) - corner[:, :, None]  # [N, 2, size]
    inside = (place >= 0) & (place < side)
    masked = (inside[:, 0, :, None] & inside[:, 1, None, :]).to(images.device)
    return images.masked_fill(masked[:, None], 127.0)
