"""The adaptive margin loss and the triplet loss: by hand, by gradcheck, and on hopeless batches."""

from __future__ import annotations

import math

import pytest
import torch

from drq_fast.retrieval.losses import (
    MINING,
    adaptive_margin_loss,
    batch_triplet_loss,
    distances,
    mine,
    similar,
    triplet_loss,
)


def flags(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def test_the_margin_loss_by_hand():
    # Words at 0, 90 and 180 degrees: delta_01 = 1, delta_02 = 2.
    words = torch.tensor([[2.0, 0.0], [0.0, 0.5], [-1.0, 0.0]])
    z = torch.tensor([[3.0, 4.0]])  # cosines .6, .8, -.6
    assert adaptive_margin_loss(z, flags([1, 0, 0]), words).item() == pytest.approx((1 - 0.6 + 0.8) + (2 - 0.6 - 0.6))
    # Labels 0 and 1: pairs (0, 2) and (1, 2), delta_12 = 1.
    expected = (2 - 0.6 - 0.6) + max(0, 1 - 0.8 - 0.6)
    assert adaptive_margin_loss(z, flags([1, 1, 0]), words).item() == pytest.approx(expected)
    # An image with all labels and one with none add nothing, and count as images.
    both = adaptive_margin_loss(z.repeat(4, 1), flags([1, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 0]), words)
    assert both.item() == pytest.approx(((1 - 0.6 + 0.8) + 0.8 + expected) / 4)


def test_the_triplet_loss_by_hand():
    a, p, n = (torch.tensor([v]) for v in ([0.0, 0.0], [3.0, 4.0], [0.0, 6.0]))
    assert triplet_loss(a, p, n, 2.5).item() == pytest.approx(5 - 6 + 2.5)
    assert triplet_loss(a, p, n, 0.5).item() == 0
    assert triplet_loss(a, n, p, 0.5).item() == pytest.approx(1.5)
    assert triplet_loss(a[:0], p[:0], n[:0], 1.0).item() == 0


def test_semi_hard_triplets_by_hand():
    # On a line: two of class 0 at 0 and 2, three of class 1 at 1, 3 and 9.
    x = torch.tensor([[0.0], [2.0], [1.0], [3.0], [9.0]])
    labels = flags([1, 0], [1, 0], [0, 1], [0, 1], [0, 1])
    found = mine(distances(x), labels, "semi_hard")
    triplets = set(zip(*(t.tolist() for t in found), strict=True))
    # Anchor 0: its positive is 2 away, so 3 (not the nearer 1) is the nearest beyond it. Anchor 1 likewise: 9.
    assert {(0, 1, 3), (1, 0, 4)} <= triplets
    # Anchor 4, positive 6 away: 0 and 2 are 9 and 7 away. Anchor 4, positive 8 away: 9 is beyond.
    assert {(4, 3, 1), (4, 2, 0)} <= triplets
    # Anchor 2: positive 3 is 2 away, both negatives are 1 away: none is beyond, so the farthest, which is either.
    assert ((2, 3, 0) in triplets) != ((2, 3, 1) in triplets)
    assert len(triplets) == 2 + 6
    loss = batch_triplet_loss(x, labels, 1.5)
    by_hand = triplet_loss(x[found.anchor], x[found.positive], x[found.negative], 1.5)
    assert loss.item() == pytest.approx(by_hand.item())


def test_random_triplets_are_triplets_and_reach_every_pair():
    labels = torch.rand(12, 3, generator=torch.Generator().manual_seed(0)) < 0.4
    alike = similar(labels, labels)
    x = torch.randn(12, 4)
    seen = set()
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        a, p, n = mine(distances(x), labels, "random", generator)
        assert bool(alike[a, p].all())
        assert not bool(alike[a, n].any())
        assert bool((a != p).all())
        assert bool(labels[n].any(dim=1).all())
        seen |= set(zip(a.tolist(), p.tolist(), strict=True))
    allowed = alike & ~torch.eye(12, dtype=torch.bool)
    negative = (~alike & labels.any(dim=1)).any(dim=1)
    assert seen == {(i, j) for i, j in allowed.nonzero().tolist() if negative[i]}


@pytest.mark.parametrize("mining", MINING)
@pytest.mark.parametrize(
    "labels",
    [
        torch.zeros(6, 3, dtype=torch.bool),  # nobody has a label
        torch.ones(6, 3, dtype=torch.bool),  # no negative
        torch.eye(6, dtype=torch.bool),  # no positive
        torch.eye(6, dtype=torch.bool)[:0],  # nothing at all
    ],
)
def test_a_batch_without_triplets_is_zero_with_gradients_of_zero(mining, labels):
    x = torch.randn(len(labels), 4, requires_grad=True)
    loss = batch_triplet_loss(x, labels, 1.0, mining)
    loss.backward()
    assert loss.item() == 0
    assert x.grad is not None
    assert not bool(x.grad.any())


@pytest.mark.parametrize("x", [torch.zeros(6, 4), torch.ones(6, 4), torch.randn(6, 4).repeat(1, 1) * 1e-20])
def test_equal_features_have_finite_gradients(x):
    labels = torch.tensor([0, 0, 1, 1, 2, 2])[:, None] == torch.arange(3)
    x = x.clone().requires_grad_()
    words = torch.eye(3, 4)
    loss = batch_triplet_loss(x, labels, 1.0) + adaptive_margin_loss(x, labels, words)
    loss.backward()
    assert math.isfinite(loss.item())
    assert bool(torch.isfinite(x.grad).all())


def test_gradients():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 7, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 0])[:, None] == torch.arange(3)
    words = torch.randn(3, 4, generator=generator, dtype=torch.float64)

    for loss in (
        lambda x: adaptive_margin_loss(x[0], labels, words),
        lambda x: batch_triplet_loss(x[0], labels, 1.0),
        lambda x: triplet_loss(x[0], x[1], x[2], 1.0),
    ):
        assert loss(x).item() > 0
        assert torch.autograd.gradcheck(loss, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    labels = torch.tensor([0, 0, 1, 1])[:, None] == torch.arange(2)
    x, words = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(dtype), torch.eye(2, 3)
    assert adaptive_margin_loss(x, labels, words) == adaptive_margin_loss(x.float(), labels, words)
    assert batch_triplet_loss(x, labels, 1.0) == batch_triplet_loss(x.float(), labels, 1.0)


def test_wrong_labels_and_words():
    z, words = torch.randn(3, 4), torch.randn(2, 4)
    with pytest.raises(
        ValueError, match=r"^adaptive_margin_loss: labels must be bool \[3, C\], got torch.int64 \[3\]\.$"
    ):
        adaptive_margin_loss(z, torch.zeros(3, dtype=torch.int64), words)
    with pytest.raises(ValueError, match=r"^adaptive_margin_loss: words must be \[5, 4\], one row per class"):
        adaptive_margin_loss(z, torch.zeros(3, 5, dtype=torch.bool), words)
    with pytest.raises(ValueError, match=r"^mine: mining must be one of 'semi_hard', 'random', got 'hard'\.$"):
        batch_triplet_loss(z, torch.zeros(3, 5, dtype=torch.bool), 1.0, "hard")
    with pytest.raises(ValueError, match="must be of one shape"):
        triplet_loss(z, z, z[:2], 1.0)


def test_features_without_a_direction_have_gradients_of_a_usual_size():
    z = torch.stack([torch.zeros(4), torch.full((4,), 1e-9), torch.ones(4)]).requires_grad_()
    adaptive_margin_loss(z, flags([1, 0], [1, 0], [0, 1]), torch.eye(2, 4)).backward()
    assert z.grad.norm(dim=1).max() < 2


def test_distances_far_from_zero():
    x = 1000 + 0.01 * torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    expected = torch.cdist(x.double(), x.double())
    assert (distances(x) - expected).norm() < 1e-4 * expected.norm()
