"""The five protocols: sizes, disjointness, seeds, and images of several classes."""

from __future__ import annotations

import pytest
import torch

from drq_fast.retrieval.protocols import split
from drq_fast.retrieval.settings import PROTOCOLS

CIFAR = torch.arange(60_000)[:, None] % 10 == torch.arange(10)


def sets(found) -> tuple[set[int], set[int], set[int]]:
    return tuple(set(rows.tolist()) for rows in found)


def several_classes(N: int, C: int, chance: float) -> torch.Tensor:
    return torch.rand(N, C, generator=torch.Generator().manual_seed(0)) < chance


def test_cifar10_first():
    train, query, database = split("cifar10-1", CIFAR)
    assert torch.equal(train, database)
    assert CIFAR[database].sum(dim=0).tolist() == [5000] * 10
    assert CIFAR[query].sum(dim=0).tolist() == [1000] * 10
    assert not set(query.tolist()) & set(database.tolist())


def test_cifar10_second():
    found = split("cifar10-2", CIFAR)
    assert [len(rows) for rows in found] == [5000, 1000, 54000]
    assert CIFAR[found.train].sum(dim=0).tolist() == [500] * 10
    assert CIFAR[found.query].sum(dim=0).tolist() == [100] * 10
    train, query, database = sets(found)
    assert len(train | query | database) == 60_000  # so none is in two


def test_nuswide():
    labels = several_classes(3000, 5, 0.3)
    found = split("nuswide-1", labels, train=100, query=50)
    train, query, database = sets(found)
    assert train <= database
    assert query | database == set(range(3000))
    assert not query & database
    for rows, count in ((found.train, 100), (found.query, 50)):
        assert bool((labels[rows].sum(dim=0) >= count).all())
        assert len(rows) <= 5 * count  # united: an image of two classes counts once
    found = split("nuswide-2", labels, train=300, query=200)
    train, query, database = sets(found)
    assert (len(train), len(query), len(database)) == (300, 200, 2800)
    assert train <= database
    assert not query & database


def test_imagenet():
    labels = torch.arange(3500)[:, None] % 7 == torch.arange(7)
    number = (torch.arange(3500) >= 3000).long()
    found = split("imagenet100-2", labels, list_number=number)
    assert found.query.tolist() == list(range(3000, 3500))
    assert found.database.tolist() == list(range(3000))
    assert labels[found.train].sum(dim=0).tolist() == [100] * 7
    assert set(found.train.tolist()) <= set(found.database.tolist())
    with pytest.raises(ValueError, match=r"^split: list_number must be of two lists, the database and the queries"):
        split("imagenet100-2", labels)


def test_a_small_class_gives_all_it_has_and_says_so():
    labels = torch.zeros(1300, 2, dtype=torch.bool)
    labels[:1250, 0] = labels[1250:, 1] = True
    with pytest.warns(UserWarning, match="^split: class 1 has ") as caught:
        found = split("cifar10-2", labels)
    said = "all that are left are drawn (the options --train and --query set the counts)."
    assert [str(warning.message) for warning in caught] == [
        f"split: class 1 has only 50 images left for 100 queries; {said}",
        f"split: class 1 has only 0 images left for 500 training images; {said}",
    ]
    assert labels[found.query].sum(dim=0).tolist() == [100, 50]


@pytest.mark.parametrize("protocol", ["cifar10-1", "cifar10-2"])
def test_seeds(protocol):
    first, again, other = (split(protocol, CIFAR, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.query, other.query)


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"^split: protocol must be one of 'cifar10-1', .*, got 'cifar'\.$"):
        split("cifar", CIFAR)
    counts = "got 100 queries per class and 500 training images per class of 500 items by protocol"
    options = r"\(the options --train and --query set the counts\)\.$"
    few = "small enough to leave items"
    with pytest.raises(ValueError, match=f"^split: query must be {few} to train on, {counts} cifar10-2 {options}"):
        split("cifar10-2", CIFAR[:500])
    with pytest.raises(ValueError, match=f"^split: train must be {few} for the database, .* of 1100 items by .*"):
        split("cifar10-2", CIFAR[:1100])
    with pytest.warns(
        UserWarning, match="class 0 has only 10 images left for 500 training images, and 9 more classes "
    ):
        split("imagenet100-2", CIFAR[:200], list_number=(torch.arange(200) >= 100).long(), train=500)
    expected = r"query must be .*, got 500 queries and 5 training images of 500 items by protocol nuswide-2 \("
    with pytest.raises(ValueError, match=expected):
        split("nuswide-2", CIFAR[:500], train=5, query=500)
    assert {rule.R for rule in PROTOCOLS.values()} == {5000, 54000}
    with pytest.raises(ValueError, match=r"^split: labels must be bool \[N, C\], got torch.int64 \[60000\]\.$"):
        split("cifar10-1", CIFAR.long().argmax(dim=1))
    number = (torch.arange(60_000) > 50_000).long()
    with pytest.raises(ValueError, match=r"^split: query must be None for imagenet100-2, whose queries are the second"):
        split("imagenet100-2", CIFAR, list_number=number, query=5)
