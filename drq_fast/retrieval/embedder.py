"""The trained network of a run, which turns new images into vectors to search with."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import checks, files
from ..files import FileError
from ..quantizer import RecurrentQuantizer
from .backbones import at_size, fill
from .datasets import pictures, pictures_in
from .experiment import check_quantizer, image_backbone, side
from .model import Model
from .settings import Settings
from .train import CHECKPOINT, features

CONFIG, MODEL = "config.json", "model.drq"


class Embedder:
    """Embeds images as `drq-fast evaluate` does: the same crop, size, network and precision.

    It needs the folder of the run and not the images of its training, so both may have moved.

    >>> embedder = Embedder.load("run")
    >>> x = embedder.embed(["photo.png", "folder"])  # [N, dim] float32
    >>> scores, ids = drq_fast.Index.load("run/index.drq").search(x, k=10)
    """

    def __init__(self, model: Model, side: int, amp: bool, size: int | None = None) -> None:
        self.model, self.side, self.amp, self.size = model.eval(), side, amp, size

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Embedder:
        """The network of a run that `drq-fast train` has trained on images."""
        run = Path(folder)
        for name in (CONFIG, MODEL):
            if not (run / name).exists():
                raise FileNotFoundError(f"load: {run / name} does not exist; `drq-fast train` makes it.")
        config = files.read_object("load", run / CONFIG)
        if config.get("command") != "train":
            raise FileError(f"load: {run} was fitted to vectors, so it has no network for images.")
        with files.describing(run / CONFIG, "a training"):
            settings, training = Settings.of_run(config)
        if settings.of_features:
            raise FileError(f"load: {run} was trained on features, so it has no network for images.")
        quantizer = RecurrentQuantizer.load(run / MODEL)
        return cls(_model(run, settings, quantizer), _side(run, settings, config), training.amp, settings.test_size)

    def embed(self, images: Any) -> Tensor:
        """x [N, dim] in float32 of N images, computed with a progress bar.

        images: the name of a file or of a folder of images, Pillow's image, or several of these; or arrays uint8
        [H, W] or [H, W, 3], one or several. A folder stands for all images in it, in the order of `image_paths`.
        """
        with at_size(self.model.backbone, self.size):
            return features(self.model, pictures(image_paths(images), self.side), amp=self.amp)


def _is_one(images: Any) -> bool:
    """Whether an array is one image, [H, W] or [H, W, 3], rather than several."""
    dimensions = getattr(images, "ndim", 0)
    return dimensions == 2 or (dimensions == 3 and images.shape[2] == 3)


def image_paths(images: Any) -> list[Any]:
    """A list of images, in which the files of a folder, sorted by name, replace it."""
    one = isinstance(images, (str, os.PathLike)) or not isinstance(images, Iterable) or _is_one(images)
    found: list[Any] = []
    for image in [images] if one else images:
        if isinstance(image, (str, os.PathLike)) and Path(image).is_dir():
            inside = pictures_in(Path(image))
            if not inside:
                checks.fail("embed", str(image), "a folder of images", "a folder without any")
            found += inside
        else:
            found.append(image)
    if not found:
        checks.fail("embed", "images", "at least one", "none")
    return found


def _model(run: Path, settings: Settings, quantizer: RecurrentQuantizer) -> Model:
    """The trained network; one without a head has only its quantizer from the training."""
    sizes: dict[str, Any] = {"dim": settings.dim, "codewords": settings.codewords, "levels": settings.levels}
    if settings.ablation == "unsupervised":
        model = Model(image_backbone(settings), torch.ones(1, 1), ablation=settings.ablation, **sizes)
        model.quantizer.load_state_dict(quantizer.state_dict())
        return model
    path = run / CHECKPOINT
    if not path.exists():
        raise FileNotFoundError(f"load: {path} does not exist, so the network is lost; train again.")
    weights = _weights(path)
    if settings.stage_one is not None:
        earlier = _weights(Path(settings.stage_one) / CHECKPOINT)
        weights |= {name: value for name, value in earlier.items() if name.startswith("backbone.")}
    with files.describing(path, "a training"):
        model = Model(image_backbone(settings, False), weights["words"], ablation=settings.ablation, **sizes)
    fill(model, weights, path)
    check_quantizer(model, quantizer, path)
    return model


def _weights(path: Path) -> dict[str, Tensor]:
    """The weights of a network in a checkpoint."""
    tensors = files.read(path, "training")[0]
    return {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}


def _side(run: Path, settings: Settings, config: dict[str, Any]) -> int:
    """The side at which the run reads images; runs of 0.1.0 do not record it."""
    if "side" in config:
        with files.describing(run / CONFIG, "a training"):
            return checks.integer("load", "side", config["side"], 1, 1 << 14)
    if not Path(settings.data[0]).exists():
        raise FileNotFoundError(
            f"load: {settings.data[0]} does not exist, and {run / CONFIG} does not have its `side`."
        )
    return side(settings)
