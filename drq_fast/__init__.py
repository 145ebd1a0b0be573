"""Deep Recurrent Quantization: one shared codebook, one training, codes that can be cut at any length."""

from . import functional
from .backend import BackendUnavailable, use_backend
from .codes import cut, pack, unpack
from .files import FileError
from .index import Index, IndexResult
from .quantizer import QuantizerOutput, RecurrentQuantizer

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "FileError",
    "Index",
    "IndexResult",
    "QuantizerOutput",
    "RecurrentQuantizer",
    "cut",
    "functional",
    "pack",
    "unpack",
    "use_backend",
]
