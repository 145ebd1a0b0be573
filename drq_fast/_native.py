"""Tensors to pointers: the only caller of the compiled extension `_C`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

extension: ModuleType | None
try:
    from . import _C

    extension = _C
except ImportError as error:
    extension = None
    _import_error = str(error)


def why_not(device: str) -> str | None:
    """The reason why the extension cannot work on a device of this type, or None if it can."""
    if extension is None:
        if Path(__file__).parent.with_name("setup.py").exists():
            return "the extension is not built; run `pip install -e .` in the source tree"
        if any(Path(__file__).parent.glob("_C.*.so")):
            return f"the extension does not load ({_import_error})"
        return "it was installed without a C++ compiler; install one, then reinstall drq_fast"
    if device == "cpu":
        return None
    if device == "cuda":
        if not extension.cuda:
            return "the extension was built without CUDA; reinstall with DRQ_FAST_CUDA=1 and nvcc at hand"
        return None if torch.cuda.is_available() else "torch sees no CUDA device"
    return f"the extension has no code for {device}"


def lookup(table: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """`reference.lookup` for float32: sums [Q, N] from table [Q, K], codes [N, M] in 0..K-1 and scale [M]."""
    assert extension is not None
    table, scale = table.contiguous(), scale.contiguous()
    codes = codes.contiguous() if codes.dtype in (torch.uint8, torch.int32) else codes.to(torch.int32).contiguous()
    (Q, K), (N, M) = table.shape, codes.shape
    sums = torch.empty(Q, N, dtype=torch.float32, device=table.device)
    wide = codes.dtype == torch.int32
    arguments = (table.data_ptr(), scale.data_ptr(), codes.data_ptr(), wide, sums.data_ptr(), Q, N, K, M)
    if table.device.type == "cpu":
        extension.lookup_cpu(*arguments, threads=torch.get_num_threads())
    else:
        with torch.cuda.device(table.device):
            extension.lookup_cuda(*arguments, stream=torch.cuda.current_stream().cuda_stream)
    return sums


def cuda_versions() -> tuple[str, str] | None:
    """(CUDA runtime the extension was built with, CUDA the driver supports), or None without a CUDA build."""
    if extension is None or not extension.cuda:
        return None
    runtime, driver = extension.cuda_runtime_version(), extension.cuda_driver_version()
    return _dotted(runtime), _dotted(driver) if driver else "no driver"


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
