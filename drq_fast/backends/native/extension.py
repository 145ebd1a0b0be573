"""The compiled extension `_C`: whether it is there, which instruction set it runs, and buffers for it."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch
from torch import Tensor

PACKAGE = Path(__file__).parents[2]
MAX_CODEWORDS = 8192  # up to which the kernels of the levels form inner products [K, K]
MAX_BEAM_CODEWORDS = 16384  # up to which a beam on the CPU forms them: these are 1 GiB

_import_error = ""
try:
    from ... import _C

    native = _C
except ImportError as error:
    native = None  # type: ignore[assignment]  # `why_not` says so before anybody calls it
    _import_error = str(error)


MAX_LEVELS = 0 if native is None else native.max_levels  # that the CUDA search holds


def why_not(device: str) -> str | None:
    """The reason why the extension cannot work on a device of this type, or None if it can."""
    if native is None:
        if any(PACKAGE.glob("_C.*.so")):
            return f"the extension does not load ({_import_error})"
        if PACKAGE.with_name("setup.py").exists():
            return "the extension is not built; run `pip install -e .` in the source tree"
        return "it was installed without a C++ compiler; install one, then reinstall drq_fast"
    if device == "cpu":
        return None
    if device == "cuda":
        if not native.cuda:
            return "the extension was built without CUDA; reinstall with DRQ_FAST_CUDA=1 and nvcc at hand"
        return _driver_problem() if torch.cuda.is_available() else "torch sees no CUDA device"
    return f"the extension has no code for {device}"


@functools.cache
def _driver_problem() -> str | None:
    """Why the driver cannot run what the extension was built with, if so. Within a major version it can."""
    runtime, driver = native.cuda_runtime_version(), native.cuda_driver_version()
    if driver // 1000 >= runtime // 1000:
        return None
    supports = f"supports CUDA {_dotted(driver)}" if driver else "is missing"
    return f"the extension was built with CUDA {_dotted(runtime)}, but the driver {supports}; update the driver"


def instruction_set() -> str:
    """The widest that this processor has and the extension was compiled for; DRQ_FAST_ISA forces another."""
    supported = supported_isas()
    forced = environment("DRQ_FAST_ISA")
    if forced and forced not in supported:
        raise ValueError(f"DRQ_FAST_ISA must be one of {', '.join(supported)} on this machine, got {forced!r}.")
    return forced or supported[-1]


def environment(name: str) -> str | None:
    """The value of an environment variable; None if it is not set or empty."""
    plain = native is None or torch.compiler.is_compiling()  # a compiler cannot trace the extension
    return (os.environ.get(name) if plain else native.environment(name)) or None


@functools.cache
def supported_isas() -> tuple[str, ...]:
    """The instruction sets that the extension was compiled for and this processor has, the narrowest first."""
    return () if native is None else tuple(native.supported_isas())


def cuda_versions() -> tuple[str, str] | None:
    """(CUDA runtime the extension was built with, CUDA the driver supports), or None without a CUDA build."""
    if native is None or not native.cuda:
        return None
    runtime, driver = native.cuda_runtime_version(), native.cuda_driver_version()
    return _dotted(runtime), _dotted(driver) if driver else "no driver"


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def floats(*shape: int) -> Tensor:
    """Uninitialised float32 on the CPU, whatever torch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def pointer(tensor: Tensor | None) -> int:
    """Where a tensor's data begin; 0, which is null, for None."""
    return 0 if tensor is None else tensor.data_ptr()
