"""The compiled code of every instruction set beside the definition."""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch

from drq_fast import Index, functional
from drq_fast.backends import plain_torch
from drq_fast.backends.native import extension

from .common import METRICS, random_codec, random_vectors, require


def differences(dice: random.Random, folder: Path) -> int:
    for _ in range(6):
        compare(dice)
    return 6


def compare(dice: random.Random) -> None:
    """Search and squared errors of a random codec, by a random instruction set."""
    codec, isas = random_codec(dice), extension.supported_isas()
    N, Q = dice.choice((1, 7, 64, 500, 3000)), dice.choice((1, 2, 5, 40, 70))
    x, query = random_vectors(dice, N, codec.dim), random_vectors(dice, Q, codec.dim)
    metric, k, levels = dice.choice(METRICS), dice.choice((1, 3, 10, 100)), dice.randint(1, codec.levels)
    keep = torch.rand(N, generator=torch.Generator().manual_seed(1)) < 0.4 if dice.random() < 0.4 else None
    index = Index(codec, metric)
    before = os.environ.get("DRQ_FAST_ISA")
    try:
        os.environ["DRQ_FAST_ISA"] = dice.choice(isas)
        index.add(x)
        found = index.search(query, k, levels, keep)
        errors = functional.squared_errors(x, *codec.tensors()[:2], offset=codec.offset)
    finally:
        os.environ.pop("DRQ_FAST_ISA") if before is None else os.environ.update(DRQ_FAST_ISA=before)
    codes, wide = index.codes[:, :levels].long(), [None if t is None else t.double() for t in codec.tensors()]
    scores = functional.adc(
        query.double(), codes, wide[0], wide[1][:levels], offset=wide[2], metric=metric, backend="torch"
    )
    if keep is not None:
        scores[:, ~keep] = float("inf") if metric == "l2" else float("-inf")
    order = plain_torch.rank(scores, k, metric)
    best = plain_torch.pad_result(scores.gather(1, order), order, k, metric).scores
    largest = (1 + query.double().square().sum(dim=1, keepdim=True)) * (1 + float(codec.codebook.abs().max()) ** 2)
    # A cosine is uncertain where offset and codewords cancel: its norm is a sum of squares that are much larger.
    certain = metric != "cosine" or float(codec.decode(codes).norm(dim=1).min()) > 0.1
    close = ((best - found.scores).abs() < 1e-3 * largest) | ~best.isfinite()
    require(bool((best.isfinite() == found.scores.isfinite()).all()), "search found another number of codes")
    require(not certain or bool(close.all()), "search found other scores than the definition")
    exact = x.double() - (0 if wide[2] is None else wide[2])
    for m in range(codec.levels):
        exact = exact - wide[1][m] * wide[0][errors.codes[:, m]]
        near = (2 * exact.square().sum(dim=1) - errors.errors[:, m]).abs() <= 1e-4 * (1 + errors.errors[:, m])
        require(bool(near.all()), "squared errors differ from those of their codes")
