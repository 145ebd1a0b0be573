"""Torch's modes, switched off around what computes or keeps a state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def plain(device: torch.device) -> Iterator[None]:
    """No gradients, no autocast and no inference mode within: full precision, and tensors that may change later."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
