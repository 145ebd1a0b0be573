"""Augmentation of images: what a view may be, and how settings reach it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drq_fast.retrieval import train as loop
from drq_fast.retrieval.augment import augment
from drq_fast.retrieval.datasets import Images, one_hot
from drq_fast.retrieval.model import Model
from drq_fast.retrieval.settings import Config
from drq_fast.retrieval.stage_one import Given


def test_augment_takes_parts_and_mirrors_them():
    images = torch.randint(0, 256, (16, 3, 9, 9), dtype=torch.uint8)
    torch.manual_seed(0)
    views = augment(images, 9, smallest=1.0, colour=0.0, hole=0.0)
    assert views.shape == (16, 3, 9, 9)
    assert augment(images, 17).shape == (16, 3, 17, 17)
    near = [bool((view - image).abs().max() < 60) for view, image in zip(views, images.float(), strict=True)]
    assert not all(near)  # some are mirrored
    assert bool((augment(images, 12) >= 0).all())
    assert bool((augment(images, 12) <= 255).all())


def test_augment_changes_colours():
    images = torch.empty(32, 3, 8, 8)
    images[:, 0], images[:, 1], images[:, 2] = 60.0, 100.0, 140.0
    torch.manual_seed(0)
    assert augment(images, 8, colour=0.0, hole=0.0).allclose(images, atol=1e-3)
    views = augment(images, 8, colour=0.3, hole=0.0)
    assert bool((views[:, 0] < views[:, 2]).all())  # the hue stays
    brightness = views.mean(dim=(1, 2, 3))
    assert 70 - 0.1 <= float(brightness.min()) < 85
    assert 115 < float(brightness.max()) <= 130 + 0.1
    gap = (views[:, 2] - views[:, 0]).mean(dim=(1, 2)) / brightness
    assert float(gap.max() / gap.min()) > 1.3


def test_augment_cuts_a_square_out_of_half_of_the_views():
    torch.manual_seed(0)
    views = augment(torch.zeros(400, 3, 10, 10), 10, colour=0.0, hole=0.4)
    grey = (views == 127).all(dim=1)
    sizes = grey.sum(dim=(1, 2))
    assert set(sizes.tolist()) == {0, 16}
    assert 160 < int((sizes == 16).sum()) < 240
    cut = grey[sizes == 16]
    assert bool((cut.any(dim=1).sum(dim=1) == 4).all())
    assert bool(cut.any(dim=0).all())  # anywhere


def test_strength_of_augmentation(monkeypatch):
    seen = []
    monkeypatch.setattr(loop, "augment", lambda images, *strength: seen.append(strength) or images.float())
    items = Images(np.zeros((8, 3, 6, 6), np.uint8), one_hot(np.arange(8) % 2, 2), ["a", "b"])
    model = Model(Given(6), torch.eye(2, 6), dim=16, codewords=16, levels=3)
    run = loop._Run(model, items, torch.arange(8), Config(crop=0.25, colour=0.5, hole=0.0), None)
    run.view(items[[0]])
    assert seen == [(6, 0.25, 0.5, 0.0)]
    with pytest.raises(ValueError, match=r"^Config: hole must be at most 1, got 1.5\.$"):
        Config(hole=1.5)
