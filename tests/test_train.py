"""The three-stage loop: it learns, resumes bit by bit, gives the same in two processes, and obeys every option."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from patience import PATIENCE

from drq_fast import files
from drq_fast.files import FileError
from drq_fast.retrieval import checkpoint
from drq_fast.retrieval import train as loop
from drq_fast.retrieval.backbones import Precomputed
from drq_fast.retrieval.datasets import FeatureArray, Images, one_hot, read_words
from drq_fast.retrieval.evaluate import evaluate_codes
from drq_fast.retrieval.model import Model
from drq_fast.retrieval.settings import ABLATIONS, Config
from drq_fast.retrieval.train import CHECKPOINT, features, train

CLASSES = 5
SHORT = Config(epochs=(2, 1, 2), batch=32, rate=3e-3, backbone_rate=3e-3, checkpoint_seconds=0.0)


@pytest.fixture(autouse=True)
def one_thread():
    """A second thread would only slow down the tiny matrix products."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def blobs(count: int = 160, seed: int = 0) -> FeatureArray:
    """Five classes of features [N, 12] that overlap."""
    generator = np.random.default_rng(seed)
    label = np.arange(count) % CLASSES
    centres = np.random.default_rng(7).normal(size=(CLASSES, 12))
    x = centres[label] + 0.7 * generator.normal(size=(count, 12))
    return FeatureArray(x.astype(np.float32), one_hot(label, CLASSES), [str(c) for c in range(CLASSES)])


def make_model(ablation: str = "none", dropout: float = 0.2, words: torch.Tensor | None = None) -> Model:
    torch.manual_seed(0)
    words = torch.randn(CLASSES, 6) if words is None else words
    return Model(Precomputed(12, 20, dropout), words, dim=16, codewords=16, levels=3, ablation=ablation)


def same(a: Model, b: Model) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def mean_average_precision(model: Model) -> list[float]:
    database, query = blobs(400, seed=1), blobs(50, seed=2)
    codes = model.quantizer.encode(features(model, database))
    found = evaluate_codes(model.quantizer, codes, database.labels, features(model, query), query.labels)
    return [figures.mean_average_precision for figures in found]


@pytest.mark.parametrize("mining", ["semi_hard", "random"])
def test_training_learns_in_three_stages(mining):
    model = make_model()
    history = train(model, blobs(), config=dataclasses.replace(SHORT, epochs=(8, 4, 8), mining=mining))
    assert [epoch["levels"] for epoch in history] == [0] * 8 + [1] * 4 + [3] * 8
    assert [epoch["error"] > 0 for epoch in history] == [False] * 8 + [True] * 12
    assert history[-1]["semantic"] < 0.7 * history[0]["semantic"]
    assert history[-1]["triplet"] < 0.97 * history[0]["triplet"]
    assert not model.training
    untrained = make_model()
    untrained.backbone.calibrate(blobs()[range(160)])
    untrained.quantizer.initialise(features(untrained, blobs()), seed=0)
    before, after = mean_average_precision(untrained), mean_average_precision(model)
    assert min(after) > max(before) + 0.03
    assert after[2] >= after[0] - 0.01


def test_the_same_seed_gives_the_same_weights_and_leaves_the_generator_alone():
    first, second, other = make_model(), make_model(), make_model()
    state = torch.get_rng_state()
    train(first, blobs(), config=SHORT)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    train(second, blobs(), config=SHORT)
    train(other, blobs(), config=dataclasses.replace(SHORT, seed=1))
    assert same(first, second)
    assert not same(first, other)


def test_worker_processes_change_nothing():
    first, second = make_model(), make_model()
    train(first, blobs(), config=dataclasses.replace(SHORT, epochs=(1, 0, 0)))
    train(second, blobs(), config=dataclasses.replace(SHORT, epochs=(1, 0, 0), workers=1))
    assert same(first, second)


PROGRAM = """
import sys, time
sys.path.insert(0, {tests!r})
import torch
import drq_fast.retrieval.train as loop
from test_train import SHORT, blobs, make_model, train
torch.set_num_threads(1)
original, waits = loop._Run.step, iter([0.05] * 5)
def slow(*arguments):
    time.sleep(next(waits, {patience}))  # after five steps: until it is killed
    return original(*arguments)
loop._Run.step = slow
train(make_model(), blobs(), config=SHORT, folder={folder!r})
"""


