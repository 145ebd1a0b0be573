"""Checks of user input. Errors have one form: "{op}: {name} must be {expected}, got {actual}."

Only `finite`, `squarable` and `gamma_value` read the values of a float tensor, which synchronises a GPU.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from .constants import METRICS as METRICS

MAX_CODEWORDS = 65536
MAX_BEAM = 4096  # wider beams have never been worth their memory
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal float32 numbers
MAX_RESULTS = (1 << 31) - 1
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # which torch supports in few operations


def fail(op: str, name: str, expected: str, actual: object, *, error: type[Exception] = ValueError) -> NoReturn:
    """Raises the error of a wrong argument, in one sentence."""
    raise error(f"{op}: {name} must be {expected}, got {actual}.")


def shape_of(tensor: Tensor) -> str:
    return f"[{', '.join(str(size) for size in tensor.shape)}]"


def dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def tensor(op: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        fail(op, name, "a torch.Tensor", type(value).__name__, error=TypeError)
    if value.layout != torch.strided:
        fail(op, name, "a dense tensor", value.layout, error=TypeError)


def floating(op: str, name: str, value: Any, *, device: torch.device | None = None) -> None:
    """A float tensor of any shape, on `device` if given."""
    tensor(op, name, value)
    if not value.is_floating_point():
        fail(op, name, "a float tensor", value.dtype, error=TypeError)
    if device is not None and value.device != device:
        fail(op, name, f"on {device}, like the codebook", f"a tensor on {value.device}")


def codec(op: str, codebook: Any, scale: Any, offset: Any, codebooks: Any = 1) -> tuple[int, ...]:
    """codebook [G * K, D], scale [M], offset [D] or None, all float and on one device -> groups [M] of the levels."""
    floating(op, "codebook", codebook)
    floating(op, "scale", scale, device=codebook.device)
    if scale.ndim != 1 or len(scale) < 1:
        fail(op, "scale", "[M] with M >= 1", shape_of(scale))
    found = groups(op, codebooks, len(scale))
    G = found[-1] + 1
    if codebook.ndim != 2 or len(codebook) % G or not 2 <= len(codebook) // G <= MAX_CODEWORDS or codebook.shape[1] < 1:
        rows = "K" if G == 1 else f"{G} * K"
        fail(op, "codebook", f"[{rows}, D] with K from 2 to {MAX_CODEWORDS} and D >= 1", shape_of(codebook))
    D = codebook.shape[1]
    if offset is not None:
        floating(op, "offset", offset, device=codebook.device)
        if offset.shape != (D,):
            fail(op, "offset", f"[{D}], one entry per dimension of the codebook", shape_of(offset))
    return found


def groups(op: str, codebooks: Any, M: int) -> tuple[int, ...]:
    """Which codebook each of M levels has, from their number, or from how many levels each of them serves."""
    if isinstance(codebooks, int) and not isinstance(codebooks, bool):
        if codebooks < 1 or M % codebooks:
            fail(op, "codebooks", f"a divisor of the {M} levels", codebooks)
        return tuple(m * codebooks // M for m in range(M))
    sizes = tuple(codebooks) if isinstance(codebooks, (tuple, list)) else ()
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
    if not whole or sum(sizes) != M:
        fail(op, "codebooks", f"a divisor of {M}, or positive integers that add up to {M} levels", repr(codebooks))
    return tuple(g for g, size in enumerate(sizes) for _ in range(size))


def vectors(op: str, name: str, value: Any, D: int, device: torch.device) -> None:
    """A float tensor [N, D] on `device`."""
    floating(op, name, value, device=device)
    if value.ndim != 2 or value.shape[1] != D:
        fail(op, name, f"[N, {D}]", shape_of(value))


def rows(op: str, name: str, value: Tensor, D: int) -> Tensor:
    """[..., D] as [N, D]."""
    if value.ndim < 1 or value.shape[-1] != D:
        channels_first = value.ndim > 2 and value.shape[1] == D
        hint = f" ({name}.movedim(1, -1) moves channels last)" if channels_first else ""
        fail(op, name, f"[..., {D}]", f"{shape_of(value)}{hint}")
    return value.reshape(-1, D)


def code_rows(op: str, value: Tensor, M: int) -> Tensor:
    """Codes [..., 1 to M levels] as [N, levels]."""
    if value.ndim < 1 or not 1 <= value.shape[-1] <= M:
        fail(op, "codes", f"[..., 1 to {M} levels]", shape_of(value))
    return value.reshape(-1, value.shape[-1])


def gamma(op: str, value: Any) -> None:
    if isinstance(value, Tensor):
        if value.ndim != 0 or not value.is_floating_point():
            fail(
                op,
                "gamma",
                "a number or a float tensor without dimensions",
                f"{value.dtype} {shape_of(value)}",
            )
    elif not isinstance(value, Real) or not 0 < _float(value) < math.inf:
        fail(op, "gamma", "a finite number above 0", repr(value))


def gamma_value(op: str, value: float | Tensor) -> float:
    """gamma as a number; reads the value of a tensor, which synchronises a GPU."""
    number = _float(value)
    gamma(op, number)
    return number


def integer(op: str, name: str, value: Any, low: int, high: int | None = None) -> int:
    """A Python int, or an object with `__index__`, from `low` to `high`."""
    if type(value) is int and low <= value and (high is None or value <= high):
        return value
    expected = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
    try:
        number = None if isinstance(value, (bool, Tensor)) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        fail(op, name, expected, repr(value), error=TypeError)
    if number < low or (high is not None and number > high):
        fail(op, name, expected, number)
    return number


def beam(op: str, value: Any) -> int:
    return integer(op, "beam", value, 1, MAX_BEAM)


def seed(op: str, value: Any) -> int | None:
    """A seed that torch accepts, or None."""
    return None if value is None else integer(op, "seed", value, 0, (1 << 64) - 1)


def boolean(op: str, name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        fail(op, name, "True or False", repr(value), error=TypeError)
    return bool(value)


def levels(op: str, value: Any, M: int) -> int:
    """A prefix length from 1 to M; None means M."""
    return M if value is None else integer(op, "levels", value, 1, M)


def level_numbers(op: str, value: Any, M: int, shape: torch.Size, device: torch.device) -> tuple[int, Tensor | None]:
    """(M, a prefix length for each of N vectors [N] int64) from a tensor of this shape, else (one length, None)."""
    if not isinstance(value, Tensor):
        return levels(op, value, M), None
    lengths = integers(op, "levels", value)
    if lengths.shape != shape or lengths.device != device:
        fail(op, "levels", f"[{', '.join(map(str, shape))}] on {device}", f"{shape_of(lengths)} on {lengths.device}")
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()  # a CUDA graph cannot be read
    if lengths.numel() and not captured and not torch.compiler.is_compiling():
        low, high = (int(bound) for bound in torch.aminmax(lengths))
        if low < 1 or high > M:
            fail(op, "levels", f"in 1..{M}", f"values from {low} to {high}")
    return M, lengths.reshape(-1).to(torch.int64)


def row_mask(op: str, value: Any, shape: torch.Size, device: torch.device) -> Tensor | None:
    """A bool tensor of this shape as [N]; None stays None."""
    if value is None:
        return None
    tensor(op, "mask", value)
    if value.dtype != torch.bool:
        fail(op, "mask", "a bool tensor", value.dtype, error=TypeError)
    if value.shape != shape or value.device != device:
        fail(op, "mask", f"[{', '.join(map(str, shape))}] on {device}", f"{shape_of(value)} on {value.device}")
    return value.reshape(-1)


def choice(op: str, name: str, value: Any, allowed: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        fail(op, name, f"one of {', '.join(map(repr, allowed))}", repr(value))


def level_weights(op: str, value: Any, M: int) -> tuple[float, ...] | None:
    """M finite numbers that are not negative, at least one above 0, as a tuple; None stays None."""
    if value is None:
        return None
    weights = _numbers(value)
    if weights is None:
        fail(op, "level_weights", f"{M} numbers", repr(value), error=TypeError)
    if len(weights) != M or not all(math.isfinite(v) and v >= 0 for v in weights) or sum(weights) <= 0:
        fail(op, "level_weights", f"{M} finite numbers >= 0, not all of them 0", weights)
    if not SMALLEST <= max(weights) <= sum(weights) <= LARGEST:
        fail(op, "level_weights", "numbers that float32 can represent and add", weights)
    return weights


def weights(op: str, value: Any) -> tuple[float, float, float]:
    """Three finite numbers that are not negative: of the hard, the soft and the joint error."""
    weights = _numbers(value)
    if weights is None or len(weights) != 3:
        fail(op, "weights", "three numbers (hard, soft, joint)", repr(value), error=TypeError)
    if not all(math.isfinite(v) and v >= 0 for v in weights):
        fail(op, "weights", "finite numbers >= 0", weights)
    if sum(weights) > LARGEST:
        fail(op, "weights", "numbers that float32 can represent and add", weights)
    return weights


def commitment(op: str, value: Any, name: str = "commitment") -> float:
    """A finite number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= _float(value) <= LARGEST:
        fail(op, name, "a finite number >= 0", repr(value))
    return float(value)


