"""Retrieval figures that ties cannot bend: every group of equal scores counts as the average over its orders."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks


def average_precision(scores: Tensor, relevant: Tensor, R: int | None = None, *, largest: bool = False) -> Tensor:
    """AP@R [Q] in float64 of scores [Q, N] with relevant [Q, N] bool; R is the depth of the cut, N by default.

    Less is better unless `largest`. Equal scores are averaged over their orders: a group of n items, r relevant,
    after N0 items with R0 relevant ones, of which m = min(n, R - N0) lie inside the cut, adds to
    numerator   sum_{i=1..m} r/n * (R0 + 1 + (i-1)(r-1)/(n-1)) / (N0 + i)     and to
    denominator m r / n. A query without relevant items in the cut has AP 0.
    """
    checks.tensor("average_precision", "scores", scores)
    if scores.ndim != 2 or relevant.shape != scores.shape or relevant.dtype != torch.bool:
        checks.fail(
            "average_precision",
            "relevant",
            "a bool tensor of the shape of scores [Q, N]",
            checks.shape_of(relevant),
        )
    N = scores.shape[1]
    if R is not None:
        checks.integer("average_precision", "R", R, 1)
    ordered, order = scores.sort(dim=1, descending=largest)
    hits = relevant.gather(1, order).double()
    # Group of each item, and where its group begins and ends.
    place = torch.arange(N, device=scores.device).expand_as(ordered)
    new_group = torch.ones_like(ordered, dtype=torch.bool)
    new_group[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    N0 = torch.where(new_group, place, 0).cummax(dim=1).values if N else place
    last = torch.ones_like(new_group)
    last[:, :-1] = new_group[:, 1:]
    end = torch.where(last, place, N).flip(1).cummin(dim=1).values.flip(1) + 1 if N else place
    total = torch.cat([hits.new_zeros(len(hits), 1), hits.cumsum(dim=1)], dim=1)  # relevant items before each place
    R0 = total.gather(1, N0)
    r, n = total.gather(1, end) - R0, (end - N0).double()
    earlier = (place - N0).double()  # i - 1
    expected = R0 + 1 + earlier * (r - 1) / (n - 1).clamp_min(1)
    inside = place < (N if R is None else R)
    numerator = torch.where(inside, r / n * expected / (place + 1), 0).sum(dim=1)
    denominator = torch.where(inside, r / n, 0).sum(dim=1)
    return torch.where(denominator > 0, numerator / denominator.clamp_min(torch.finfo(torch.float64).tiny), 0)
