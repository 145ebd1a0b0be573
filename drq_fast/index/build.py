"""The codec of an index that is built from vectors alone."""

from __future__ import annotations

from typing import Any

import torch

from .. import checks
from .. import fit as fitting
from ..codec import Codec, directions
from ..quantizer import RecurrentQuantizer

_CODEWORDS = 256  # a byte per level
_MAX_BITS = 1 << 15


def fitted_codec(
    x: Any, bits: int, metric: str, beam: int, sample: int | None, seed: int | None, device: torch.device
) -> Codec:
    """A codec of `bits` per vector, fitted to a sample of x [N, D]; for cosine, to its directions."""
    bits = checks.integer("build", "bits", bits, 8, _MAX_BITS)
    if bits % 8:
        checks.fail("build", "bits", "a multiple of 8", bits)
    checks.choice("build", "metric", metric, checks.METRICS)
    values = checks.array("build", "x", x)
    if values.ndim != 2 or len(values) == 0:
        checks.fail("build", "x", "[N, D] with at least one vector", checks.shape_of(values))
    rows = fitting.sample_size(_CODEWORDS) if sample is None else checks.integer("build", "sample", sample, 1)
    some = fitting.sample(values, rows, values.shape[1], fitting.seeded(checks.seed("build", seed))).to(device)
    unit = metric == "cosine"
    layer = RecurrentQuantizer(values.shape[1], _CODEWORDS, bits // 8).to(device)
    layer.fit(directions(some) if unit else some, beam=beam, seed=seed)
    return Codec(*layer.codec().tensors(), unit=unit)
