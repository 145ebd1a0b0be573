"""Damaged and forged inputs of users: `.npy` and `.npz`, CIFAR-10, lists of images, word vectors, and checkpoints."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import pickle
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drq_fast import FileError
from drq_fast.app.vectors import VectorFiles
from drq_fast.files import read_array
from drq_fast.retrieval import checkpoint, datasets, pickles
from drq_fast.retrieval.backbones import Precomputed
from drq_fast.retrieval.model import Model
from drq_fast.retrieval.settings import Config
from drq_fast.retrieval.train import CHECKPOINT, train

from .common import damaged, require
from .files import forged

DTYPES = ("<f4", "<f4", "<f8", "<f2", ">f4", "|u1", "<i8", "<u8", "|b1", "<c8", "<U3", "|S2", "<M8[s]", "<f4,<i2", "|O")
SIZES = (
    "0",
    "1",
    "-1",
    "7",
    "65536",
    "4294967296",
    "9223372036854775807",
    "18446744073709551616",
    "9" * 30,
    "1.5",
    "x",
)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def changed_npy(dice: random.Random, content: bytes) -> bytes:
    """An `.npy` file with damage, or with another description of its array."""
    if dice.random() < 0.4:
        return damaged(dice, content)
    size = int.from_bytes(content[8:10], "little")
    text, data = content[10 : 10 + size].decode("latin1"), content[10 + size :]
    numbers = list(re.finditer(r"\d+", text[text.index("shape") :]))
    way = dice.randrange(4)
    if way == 0 and numbers:
        place, start = dice.choice(numbers), text.index("shape")
        text = text[: start + place.start()] + dice.choice(SIZES) + text[start + place.end() :]
    elif way == 1:
        text = re.sub(r"'descr': '[^']*'", f"'descr': {dice.choice(DTYPES)!r}", text)
    elif way == 2:
        text = text.replace("False", dice.choice(("True", "None", "0", "[]")))
    else:
        text = damaged(dice, text.encode()).decode("latin1")
    return content[:8] + len(text).to_bytes(2, "little") + text.encode("latin1", "replace") + data


def random_array(dice: random.Random, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    numbers = np.random.default_rng(dice.getrandbits(32)).normal(size=shape) * 3
    with np.errstate(invalid="ignore"):
        array = np.abs(numbers).astype(dtype) if dtype != "<f4,<i2" else np.zeros(shape, dtype)
    return np.asfortranarray(array) if dice.random() < 0.1 else array


def vectors(dice: random.Random, folder: Path) -> None:
    """Vectors of the command line: FileError, or what numpy reads."""
    path = folder / "x.npy"
    shape = tuple(dice.randint(0 if dice.random() < 0.1 else 1, 9) for _ in range(dice.choice((2, 2, 2, 1, 3))))
    path.write_bytes(changed_npy(dice, npy(random_array(dice, shape, dice.choice(DTYPES)))))
    with contextlib.suppress(FileError):
        read_array("index", path)
    with contextlib.suppress(FileError):
        found = VectorFiles([path])
        rows = min(len(found), 20)
        x, picked = found.read(0, rows), found.pick(torch.arange(-(-rows // 2)))
        json.dumps(found.identity())
        with np.errstate(over="ignore"):
            expected = np.load(path)[:rows].astype(np.float32)
        require(np.array_equal(x.numpy(), expected), "vectors differ from the file")
        require(picked.shape[1] == found.dim and bool(picked.isfinite().all()), "a sample that is not of the file")


def features(dice: random.Random, folder: Path) -> None:
    """Features with labels in an `.npz` or in two `.npy`."""
    N, D, C = dice.randint(1, 12), dice.randint(1, 5), dice.randint(1, 3)
    of_flags = dice.random() < 0.3
    arrays = {
        "x": random_array(dice, (N, D), dice.choice(("<f4", "<f8", "|u1", "<i8"))),
        "label": np.eye(C, dtype=dice.choice((bool, np.uint8)))[np.arange(N) % C] if of_flags else np.arange(N) % C,
    }
    if dice.random() < 0.5:
        arrays["step"] = random_array(dice, (D,), "<f4")
    if dice.random() < 0.5:
        arrays["classes"] = np.array([f"class {c}" for c in range(C)])
    parts = {name: npy(array) for name, array in arrays.items()}
    if dice.random() < 0.3:
        parts[changed] = changed_npy(dice, parts[changed := dice.choice(("x", "label"))])
        for name in ("x", "label"):
            (folder / f"{name}.npy").write_bytes(parts[name])
        given: tuple[Path, ...] = folder / "x.npy", folder / "label.npy"
    else:
        content = io.BytesIO()
        inside = dice.random() < 0.6
        if inside:
            name = dice.choice(sorted(parts))
            parts[name] = changed_npy(dice, parts[name])
        with zipfile.ZipFile(content, "w", dice.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
            for name, part in parts.items():
                archive.writestr(f"{name}.npy", part)
        given = (folder / "x.npz",)
        given[0].write_bytes(content.getvalue() if inside else damaged(dice, content.getvalue()))
    with contextlib.suppress(FileError):
        items = datasets.features(*given)
        batch = items[range(min(len(items), 5))]
        require(len(items.labels) == len(items) and bool(batch.isfinite().all()), "features that are not finite")
        require(items.labels.shape[1] == len(items.classes), "labels of other classes")


OPCODES = b"(.01234567890KMJIUTXCB\x8c\x8e\x8d\x80\x94\x85\x86\x87)]}hjqrbRcesuatlNGVLFSp\x93\x95\x8a\x88\x89"


def changed_pickle(dice: random.Random, content: bytes) -> bytes:
    """Damage, and pieces of a pickle or single operations put elsewhere."""
    for _ in range(dice.randint(1, 3)):
        first, place = dice.randrange(len(content)), dice.randrange(len(content) + 1)
        piece = dice.choice((bytes([dice.choice(OPCODES)]), content[first : first + dice.randint(1, 40)]))
        way = dice.randrange(3)
        if way == 0:
            content = damaged(dice, content) or b"."
        elif way == 1:
            content = content[:place] + piece + content[place:]
        else:
            content = content[:place] + piece + content[place + len(piece) :]
    return content


def cifar(dice: random.Random, folder: Path) -> None:
    """CIFAR-10 with a damaged batch or damaged names of classes."""
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    binary, broken = dice.random() < 0.3, dice.choice([*names, "batches.meta"])
    for number, name in enumerate(names):
        pixels, labels = np.full((2, 3072), number, np.uint8), [2 * number % 10, (2 * number + 1) % 10]
        given = dice.choice((labels, np.array(labels)))
        content = pickle.dumps({b"data": pixels, b"labels": given, b"filenames": [b"a", "b"]}, dice.randint(1, 4))
        if binary:
            content = b"".join(bytes([label]) + row.tobytes() for label, row in zip(labels, pixels, strict=True))
        if name == broken:
            content = (damaged if binary else changed_pickle)(dice, content)
            with contextlib.suppress(pickle.UnpicklingError):
                pickles.read(content)
        (folder / (f"{name}.bin" if binary else name)).write_bytes(content)
    meta = pickle.dumps({b"label_names": [b"c%d" % c for c in range(10)]}, 2)
    (folder / "batches.meta").write_bytes(changed_pickle(dice, meta) if broken == "batches.meta" else meta)
    (folder / "batches.meta.txt").write_bytes(damaged(dice, b"a b c d e f g h i j"))
    with contextlib.suppress(FileError, FileNotFoundError):
        items = datasets.cifar10(folder)
        require(items[[0]].shape == (1, 3, 32, 32) and items.labels.shape == (12, 10), "images of another shape")


def texts(dice: random.Random, folder: Path) -> None:
    """Lists of images, and word vectors."""
    C = dice.randint(1, 3)
    flags = dice.random() < 0.5
    lines = [
        f"{n}.png " + (" ".join(str(int(c == n % C)) for c in range(C)) if flags else str(n % C)) for n in range(6)
    ]
    words = [f"{c} {dice.random():.3f} {dice.random():.3f}" for c in range(C)]
    for name, rows in (("list.txt", lines), ("words.txt", words)):
        row = dice.randrange(len(rows))
        fields = rows[row].split()
        fields[dice.randrange(len(fields))] = dice.choice((*SIZES, "nan", "1e39", "\u0663", "\0", ""))
        rows[row] = " ".join(fields)
        content = "\n".join(rows).encode()
        (folder / name).write_bytes(damaged(dice, content) if dice.random() < 0.5 else content)
    with contextlib.suppress(FileError):
        items = datasets.image_list(folder / "list.txt")
        require(items.labels.shape == (len(items.paths), len(items.classes)), "labels of another shape")
    with contextlib.suppress(FileError):
        found = datasets.read_words(folder / "words.txt", [str(c) for c in range(C)])
        require(len(found) == C and bool(found.isfinite().all()), "word vectors that are not finite")


CONFIG = Config(epochs=(1, 1, 1), batch=6, checkpoint_seconds=0.0)


def trained(folder: Path) -> tuple[Model, list[dict[str, float]]]:
    """A small model after its training in the folder, which is resumed if there is a checkpoint; and its history."""
    label = np.arange(12) % 2
    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32) + label[:, None]
    items = datasets.FeatureArray(x, datasets.one_hot(label, 2), ["a", "b"])
    torch.manual_seed(0)
    model = Model(Precomputed(3, 4, 0.0), torch.eye(2), dim=4, codewords=3, levels=2)
    return model, train(model, items, config=CONFIG, folder=folder)


@functools.cache
def checkpoints(folder: Path) -> tuple[list[bytes], dict[str, torch.Tensor], list[dict[str, float]]]:
    """All checkpoints of a training, its weights and its history."""
    contents, save = [], checkpoint.save

    def record(path: Path, *arguments: Any) -> None:
        save(path, *arguments)
        contents.append(path.read_bytes())

    checkpoint.save = record  # type: ignore[assignment]
    try:
        model, history = trained(folder / "whole")
    finally:
        checkpoint.save = save
    return contents, model.state_dict(), history


def resumed(dice: random.Random, folder: Path) -> None:
    """A training that finds a damaged or forged checkpoint; from a whole one it reaches the same weights."""
    contents, weights, history = checkpoints(folder)
    content, way = dice.choice(contents), dice.randrange(5)
    (folder / "train").mkdir(exist_ok=True)
    path = folder / "train" / CHECKPOINT
    path.unlink(missing_ok=True)
    path.write_bytes(content if way == 0 else (damaged if way == 1 else forged)(dice, content))
    try:
        model, found = trained(folder / "train")
        require(len(found) == 3, "a resumed training has another history")
        if way == 0:
            same = all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
            require(same and found == history, "a resumed training has other results")
    except (FileError, ValueError):
        require(way != 0, "a whole checkpoint was refused")


KINDS: tuple[tuple[Callable[[random.Random, Path], None], int], ...] = (
    (vectors, 60),
    (features, 40),
    (cifar, 30),
    (texts, 40),
    (resumed, 10),
)


def inputs(dice: random.Random, folder: Path) -> int:
    kind, count = dice.choice(KINDS)
    for _ in range(count):
        kind(dice, folder)
    checkpoints.cache_clear()
    return count