def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(tmp_path):
    whole = make_model()
    history = train(whole, blobs(), config=SHORT)
    program = PROGRAM.format(tests=str(Path(__file__).parent), folder=str(tmp_path), patience=PATIENCE)
    generator = np.random.default_rng(0)
    for _ in range(3):
        stamp = (tmp_path / CHECKPOINT).stat().st_mtime_ns if (tmp_path / CHECKPOINT).exists() else None
        process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
        while process.poll() is None:  # kill it at a random moment after a new checkpoint
            time.sleep(0.01)
            if (tmp_path / CHECKPOINT).exists() and (tmp_path / CHECKPOINT).stat().st_mtime_ns != stamp:
                time.sleep(generator.uniform(0, 0.3))
                process.kill()
        assert process.returncode == -signal.SIGKILL, process.stderr.read().decode()
    resumed = make_model()
    assert train(resumed, blobs(), config=SHORT, folder=tmp_path) == history
    assert same(whole, resumed)
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT]


def test_what_a_kill_inside_a_write_leaves_is_removed(tmp_path):
    remains = tmp_path / ".drq_fast-0123456789abcdef.tmp"
    remains.mkdir()
    (remains / ".tmpNH8vv1").write_bytes(b"half a checkpoint")
    train(make_model(), blobs(), config=SHORT, folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT]


class Damaged(FeatureArray):
    """Cannot be read beyond row 100."""

    said = "datasets: the image a.png cannot be decoded (cut off)."

    def __getitem__(self, rows):
        if max(rows) > 100:
            raise FileError(self.said)
        return super().__getitem__(rows)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_read_is_said_as_it_was(workers):
    whole = blobs()
    items = Damaged(whole.x, whole.labels, whole.classes)
    for said in (items.said, "datasets: a.png is not right (one line\nand another)."):
        items.said = said
        with pytest.raises(FileError) as caught:
            features(make_model(), items, workers=workers)
        assert str(caught.value) == said


def test_frozen_norms_stay_as_they_are():
    class Normed(torch.nn.Sequential):
        dim = 12

    norm = torch.nn.BatchNorm1d(12)
    model = Model(Normed(norm), torch.randn(CLASSES, 6), dim=16, codewords=16, levels=3)
    start = {name: value.clone() for name, value in norm.state_dict().items()}
    train(model, blobs(), config=dataclasses.replace(SHORT, freeze_norms=True))
    assert all(torch.equal(value, start[name]) for name, value in norm.state_dict().items())
    train(model, blobs(), config=SHORT)
    assert not any(torch.equal(value, start[name]) for name, value in norm.state_dict().items())


def test_numbers_of_numpy_become_pythons():
    config = Config(batch=np.int64(32), seed=np.int64(3), rate=np.float32(0.5), detach=np.bool_(True))
    assert config == Config(batch=32, seed=3, rate=0.5, detach=True)
    assert [type(value) for value in (config.batch, config.seed, config.rate, config.detach)] == [int, int, float, bool]
    with pytest.raises(ValueError, match=r"^Config: rate must be a finite number of at least 0, got True\.$"):
        Config(rate=True)


