"""The settings of an experiment: data, protocol, ablation, network and training.

`drq-fast --help` reads the fields and defaults, so this module does not import torch: the checks, which do, are
imported when settings are made.
"""

from __future__ import annotations

import dataclasses
import math
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from ..constants import METRICS

MINING = ("semi_hard", "random")
SCHEDULES = ("cosine", "constant")


class Protocol(NamedTuple):
    """Counts of training images and queries, per class or in total, and the depth R of mAP@R.

    train 0: train on the whole database. codewords: the codebook sizes of the paper; each gives a model of 4 levels.
    listed: the data come as two lists, the database and the queries.
    """

    train: int
    query: int
    per_class: tuple[bool, bool]  # train, query
    train_in_database: bool
    R: int
    codewords: tuple[int, ...]
    listed: bool = False


PROTOCOLS = {
    "cifar10-1": Protocol(0, 1000, (True, True), True, 5000, (16, 64, 512, 4096)),
    "nuswide-1": Protocol(5000, 1000, (True, True), True, 5000, (4096,)),
    "cifar10-2": Protocol(500, 100, (True, True), False, 54000, (256,)),
    "nuswide-2": Protocol(10000, 5000, (False, False), True, 5000, (256,)),
    "imagenet100-2": Protocol(100, 0, (True, True), True, 5000, (256,), listed=True),
}


class Ablation(NamedTuple):
    """What one row of the ablation table keeps: layers of the head, losses, and the weights of E_h, E_s and E_j."""

    fc8: bool = True
    fc9: bool = True
    semantic: bool = True
    triplet: bool = True
    errors: tuple[float, float, float] = (1.0, 1.0, 1.0)


