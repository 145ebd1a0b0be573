"""The running average of a network's weights over the steps of a training."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Average:
    """Weights and statistics of a model, each step's with weight `decay` relative to the next one's.

    The first steps count more, so that the weights before training are soon forgotten. `values` are the averages by
    name in the model's state dict.
    """

    def __init__(self, model: nn.Module, decay: float, values: dict[str, Tensor]) -> None:
        self.model, self.decay = model, decay
        self.values = values or {name: value.clone() for name, value in self._current()}

    def add(self, step: int) -> None:
        """Adds the weights after so many steps, 1 or more."""
        rate = max(1 - self.decay, 9 / (step + 9))
        for name, value in self._current():
            self.values[name].lerp_(value, rate)

    def restart(self, prefix: str) -> None:
        """Forgets earlier values of the names with this prefix."""
        self.values |= {name: value.clone() for name, value in self._current() if name.startswith(prefix)}

    @torch.no_grad()
    def apply(self) -> None:
        """Gives the averages to the model."""
        for name, value in self._current():
            value.copy_(self.values[name])

    def _current(self) -> list[tuple[str, Tensor]]:
        return [(name, value) for name, value in self.model.state_dict().items() if value.is_floating_point()]
