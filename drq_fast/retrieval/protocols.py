"""The five protocols of the paper: training images, queries and database."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks
from .settings import PROTOCOLS

_COUNTS = "(the options --train and --query set the counts)"


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

    An image that is drawn for several classes is used once. If a class has too few images, all of them are drawn, with
    a warning. "imagenet100-2" needs the `list_number` [N] of items read from two lists.
    """
    checks.choice("split", "protocol", protocol, tuple(PROTOCOLS))
    checks.tensor("split", "labels", labels)
    if labels.dtype != torch.bool or labels.ndim != 2:
        checks.fail("split", "labels", "bool [N, C]", f"{labels.dtype} {checks.shape_of(labels)}")
    rule = PROTOCOLS[protocol]
    generator, too_few = torch.Generator().manual_seed(checks.seed("split", seed) or 0), list[str]()
    trains = rule.train if train is None else checks.integer("split", "train", train, 0)
    asks = rule.query if query is None else checks.integer("split", "query", query, 1)
    if rule.listed:
        if list_number is None or len(list_number) != len(labels) or set(list_number.tolist()) != {0, 1}:
            checks.fail("split", "list_number", "of two lists, the database and the queries", "another")
        if query is not None:
            checks.fail("split", "query", f"None for {protocol}, whose queries are the second list", query)
        ask = list_number == 1
    else:
        everything = torch.ones(len(labels), dtype=torch.bool)
        ask = _draw(labels, everything, asks, rule.per_class[1], generator, "queries", too_few)
    rest = ~ask
    learn = _draw(labels, rest, trains, rule.per_class[0], generator, "training images", too_few) if trains else rest
    database = rest if rule.train_in_database else rest & ~learn
    if not bool(ask.any()):
        checks.fail("split", "labels", "given for at least one item", "none")
    taken = [(asks, "queries", rule.per_class[1]), (trains, "training images", rule.per_class[0])]
    words = " and ".join(f"{count} {what}{' per class' * each}" for count, what, each in taken if count)
    for name, rows, use in (("query", learn, "to train on"), ("train", database, "for the database")):
        if not bool(rows.any()):
            expected, got = f"small enough to leave items {use}", f"{words} of {len(labels)} items"
            checks.fail("split", name, expected, f"{got} by protocol {protocol} {_COUNTS}")
    for said in too_few:
        warnings.warn(f"split: {said}; all that are left are drawn {_COUNTS}.", stacklevel=2)
    return Split(*(rows.nonzero().squeeze(1) for rows in (learn, ask, database)))


def _draw(
    labels: Tensor,
    allowed: Tensor,
    count: int,
    per_class: bool,
    generator: torch.Generator,
    what: str,
    too_few: list[str],
) -> Tensor:
    """Flags [N] of `count` of the allowed rows, per class or in total; adds to `too_few` which classes have fewer."""
    chosen, short = torch.zeros_like(allowed), list[str]()
    groups = [(f"class {c}", labels[:, c]) for c in range(labels.shape[1])] if per_class else [("the data", allowed)]
    for name, members in groups:
        rows = (members & allowed).nonzero().squeeze(1)
        if len(rows) < count:
            short.append(f"{name} has only {len(rows)} images left for {count} {what}")
        chosen[rows[torch.randperm(len(rows), generator=generator)[:count]]] = True
    if short:
        too_few.append(short[0] + (f", and {len(short) - 1} more classes have too few" if len(short) > 1 else ""))
    return chosen
