"""Checkpoints: model, optimiser and position of a training in one file, written atomically."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import files
from .settings import NEW_IN_CONFIG

# What has changed if a setting that a checkpoint records as a checksum is another.
_CHECKSUMS = {
    "rows": "the data have changed (other items to train on)",
    "labels": "the data have changed (other labels)",
    "items": "the data have changed (other images or features)",
    "words": "the word vectors have changed",
    "backbone": "the backbone has changed",
}


def make_folder(folder: Path) -> None:
    """Creates the folder of a run and removes temporary files of killed runs; raises OSError if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        files.remove_remains(folder)
    except OSError as error:
        raise type(error)(f"train: {folder} cannot be written to: {error.strerror or error}.") from error


def save(
    path: Path,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    run: dict[str, Any],
    position: dict[str, Any],
    average: dict[str, Tensor],
) -> None:
    """Writes a checkpoint atomically. run: settings that a resumed run must share. average: of weights, by name."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for number, state in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{number}.{name}": value for name, value in state.items()}
    tensors |= {f"average.{name}": value for name, value in average.items()}
    tensors = {
        name: value.clone() for name, value in tensors.items()
    }  # safetensors refuses parameters that share memory
    files.write(path, "training", tensors, {"run": run, "position": position})


def restore(
    path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, run: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Restores model and optimiser and returns the position, which the caller checks, and the average of weights.

    Raises FileError for a checkpoint of another run, and if its contents are not those of a checkpoint.
    """
    tensors, stored, _ = files.read(path, "training")
    with files.describing(path, "a training"):
        found, position = _flat(dict(stored["run"])), dict(stored["position"])
    new = {f"config.{name}": None for name in NEW_IN_CONFIG}  # what `run` leaves out, a checkpoint must not have either
    wanted = new | _flat(json.loads(json.dumps(run)))
    for name in wanted:
        if found.get(name) != wanted[name]:
            if name in _CHECKSUMS:
                raise files.FileError(f"train: {_CHECKSUMS[name]} since {path} was written; train in a new folder.")
            there, here = found.get(name), wanted[name]
            raise files.FileError(f"train: {path} belongs to another run: {name} is {there} there and {here} here.")
    weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    expected = model.state_dict()
    for name in sorted({*weights, *expected}):
        if name not in weights or name not in expected or weights[name].shape != expected[name].shape:
            raise files.FileError(f"train: {path} belongs to another model: it differs in {name!r}.")
    with files.describing(path, "a training"):
        state = _optimiser_state(tensors, [p for group in optimiser.param_groups for p in group["params"]])
    average = {name.removeprefix("average."): t for name, t in tensors.items() if name.startswith("average.")}
    if any(name not in expected or expected[name].shape != value.shape for name, value in average.items()):
        raise files.FileError(f"train: {path} belongs to another model: it differs in the average of weights.")
    model.load_state_dict(weights)
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    return position, {name: value.to(expected[name].device) for name, value in average.items()}


def _optimiser_state(tensors: dict[str, Tensor], parameters: list[Tensor]) -> dict[int, dict[str, Tensor]]:
    """Adam's state by the number of the parameter; ValueError unless each is complete and has the right shapes."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimiser."):
            _, place, entry = name.split(".")
            state.setdefault(int(place), {})[entry] = value
    for number, entries in state.items():
        if not 0 <= number < len(parameters):
            raise ValueError(f"it has a state of parameter {number}")
        shape = parameters[number].shape
        if {name: t.shape for name, t in entries.items()} != {"step": (), "exp_avg": shape, "exp_avg_sq": shape}:
            raise ValueError(f"the state of parameter {number} is incomplete")
    return state


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested settings to dotted names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