@pytest.mark.parametrize("average", [0.0, 0.8])
def test_every_checkpoint_leads_to_the_same_end(tmp_path, monkeypatch, average):
    """Also the one after the last step of an epoch, before its losses are recorded."""
    contents, save = [], checkpoint.save

    def record(path, *arguments):
        save(path, *arguments)
        contents.append(path.read_bytes())

    monkeypatch.setattr(checkpoint, "save", record)
    config = dataclasses.replace(SHORT, epochs=(1, 0, 1), batch=80, average=average)
    whole = make_model()
    history = train(whole, blobs(), config=config, folder=tmp_path)
    monkeypatch.undo()
    assert len(contents) == 5  # after each of 4 steps, and at the end
    for content in contents:
        (tmp_path / CHECKPOINT).write_bytes(content)
        model = make_model()
        found = train(model, blobs(), config=config, folder=tmp_path)
        assert same(model, whole)
        assert json.dumps(found) == json.dumps(history)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("position", None, r"a training \("),
        ("run", [1], r"a training \("),
        ("epoch", -(10**9), r"epoch must be an integer from 0 to 5, got -1000000000\."),
        ("epoch", 4, r"history must be the losses of 4 epochs, got 5 entries\."),
        ("step", 10**9, r"step must be an integer from 0 to 0, got 1000000000\."),
        ("sums", [0.0, 0.0], r"a position in this training \("),
        ("sums", [0.0, 0.0, float("nan")], r"history must be finite numbers, got nan\."),
        ("history", [1] * 5, r"a position in this training \("),
        ("x", 1, r"a position in this training \("),
        ("optimiser.0.exp_avg", torch.zeros(3), r"the state of parameter 0 is incomplete"),
        ("optimiser.99.step", torch.zeros(()), r"it has a state of parameter 99"),
        ("optimiser.x", torch.zeros(()), r"a training \("),
    ],
)
def test_a_forged_checkpoint_is_refused(tmp_path, name, value, message):
    train(make_model(), blobs(), config=SHORT, folder=tmp_path)
    tensors, config, _ = files.read(tmp_path / CHECKPOINT, "training")
    part = tensors if isinstance(value, torch.Tensor) else config if name in config else config["position"]
    part[name] = value
    files.write(tmp_path / CHECKPOINT, "training", tensors, config)
    with pytest.raises(FileError, match=rf"checkpoint.safetensors does not describe .*{message}"):
        train(make_model(), blobs(), config=SHORT, folder=tmp_path)


def test_a_checkpoint_of_another_run_is_refused_and_kept(tmp_path):
    train(make_model(), blobs(), config=SHORT, folder=tmp_path)
    content = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(FileError, match=r"belongs to another run: config.rate is 0\.003 there and 0\.001 here\.$"):
        train(make_model(), blobs(), config=dataclasses.replace(SHORT, rate=1e-3), folder=tmp_path)
    with pytest.raises(FileError, match=r"belongs to another run: ablation is none there and no_joint here\.$"):
        train(make_model("no_joint"), blobs(), config=SHORT, folder=tmp_path)
    wider = Model(Precomputed(12, 21), torch.randn(CLASSES, 6), dim=16, codewords=16, levels=3)
    with pytest.raises(FileError, match=r"^train: the backbone has changed since .*; train in a new folder\.$"):
        train(wider, blobs(), config=SHORT, folder=tmp_path)
    with pytest.raises(FileError, match=r"the data have changed \(other items to train on\) since .*checkpoint"):
        train(make_model(), blobs(), torch.arange(159), config=SHORT, folder=tmp_path)
    others = (
        (
            r"belongs to another run: activation is tanh there and none here\.$",
            Model(Precomputed(12, 20, 0.2), torch.randn(5, 6), dim=16, codewords=16, levels=3, activation="none"),
        ),
        (r"the backbone has changed since", make_model(dropout=0.3)),
        (r"the word vectors have changed since", make_model(words=torch.ones(5, 6))),
    )
    for message, other in others:
        with pytest.raises(FileError, match=message):
            train(other, blobs(), config=SHORT, folder=tmp_path)
    with pytest.raises(FileError, match=r"the data have changed \(other images or features\) since"):
        train(make_model(), blobs(seed=5), config=SHORT, folder=tmp_path)
    changed = blobs()
    changed.x[80] *= -3
    with pytest.raises(FileError, match=r"the data have changed \(other images or features\) since"):
        train(make_model(), changed, config=SHORT, folder=tmp_path)
    assert (tmp_path / CHECKPOINT).read_bytes() == content
    (tmp_path / CHECKPOINT).write_bytes(content[:-10])
    model = make_model()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(FileError, match="is not a complete safetensors file"):
        train(model, blobs(), config=SHORT, folder=tmp_path)
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("ablation", list(ABLATIONS))
def test_what_every_ablation_switches_off(ablation):
    model = make_model(ablation)
    history = train(model, blobs(), config=dataclasses.replace(SHORT, epochs=(1, 1, 1)))
    fc8, fc9 = (0, 0) if model.head is None else model.head.sizes
    expected = {
        "none": (10, 6, True, True, (1, 1, 1)),
        "unsupervised": (0, 0, False, False, (1, 1, 1)),
        "no_semantic": (16, 0, False, True, (1, 1, 1)),
        "no_triplet": (0, 6, True, False, (1, 1, 1)),
        "soft_only": (10, 6, True, True, (0, 1, 0)),
        "no_joint": (10, 6, True, True, (1, 1, 0)),
        "no_concat": (0, 6, True, True, (1, 1, 1)),
    }[ablation]
    semantic = any(epoch["semantic"] for epoch in history)
    triplet = any(epoch["triplet"] for epoch in history)
    assert (fc8, fc9, semantic, triplet, model.quantizer.weights) == expected
    assert model.quantizer.dim == (fc8 + fc9 or 20)
    assert len(mean_average_precision(model)) == 3


