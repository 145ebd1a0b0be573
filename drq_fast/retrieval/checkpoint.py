"""Checkpoints: model, optimiser and position of a training in one file, written atomically."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import files


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
    path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, run: dict[str, Any], position: dict[str, Any]
) -> None:
    """Writes a checkpoint atomically. run: settings that a resumed run must share."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for number, state in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{number}.{name}": value for name, value in state.items()}
    tensors = {
        name: value.clone() for name, value in tensors.items()
    }  # safetensors refuses parameters that share memory
    files.write(path, "training", tensors, {"run": run, "position": position})


def restore(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, run: dict[str, Any]) -> dict[str, Any]:
    """Restores model and optimiser and returns the position; raises FileError for a checkpoint of another run."""
    tensors, stored, _ = files.read(path, "training")
    found, wanted = _flat(stored.get("run", {})), _flat(json.loads(json.dumps(run)))
    for name in wanted:
        if found.get(name) != wanted[name]:
            there, here = found.get(name), wanted[name]
            raise files.FileError(f"train: {path} belongs to another run: {name} is {there} there and {here} here.")
    weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    expected = model.state_dict()
    for name in sorted({*weights, *expected}):
        if name not in weights or name not in expected or weights[name].shape != expected[name].shape:
            raise files.FileError(f"train: {path} belongs to another model: it differs in {name!r}.")
    model.load_state_dict(weights)
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimiser."):
            _, number, entry = name.split(".")
            state.setdefault(int(number), {})[entry] = value
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    return stored["position"]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested settings to dotted names."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
