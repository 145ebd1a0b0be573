"""Tensors to pointers: the only caller of the compiled extension `_C`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from . import reference

MAX_CODEWORDS = 8192  # up to which `encode` forms their inner products
_TILE = 1 << 20  # floats of a tile that stays in cache

extension: ModuleType | None
_import_error = ""
try:
    from . import _C

    extension = _C
except ImportError as error:
    extension = None
    _import_error = str(error)


def why_not(device: str) -> str | None:
    """The reason why the extension cannot work on a device of this type, or None if it can."""
    if extension is None:
        if any(Path(__file__).parent.glob("_C.*.so")):
            return f"the extension does not load ({_import_error})"
        if Path(__file__).parent.with_name("setup.py").exists():
            return "the extension is not built; run `pip install -e .` in the source tree"
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


class _Codec:
    """A codec as the level kernels want it: K padded to P, a multiple of 16, in float32."""

    def __init__(self, codebook: Tensor, scale: Tensor) -> None:
        self.K, self.D = codebook.shape
        self.P = -(-self.K // 16) * 16
        self.M = len(scale)
        self.scale = scale.float().contiguous()
        self.codebook = torch.nn.functional.pad(codebook.float(), (0, 0, 0, self.P - self.K)).contiguous()
        self.gram = self.codebook @ self.codebook.T
        self.diagonal = self.gram.diagonal().contiguous()
        self.bias = (self.scale * self.scale)[:, None] * self.diagonal
        self.bias[:, self.K :] = float("inf")

    def tiles(self, x: Tensor, offset: Tensor | None, rows: int) -> Iterator[tuple[slice, Tensor, dict[str, int]]]:
        """(rows, x - offset there, what every kernel is told of them) with the scores of the tile in `scores`."""
        self.scores, self.norms = _floats(rows, self.P), _floats(rows)
        for first in range(0, len(x), rows):
            tile = x[first : first + rows].float()
            tile = (tile if offset is None else tile - offset.float()).contiguous()
            N = len(tile)
            torch.mm(tile, self.codebook.T, out=self.scores[:N])
            torch.linalg.vecdot(tile, tile, out=self.norms[:N])
            told = {name: getattr(self, name).data_ptr() for name in ("codebook", "gram", "diagonal", "bias", "scale")}
            told |= {"scores": self.scores.data_ptr(), "squared_norms": self.norms.data_ptr(), "x": tile.data_ptr()}
            told |= {"N": N, "K": self.K, "P": self.P, "D": self.D, "M": self.M}
            yield slice(first, first + N), tile, told


def encode(
    x: Tensor,
    codebook: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    beam: int = 1,
    level_weights: Tensor | None = None,
) -> Tensor:
    """`reference.encode` in float32 and score space: one product with the codebook, then additions only."""
    assert extension is not None
    codec = _Codec(codebook, scale)
    omega = torch.ones(codec.M, dtype=torch.float32) if level_weights is None else level_weights.float()
    still_to_come = reference.still_to_come(omega)
    codes = torch.empty(len(x), codec.M, dtype=torch.uint8 if codec.K <= 256 else torch.int32, device="cpu")
    for rows, _, told in codec.tiles(x, offset, min(max(64, _TILE // max(codec.P, codec.D)), max(len(x), 1))):
        extension.encode_cpu(
            **told,
            omega=omega.data_ptr(),
            still_to_come=still_to_come.data_ptr(),
            codes=codes[rows].data_ptr(),
            wide=codes.dtype == torch.int32,
            beam=beam,
            isa=instruction_set(),
            threads=torch.get_num_threads(),
        )
    return codes


class LossGradients(NamedTuple):
    """value: the sum of what `weigh` returned; codes [N, M] int64; dx [N, D], dcodebook [K, D], dscale [M] or None."""

    value: Tensor
    codes: Tensor
    dx: Tensor | None
    dcodebook: Tensor | None
    dscale: Tensor | None


# (hard, soft, joint), each [n, M], as `reference.Distortion` has them -> (their loss, its gradient by each of them)
Weigh = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, tuple[Tensor, Tensor, Tensor]]]


def loss(
    x: Tensor, codebook: Tensor, scale: Tensor, *, gamma: float, offset: Tensor | None, weigh: Weigh, gradients: bool
) -> LossGradients:
    """A loss of the errors after each level and, in the same pass over x, its gradients: three products of N K D and
    2 M of N K K, tile by tile, so that nothing of size N K is ever stored."""
    assert extension is not None
    codec = _Codec(codebook, scale)
    M, P = codec.M, codec.P
    rows = min(max(16, _TILE // (P * (2 * M + 1))), max(len(x), 1))
    threads = torch.get_num_threads()
    codes = torch.empty(len(x), M, dtype=torch.int64, device="cpu")
    residuals, soft_errors, joint = _floats(3, rows, M).unbind()
    dhard, dsoft, djoint = _floats(3, rows, M).unbind()
    soft, product = _floats(2, rows * M, P).unbind()
    dscores, dnorms = _floats(rows, P), _floats(rows)
    dgram, ddiagonal = _floats(threads, P, P).zero_(), _floats(threads, P).zero_()
    dscale = torch.zeros(threads, M, dtype=torch.float64, device="cpu")
    buffers = {
        "residuals": residuals, "soft": soft, "product": product, "soft_errors": soft_errors, "joint": joint,
        "dhard": dhard, "dsoft": dsoft, "djoint": djoint, "dscores": dscores, "dsquared_norms": dnorms,
        "dgram": dgram, "ddiagonal": ddiagonal, "dscale": dscale,
    }  # fmt: skip
    pointers = {name: buffer.data_ptr() for name, buffer in buffers.items()}
    value = torch.zeros((), dtype=torch.float64, device="cpu")
    dx = _floats(len(x), codec.D) if gradients else None
    dcodebook = _floats(P, codec.D).zero_()
    for part, tile, told in codec.tiles(x, offset, rows):
        N = len(tile)
        job = {**told, **pointers, "codes": codes[part].data_ptr(), "gamma": gamma}
        run = {"isa": instruction_set(), "threads": threads}
        extension.assign_cpu(**run, **job)
        torch.mm(soft[: N * M], codec.gram, out=product[: N * M])
        extension.errors_cpu(**run, **job)
        errors = residuals[:N].clamp_min(0).sqrt(), soft_errors[:N].clamp_min(0).sqrt(), joint[:N]
        part_value, upstream = weigh(*errors)
        value += part_value
        if dx is not None:
            for buffer, gradient in zip((dhard, dsoft, djoint), upstream, strict=True):
                buffer[:N] = gradient
            extension.backward_cpu(**run, **job)
            dgram[0].addmm_(soft[: N * M].T, product[: N * M])
            torch.mm(dscores[:N], codec.codebook, out=dx[part])
            dx[part].addcmul_(tile, dnorms[:N, None], value=2)
            dcodebook.addmm_(dscores[:N].T, tile)
    if dx is None:
        return LossGradients(value.float(), codes, None, None, None)
    dgram_sum = dgram.sum(dim=0)
    dgram_sum.diagonal().add_(ddiagonal.sum(dim=0))
    dcodebook.addmm_(dgram_sum + dgram_sum.T, codec.codebook)
    return LossGradients(value.float(), codes, dx, dcodebook[: codec.K], dscale.sum(dim=0).float())


def instruction_set() -> str:
    """The widest that this processor has and the extension was compiled for; DRQ_FAST_ISA forces another."""
    assert extension is not None
    supported: list[str] = extension.supported_isas()
    forced = os.environ.get("DRQ_FAST_ISA")
    if forced and forced not in supported:
        raise ValueError(f"DRQ_FAST_ISA must be one of {', '.join(supported)} on this machine, got {forced!r}.")
    return forced or supported[-1]


def _floats(*shape: int) -> Tensor:
    """Uninitialised float32 on the CPU, whatever torch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def cuda_versions() -> tuple[str, str] | None:
    """(CUDA runtime the extension was built with, CUDA the driver supports), or None without a CUDA build."""
    if extension is None or not extension.cuda:
        return None
    runtime, driver = extension.cuda_runtime_version(), extension.cuda_driver_version()
    return _dotted(runtime), _dotted(driver) if driver else "no driver"


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
