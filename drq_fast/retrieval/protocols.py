"""The five protocols of the paper: training images, queries and database."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks
from .settings import PROTOCOLS


class Split(NamedTuple):
    """Row numbers of items, int64, ascending; query is disjoint from train and database."""

    train: Tensor
    query: Tensor
    database: Tensor


def split(
    protocol: str,
    labels: Tensor,
    *,
    seed: int = 0,
    list_number: Tensor | None = None,
    train: int | None = None,
    query: int | None = None,
) -> Split:
    """Draws training images, queries and database from labels [N, C] bool; `train` and `query` replace the counts.

    An image that is drawn for several classes is used once. If a class has too few images, all of them are used, with a
    warning. "imagenet100-2" needs the `list_number` [N] of items read from two lists.
    """
    checks.choice("split", "protocol", protocol, tuple(PROTOCOLS))
    checks.tensor("split", "labels", labels)
    if labels.dtype != torch.bool or labels.ndim != 2:
        checks.fail("split", "labels", "bool [N, C]", f"{labels.dtype} {checks.shape_of(labels)}")
    rule = PROTOCOLS[protocol]
    generator = torch.Generator().manual_seed(checks.seed("split", seed) or 0)
    trains = rule.train if train is None else checks.integer("split", "train", train, 0)
    asks = rule.query if query is None else checks.integer("split", "query", query, 1)
    if rule.listed:
        if list_number is None or len(list_number) != len(labels) or set(list_number.tolist()) != {0, 1}:
            checks.fail("split", "list_number", "of two lists, the database and the queries", "another")
        if query is not None:
            checks.fail("split", "query", f"None for {protocol}, whose queries are the second list", query)
        ask = list_number == 1
    else:
        ask = _draw(labels, torch.ones(len(labels), dtype=torch.bool), asks, rule.per_class[1], generator, "queries")
    rest = ~ask
    learn = _draw(labels, rest, trains, rule.per_class[0], generator, "training images") if trains else rest
    database = rest if rule.train_in_database else rest & ~learn
    for name, rows in (("train", learn), ("query", ask), ("database", database)):
        if not bool(rows.any()):
            checks.fail("split", "labels", f"enough for {protocol}", f"{len(labels)} items and none left for {name}")
    return Split(*(rows.nonzero().squeeze(1) for rows in (learn, ask, database)))


def _draw(
    labels: Tensor, allowed: Tensor, count: int, per_class: bool, generator: torch.Generator, what: str
) -> Tensor:
    """Flags [N] of `count` of the allowed rows, per class or in total."""
    chosen = torch.zeros_like(allowed)
    groups = [(f"class {c}", labels[:, c]) for c in range(labels.shape[1])] if per_class else [("all", allowed)]
    for name, members in groups:
        rows = (members & allowed).nonzero().squeeze(1)
        if len(rows) < count:
            warnings.warn(f"split: {name} has {len(rows)} of {count} {what}; all are taken.", stacklevel=3)
        chosen[rows[torch.randperm(len(rows), generator=generator)[:count]]] = True
    return chosen
