"""Stage 1 in a folder of its own: the network that it trains and its backbone's features of all items.

Stages 2 and 3 then train on these features, so that models with different codebooks share one fine-tuning.
"""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from .. import files
from . import datasets
from .backbones import at_size
from .datasets import FeatureArray, Items
from .model import Model
from .settings import Config
from .train import CHECKPOINT, features, train

FEATURES = "features.npz"


class StageOne(NamedTuple):
    """items: features of the backbone [N, width] with their labels; head: the weights after stage 1."""

    items: FeatureArray
    head: dict[str, Tensor]
    history: list[dict[str, float]]


class Given(nn.Identity):
    """A backbone for features [N, dim] that another one has computed."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim


def stage_one(
    model: Model, items: Items, rows: Tensor, config: Config, folder: Path, size: int | None = None
) -> StageOne:
    """Trains stage 1 of the model on these rows, then computes the features of all items; what is done is not repeated.

    After an interruption the training resumes from its checkpoint. size: of images for these features, if not that of
    the training. The file of features records network and size.
    """
    # The quantizer's settings do not matter in stage 1, so they may differ between trainings that share it.
    own = dataclasses.replace(config, epochs=(config.epochs[0], 0, 0), quantization=1.0, detach=False)
    history = train(model, items, rows, own, folder=folder)
    assert model.head is not None
    path, network = folder / FEATURES, f"{files.fingerprint(folder / CHECKPOINT, 'training')} {size}"
    if not path.exists() or str(datasets.arrays_of(path, ("network",)).get("network")) != network:
        with at_size(model.backbone, size):
            x = features(model, items, amp=config.amp, workers=config.workers, of_backbone=True)
        label, names = items.labels.numpy(), np.array(items.classes)
        _write(path, {"x": x.cpu().numpy(), "label": label, "classes": names, "network": np.array(network)})
    return StageOne(datasets.features(path), model.head.state_dict(), history)


def later(config: Config) -> Config:
    """The training of stages 2 and 3."""
    return dataclasses.replace(config, epochs=(0, *config.epochs[1:]))


def _write(path: Path, arrays: dict[str, Any]) -> None:
    content = io.BytesIO()
    np.savez(content, **arrays)
    files.write_bytes(path, content.getbuffer())