def test_the_error_can_be_kept_from_the_features():
    gradients = []
    for detach in (False, True):
        model = make_model(dropout=0.0)
        model.quantizer.initialise(model.features(blobs()[range(160)]).x.detach(), seed=0)
        model(blobs()[range(32)], 3, detach).error.backward()
        gradients.append((model.head.fc8.weight.grad, model.quantizer.codebook.grad))
    assert gradients[0][0].abs().max() > 0
    assert gradients[1][0] is None
    assert torch.equal(gradients[0][1], gradients[1][1])


def test_rates_of_backbone_and_new_layers():
    model = make_model()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, blobs(), config=dataclasses.replace(SHORT, backbone_rate=0.0))
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, start[name])}
    assert "backbone.layers.1.weight" not in moved
    assert {"head.fc8.weight", "head.fc9.bias", "quantizer.codebook", "quantizer.w"} <= moved


def test_mixed_precision_trains_to_about_the_same():
    exact, mixed = make_model(dropout=0.0), make_model(dropout=0.0)
    first = train(exact, blobs(), config=SHORT)
    second = train(mixed, blobs(), config=dataclasses.replace(SHORT, amp=True))
    assert not same(exact, mixed)
    assert second[-1]["triplet"] == pytest.approx(first[-1]["triplet"], rel=0.1)


def test_images_are_augmented_in_training_only():
    generator = np.random.default_rng(0)
    label = np.arange(20) % CLASSES
    images = Images(
        generator.integers(0, 256, (20, 3, 8, 8), dtype=np.uint8), one_hot(label, CLASSES), [str(c) for c in range(5)]
    )

    class Flat(torch.nn.Module):
        dim = 192

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[torch.Tensor] = []

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            self.seen.append(images)
            return images.float().flatten(1) / 255

    for wanted in (True, False):
        torch.manual_seed(0)
        model = Model(Flat(), torch.eye(CLASSES), dim=16, codewords=4, levels=2)
        train(model, images, config=dataclasses.replace(SHORT, epochs=(1, 0, 0), batch=20, augment=wanted))
        trained = model.backbone.seen[-1]
        features(model, images)
        assert torch.equal(model.backbone.seen[-1], images[range(20)])
        assert (trained.dtype == torch.float32) == wanted
        known = {tuple(image.flatten().tolist()) for image in images[range(20)].float()}
        assert all(tuple(image.float().flatten().tolist()) in known for image in trained) == (not wanted)


