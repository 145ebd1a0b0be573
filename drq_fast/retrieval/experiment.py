"""The paper's experiment as settings that a file can hold: data, protocol, network and training."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..files import FileError
from ..quantizer import RecurrentQuantizer
from ..run import Run
from . import datasets
from .backbones import AlexNet, EfficientNetLite0, Precomputed
from .datasets import Items
from .model import ABLATIONS, Model
from .protocols import PROTOCOLS, Split, split
from .train import CHECKPOINT, Config, features, train

# What the tables of docs/results.md were made with.
FROM_FEATURES = Config(epochs=(20, 5, 10), margin=0.5, semantic=3.0, backbone_rate=1e-3)
FROM_IMAGES = Config(
    epochs=(14, 4, 10), margin=0.5, semantic=3.0, backbone_rate=5e-4, batch=64, weight_decay=0.01, amp=True
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What an experiment is made of, but for the training's Config.

    data: CIFAR-10's folder, a folder of images by class, a file of features, or lists of images (with `root`).
    labels: of features in an `.npy`. words: vectors of class names. train, query: how many per class, or in all, where
    not the protocol's. backbone: "efficientnet-lite0" or a state dict file of AlexNet, for images of `size` pixels;
    `hidden` and `dropout` are of the layer above given features. metric: what items are ranked by; by default "ip", as
    the authors did, or "l2" where nothing is learnt from labels.
    """

    data: tuple[str, ...]
    labels: str | None = None
    root: str | None = None
    words: str | None = None
    protocol: str = "cifar10-2"
    train: int | None = None
    query: int | None = None
    backbone: str = "efficientnet-lite0"
    size: int = 128
    hidden: int = 2048
    dropout: float = 0.5
    dim: int = 2048
    codewords: int | None = None
    levels: int = 4
    ablation: str = "none"
    metric: str | None = None

    def __post_init__(self) -> None:
        op = "train"
        data = (self.data,) if isinstance(self.data, str) else self.data
        if not isinstance(data, (list, tuple)) or not data or not all(isinstance(path, (str, Path)) for path in data):
            checks.fail(op, "data", "the name of a folder or a file, or of several files", repr(data))
        object.__setattr__(self, "data", tuple(str(path) for path in data))  # a list from JSON becomes what it was
        for name in ("labels", "root", "words", "backbone"):
            value = getattr(self, name)
            if not isinstance(value, (str, Path)) and (value is not None or name == "backbone"):
                checks.fail(op, name, "the name of a file", repr(value))
        for name in ("size", "hidden", "dim", "levels"):
            object.__setattr__(self, name, checks.integer(op, name, getattr(self, name), 1, 1 << 20))
        for name in ("train", "query"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, checks.integer(op, name, getattr(self, name), 0))
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            checks.fail(op, "dropout", "at least 0 and below 1", repr(self.dropout))
        checks.choice(op, "protocol", self.protocol, tuple(PROTOCOLS))
        checks.choice(op, "ablation", self.ablation, tuple(ABLATIONS))
        metric = self.metric or ("l2" if self.ablation == "unsupervised" else "ip")
        checks.choice(op, "metric", metric, checks.METRICS)
        object.__setattr__(self, "metric", metric)
        known = PROTOCOLS[self.protocol].codewords
        if self.codewords is None:
            if len(known) > 1:
                checks.fail(
                    op, "codewords", f"chosen for {self.protocol}, one of {', '.join(map(str, known))}", "nothing"
                )
            object.__setattr__(self, "codewords", known[0])
        codewords = checks.integer(op, "codewords", self.codewords, 2, checks.MAX_CODEWORDS)
        object.__setattr__(self, "codewords", codewords)

    def resolved(self) -> Settings:
        """The same with absolute paths, which hold wherever a run is looked at."""
        names = {name: getattr(self, name) for name in ("labels", "root", "words")}
        if self.backbone != "efficientnet-lite0":
            names["backbone"] = self.backbone
        paths: dict[str, Any] = {name: str(Path(path).resolve()) for name, path in names.items() if path}
        return dataclasses.replace(self, data=tuple(str(Path(path).resolve()) for path in self.data), **paths)

    @property
    def of_features(self) -> bool:
        """Are the data features, not images?"""
        return Path(self.data[0]).suffix in (".npy", ".npz")

    @property
    def config(self) -> Config:
        """How such data are trained by default."""
        return FROM_FEATURES if self.of_features else FROM_IMAGES


