"""Switches torch's global modes (gradients, autocast, inference mode, TF32) off inside the library."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Since torch 2.9 each library has a switch of its own, beside the older one for all of them.
_SWITCHES = [
    library.matmul
    for library in (torch.backends.cuda, torch.backends.mkldnn)
    if hasattr(getattr(library, "matmul", None), "fp32_precision")
]
_REDUCED = ("tf32", "bf16")


class _Precision(NamedTuple):
    """How torch multiplies float32 matrices."""

    of_all: str | None  # the older switch; None where torch refuses to read it, because a newer one contradicts it
    of_each: list[str]

    @property
    def reduced(self) -> bool:
        """Whether anything multiplies in less than float32."""
        if not self.of_each:
            return self.of_all != "highest"
        return any(precision in _REDUCED for precision in self.of_each)


def _precision() -> _Precision:
    try:
        of_all = torch.get_float32_matmul_precision()
    except RuntimeError:
        of_all = None
    return _Precision(of_all, [switch.fp32_precision for switch in _SWITCHES])


def _set_full_precision(found: _Precision) -> None:
    """By the switch that the user took, so that torch still reads it without complaint."""
    if found.of_all not in (None, "highest"):
        torch.set_float32_matmul_precision("highest")
    for switch in _SWITCHES:
        if switch.fp32_precision in _REDUCED:
            switch.fp32_precision = "ieee"


def _set_precision(wanted: _Precision) -> None:
    if wanted.of_all not in (None, "highest"):
        torch.set_float32_matmul_precision(wanted.of_all)
    for switch, precision in zip(_SWITCHES, wanted.of_each, strict=True):
        if switch.fp32_precision != precision:
            switch.fp32_precision = "none"  # what torch.backends.fp32_precision says, if that is it
        if switch.fp32_precision != precision:
            switch.fp32_precision = precision


class _Switched:
    """The switches belong to the whole process: the first thread that needs float32 sets them, the last resets them."""

    lock = threading.Lock()
    threads = 0
    before: _Precision
    within: _Precision


@contextmanager
def full_float32() -> Iterator[None]:
    """A context in which torch multiplies matrices of float32 without TF32 or bfloat16, whatever its switches say."""
    with _Switched.lock:
        if needed := _Switched.threads > 0 or (found := _precision()).reduced:
            if _Switched.threads == 0:
                _set_full_precision(found)
                _Switched.before, _Switched.within = found, _precision()
            _Switched.threads += 1
    try:
        yield
    finally:
        if needed:
            with _Switched.lock:
                _Switched.threads -= 1
                if _Switched.threads == 0 and _precision() == _Switched.within:  # else somebody has set them meanwhile
                    _set_precision(_Switched.before)


def precise(device_type: str) -> AbstractContextManager[Any]:
    """A context without autocast, in which float32 is multiplied as float32. Compiled code follows torch's switches."""
    off = torch.autocast(device_type, enabled=False)
    return off if torch.compiler.is_compiling() else _both(off)


@contextmanager
def _both(autocast_off: torch.autocast) -> Iterator[None]:
    with autocast_off, full_float32():
        yield


@contextmanager
def plain(device: torch.device) -> Iterator[None]:
    """Disables gradients, autocast, inference mode and TF32: full precision, and tensors that can be modified later."""
    with torch.inference_mode(False), torch.no_grad(), precise(device.type):
        yield


def plainly(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorator for a method of an object with a `codebook`: runs all of it in `plain`."""

    @functools.wraps(method)
    def run(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        owner: Any = arguments[0]
        with plain(owner.codebook.device):
            return method(*arguments, **options)

    return run
