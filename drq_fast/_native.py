"""Tensors to pointers: the only caller of the compiled extension `_C`."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from . import reference

MAX_CODEWORDS = 8192  # up to which `encode` forms their inner products
_TILE = 1 << 20  # floats of a tile that stays in cache

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


def encode(
    x: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    beam: int = 1,
    level_weights: Tensor | None = None,
) -> Tensor:
    """`reference.encode` in float32 and score space: one product with the codebook, then additions only.

    Works on tiles of rows whose scores [rows, K] stay in cache.
    """
    assert extension is not None
    x, codebook, scale = x.float(), codebook.float().contiguous(), scale.float().contiguous()
    (K, D), M = codebook.shape, len(scale)
    P = -(-K // 16) * 16
    gram = torch.zeros(K, P)
    torch.mm(codebook, codebook.T, out=gram[:, :K])
    bias = torch.full((M, P), float("inf"))
    bias[:, :K] = (scale * scale)[:, None] * gram.diagonal()
    omega = torch.ones(M) if level_weights is None else level_weights.float()
    still_to_come = reference.still_to_come(omega)
    codes = torch.empty(len(x), M, dtype=torch.uint8 if K <= 256 else torch.int32)
    rows = max(64, min(_TILE // K, _TILE // D))
    scores, norms = torch.empty(rows, K), torch.empty(rows)
    for first in range(0, len(x), rows):
        tile = x[first : first + rows]
        tile = (tile if offset is None else tile - offset.float()).contiguous()
        N = len(tile)
        torch.mm(tile, codebook.T, out=scores[:N])
        torch.linalg.vecdot(tile, tile, out=norms[:N])
        extension.encode_cpu(
            scores=scores.data_ptr(),
            squared_norms=norms.data_ptr(),
            x=tile.data_ptr(),
            codebook=codebook.data_ptr(),
            gram=gram.data_ptr(),
            bias=bias.data_ptr(),
            scale=scale.data_ptr(),
            omega=omega.data_ptr(),
            still_to_come=still_to_come.data_ptr(),
            codes=codes[first:].data_ptr(),
            wide=codes.dtype == torch.int32,
            N=N,
            K=K,
            P=P,
            D=D,
            M=M,
            beam=beam,
            isa=instruction_set(),
            threads=torch.get_num_threads(),
        )
    return codes


def instruction_set() -> str:
    """The widest that this processor has and the extension was compiled for; DRQ_FAST_ISA forces another."""
    assert extension is not None
    supported: list[str] = extension.supported_isas()
    forced = os.environ.get("DRQ_FAST_ISA")
    if forced and forced not in supported:
        raise ValueError(f"DRQ_FAST_ISA must be one of {', '.join(supported)} on this machine, got {forced!r}.")
    return forced or supported[-1]


def cuda_versions() -> tuple[str, str] | None:
    """(CUDA runtime the extension was built with, CUDA the driver supports), or None without a CUDA build."""
    if extension is None or not extension.cuda:
        return None
    runtime, driver = extension.cuda_runtime_version(), extension.cuda_driver_version()
    return _dotted(runtime), _dotted(driver) if driver else "no driver"


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
