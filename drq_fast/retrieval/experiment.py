"""The paper's experiment, described by settings: data, protocol, network and training."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..files import FileError
from ..quantizer import RecurrentQuantizer
from . import datasets, stage_one
from .backbones import AlexNet, EfficientNetLite0, Precomputed, at_size
from .datasets import Items
from .model import Model
from .protocols import Split, split
from .settings import NEW_SETTINGS, PROTOCOLS, Config, Settings
from .stage_one import Given, StageOne
from .train import CHECKPOINT, features, train


class Experiment:
    """The items, their split and the network of given settings."""

    def __init__(self, settings: Settings, config: Config | None = None) -> None:
        self.settings = settings
        self.items = read_items(settings)
        self.config = config or settings.config
        if not any(self.config.epochs[1:]):
            checks.fail("train", "epochs", "at least 1 in stage 2 or 3, which learn the codebook", self.config.epochs)
        if settings.stage_one is not None and (self.config.epochs[0] == 0 or settings.ablation == "unsupervised"):
            checks.fail("train", "stage_one", "left out where stage 1 trains nothing", settings.stage_one)
        self.words = datasets.read_words(settings.words, self.items.classes)
        self.split: Split = split(
            settings.protocol,
            self.items.labels,
            seed=self.config.seed,
            list_number=self.items.list_number,
            train=settings.train,
            query=settings.query,
        )
        self.R = min(PROTOCOLS[settings.protocol].R, len(self.split.database))

    def model(self) -> Model:
        """The network before training, or with `stage_one` before stage 2, on given features."""
        settings, done = self.settings, self.stage_one
        assert settings.codewords is not None
        if done is None:
            return self._model(None, settings.codewords, settings.levels)
        model = self._model(Given(done.items.x.shape[1]), settings.codewords, settings.levels)
        assert model.head is not None
        model.head.load_state_dict(done.head)
        return model

    def check(self) -> None:
        """Raises an error if an image is missing, or if the settings of the network are wrong."""
        first = Path(self.settings.data[0])
        listed = not (first.is_dir() or self.settings.of_features)
        hint = f"; paths in lists are relative to {self.settings.root or first.parent} (--root)" if listed else ""
        for path in getattr(self.items, "paths", ()):
            if not os.path.exists(path):
                raise FileNotFoundError(f"train: the image {path} is missing{hint}.")
        self._model(None, self.settings.codewords or 2, self.settings.levels)

    @functools.cached_property
    def stage_one(self) -> StageOne | None:
        """Stage 1 in its own folder, trained unless it has been; None if all stages are trained in one run."""
        if self.settings.stage_one is None:
            return None
        folder = Path(self.settings.stage_one)
        model, size = self._model(None, 2, 1), self.settings.test_size
        return stage_one.stage_one(model, self.items, self.split.train, self.config, folder, size)

    def _model(self, backbone: nn.Module | None, codewords: int, levels: int) -> Model:
        torch.manual_seed(self.config.seed)
        backbone = self._backbone() if backbone is None else backbone
        sizes: dict[str, Any] = {"dim": self.settings.dim, "codewords": codewords, "levels": levels}
        return Model(backbone, self.words, ablation=self.settings.ablation, **sizes)

    def _backbone(self) -> nn.Module:
        settings = self.settings
        if settings.of_features:
            width = self.items[[0]].shape[1]
            plain = settings.ablation == "unsupervised"
            return Precomputed(width) if plain else Precomputed(width, settings.hidden, settings.dropout)
        return image_backbone(settings)

    def train(self, folder: Path | None) -> tuple[Model, list[dict[str, float]]]:
        """The trained network and the losses of every epoch; resumes from a checkpoint in the folder."""
        first = self.settings.stage_one
        if folder is not None and first is not None and folder.resolve() == Path(first).resolve():
            checks.fail("train", "stage_one", "another folder than that of the run", first)
        model = self.model()
        history = self._train(model, folder)
        return model, history if self.stage_one is None else self.stage_one.history + history

    def _train(self, model: Model, folder: Path | None) -> list[dict[str, float]]:
        config = self.config if self.stage_one is None else stage_one.later(self.config)
        return train(model, self._inputs, self.split.train, config, folder=folder)

    @property
    def _inputs(self) -> Items:
        """What `model` is given: the items, or their features after stage 1."""
        return self.items if self.stage_one is None else self.stage_one.items

    def trained(self, folder: Path, quantizer: RecurrentQuantizer) -> Model:
        """The network of a finished training with its quantizer."""
        model = self.model()
        if model.head is None:
            model.quantizer.load_state_dict(quantizer.state_dict())
            model.quantizer.initialised = True
            return model.eval()
        if not (folder / CHECKPOINT).exists():
            raise FileNotFoundError(f"run: {folder / CHECKPOINT} does not exist, so the network is lost; train again.")
        self._train(model, folder)
        check_quantizer(model, quantizer, folder / CHECKPOINT)
        return model

    def features(self, model: Model, rows: Tensor) -> Tensor:
        """x [n, dim] of these rows."""
        with at_size(model.backbone, self.settings.test_size):
            return features(model, self._inputs, rows, amp=self.config.amp, workers=self.config.workers)


class ItemSource:
    """Vectors to encode: the features of items, computed by the network as they are read, or all at once."""

    def __init__(self, experiment: Experiment, model: Model, rows: Tensor) -> None:
        self.experiment, self.model, self.rows, self.dim = experiment, model, rows, model.quantizer.dim
        self._all: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def identity(self) -> Any:
        """The settings that identify these items."""
        return self.describe(self.experiment)

    @staticmethod
    def describe(experiment: Experiment) -> Any:
        """The identity of the items of an experiment, without a network; names of classes do not matter."""
        settings = dataclasses.asdict(experiment.settings)
        settings = {n: v for n, v in settings.items() if n != "classes" and (n not in NEW_SETTINGS or v is not None)}
        return settings | {"seed": experiment.config.seed, "files": _state(experiment.settings.data)}

    def read(self, first: int, last: int) -> Tensor:
        """Features [last - first, dim]."""
        if self._all is not None:
            return self._all[first:last]
        return self.experiment.features(self.model, self.rows[first:last])

    def all(self) -> Tensor:
        """Features [n, dim], computed once."""
        if self._all is None:
            self._all = self.experiment.features(self.model, self.rows)
        return self._all


def image_backbone(settings: Settings, weights: bool = True) -> nn.Module:
    """The backbone for images; with weights those before training."""
    if settings.backbone == "efficientnet-lite0":
        if (settings.test_size or 0) % 32:
            checks.fail("train", "test_size", "a multiple of 32", settings.test_size)
        return EfficientNetLite0(settings.size, weights)
    return AlexNet.load(settings.backbone, size=settings.size) if weights else AlexNet(size=settings.size)


def check_quantizer(model: Model, quantizer: RecurrentQuantizer, checkpoint: Path) -> None:
    """Raises FileError unless the quantizer of a network, which came from this checkpoint, is that of the run."""
    learnt, stored = model.quantizer.state_dict(), quantizer.state_dict()
    if not all(name in stored and torch.equal(value, stored[name]) for name, value in learnt.items()):
        raise FileError(f"run: {checkpoint} belongs to another training than the model; train again.")


def _state(paths: tuple[str, ...]) -> str:
    """A digest of the names, sizes and times of files, including those in folders."""
    digest = hashlib.blake2b(digest_size=16)
    for path in map(Path, paths):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            state = file.stat()
            digest.update(f"{file.name} {state.st_size} {state.st_mtime_ns} ".encode())
    return digest.hexdigest()


def read_items(settings: Settings) -> Items:
    """The items that `settings.data` names, of any kind."""
    first = Path(settings.data[0])
    if not first.exists():
        raise FileNotFoundError(f"train: {first} does not exist.")
    if settings.classes is not None and (first.is_dir() or settings.of_features):
        checks.fail("train", "classes", "left out unless the data are lists of images", settings.classes)
    if first.is_dir():
        if len(settings.data) > 1:
            checks.fail("train", "data", "one folder, or files", f"{len(settings.data)} with a folder first")
        return datasets.cifar10(first) if _is_cifar(first) else datasets.image_folder(first, side(settings))
    if settings.of_features:
        if len(settings.data) > 1:
            checks.fail("train", "data", "one file of features", len(settings.data))
        return datasets.features(first, settings.labels)
    if first.name.removesuffix(".bin") in datasets.CIFAR_BATCHES:
        raise FileError(f"train: {first} is one of six files of CIFAR-10; name the folder that holds them.")
    classes = None if settings.classes is None else datasets.read_classes(settings.classes)
    return datasets.image_list(list(settings.data), settings.root, classes, side(settings))


def _is_cifar(folder: Path) -> bool:
    return any((folder / f"data_batch_1{suffix}").exists() for suffix in ("", ".bin"))


def side(settings: Settings) -> int:
    """The side at which images are read: at most twice that of the network, so that random crops stay sharp."""
    if _is_cifar(Path(settings.data[0])):
        return 32
    return max(settings.size, settings.test_size or 0, min(256, 2 * settings.size))