def _numbers(value: Any) -> tuple[float, ...] | None:
    """A sequence of numbers as floats; None for anything else, a string of digits included."""
    try:
        return None if isinstance(value, (str, bytes)) else tuple(_float(v) for v in value)
    except (TypeError, ValueError):
        return None


def _float(value: Any) -> float:
    """float(value), infinite where an integer is beyond the range of floats."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def codes(op: str, value: Any, K: int, M: int, device: torch.device, *, name: str = "codes") -> Tensor:
    """Integers [N, 1..M] in 0..K-1 on `device`. Reads the values unless the dtype already bounds them."""
    value = integers(op, name, value)
    if value.device != device:
        fail(op, name, f"on {device}, like the codebook", f"a tensor on {value.device}")
    if value.ndim != 2 or not 1 <= value.shape[1] <= M:
        fail(op, name, f"[N, levels] with 1 to {M} levels", shape_of(value))
    code_range(op, value, K, name=name)
    return value


def integers(op: str, name: str, value: Any) -> Tensor:
    """The tensor itself, or int64 for unsigned dtypes that torch supports in few operations."""
    tensor(op, name, value)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        fail(op, name, "integers", dtype_of(value), error=TypeError)
    if value.dtype not in _UNSIGNED:
        return value
    signed: Tensor = value.to(torch.int64)
    if value.dtype == torch.uint64 and not torch.compiler.is_compiling() and bool((signed < 0).any()):
        fail(op, name, "below 2**63", int(signed[signed < 0][0]) + (1 << 64))
    return signed


def code_range(op: str, value: Tensor, K: int, *, name: str = "codes") -> None:
    """Every code in 0..K-1."""
    if value.numel() == 0 or (value.dtype == torch.uint8 and K == 256) or torch.compiler.is_compiling():
        return
    low, high = (int(bound) for bound in torch.aminmax(value))
    if low < 0 or high >= K:
        fail(op, name, f"in 0..{K - 1}", f"values from {low} to {high}")


class _Writable:
    """A view of a read-only array that torch accepts without a warning; this library never writes to it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array  # keeps the memory alive
        interface = array.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}


