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


@pytest.mark.parametrize("R", [1, 2, 4, 6, 9])
def test_ties_are_averaged_over_all_orders(R):
    generator = torch.Generator().manual_seed(R)
    for _ in range(20):
        scores = torch.randint(3, (1, 6), generator=generator).float()
        relevant = torch.randint(2, (1, 6), generator=generator).bool()
        orders = [
            p for p in itertools.permutations(range(6)) if all(scores[0, p[i]] <= scores[0, p[i + 1]] for i in range(5))
        ]
        expected = sum(plain([bool(relevant[0, i]) for i in p], R) for p in orders) / len(orders)
        assert average_precision(scores, relevant, R=R).item() == pytest.approx(expected)


def test_a_large_tie_with_few_relevant_items():
    relevant = torch.zeros(2, 1000, dtype=torch.bool)
    relevant[0, 17] = True
    relevant[1, ::10] = True
    result = average_precision(torch.zeros(2, 1000), relevant, R=10)
    assert result[0].item() == pytest.approx(sum(1 / i for i in range(1, 11)) / 1000)
    generator = torch.Generator().manual_seed(0)
    runs = [plain(relevant[1, torch.randperm(1000, generator=generator)].tolist(), 10) for _ in range(4000)]
    assert result[1].item() == pytest.approx(sum(runs) / 4000, abs=0.015)
