"""Deep Recurrent Quantization: one shared codebook, one training, codes that can be cut at any length."""

from . import functional
from .backends import BackendUnavailable, use_backend
from .codec import Codec
from .codes import cut, pack, unpack
from .files import FileError
from .index import Index, IndexResult
from .quantizer import QuantizerOutput, RecurrentQuantizer

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "Codec",
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