def _from_numpy(op: str, name: str, value: np.ndarray) -> Tensor:
    """The array as a tensor; copies only if torch cannot share its byte order or strides."""
    if isinstance(value, np.ma.MaskedArray):
        fail(op, name, "an array without a mask", "a masked array", error=TypeError)
    if not value.dtype.isnative or any(stride < 0 for stride in value.strides):
        value = value.astype(value.dtype.newbyteorder("="), order="C", copy=True)
    try:
        return torch.from_numpy(value if value.flags.writeable else np.asarray(_Writable(value)))
    except (TypeError, ValueError):
        fail(op, name, "an array of numbers that torch can read", value.dtype, error=TypeError)


def array(op: str, name: str, value: Any, *, integer: bool = False) -> Tensor:
    """Vectors, or integers with `integer=True`, from a tensor or, without copying, a numpy array.

    Vectors are floats or integers: callers convert these to float32, some rows at a time, as they do float16.
    """
    if type(value) is Tensor and value.dtype is torch.float32 and value.layout is torch.strided and not integer:
        return value  # what most calls of a search are given
    if isinstance(value, np.ndarray):
        value = _from_numpy(op, name, value)
    if not isinstance(value, Tensor):
        fail(op, name, "a torch.Tensor or a numpy array", type(value).__name__, error=TypeError)
    if integer:
        return integers(op, name, value)
    tensor(op, name, value)
    if value.dtype in _UNSIGNED:
        return value.to(torch.float32)
    if value.is_complex() or value.dtype == torch.bool:
        fail(op, name, "floats or integers", dtype_of(value), error=TypeError)
    return value


def floats(value: Tensor) -> Tensor:
    """The tensor itself, or float32 if it has integers."""
    return value if value.is_floating_point() else value.to(torch.float32)


def listed(op: str, name: str, value: Any) -> Any:
    """A list or tuple of numbers, or of lists of them, as a float64 tensor; anything else as it is."""
    if not isinstance(value, (list, tuple)):
        return value
    try:
        numbers = np.array(value)
    except (TypeError, ValueError, RuntimeError):
        numbers = None
    if numbers is None or numbers.dtype.kind not in "iuf":
        fail(op, name, "numbers in lists of equal length", "others", error=TypeError)
    return torch.from_numpy(numbers.astype(np.float64))


