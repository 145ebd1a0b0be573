"""Codebook, scale and offset of a layer: parameters that an optimiser trains, or buffers that follow x."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from . import checks, ema
from .backends.types import Parameters

_AVERAGES = ("codebook", "w", "free_scale", "offset")  # what update="ema" changes, as far as the layer has it
LEVELS = "_levels"  # in a state dict, where no shape tells the number of levels if they share a scale
_MAX_LEVELS = 1 << 16  # that a file may claim
_STATE = ("_mass", "_gain", "_batches", *(f"_{name}_change" for name in _AVERAGES))


class LayerParameters(nn.Module):
    """codebook [K, D], w or free_scale [M - 1], offset [D] or None.

    With update="gradient" they are parameters. With update="ema" they are buffers, and every forward in training mode
    calls `_move` before it computes and `_follow` after it.
    """

    codebook: Tensor
    w: Tensor | None
    free_scale: Tensor | None
    offset: Tensor | None
    _mass: Tensor
    _gain: Tensor
    _batches: Tensor

    def __init__(self, dim: int, codewords: int, levels: int, *, free_scale: bool, offset: bool, update: str) -> None:
        super().__init__()
        self.dim, self.codewords, self.levels, self.update = dim, codewords, levels, update
        averages = update == "ema"
        values = {
            "codebook": torch.randn(codewords, dim) / math.sqrt(dim),
            "w": None if free_scale else torch.tensor(0.7),
            "free_scale": 0.7 ** torch.arange(1.0, levels) if free_scale else None,
            "offset": torch.zeros(dim) if offset else None,
        }
        for name, value in values.items():
            if value is None:
                setattr(self, name, None)  # not a buffer that is None, which torch.export cannot count
            elif averages:
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value))
        state = {
            "_mass": torch.zeros(codewords),
            "_gain": torch.zeros(codewords),
            "_batches": torch.tensor(0),
            **{f"_{name}_change": None if value is None else torch.zeros_like(value) for name, value in values.items()},
        }
        for name, value in state.items():
            if averages and value is not None:
                self.register_buffer(name, value)
            else:
                setattr(self, name, None)

    @property
    def scale(self) -> Tensor:
        """The factor of each level, [levels]."""
        if self.w is not None:
            return self.w ** torch.arange(self.levels, device=self.w.device)
        assert self.free_scale is not None
        return torch.cat([self.free_scale.new_ones(1), self.free_scale])

    def _follows(self) -> bool:
        """Whether this forward changes the averages.

        It does not in the second forward of activation checkpointing, which is part of a backward pass, nor in
        inference mode or under torch.func, whose tensors must not be kept.
        """
        if self.update != "ema" or not self.training:
            return False
        if torch.compiler.is_compiling():
            return True
        plain = torch._C._functorch.peek_interpreter_stack() is None and not torch.is_inference_mode_enabled()
        return plain and torch._C._current_graph_task_id() == -1

    def _move(self) -> None:
        """Adds what the last batch changed. Makes new tensors, because graphs of earlier batches may hold the old."""
        for name in _AVERAGES:
            value, change = getattr(self, name), getattr(self, f"_{name}_change")
            if value is not None:
                setattr(self, name, value + change)

    @torch.no_grad()
    def _follow(self, x: Tensor, codes: Tensor, residuals: Tensor, codec: Parameters, weights: Tensor) -> None:
        """Keeps what this batch changes for the next one: see `ema.change`.

        Until then `decode` gives what forward returned, and checkpointing computes the same again.
        """
        averages = ema.Averages(self._mass, self._gain)
        change = ema.change(x, codes, residuals, codec, weights, averages, self._batches)
        changes = {"codebook": change.codebook, "offset": change.offset}
        L = codes.shape[1]
        if self.w is not None and L > 1:
            changes["w"] = ema.shared_factor(codec.scale + change.scale) - self.w
        elif self.w is not None:
            changes["w"] = torch.zeros_like(self.w)  # one level says nothing about it
        else:
            changes["free_scale"] = nn.functional.pad(change.scale[1:], (0, self.levels - L))
        for name, value in changes.items():
            if value is not None:
                setattr(self, f"_{name}_change", value.to(self.codebook.dtype))
        most = torch.finfo(self._mass.dtype).max
        self._mass, self._gain = (each.clamp_max(most).to(self._mass.dtype) for each in change.averages)
        self._batches = self._batches + 1

    def forget(self) -> None:
        """Starts the averages anew: call it after setting codewords by hand."""
        for name in _STATE:
            if getattr(self, name) is not None:
                getattr(self, name).zero_()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + LEVELS] = torch.tensor(self.levels)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        levels = int(state_dict.pop(prefix + LEVELS, self.levels))  # older versions have none
        if levels != self.levels:
            checks.fail("load_state_dict", "levels", f"{self.levels}, as in this layer", levels)
        for name in _STATE:  # older versions have none, nor have layers with the other `update`
            if getattr(self, name) is None:
                state_dict.pop(prefix + name, None)
            else:
                state_dict.setdefault(prefix + name, torch.zeros_like(getattr(self, name)))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def check_sizes(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """ValueError unless the sizes in the config of a file are those of its tensors."""
    codebook, K, D, M = tensors["codebook"], config["codewords"], config["dim"], config["levels"]
    checks.floating("load", "codebook", codebook)
    if list(codebook.shape) != [K, D]:
        checks.fail("load", "codebook", f"[{K}, {D}]", checks.shape_of(codebook))
    free = tensors.get("free_scale")
    if free is None:  # nothing of this size is stored
        checks.integer("load", "levels", M, 1, _MAX_LEVELS)
    elif list(free.shape) != [M - 1]:
        checks.fail("load", "free_scale", f"[{M - 1}]", checks.shape_of(free))
