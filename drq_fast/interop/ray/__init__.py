"""Fit, encode and search on a Ray cluster, with the results of one machine; `pip install 'drq_fast[ray]'`.

>>> from drq_fast.interop.ray import ShardedIndex, batches, encode, encode_files, fit
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("ray") is None:
    raise ModuleNotFoundError("drq_fast.interop.ray: ray is missing; `pip install 'drq_fast[ray]'` installs it.")

from .data import batches, encode, encode_files
from .fit import fit
from .shards import PartialResult, ShardedIndex, ShardsMissing

__all__ = ["PartialResult", "ShardedIndex", "ShardsMissing", "batches", "encode", "encode_files", "fit"]
