"""Matrix products in float32 on the CPU, by the faster one of the two libraries that torch contains.

torch.mm calls MKL, which limits itself to AVX2 on AMD's processors. oneDNN uses AVX-512 there and is twice as fast.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .extension import native

_LARGE = 1 << 20  # multiplications from which oneDNN's start, about 10 microseconds, does not matter


def product(a: Tensor, b: Tensor, scratch: Tensor | None = None) -> Tensor:
    """a [n, d] times b [d, k]. The result may be in scratch [n, k], which spares new memory and its page faults."""
    if a.shape[0] * b.numel() < _LARGE or not _prefers_onednn():
        return torch.mm(a, b, out=scratch)
    dense = b if b.is_contiguous() or b.T.is_contiguous() else b.contiguous()  # others take a thousand times as long
    return torch.ops.mkldnn._linear_pointwise(a, dense.T, None, "none", [], "")


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a [n, d]^T times b [n, k] to total [d, k]."""
    if b.shape[0] * total.numel() < _LARGE or not _prefers_onednn():
        total.addmm_(a.T, b)
    else:
        total += product(a.T.contiguous(), b)


def _prefers_onednn() -> bool:
    return bool(torch.backends.mkldnn.enabled) and _has_onednn()  # users can switch oneDNN off


@functools.cache
def _has_onednn() -> bool:
    """Whether this is such a processor, and torch's private operation is what it was when this was written."""
    if not native.amd or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    a = torch.arange(12.0, device="cpu").view(3, 4)
    try:
        return torch.equal(torch.ops.mkldnn._linear_pointwise(a, a[:2], None, "none", [], ""), a @ a[:2].T)
    except (AttributeError, RuntimeError, TypeError):
        return False
