"""Random views of images, for training only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks


def augment(images: Tensor, size: int, smallest: float = 0.6) -> Tensor:
    """Pixels [N, 3, H, W] to float [N, 3, size, size]: of each a random part, mirrored half of the time.

    The part has `smallest` to all of the area, its sides keep their ratio within 3:4 and 4:3. It is read by bilinear
    interpolation, so an image more than twice as large as `size` should be made smaller first.
    """
    checks.integer("augment", "size", size, 1)
    N = len(images)
    area = torch.empty(N).uniform_(smallest, 1)
    ratio = torch.empty(N).uniform_(-1, 1).mul(torch.log(torch.tensor(4 / 3))).exp().sqrt()
    half = torch.stack([area.sqrt() * ratio, area.sqrt() / ratio], dim=1).clamp_max(1)  # of width and height
    centre = (2 * torch.rand(N, 2) - 1) * (1 - half)
    mirror = torch.where(torch.rand(N) < 0.5, -1.0, 1.0)
    theta = torch.zeros(N, 2, 3)
    theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = half[:, 0] * mirror, half[:, 1], centre
    grid = F.affine_grid(theta, [N, 3, size, size], align_corners=False).to(images.device)
    return F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
