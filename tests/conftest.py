"""Common ground of all tests: uninitialised memory shows, kernels run without a GPU, one table of tolerances."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported
torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())  # fills torch.empty with NaN, too

# Largest error of a result, relative to the largest entry of the float64 reference.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Codec(NamedTuple):
    """Random inputs of every operation: x [N, D], codebook [K, D], scale [M], offset [D]."""

    x: Tensor
    codebook: Tensor
    scale: Tensor
    offset: Tensor


@pytest.fixture
def codec() -> Callable[..., Codec]:
    """codec(N, D, K, M, dtype=...) makes reproducible inputs; the scales have both signs."""

    def make(
        N: int = 50, D: int = 5, K: int = 8, M: int = 3, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> Codec:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(N, D, dtype=torch.float64, generator=generator)
        codebook = torch.randn(K, D, dtype=torch.float64, generator=generator)
        scale = torch.tensor([(-1) ** m * 0.8**m for m in range(M)], dtype=torch.float64)
        offset = torch.randn(D, dtype=torch.float64, generator=generator) / 3
        return Codec(*(t.to(dtype) for t in (x, codebook, scale, offset)))

    return make


@pytest.fixture
def assert_close() -> Callable[..., None]:
    """assert_close(actual, expected float64): by the tolerance of the actual dtype (or of `dtype`)."""

    def check(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
        assert actual.shape == expected.shape
        if actual.numel():
            error = (actual.double() - expected.double()).abs().max()
            assert float(error) <= TOLERANCE[dtype or actual.dtype] * max(1e-30, float(expected.abs().max()))

    return check
