"""Retrieval figures that ties cannot bend: every group of equal scores counts as the average over its orders."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks


def average_precision(scores: Tensor, relevant: Tensor, R: int | None = None, *, largest: bool = False) -> Tensor:
    """AP@R [Q] in float64 of scores [Q, N] with relevant [Q, N] bool; R is the depth of the cut, N by default.

    Less is better unless `largest`. AP@R is the mean of the precisions at the relevant items within the cut, 0 where
    there are none, and the result its expectation over all orders of equal scores. A group of n items, r relevant,
    after N0 items with R0 relevant ones adds sum_i r/n (R0 + 1 + (i-1)(r-1)/(n-1)) / (N0 + i) to the sum of precisions;
    of the group that the cut goes through, j of m items are relevant with hypergeometric probability.
    """
    checks.tensor("average_precision", "scores", scores)
    if scores.ndim != 2 or relevant.shape != scores.shape or relevant.dtype != torch.bool:
        checks.fail("average_precision", "relevant", "bool [Q, N] like scores", checks.shape_of(relevant))
    if R is not None:
        checks.integer("average_precision", "R", R, 1)
    N = scores.shape[1]
    if N == 0:
        return torch.zeros(len(scores), dtype=torch.float64, device=scores.device)
    cut = N if R is None else min(R, N)
    ordered, order = scores.sort(dim=1, descending=largest)
    place = torch.arange(N, device=scores.device).expand_as(ordered)
    starts = torch.ones_like(relevant)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    N0 = torch.where(starts, place, 0).cummax(dim=1).values  # of each item: where its group begins and ends
    ends = starts.roll(-1, dims=1)
    end = torch.where(ends, place, N).flip(1).cummin(dim=1).values.flip(1) + 1
    hits = relevant.gather(1, order).double().cumsum(dim=1)
    before = torch.cat([hits.new_zeros(len(hits), 1), hits], dim=1)  # relevant items before each place
    R0, n = before.gather(1, N0), (end - N0).double()
    r = before.gather(1, end) - R0
    expected = R0 + 1 + (place - N0) * (r - 1) / (n - 1).clamp_min(1)
    whole = end <= cut
    precisions = torch.where(whole, r / n * expected / (place + 1), 0).sum(dim=1)
    N0, n, R0, r = (t[:, cut - 1 : cut].double() for t in (N0, n, R0, r))  # of the group that the cut goes through
    return _expectation(precisions, N0, n, R0, r, cut)


def _expectation(precisions: Tensor, N0: Tensor, n: Tensor, R0: Tensor, r: Tensor, cut: int) -> Tensor:
    """AP from the sum of precisions [Q] of whole groups and from the group [Q, 1] that holds the last item inside."""
    m = cut - N0  # items of the group inside; if that is all of them, they are in `precisions` already
    inverse = torch.cat([n.new_zeros(1), 1 / torch.arange(1.0, cut + 1, dtype=n.dtype, device=n.device)]).cumsum(0)
    A = inverse[cut] - inverse[N0.long()]  # sum of 1 / (N0 + i), i = 1..m
    B = m - (N0 + 1) * A  # sum of (i - 1) / (N0 + i)
    j = torch.arange(float(torch.minimum(r, m).max()) + 1, dtype=n.dtype, device=n.device)  # relevant ones inside
    log_choose = lambda a, b: torch.lgamma(a + 1) - torch.lgamma(b + 1) - torch.lgamma(a - b + 1)  # noqa: E731
    possible = (j <= r) & (j <= m) & (m - j <= n - r)
    inside = torch.where(possible, j, torch.minimum(r, m))
    log_chance = log_choose(r, inside) + log_choose(n - r, (m - inside).clamp_max(n - r)) - log_choose(n, m)
    chance = torch.where(possible, log_chance.exp(), 0)
    partial = j / m * ((R0 + 1) * A + (j - 1) / (m - 1).clamp_min(1) * B)
    total = torch.where(m < n, precisions[:, None] + partial, precisions[:, None])
    return (chance * torch.where(R0 + j > 0, total / (R0 + j).clamp_min(1), 0)).sum(dim=1)