def test_averages_of_weights_by_hand(monkeypatch):
    steps, step = [], loop._Run.step

    def recorded(run, *arguments):
        losses = step(run, *arguments)
        steps.append({name: value.clone() for name, value in run.model.state_dict().items()})
        return losses

    started, restart = [], loop.Average.restart

    def restarted(average, prefix):
        restart(average, prefix)
        started.append(average.values["quantizer.codebook"].clone())

    monkeypatch.setattr(loop._Run, "step", recorded)
    monkeypatch.setattr(loop.Average, "restart", restarted)
    plain, averaged = make_model(), make_model()
    train(plain, blobs(), config=dataclasses.replace(SHORT, epochs=(1, 1, 0)))
    steps.clear()
    train(averaged, blobs(), config=dataclasses.replace(SHORT, epochs=(1, 1, 0), average=0.8))
    assert len(steps) == 10
    assert all(
        torch.equal(steps[-1][name], value) for name, value in plain.state_dict().items()
    )  # training is the same
    for name in ("head.fc8.weight", "backbone.layers.1.bias"):
        expected = steps[0][name]
        for number, weights in enumerate(steps, 1):
            expected = expected.lerp(weights[name], max(0.2, 9 / (number + 9)))
        torch.testing.assert_close(averaged.state_dict()[name], expected)
    (codebook,) = started
    for number, weights in enumerate(steps[5:], 6):  # of stage 2 alone
        codebook = codebook.lerp(weights["quantizer.codebook"], max(0.2, 9 / (number + 9)))
    torch.testing.assert_close(averaged.state_dict()["quantizer.codebook"], codebook)
    with pytest.raises(ValueError, match=r"^Config: average must be below 1, got 1.0\.$"):
        Config(average=1.0)


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"^Config: epochs must be three numbers, one per stage"):
        Config(epochs=(1, 2))
    with pytest.raises(TypeError, match=r"^Config: epochs must be three numbers, one per stage, got 5\.$"):
        Config(epochs=5)
    with pytest.raises(ValueError, match=r"^Config: rate must be a finite number of at least 0, got -1\.0\.$"):
        Config(rate=-1.0)
    with pytest.raises(TypeError, match=r"^Config: amp must be True or False, got 1\.$"):
        Config(amp=1)
    with pytest.raises(ValueError, match=r"^Model: ablation must be one of 'none', .*, got 'all'\.$"):
        make_model("all")
    with pytest.raises(ValueError, match=r"^train: words must be a vector per class, 5, got 4\.$"):
        train(make_model(words=read_words(None, ["a", "b", "c", "d"])), blobs())
    with pytest.raises(TypeError, match=r"^Model: backbone.dim must be an integer of at least 1, got None\.$"):
        Model(torch.nn.Linear(12, 4), torch.eye(5))


def test_rows_that_are_not_there():
    model = make_model()
    with pytest.raises(TypeError, match=r"^train: rows must be row numbers, got a mask; mask\.nonzero"):
        train(model, blobs(), torch.ones(160, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"^train: rows must be in 0\.\.159, got values from -1 to 3\.$"):
        train(model, blobs(), torch.tensor([-1, 3]))
    with pytest.raises(ValueError, match=r"^features: rows must be in 0\.\.159, got values from 0 to 160\.$"):
        features(model, blobs(), torch.arange(161))
    assert torch.equal(features(model, blobs(), [3, 5]), features(model, blobs(), torch.tensor([3, 5])))


def test_numbers_that_are_not_finite_stop_the_training():
    items = blobs()
    items.x[7, 3] = np.nan
    with pytest.raises(FileError, match=r"^datasets: item 7 has a feature that is not finite in float32\.$"):
        train(make_model(), items, config=SHORT)
    with pytest.raises(
        ValueError, match=r"^train: the loss must be finite, got (nan|inf) in step \d+ of this epoch\.$"
    ):
        train(make_model(), blobs(), config=dataclasses.replace(SHORT, rate=1e30, backbone_rate=1e30))


def test_a_folder_that_cannot_be_written_is_noticed_before_training(tmp_path):
    (tmp_path / "file").write_text("mine")
    model = make_model()
    with pytest.raises(OSError, match=r"^train: .*file cannot be written to: .*\.$"):
        train(model, blobs(), config=SHORT, folder=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    assert not model.quantizer.initialised


DISTRIBUTED = dataclasses.replace(SHORT, epochs=(2, 1, 2), mining="semi_hard", freeze_norms=True)


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    for mining in ("semi_hard", "random"):
        model = make_model(dropout=0.0)
        train(model, blobs(), config=dataclasses.replace(DISTRIBUTED, mining=mining), folder=f"{folder}/run-{mining}")
        torch.save(model.state_dict(), f"{folder}/{mining}{rank}")
    with pytest.raises(ValueError, match=r"^train: batch must be a multiple of 2, the number of processes, got 33\.$"):
        train(make_model(), blobs(), config=dataclasses.replace(DISTRIBUTED, batch=33))
    dist.barrier()
    os._exit(0)  # see test_distributed.py


def test_two_processes_train_as_one(tmp_path):
    mp.spawn(worker, args=(str(tmp_path),), nprocs=2)
    for mining in ("semi_hard", "random"):
        first, second = (torch.load(tmp_path / f"{mining}{rank}") for rank in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)
        alone = make_model(dropout=0.0)
        train(alone, blobs(), config=dataclasses.replace(DISTRIBUTED, mining=mining))
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(
                first[name], value, rtol=2e-3, atol=2e-3, msg=lambda text, n=name: f"{n}: {text}"
            )
