"""Stage 1 in a folder of its own, which models with different codebooks share; stages 2 and 3 on its features."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
import torch

from drq_fast.files import FileError
from drq_fast.retrieval import stage_one, train
from drq_fast.retrieval.datasets import features as read_features
from drq_fast.retrieval.experiment import Experiment
from drq_fast.retrieval.settings import Config, Settings

CONFIG = Config(epochs=(2, 1, 1), batch=10, rate=3e-3, checkpoint_seconds=0.0)


@pytest.fixture
def settings(tmp_path) -> Settings:
    """Two classes of 30 features each."""
    generator = np.random.default_rng(0)
    label = np.arange(60) % 2
    np.savez(tmp_path / "x.npz", x=(generator.normal(size=(60, 8)) + label[:, None]).astype(np.float32), label=label)
    sizes = {"hidden": 16, "dim": 12, "codewords": 4, "levels": 2, "train": 10, "query": 5}
    return Settings(str(tmp_path / "x.npz"), stage_one=str(tmp_path / "one"), **sizes)


def trained(settings: Settings, folder, config: Config = CONFIG):
    """(weights, history, features of the queries) of a new object, as a new process makes it."""
    experiment = Experiment(settings, config)
    model, history = experiment.train(folder)
    return model.state_dict(), history, experiment.features(model, experiment.split.query)


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def counted(monkeypatch) -> dict[str, int]:
    """Counts steps of the optimiser and features that a backbone computes."""
    counts, step, features = {"steps": 0, "features": 0}, train._Run.step, stage_one.features

    def counting_step(*arguments):
        counts["steps"] += 1
        return step(*arguments)

    def counting_features(model, items, **options):
        counts["features"] += len(items)
        return features(model, items, **options)

    monkeypatch.setattr(train._Run, "step", counting_step)
    monkeypatch.setattr(stage_one, "features", counting_features)
    return counts


def test_codebooks_share_one_stage_one(settings, tmp_path, monkeypatch):
    counts = counted(monkeypatch)
    _, history, _ = trained(settings, tmp_path / "4")
    assert [epoch["levels"] for epoch in history] == [0, 0, 1, 2]
    assert counts == {"steps": 8, "features": 60}
    first = (tmp_path / "one" / train.CHECKPOINT).read_bytes()
    other = dataclasses.replace(settings, codewords=8, levels=3)
    weights, longer, x = trained(other, tmp_path / "8", dataclasses.replace(CONFIG, epochs=(2, 1, 2), detach=True))
    assert counts == {"steps": 8 + 6, "features": 60}  # of stages 2 and 3 alone
    assert longer[:2] == history[:2]
    assert [epoch["levels"] for epoch in longer] == [0, 0, 1, 3, 3]
    assert (tmp_path / "one" / train.CHECKPOINT).read_bytes() == first
    assert weights["quantizer.codebook"].shape == (8, 12)
    assert x.shape == (10, 12)
    assert not [name for name in weights if name.startswith("backbone.")]
    again = Experiment(other, dataclasses.replace(CONFIG, epochs=(2, 1, 2), detach=True))
    model = again.model()
    model.load_state_dict(weights)
    kept = again.trained(tmp_path / "8", model.quantizer)
    assert torch.equal(again.features(kept, again.split.query), x)
    assert counts == {"steps": 8 + 6, "features": 60}


def test_features_are_those_of_the_backbone_after_stage_one(settings, tmp_path):
    trained(settings, tmp_path / "run")
    experiment = Experiment(
        dataclasses.replace(settings, stage_one=None), dataclasses.replace(CONFIG, epochs=(2, 1, 1))
    )
    base = experiment._model(None, 2, 1)
    train.train(base, experiment.items, experiment.split.train, dataclasses.replace(CONFIG, epochs=(2, 0, 0)))
    items = read_features(tmp_path / "one" / stage_one.FEATURES)
    with torch.no_grad():
        torch.testing.assert_close(items[range(60)], base.backbone(experiment.items[range(60)]))
    assert torch.equal(items.labels, experiment.items.labels)
    assert items.classes == experiment.items.classes


def test_a_run_that_is_killed_anywhere_ends_as_if_it_had_not_been(settings, tmp_path, monkeypatch):
    whole = trained(settings, tmp_path / "whole")
    expected = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    settings = dataclasses.replace(settings, stage_one=str(tmp_path / "two"))
    calls = 0
    found = None
    while found is None:
        calls += 1
        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            killed_after_one(patched)
            found = trained(settings, tmp_path / "run")
    assert calls == 2 * 4 + 1  # each did one step more, or wrote the features
    assert same(found[0], whole[0])
    assert found[1] == whole[1]
    assert torch.equal(found[2], whole[2])
    assert {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()} == expected


def killed_after_one(patched) -> None:
    """Ends the program before its second step; writing the features is a step, too."""
    left = iter([None])

    def guarded(function):
        def run(*arguments):
            if next(left, 0) == 0:
                raise KeyboardInterrupt
            return function(*arguments)

        return run

    patched.setattr(train._Run, "step", guarded(train._Run.step))
    patched.setattr(stage_one, "_write", guarded(stage_one._write))


def test_another_stage_one_is_refused_and_old_features_are_computed_again(settings, tmp_path, monkeypatch):
    trained(settings, tmp_path / "run")
    for change, config in (({}, {"margin": 0.25}), ({"hidden": 17}, {}), ({}, {"epochs": (3, 1, 1)})):
        with pytest.raises(
            FileError, match=r"one/checkpoint.safetensors (belongs to another run|was written; train in)"
        ):
            trained(dataclasses.replace(settings, **change), tmp_path / "b", dataclasses.replace(CONFIG, **config))
    path, counts = tmp_path / "one" / stage_one.FEATURES, counted(monkeypatch)
    pack = dict(np.load(path))
    np.savez(path, **pack | {"network": np.array("another")})
    trained(settings, tmp_path / "again")
    assert counts["features"] == 60
    assert np.array_equal(np.load(path)["x"], pack["x"])


def test_wrong_settings(settings, tmp_path):
    with pytest.raises(ValueError, match=r"^train: stage_one must be another folder than that of the run, got"):
        trained(settings, tmp_path / "one")
    for change, epochs in (({}, (0, 1, 1)), ({"ablation": "unsupervised"}, (1, 1, 1))):
        with pytest.raises(ValueError, match=r"^train: stage_one must be left out where stage 1 trains nothing, got"):
            trained(dataclasses.replace(settings, **change), tmp_path / "b", dataclasses.replace(CONFIG, epochs=epochs))
