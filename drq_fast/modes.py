"""Switches torch's global modes (gradients, autocast, inference mode) off inside the library."""

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
    """Disables gradients, autocast and inference mode: full precision, and tensors that can be modified later."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def plainly(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorator for a method of an object with a `codebook`: runs all of it in `plain`."""

    @functools.wraps(method)
    def run(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        owner: Any = arguments[0]
        with plain(owner.codebook.device):
            return method(*arguments, **options)

    return run
