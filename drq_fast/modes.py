"""Torch's modes, switched off around what computes or keeps a state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@contextmanager
def plain(device: torch.device) -> Iterator[None]:
    """No gradients, no autocast and no inference mode within: full precision, and tensors that may change later."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def plainly(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The method of an object with a `codebook`, in `plain` as a whole."""

    @functools.wraps(method)
    def run(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        owner: Any = arguments[0]
        with plain(owner.codebook.device):
            return method(*arguments, **options)

    return run