class Experiment:
    """Items, their split and the network that the settings describe."""

    def __init__(self, settings: Settings, config: Config | None = None) -> None:
        self.settings = settings
        self.items = read_items(settings)
        self.config = config or settings.config
        if not any(self.config.epochs[1:]):
            checks.fail("train", "epochs", "at least 1 in stage 2 or 3, which learn the codebook", self.config.epochs)
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

    @classmethod
    def of(cls, run: Run) -> Experiment:
        """The experiment of a trained run, from its config."""
        config = run.read_json(run.config, "train")
        if config.get("command") != "train":
            raise FileError(f"run: {run.folder} was fitted without labels, not trained; name the vectors to encode.")
        try:
            settings = Settings(**{field.name: config[field.name] for field in dataclasses.fields(Settings)})
            training = Config(**{field.name: config[field.name] for field in dataclasses.fields(Config)})
        except (KeyError, TypeError) as error:
            raise FileError(f"run: {run.config} does not describe a training ({error}).") from error
        return cls(settings, training)

    def model(self) -> Model:
        """The network as it is before training."""
        settings = self.settings
        torch.manual_seed(self.config.seed)
        assert settings.codewords is not None
        return Model(
            self._backbone(),
            self.words,
            dim=settings.dim,
            codewords=settings.codewords,
            levels=settings.levels,
            ablation=settings.ablation,
        )

    def _backbone(self) -> nn.Module:
        settings = self.settings
        if settings.of_features:
            width = self.items[[0]].shape[1]
            plain = settings.ablation == "unsupervised"
            return Precomputed(width) if plain else Precomputed(width, settings.hidden, settings.dropout)
        if settings.backbone == "efficientnet-lite0":
            return EfficientNetLite0(settings.size)
        return AlexNet.load(settings.backbone, size=settings.size)

    def train(self, folder: Path | None) -> tuple[Model, list[dict[str, float]]]:
        """The trained network and the losses of every epoch; goes on with what is in the folder."""
        model = self.model()
        history = train(model, self.items, self.split.train, self.config, folder=folder)
        return model, history

    def trained(self, folder: Path, quantizer: RecurrentQuantizer) -> Model:
        """The network of a training that is over; `quantizer` is what it has learnt."""
        model = self.model()
        if model.head is None:
            model.quantizer.load_state_dict(quantizer.state_dict())
            model.quantizer.initialised = True
            return model.eval()
        if not (folder / CHECKPOINT).exists():
            raise FileNotFoundError(f"run: {folder / CHECKPOINT} is not there, so the network is lost; train again.")
        train(model, self.items, self.split.train, self.config, folder=folder)
        learnt, stored = model.quantizer.state_dict(), quantizer.state_dict()
        if not all(torch.equal(value, stored[name]) for name, value in learnt.items()):
            raise FileError(f"run: {folder / CHECKPOINT} is of another training than the model beside it; train again.")
        return model

    def features(self, model: Model, rows: Tensor) -> Tensor:
        """x [n, dim] of these rows."""
        return features(model, self.items, rows, amp=self.config.amp, workers=self.config.workers)


class ItemSource:
    """The features of items as vectors to encode, read through the network."""

    def __init__(self, experiment: Experiment, model: Model, rows: Tensor) -> None:
        self.experiment, self.model, self.rows, self.dim = experiment, model, rows, model.quantizer.dim

    def __len__(self) -> int:
        return len(self.rows)

    def identity(self) -> Any:
        """The settings that decide which items these are."""
        settings = self.experiment.settings
        return dataclasses.asdict(settings) | {"seed": self.experiment.config.seed, "files": _state(settings.data)}

    def read(self, first: int, last: int) -> Tensor:
        """Features [last - first, dim]."""
        return self.experiment.features(self.model, self.rows[first:last])


def _state(paths: tuple[str, ...]) -> str:
    """What changes with the names, sizes or times of files, those in folders, too."""
    digest = hashlib.blake2b(digest_size=16)
    for path in map(Path, paths):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            state = file.stat()
            digest.update(f"{file.name} {state.st_size} {state.st_mtime_ns} ".encode())
    return digest.hexdigest()


def read_items(settings: Settings) -> Items:
    """The items of whatever kind the data are."""
    first = Path(settings.data[0])
    if not first.exists():
        raise FileNotFoundError(f"train: {first} is not there.")
    if first.is_dir():
        if len(settings.data) > 1:
            checks.fail("train", "data", "one folder, or files", f"{len(settings.data)} with a folder first")
        cifar = any((first / f"data_batch_1{suffix}").exists() for suffix in ("", ".bin"))
        return datasets.cifar10(first) if cifar else datasets.image_folder(first, _decoded(settings))
    if settings.of_features:
        if len(settings.data) > 1:
            checks.fail("train", "data", "one file of features", len(settings.data))
        return datasets.features(first, settings.labels)
    return datasets.image_list(list(settings.data), settings.root, size=_decoded(settings))


def _decoded(settings: Settings) -> int:
    """Pixels of images as they are read: at most twice as many as the network sees, so that random parts are sharp."""
    return max(settings.size, min(256, 2 * settings.size))
