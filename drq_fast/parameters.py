"""Codebook, scale and offset of a layer: parameters that an optimiser trains, or buffers that follow x."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from . import checks, devices, ema
from .backends.types import Parameters, powers_of

_AVERAGES = ("codebook", "w", "free_scale", "offset")  # what update="ema" changes, as far as the layer has it
LEVELS = "_levels"  # in a state dict, where no shape tells the number of levels if they share a scale
CODEBOOKS = "_codebooks"  # there as well, unless it is 1: G codebooks of K rows have the shape of one of G * K
_MAX_LEVELS = 1 << 16  # that a file may claim
_STATE = ("_mass", "_gain", "_batches", *(f"_{name}_change" for name in _AVERAGES))


class LayerParameters(nn.Module):
    """codebook [G * K, D], w or free_scale [M - G], offset [D] or None. Groups of levels share K codewords each, and
    the first level of a group has the factor 1.

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

    def __init__(
        self,
        dim: int,
        codewords: int,
        levels: int,
        *,
        groups: tuple[int, ...],
        free_scale: bool,
        offset: bool,
        update: str,
    ) -> None:
        super().__init__()
        self.dim, self.codewords, self.levels, self.update = dim, codewords, levels, update
        self.groups, self.codebooks = groups, groups[-1] + 1
        self.powers = powers_of(groups)
        averages, rows = update == "ema", self.codebooks * codewords
        values = {
            "codebook": torch.randn(rows, dim) / math.sqrt(dim),
            "w": None if free_scale else torch.tensor(0.7),
            "free_scale": 0.7 ** torch.tensor([float(p) for p in self.powers if p]) if free_scale else None,
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
            "_mass": torch.zeros(rows),
            "_gain": torch.zeros(rows),
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
            return self.w ** devices.tensor_of(self.powers, torch.int64, self.w.device)
        assert self.free_scale is not None
        free, one = iter(self.free_scale.split(1)), self.free_scale.new_ones(1)
        return torch.cat([next(free) if power else one for power in self.powers])

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
        """Adds what the last batch changed."""
        for name in _AVERAGES:
            value, change = getattr(self, name), getattr(self, f"_{name}_change")
            if value is not None:
                self._replace(name, value + change)

    def _replace(self, name: str, value: Tensor) -> None:
        """Makes `value` a buffer: a new one, because graphs of earlier batches may hold the old.

        In place while a CUDA graph is captured, so that each replay goes on from the one before.
        """
        if devices.captures(value.device):
            getattr(self, name).copy_(value)
        else:
            setattr(self, name, value)

    @torch.no_grad()
    def _follow(self, x: Tensor, codes: Tensor, residuals: Tensor, codec: Parameters, weights: Tensor) -> None:
        """Keeps what this batch changes for the next one: see `ema.change`.

        Until then `decode` gives what forward returned, and checkpointing computes the same again.
        """
        L, rows, others = codes.shape[1], len(codec.codebook), len(self.codebook) - len(codec.codebook)
        averages = ema.Averages(self._mass[:rows], self._gain[:rows])
        change = ema.change(x, codes, residuals, codec, weights, averages, self._batches)
        codebook = nn.functional.pad(change.codebook, (0, 0, 0, others)) if others else change.codebook
        changes = {"codebook": codebook, "offset": change.offset}
        if self.w is not None and any(self.powers[:L]):
            changes["w"] = ema.shared_factor(codec.scale + change.scale, self.powers[:L]) - self.w
        elif self.w is not None:
            changes["w"] = torch.zeros_like(self.w)  # first levels of groups say nothing about it
        else:
            free = tuple(m for m, power in enumerate(self.powers) if power)
            places = devices.tensor_of(free, torch.int64, change.scale.device)  # a list would be copied from the host
            changes["free_scale"] = nn.functional.pad(change.scale, (0, self.levels - L)).index_select(0, places)
        for name, value in changes.items():
            if value is not None:
                self._replace(f"_{name}_change", value.to(self.codebook.dtype))
        most = torch.finfo(self._mass.dtype).max
        mass, gain = (each.clamp_max(most).to(self._mass.dtype) for each in change.averages)
        if others:
            mass, gain = torch.cat([mass, self._mass[rows:]]), torch.cat([gain, self._gain[rows:]])
        for name, value in {"_mass": mass, "_gain": gain, "_batches": self._batches + 1}.items():
            self._replace(name, value)

    def forget(self) -> None:
        """Starts the averages anew: call it after setting codewords by hand."""
        for name in _STATE:
            if getattr(self, name) is not None:
                getattr(self, name).zero_()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + LEVELS] = torch.tensor(self.levels)
        if self.codebooks > 1:
            destination[prefix + CODEBOOKS] = torch.tensor(self.codebooks)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        levels = int(state_dict.pop(prefix + LEVELS, self.levels))  # older versions have none
        if levels != self.levels:
            checks.fail("load_state_dict", "levels", f"{self.levels}, as in this layer", levels)
        default = 1 if prefix + "codebook" in state_dict else self.codebooks  # a state may have no codebook
        codebooks = int(state_dict.pop(prefix + CODEBOOKS, default))
        if codebooks != self.codebooks:
            checks.fail("load_state_dict", "codebooks", f"{self.codebooks}, as in this layer", codebooks)
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
    checks.integer("load", "levels", M, 1, _MAX_LEVELS)  # nothing of this size may be stored
    G = checks.groups("load", config.get("codebooks", 1), M)[-1] + 1
    if list(codebook.shape) != [G * K, D]:
        checks.fail("load", "codebook", f"[{G * K}, {D}]", checks.shape_of(codebook))
    free = tensors.get("free_scale")
    if free is not None and list(free.shape) != [M - G]:
        checks.fail("load", "free_scale", f"[{M - G}]", checks.shape_of(free))
