"""Codec and inverted lists of an index that is built from vectors alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks, functional
from .. import fit as fitting
from ..codec import Codec, directions
from . import coarse
from .source import Source, sample_of

_CODEWORDS = 256  # a byte per level
_MAX_BITS = 1 << 15


class Fitted(NamedTuple):
    """A codec, and the centroids [L, D] of inverted lists if there are any."""

    codec: Codec
    centroids: Tensor | None


def fitted(
    x: Source,
    bits: int,
    codebooks: int,
    metric: str,
    lists: int | str | None,
    beam: int,
    sample: int | None,
    seed: int | None,
    device: torch.device,
) -> Fitted:
    """A codec of `bits` per vector, fitted to a sample of x [N, D]; for cosine, to its directions.

    With lists it is fitted to what the centroids leave of the vectors, and its offset is their mean.
    """
    bits = checks.integer("build", "bits", bits, 8, _MAX_BITS)
    if bits % 8:
        checks.fail("build", "bits", "a multiple of 8", bits)
    levels = bits // 8
    checks.groups("build", checks.integer("build", "codebooks", codebooks, 1), levels)
    checks.choice("build", "metric", metric, checks.METRICS)
    count = _list_count(lists, len(x))
    rows = fitting.sample_size(_CODEWORDS) if sample is None else checks.integer("build", "sample", sample, 1)
    seed, beam = checks.seed("build", seed), checks.beam("build", beam)
    generator = fitting.seeded(seed)
    drawn = sample_of("build", x, max(rows, coarse.sample_size(count or 0)), generator)
    unit, some = metric == "cosine", drawn.to(device)
    some = directions(some) if unit else some
    checks.squarable("build", "x", some)
    fitting.warn_of_few("build", len(some), _CODEWORDS)
    mean, centroids = None, None
    if count is not None:
        mean = some.mean(dim=0)
        some = some - mean
        centroids = coarse.centroids_of(some, count, generator)
        some, centroids = coarse.residuals(some[:: -(-len(some) // rows)], centroids), centroids + mean
    omega = some.new_tensor(functional.default_weights(levels))
    options = {"offset": count is None, "omega": omega, "beam": beam, "seed": seed, "interruptible": False}
    found = fitting.fit(some, _CODEWORDS, levels, codebooks=codebooks, **options)  # type: ignore[arg-type]
    offset = found.offset if mean is None else mean
    codec = Codec(found.codebook, found.scale, offset, codebooks=codebooks, unit=unit)
    return Fitted(codec, centroids)


def _list_count(lists: int | str | None, N: int) -> int | None:
    if isinstance(lists, str):
        checks.choice("build", "lists", lists, ("auto",))
        return coarse.default_lists(N)
    return None if lists is None else checks.integer("build", "lists", lists, 1, N)
