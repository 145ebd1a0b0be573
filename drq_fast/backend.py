"""Which ways to compute exist here, which one is taken, and why not a faster one."""

from __future__ import annotations

import functools
import importlib
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from . import _native, checks

BACKENDS = ("torch", "native", "triton")
OPERATIONS = ("quantize", "distortion", "loss", "encode", "decode", "adc", "search")

# (operation, device type) -> the backends that implement it beside "torch", the fastest first.
FASTER: dict[tuple[str, str], tuple[str, ...]] = {
    ("quantize", "cpu"): ("native",),
    ("quantize", "cuda"): ("triton",),
    ("distortion", "cpu"): ("native",),
    ("distortion", "cuda"): ("triton",),
    ("loss", "cpu"): ("native",),
    ("loss", "cuda"): ("triton",),
    ("encode", "cpu"): ("native",),
    ("encode", "cuda"): ("triton",),
    ("decode", "cuda"): ("triton",),
    ("adc", "cpu"): ("native",),
    ("adc", "cuda"): ("native",),
    ("search", "cpu"): ("native",),
    ("search", "cuda"): ("native",),
}


class _Forced(threading.local):
    """The backend that `use_backend` set in this thread."""

    name: str | None = None


_forced = _Forced()
_warned = False


class BackendUnavailable(RuntimeError):
    """An explicitly requested backend cannot do what was asked of it here."""


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within this context, in this thread, every operation uses backend `name` or raises BackendUnavailable.

    >>> with drq_fast.use_backend("torch"):
    ...     codes = layer.encode(x)
    """
    checks.choice("use_backend", "name", name, BACKENDS)
    before, _forced.name = _forced.name, name
    try:
        yield
    finally:
        _forced.name = before


def choose(
    op: str,
    device: torch.device,
    requested: str | None = None,
    unsupported: str | None = None,
    torch_is_faster: bool = False,
) -> str:
    """The backend for `op` on `device`: the requested one, or the fastest that works here.

    unsupported: why only "torch" can take the inputs at hand, if so. torch_is_faster: for the inputs at hand.
    """
    wanted = requested or _forced.name
    explicit = wanted or os.environ.get("DRQ_FAST_BACKEND") or None
    if explicit is not None:
        name = "backend" if wanted else "DRQ_FAST_BACKEND"
        checks.choice(op, name, explicit, BACKENDS)
        reason = why_not(explicit, op, device.type) or (None if explicit == "torch" else unsupported)
        if reason is not None:
            raise BackendUnavailable(f"{op}: backend {explicit!r} cannot be used on {device.type}: {reason}.")
        return explicit
    for name in () if torch_is_faster else FASTER.get((op, device.type), ()):
        if unsupported is None and why_not(name, op, device.type) is None:
            return name
        if name == "native":
            _warn_once_if_not_built()
    return "torch"


def why_not(backend: str, op: str, device: str) -> str | None:
    """The reason why `backend` cannot do `op` on a device of this type, or None if it can."""
    if backend == "torch":
        return None
    interpreted = backend == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if backend not in FASTER.get((op, "cuda" if interpreted else device), ()):
        return f"it has no {op} for {device}"
    if backend == "native":
        return _native.why_not(device)
    if not interpreted and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return _why_no_kernels()


@functools.cache
def _why_no_kernels() -> str | None:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    try:
        importlib.import_module("drq_fast.kernels")
    except ImportError:
        return "drq_fast.kernels is not installed; run `pip install -e .` in the source tree"
    return None


def precision(op: str) -> str:
    """What Triton's matrix products of float32 use: "tf32x3", or "ieee" with DRQ_FAST_PRECISION=exact."""
    wanted = os.environ.get("DRQ_FAST_PRECISION") or "fast"
    checks.choice(op, "DRQ_FAST_PRECISION", wanted, ("fast", "exact"))
    return "ieee" if wanted == "exact" else "tf32x3"


def table(device: str) -> Iterator[tuple[str, str, str]]:
    """(operation, backend taken, why not a faster one) for a device type; the third is empty for the fastest.

    Where DRQ_FAST_BACKEND asks for one that cannot be, the second is "none" and the third the error.
    """
    forced = os.environ.get("DRQ_FAST_BACKEND")
    for op in OPERATIONS:
        if forced:
            try:
                yield op, choose(op, torch.device(device)), f"DRQ_FAST_BACKEND={forced}"
            except (ValueError, BackendUnavailable) as error:
                yield op, "none", str(error)
            continue
        reasons = [] if (op, device) in FASTER else ["nothing faster is written for it"]
        for name in FASTER.get((op, device), ()):
            reason = why_not(name, op, device)
            if reason is None:
                yield op, name, "; ".join(reasons)
                break
            reasons.append(f"{name}: {reason}")
        else:
            yield op, "torch", "; ".join(reasons)


def _warn_once_if_not_built() -> None:
    global _warned
    if _native.extension is None and not _warned:
        _warned = True
        warnings.warn(f"drq_fast runs without its native code: {_native.why_not('cpu')}.", stacklevel=4)
