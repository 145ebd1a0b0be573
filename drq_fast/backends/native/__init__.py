"""The operations in C++ and, for search, CUDA: the names and arguments of `backends.torch`, in float32."""

from .checksum import block_sums
from .distortion import distortion
from .encode import encode
from .extension import why_not
from .loss import loss
from .norms import squared_norms
from .quantize import quantize
from .search import adc, refine, search
from .squared import codeword_sums, decode, squared_errors

__all__ = [
    "adc",
    "block_sums",
    "codeword_sums",
    "decode",
    "distortion",
    "encode",
    "loss",
    "quantize",
    "refine",
    "search",
    "squared_errors",
    "squared_norms",
    "why_not",
]