def id_array(op: str, name: str, value: Any) -> Tensor:
    """Ids (integers) or flags (bools) [n] from a tensor, an array or an iterable."""
    if not isinstance(value, (Tensor, np.ndarray)):
        try:
            listed = list(value)
            beyond = [v for v in listed if isinstance(v, int) and not -(1 << 63) <= v < 1 << 63]
            value = np.array(listed, dtype=None if listed else np.int64)
        except (TypeError, ValueError):
            fail(op, name, "a list, an array or a tensor of ids", repr(value), error=TypeError)
        if beyond:
            fail(op, name, "below 2**63", beyond[0])
    if isinstance(value, np.ndarray):
        value = _from_numpy(op, name, value)
    if value.dtype != torch.bool:
        value = integers(op, name, value)
    if value.ndim != 1:
        fail(op, name, "[n]", shape_of(value))
    return value


def in_kind(result: Tensor, like: Any) -> Any:
    """The result as a tensor or a numpy array, like `like`; bfloat16, which numpy lacks, becomes float32."""
    if not isinstance(like, np.ndarray):
        return result
    return (result.float() if result.dtype == torch.bfloat16 else result).cpu().numpy()


def device(op: str, value: Any, default: torch.device) -> torch.device:
    """A device on which a tensor can be created here; `default` for None."""
    if value is None:
        return default
    try:
        torch.empty(0, device=value)
        return torch.device(value)
    except (AssertionError, RuntimeError, TypeError) as error:
        fail(op, "device", "an available device", f"{value!r} ({str(error).partition(chr(10))[0]})")


def thresholds(op: str, value: Any, Q: int, device: torch.device) -> Tensor | None:
    """A number, or one for each of Q queries, as float32 [Q]; None stays None."""
    if value is None:
        return None
    if isinstance(value, Real) and not isinstance(value, bool):
        limits = torch.full((Q,), _float(value), dtype=torch.float32, device=device)
    else:
        limits = array(op, "threshold", listed(op, "threshold", value)).detach().to(device, torch.float32)
        if limits.shape != (Q,):
            fail(op, "threshold", f"a number or [{Q}], one per query", shape_of(limits))
    if bool(limits.isnan().any()):
        fail(op, "threshold", "numbers", "NaN")
    return limits


def norms(op: str, value: Any, N: int, device: torch.device) -> None:
    if value is None:
        return
    floating(op, "norms", value, device=device)
    if value.shape != (N,):
        fail(op, "norms", f"[{N}], one per code", shape_of(value))


def mask(op: str, value: Any, N: int, device: torch.device) -> None:
    if value is None:
        return
    tensor(op, "keep", value)
    if value.dtype != torch.bool:
        fail(op, "keep", "a bool tensor", value.dtype, error=TypeError)
    if value.shape != (N,):
        fail(op, "keep", f"[{N}], one per code", shape_of(value))
    if value.device != device:
        fail(op, "keep", f"on {device}, like the codebook", f"a tensor on {value.device}")


def finite(
    op: str, name: str, value: Tensor, dtype: torch.dtype | None = None, rows: Tensor | range | None = None
) -> None:
    """No NaN and no infinity, after conversion to `dtype` if given. Reads all values, some rows at a time.

    rows: the numbers that the rows have in the user's array, if `value` is a part of it.
    """
    if not value.is_floating_point():
        return
    rows_read = 0
    for part in value.split(1 << 16) if value.ndim else (value,):
        good = torch.isfinite(part if dtype is None else part.to(dtype))
        if not bool(good.all()):
            where = ""
            if value.ndim > 1:
                row = rows_read + int((~good.flatten(1)).any(dim=1).nonzero()[0])
                where = f" in row {row if rows is None else int(rows[row])}"
            narrower = f" in {dtype}" if bool(torch.isfinite(part[~good]).all()) else ""
            fail(op, name, f"finite{narrower}", f"NaN or infinity{where}")
        rows_read += len(part) if value.ndim else 0


def squarable(op: str, name: str, value: Tensor) -> None:
    """Values whose squares, summed over any number of rows, neither overflow nor vanish in float32."""
    largest = max((float(part.abs().amax()) for part in value.split(1 << 16) if part.numel()), default=0.0)
    if not (largest == 0 or 1e-12 <= largest <= 1e12):
        fail(op, name, "scaled to a largest magnitude from 1e-12 to 1e12", f"{largest:.0e}")


def training_data(op: str, x: Tensor) -> None:
    """At least one vector [N, D], finite and `squarable`."""
    if len(x) == 0:
        fail(op, "x", "at least one vector", "none")
    finite(op, "x", x)
    squarable(op, "x", x)