ABLATIONS = {
    "none": Ablation(),
    "unsupervised": Ablation(fc8=False, fc9=False, semantic=False, triplet=False),
    "no_semantic": Ablation(fc9=False, semantic=False),
    "no_triplet": Ablation(fc8=False, triplet=False),
    "soft_only": Ablation(errors=(0.0, 1.0, 0.0)),
    "no_joint": Ablation(errors=(1.0, 1.0, 0.0)),
    "no_concat": Ablation(fc8=False),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """How to train. `rate` and `backbone_rate` are Adam's learning rates of the new layers and of the backbone.

    epochs: of each stage. batch: in total over all processes. schedule: "cosine" lowers both rates to 0 over the run.
    detach: the quantizer's loss does not train head and backbone. freeze_norms: batch norms keep their weights and
    statistics. augment: train on random views, whose strength `crop`, `colour` and `hole` set (see `augment.augment`).
    average: the decay per step of a running average of the weights, which replaces them at the end; 0: none. amp:
    autocast to bfloat16. A checkpoint is written every `checkpoint_seconds`.
    """

    epochs: tuple[int, int, int] = (30, 10, 20)
    batch: int = 128
    rate: float = 1e-3
    backbone_rate: float = 1e-4
    schedule: str = "cosine"
    weight_decay: float = 0.0
    margin: float = 1.0
    mining: str = "semi_hard"
    semantic: float = 1.0
    triplet: float = 1.0
    quantization: float = 1.0
    detach: bool = False
    freeze_norms: bool = False
    augment: bool = True
    crop: float = 0.5
    colour: float = 0.3
    hole: float = 0.4
    average: float = 0.0
    amp: bool = False
    workers: int = 0
    checkpoint_seconds: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        from .. import checks

        op = "Config"
        if not isinstance(self.epochs, (tuple, list)):
            checks.fail(op, "epochs", "three numbers, one per stage", repr(self.epochs), error=TypeError)
        epochs = tuple(checks.integer(op, "epochs", epoch, 0) for epoch in self.epochs)
        if len(epochs) != 3 or not any(epochs):
            checks.fail(op, "epochs", "three numbers, one per stage and not all of them 0", self.epochs)
        # Lists from JSON become tuples, numbers of numpy become Python's.
        object.__setattr__(self, "epochs", epochs)
        for name, low in (("batch", 2), ("workers", 0), ("seed", 0)):
            object.__setattr__(self, name, checks.integer(op, name, getattr(self, name), low, (1 << 63) - 1))
        checks.choice(op, "schedule", self.schedule, SCHEDULES)
        checks.choice(op, "mining", self.mining, MINING)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "float":
                number = isinstance(value, Real) and not isinstance(value, bool)
                if not (number and 0 <= value < math.inf):
                    checks.fail(op, field.name, "a finite number of at least 0", repr(value))
                object.__setattr__(self, field.name, float(value))
                if field.name in ("crop", "colour", "hole", "average") and value > 1:
                    checks.fail(op, field.name, "at most 1", value)
            if field.type == "bool":
                object.__setattr__(self, field.name, checks.boolean(op, field.name, value))

        if self.average == 1 or self.crop == 0:
            name, expected = ("average", "below 1") if self.average == 1 else ("crop", "above 0")
            checks.fail(op, name, expected, getattr(self, name))

    def levels(self, epoch: int, M: int) -> int:
        """The number of levels that are trained in an epoch: 0 in stage 1, 1 in stage 2, M in stage 3."""
        first, second, _ = self.epochs
        return 0 if epoch < first else 1 if epoch < first + second else M


# Fields of Config for each kind of data; the tables of docs/results.md were made with them.
FOR_FEATURES: dict[str, Any] = {"epochs": (20, 5, 10), "margin": 0.5, "semantic": 3.0, "backbone_rate": 1e-3}
FOR_IMAGES: dict[str, Any] = {
    "epochs": (14, 4, 10),
    "margin": 0.5,
    "semantic": 3.0,
    "backbone_rate": 5e-4,
    "batch": 64,
    "weight_decay": 0.01,
    "amp": True,
}


# Settings that only one kind of data uses.
OF_FEATURES = ("labels", "hidden", "dropout")
OF_IMAGES = (
    *("root", "classes", "backbone", "size", "test_size", "side", "freeze_norms"),
    *("augment", "crop", "colour", "hole"),
)


PATHS = ("labels", "root", "classes", "words", "stage_one")

# Since 0.1.0, with values that change nothing.
NEW_SETTINGS: dict[str, Any] = {"classes": None, "stage_one": None, "test_size": None}
NEW_IN_CONFIG: dict[str, Any] = {"crop": 0.5, "colour": 0.3, "hole": 0.4, "average": 0.0}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Data, protocol and network of an experiment; Config has the training.

    data: CIFAR-10's folder, a folder of images by class, a file of features, or lists of images (with `root`).
    labels: of features in an `.npy`. classes: names of the classes in lists of images. words: vectors of these names.
    train, query: counts that replace the protocol's.
    backbone: "efficientnet-lite0" or a state dict file of AlexNet, for images of `size` pixels. hidden, dropout: of the
    layer above given features. metric: for ranking; by default "ip", as in the authors' code, and "l2" for the ablation
    "unsupervised". stage_one: a folder for the network after stage 1 and its backbone's features of all items, on which
    stages 2 and 3 train; runs with the same data, network and stage 1 share it. test_size: of images after training, to
    be encoded or searched for; by default `size`.
    """

    data: tuple[str, ...]
    labels: str | None = None
    root: str | None = None
    classes: str | None = None
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
    stage_one: str | None = None
    test_size: int | None = None

    def __post_init__(self) -> None:
        from .. import checks

        op = "train"
        data = (self.data,) if isinstance(self.data, str) else self.data
        if not isinstance(data, (list, tuple)) or not data or not all(isinstance(path, (str, Path)) for path in data):
            checks.fail(op, "data", "the name of a folder or a file, or of several files", repr(data))
        object.__setattr__(self, "data", tuple(str(path) for path in data))  # a list from JSON becomes a tuple
        for name in (*PATHS, "backbone"):
            value = getattr(self, name)
            if not isinstance(value, (str, Path)) and (value is not None or name == "backbone"):
                checks.fail(op, name, "the name of a file", repr(value))
        for name in ("size", "hidden", "dim", "levels"):
            object.__setattr__(self, name, checks.integer(op, name, getattr(self, name), 1, 1 << 20))
        for name, low in (("train", 0), ("query", 0), ("test_size", 1)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, checks.integer(op, name, getattr(self, name), low))
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            checks.fail(op, "dropout", "at least 0 and below 1", repr(self.dropout))
        checks.choice(op, "protocol", self.protocol, tuple(PROTOCOLS))
        checks.choice(op, "ablation", self.ablation, tuple(ABLATIONS))
        metric = self.metric or ("l2" if self.ablation == "unsupervised" else "ip")
        checks.choice(op, "metric", metric, METRICS)
        object.__setattr__(self, "metric", metric)
        known = PROTOCOLS[self.protocol].codewords
        if self.codewords is None and len(known) > 1:
            checks.fail(op, "codewords", f"chosen for {self.protocol}, one of {', '.join(map(str, known))}", "nothing")
        codewords = known[0] if self.codewords is None else self.codewords
        codewords = checks.integer(op, "codewords", codewords, 2, checks.MAX_CODEWORDS)
        object.__setattr__(self, "codewords", codewords)

    def resolved(self) -> Settings:
        """The same settings with absolute paths, which stay valid in any working directory."""
        names = {name: getattr(self, name) for name in PATHS}
        if self.backbone != "efficientnet-lite0":
            names["backbone"] = self.backbone
        paths: dict[str, Any] = {name: str(Path(path).resolve()) for name, path in names.items() if path}
        return dataclasses.replace(self, data=tuple(str(Path(path).resolve()) for path in self.data), **paths)

    @classmethod
    def of_run(cls, config: dict[str, Any]) -> tuple[Settings, Config]:
        """Settings and training of a run, from the content of its config.json; KeyError if a setting is missing."""
        config = NEW_SETTINGS | NEW_IN_CONFIG | config
        return tuple(  # type: ignore[return-value]
            kind(**{field.name: config[field.name] for field in dataclasses.fields(kind)}) for kind in (cls, Config)
        )

    @property
    def of_features(self) -> bool:
        """True if the data are features, not images."""
        return Path(self.data[0]).suffix in (".npy", ".npz")

    @property
    def config(self) -> Config:
        """The default training for such data."""
        return Config(**(FOR_FEATURES if self.of_features else FOR_IMAGES))
