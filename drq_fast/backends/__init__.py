"""Which backends exist here, which one is taken for an operation, and why not a faster one.

A backend is a module with a function for each operation that it can do. All take the same arguments: `backends.torch`
is plain torch and defines every operation, `backends.native` is C++ and CUDA, `backends.triton` is Triton.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch as _torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import checks
from . import native
from . import torch as plain_torch
from .native import extension
from .types import Parameters

BACKENDS = ("torch", "native", "triton")
_TRAINING = ("squared_errors", "codeword_sums", "quantize", "distortion", "loss")
OPERATIONS = (*_TRAINING, "encode", "decode", "adc", "search", "refine", "squared_norms")

# (operation, device type) -> the backend that is faster than plain torch.
FASTER: dict[tuple[str, str], str] = {
    **{(op, "cpu"): "native" for op in OPERATIONS},
    **{(op, "cuda"): "triton" for op in (*_TRAINING, "encode", "decode")},
    **{(op, "cuda"): "native" for op in ("adc", "search")},
}


class _Forced(threading.local):
    """The backend that `use_backend` set in this thread."""

    name: str | None = None


_forced = _Forced()
_warned: set[str] = set()  # types of devices


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
    device: str,
    requested: str | None = None,
    unsupported: str | None = None,
    torch_is_faster: bool = False,
) -> ModuleType:
    """The backend for `op` on a type of device: the requested one, or the fastest that works here.

    unsupported: why only plain torch can take the inputs at hand, if so. torch_is_faster: for the inputs at hand.
    """
    wanted = requested or _forced.name
    explicit = wanted or extension.environment("DRQ_FAST_BACKEND")
    if explicit is not None:
        name = "backend" if wanted else "DRQ_FAST_BACKEND"
        checks.choice(op, name, explicit, BACKENDS)
        reason = why_not(explicit, op, device) or (None if explicit == "torch" else unsupported)
        if reason is not None:
            raise BackendUnavailable(f"{op}: backend {explicit!r} cannot be used on {device}: {reason}.")
        return _module(explicit)
    faster = None if torch_is_faster else FASTER.get((op, device))
    if faster is not None and unsupported is None and why_not(faster, op, device) is None:
        return _module(faster)
    if faster == "native" and unsupported is None:
        _warn_once(op, device)
    return plain_torch


def _module(name: str) -> ModuleType:
    if name == "torch":
        return plain_torch
    if name == "native":
        return native
    from . import triton  # here, because it needs the package of that name

    return triton


def why_not(backend: str, op: str, device: str) -> str | None:
    """The reason why `backend` cannot do `op` on a device of this type, or None if it can."""
    if backend == "torch":
        return None
    interpreted = backend == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if backend != FASTER.get((op, "cuda" if interpreted else device)):
        return f"it has no {op} for {device}"
    if backend == "native":
        return extension.why_not(device)
    if not interpreted and not _torch.cuda.is_available():
        return "torch sees no CUDA device"
    return _why_no_kernels()


def _why_no_kernels() -> str | None:
    return _import_problem()


_why_no_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called, not traced by torch.compile


@functools.cache
def _import_problem() -> str | None:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    try:
        importlib.import_module("drq_fast.kernels")
    except ImportError:
        return "drq_fast.kernels is not installed; run `pip install -e .` in the source tree"
    return None


def table(device: str) -> Iterator[tuple[str, str, str]]:
    """(operation, backend taken, why not a faster one) for a device type; the third is empty for the fastest.

    Where DRQ_FAST_BACKEND asks for one that cannot be used, the second is "none" and the third the error.
    """
    forced = extension.environment("DRQ_FAST_BACKEND")
    for op in OPERATIONS:
        faster = FASTER.get((op, device))
        if forced:
            try:
                choose(op, device)
                yield op, forced, f"DRQ_FAST_BACKEND={forced}"
            except (ValueError, BackendUnavailable) as error:
                yield op, "none", str(error)
        elif faster is None:
            yield op, "torch", "nothing faster is written for it"
        else:
            reason = why_not(faster, op, device)
            yield op, *((faster, "") if reason is None else ("torch", f"{faster}: {reason}"))


def cannot_compile(codec: Parameters, *inputs: Tensor | None, registered: bool = False) -> str | None:
    """Why no compiled code may be used for these inputs, if so.

    registered: whether the operation of the Triton backend is one of torch.library, which torch.compile keeps.
    """
    if _torch.compiler.is_compiling():
        if not (registered and _takes_triton(codec.device.type)):
            return "torch.compile cannot trace it"
    elif _torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return "torch.func and forward-mode derivatives cannot see through it"
    double = codec.double
    for tensor in inputs:
        double = double or (tensor is not None and tensor.dtype is _torch.float64)
    return "it computes in float32, and an input is float64" if double else None


def _takes_triton(device: str) -> bool:
    """Whether operations on a type of device are given to Triton, as far as it has them."""
    wanted = _forced.name or extension.environment("DRQ_FAST_BACKEND")
    return device == "cuda" if wanted is None else wanted == "triton"


def cannot_differentiate(codec: Parameters, registered: bool = False) -> str | None:
    """Why compiled code without a gradient may not be used with a codec, if so; registered: see `cannot_compile`."""
    if codec.requires_grad and _torch.is_grad_enabled():
        return "it gives no gradient, and an input requires one"
    return cannot_compile(codec, registered=registered)


def cannot_quantize(x: Tensor, codec: Parameters, gamma: float | Tensor = 1.0) -> str | None:
    """Why the kernels of the levels may not be used, if so."""
    if isinstance(gamma, Tensor) and gamma.requires_grad:
        return "it gives no gradient of gamma"
    return (None if x.device.type == "cpu" else _too_many_codewords(codec)) or cannot_compile(codec, x, registered=True)


def cannot_encode(x: Tensor, codec: Parameters, beam: int) -> str | None:
    """Why the kernels of greedy codes or of a beam may not be used, if so. On the CPU only a beam needs K x K."""
    on_cpu = x.device.type == "cpu"
    too_many = _too_many_codewords(codec, extension.MAX_BEAM_CODEWORDS if on_cpu else extension.MAX_CODEWORDS)
    return (None if beam == 1 and on_cpu else too_many) or cannot_compile(codec, x, registered=True)


def cannot_search(query: Tensor, codes: Tensor, codec: Parameters, norms: Tensor | None) -> str | None:
    """Why the compiled search may not be used, if so."""
    if codes.shape[0] >= 1 << 32:
        return "it counts positions in 32 bits"
    if codes.shape[1] > extension.MAX_LEVELS and query.device.type == "cuda":
        return f"it holds {extension.MAX_LEVELS} levels, and the codes have {codes.shape[1]}"
    return cannot_compile(codec, query, norms)


def cannot_add_norms(codec: Parameters) -> str | None:
    """Why the compiled squared norms may not be used, if so."""
    return _too_many_codewords(codec) or cannot_differentiate(codec)


def _too_many_codewords(codec: Parameters, most: int | None = None) -> str | None:
    most = extension.MAX_CODEWORDS if most is None else most
    if len(codec.codebook) <= most:
        return None
    return f"it forms the inner products of all codewords, and there are more than {most}"


def choose_for_norms(device: str, codec: Parameters) -> ModuleType:
    """The backend for the squared norms of an index, which nobody asks for by name: torch where another has none."""
    try:
        return choose("squared_norms", device, None, cannot_add_norms(codec))
    except BackendUnavailable:
        return plain_torch


def _warn_once(op: str, device: str) -> None:
    """Warns if the native code cannot run on a type of device, once for each."""
    reason = None if device in _warned or _torch.compiler.is_compiling() else extension.why_not(device)
    if reason is not None:
        _warned.add(device)
        where = "" if device == "cpu" else f" on {device}, where {op} is much slower by plain torch"
        warnings.warn(f"drq_fast runs without its native code{where}: {reason}.", stacklevel=4)
