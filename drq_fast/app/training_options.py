"""The options of `drq-fast train`: the fields of Settings and Config, with their choices and defaults in words."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from typing import Any

from ..constants import METRICS
from ..retrieval.settings import (
    ABLATIONS,
    FOR_FEATURES,
    FOR_IMAGES,
    MINING,
    PATHS,
    PROTOCOLS,
    SCHEDULES,
    Config,
    Settings,
)

_CHOICES = {
    "protocol": tuple(PROTOCOLS),
    "ablation": tuple(ABLATIONS),
    "metric": METRICS,
    "schedule": SCHEDULES,
    "mining": MINING,
}


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds every field as an option; if it is not given, the namespace does not have it."""
    for title, options in (("data and network", Settings), ("training", Config)):
        group, kinds = parser.add_argument_group(title), typing.get_type_hints(options)
        for field in dataclasses.fields(options):
            _setting(group, field, kinds[field.name])


def _setting(group: Any, field: dataclasses.Field[Any], kind: Any) -> None:
    name = field.name
    keywords: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(field)}
    if kind is bool:
        keywords["action"] = argparse.BooleanOptionalAction
    elif name == "data":
        keywords |= {"nargs": "+", "metavar": "PATH"}
    elif name in PATHS:
        keywords["metavar"] = "PATH"
    elif name == "epochs":
        keywords |= {"nargs": 3, "type": int, "metavar": "int"}
    else:
        plain = next((part for part in typing.get_args(kind) if part is not type(None)), kind)  # `int | None` -> int
        keywords |= {"type": plain, "metavar": plain.__name__}
        if name in _CHOICES:
            keywords |= {"choices": _CHOICES[name], "metavar": name}
    group.add_argument(f"--{name.replace('_', '-')}", **keywords)


def _help(field: dataclasses.Field[Any]) -> str:
    """What a setting means, its choices, and the default of a run on features and of one on images."""
    text, choices = _HELP[field.name], _CHOICES.get(field.name)
    text += f": {', '.join(choices)}" if choices else ""
    features, images = (_typed(preset.get(field.name, field.default)) for preset in (FOR_FEATURES, FOR_IMAGES))
    default = _DEFAULTS.get(
        field.name, features if features == images else f"{features} for features, {images} for images"
    )
    return f"{text} (default: {default})" if default else text


def _typed(value: Any) -> str:
    """A default as it is typed; "" if there is none."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "" if value in (None, dataclasses.MISSING) else f"{value:g}" if isinstance(value, float) else str(value)


_HELP = {
    "data": "a folder, a file or several lists of images",
    "labels": "for features in a .npy: class numbers [N] or flags [N, C] in a .npy",
    "root": "folder that the paths in lists of images are relative to",
    "classes": "for lists of images: a text file with the names of the classes, one per line",
    "words": "vectors of the class names: a matrix, or a text file of word vectors",
    "protocol": "how training images, queries and database are drawn",
    "train": "training images, per class or in total as in the protocol",
    "query": "queries, per class or in total as in the protocol",
    "backbone": "network for images: efficientnet-lite0, or a state dict file of torchvision's AlexNet",
    "size": "height and width of images as the network sees them, in pixels",
    "hidden": "for features: width of the layer above them",
    "dropout": "for features: dropout of this layer, at least 0 and below 1",
    "dim": "dimensions of the vectors that are quantized, fc8 and fc9 together",
    "codewords": "codewords K in the shared codebook",
    "levels": "levels M: rounds of quantization",
    "ablation": "the row of the paper's ablation table",
    "metric": "metric that items are ranked by",
    "test_size": "height and width of images after training, in pixels",
    "stage_one": "folder for the result of stage 1, which runs can share; stages 2 and 3 then train on its features",
    "epochs": "epochs of each stage: features alone, one level of codes, all levels",
    "batch": "items in a batch, over all processes",
    "rate": "learning rate of the new layers",
    "backbone_rate": "learning rate of the backbone",
    "schedule": "whether the learning rates fall to 0 (cosine) or stay (constant)",
    "weight_decay": "weight decay of Adam",
    "margin": "margin of the triplet loss",
    "mining": "how the negatives of triplets are chosen in a batch",
    "semantic": "weight of the adaptive margin loss l_s",
    "triplet": "weight of the triplet loss l_t",
    "quantization": "weight of the loss of the quantizer",
    "detach": "keep the loss of the quantizer from training the network",
    "freeze_norms": "keep the weights and statistics of batch norms",
    "augment": "for images: train on random crops, mirrored and in other colours",
    "crop": "least fraction of the area that random crops have",
    "colour": "how much brightness, contrast and saturation change, at most",
    "hole": "side of the grey square that half of the images get, relative to the image",
    "average": "decay per step, below 1, of a running average that replaces the weights at the end; 0 for none",
    "amp": "compute the network in bfloat16",
    "workers": "processes that read images; 0 reads them in this process",
    "checkpoint_seconds": "seconds between two checkpoints",
    "seed": "seed of split and training",
}
_PROTOCOL = PROTOCOLS[Settings.protocol]
_DEFAULTS = {
    "root": "the folder of the first list",
    "words": "all classes are equally far apart",
    "train": f"the protocol's, {_PROTOCOL.train} per class for {Settings.protocol}",
    "query": f"the protocol's, {_PROTOCOL.query} per class for {Settings.protocol}",
    "codewords": "the protocol's, 256 or 4096; cifar10-1 has several, so choose one",
    "metric": "ip, or l2 for unsupervised",
    "test_size": "--size",
}
