"""Deep Recurrent Quantization: one shared codebook, one training, codes that can be cut at any length."""

from typing import TYPE_CHECKING

__version__ = "0.2.0"

# Public name -> its module, which is imported at first use: it imports torch, and `drq-fast --help` needs no torch.
_MODULES = {
    "BackendUnavailable": "backends",
    "Codec": "codec",
    "FileError": "files",
    "Index": "index",
    "IndexResult": "index",
    "QuantizerOutput": "quantizer",
    "RecurrentQuantizer": "quantizer",
    "SemanticIds": "semantic",
    "cut": "codes",
    "functional": "functional",
    "merge": "index",
    "pack": "codes",
    "unpack": "codes",
    "use_backend": "backends",
}
__all__ = list(_MODULES)

if TYPE_CHECKING:
    from . import functional as functional
    from .backends import BackendUnavailable as BackendUnavailable
    from .backends import use_backend as use_backend
    from .codec import Codec as Codec
    from .codes import cut as cut
    from .codes import pack as pack
    from .codes import unpack as unpack
    from .files import FileError as FileError
    from .index import Index as Index
    from .index import IndexResult as IndexResult
    from .index import merge as merge
    from .quantizer import QuantizerOutput as QuantizerOutput
    from .quantizer import RecurrentQuantizer as RecurrentQuantizer
    from .semantic import SemanticIds as SemanticIds
else:

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        module = import_module(f".{_MODULES[name]}", __name__)
        value = globals()[name] = module if name == "functional" else getattr(module, name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
