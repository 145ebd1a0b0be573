"""mAP@R: on numbers worked out by hand, and against the average over random orders of ties."""

from __future__ import annotations

import itertools

import pytest
import torch

from drq_fast.retrieval.evaluate import average_precision


def plain(relevant: list[bool], R: int) -> float:
    hits = [sum(relevant[: i + 1]) / (i + 1) for i in range(min(R, len(relevant))) if relevant[i]]
    return sum(hits) / len(hits) if hits else 0.0


def test_by_hand_without_ties():
    scores, relevant = torch.tensor([[1.0, 2, 3, 4]]), torch.tensor([[True, False, True, True]])
    assert average_precision(scores, relevant).item() == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)
    assert average_precision(scores, relevant, R=2).item() == pytest.approx(1)
    assert average_precision(scores, relevant, largest=True).item() == pytest.approx((1 + 1 + 3 / 4) / 3)
    assert average_precision(scores, ~relevant, R=1).item() == 0
    assert average_precision(scores[:, :0], relevant[:, :0]).tolist() == [0]


def test_ties_are_averaged_over_all_orders():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        scores = torch.randint(3, (1, 6), generator=generator).float()
        relevant = torch.randint(2, (1, 6), generator=generator).bool()
        orders = [
            p for p in itertools.permutations(range(6)) if all(scores[0, p[i]] <= scores[0, p[i + 1]] for i in range(5))
        ]
        expected = sum(plain([bool(relevant[0, i]) for i in p], 6) for p in orders) / len(orders)
        assert average_precision(scores, relevant).item() == pytest.approx(expected)


def test_a_cut_through_a_tie_is_close_to_the_average_over_orders():
    generator = torch.Generator().manual_seed(1)
    scores, relevant = (
        torch.randint(8, (1, 200), generator=generator).float(),
        torch.rand(1, 200, generator=generator) < 0.3,
    )
    runs = []
    for _ in range(400):
        order = torch.randperm(200, generator=generator)
        order = order[scores[0, order].sort(stable=True).indices]
        runs.append(plain(relevant[0, order].tolist(), 60))
    assert average_precision(scores, relevant, R=60).item() == pytest.approx(sum(runs) / 400, abs=0.01)
