"""Loaders: what they read from small files in every format, and one sentence for every file that is not right."""

from __future__ import annotations

import dataclasses
import pickle
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from drq_fast.files import FileError
from drq_fast.retrieval import datasets
from drq_fast.retrieval.experiment import read_items
from drq_fast.retrieval.settings import Settings

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def cifar_arrays(batches: int = 6, each: int = 10) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (batches, each, 3, 32, 32), dtype=np.uint8)
    return pixels, np.stack([generator.permutation(10)[:each] for _ in range(batches)])


def batch_names() -> list[str]:
    return [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]


@pytest.fixture
def binary(tmp_path):
    pixels, label = cifar_arrays()
    for name, images, numbers in zip(batch_names(), pixels, label, strict=True):
        records = np.concatenate([numbers[:, None].astype(np.uint8), images.reshape(len(images), -1)], axis=1)
        records.tofile(tmp_path / f"{name}.bin")
    (tmp_path / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n")
    return tmp_path


def test_cifar10_binary(binary):
    pixels, label = cifar_arrays()
    items = datasets.cifar10(binary)
    assert len(items) == 60
    assert items.classes == tuple(NAMES)
    assert items.labels.float().argmax(dim=1).tolist() == label.flatten().tolist()
    assert torch.equal(items[[0, 59, 7]], torch.from_numpy(pixels.reshape(-1, 3, 32, 32)[[0, 59, 7]]))


def test_cifar10_python(tmp_path):
    pixels, label = cifar_arrays()
    for name, images, numbers in zip(batch_names(), pixels, label, strict=True):
        content = {b"data": images.reshape(len(images), -1), b"labels": numbers.tolist(), b"batch_label": b"x"}
        (tmp_path / name).write_bytes(pickle.dumps(content, protocol=2))
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({b"label_names": [n.encode() for n in NAMES]}, protocol=2))
    items = datasets.cifar10(tmp_path)
    assert items.classes == tuple(NAMES)
    assert items.labels.float().argmax(dim=1).tolist() == label.flatten().tolist()
    assert torch.equal(items[[31]], torch.from_numpy(pixels.reshape(-1, 3, 32, 32)[[31]]))


def test_cifar10_with_names_that_are_not_text(binary):
    (binary / "batches.meta.txt").write_bytes(b"airplane\xff")
    with pytest.raises(FileError, match=r"batches.meta.txt is not a text file\.$"):
        datasets.cifar10(binary)


def test_cifar10_that_is_not_right(binary, tmp_path_factory):
    (binary / "data_batch_2.bin").write_bytes(b"\0" * 3072)
    with pytest.raises(FileError, match=r"data_batch_2.bin is truncated: 3072 bytes are not a multiple of 3073\.$"):
        datasets.cifar10(binary)
    whole = (binary / "data_batch_1.bin").read_bytes()
    (binary / "data_batch_2.bin").write_bytes(whole[:-3073])
    there = r"has 9 images and 9 labels, but data_batch_1 has 10 images\.$"
    with pytest.raises(FileError, match=rf"^datasets: data_batch_2 in .* {there}"):
        datasets.cifar10(binary)
    (binary / "data_batch_2.bin").write_bytes(b"\x0b" + whole[1:])
    with pytest.raises(FileError, match=r"^datasets: item 10 has class 11, not one of 0\.\.9\.$"):
        datasets.cifar10(binary)
    (binary / "data_batch_2.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"data_batch_2.bin cannot be read: No such file or directory\.$"):
        datasets.cifar10(binary)
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(FileNotFoundError, match=r"holds neither data_batch_1\.bin nor data_batch_1 of CIFAR-10\.$"):
        datasets.cifar10(empty)
    (empty / "data_batch_1").write_bytes(pickle.dumps(print))  # a pickle that would run something
    with pytest.raises(FileError, match=r"is not a batch of CIFAR-10 \(it refers to .*print\)\.$"):
        datasets.cifar10(empty)
    (empty / "data_batch_1").write_bytes(pickle.dumps({b"data": np.zeros(5)}))
    with pytest.raises(FileError, match="is not a batch of CIFAR-10"):
        datasets.cifar10(empty)
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        batch = {b"data": np.zeros((10, 3072), np.uint8), b"labels": list(range(10))}
        (empty / name).write_bytes(pickle.dumps(batch))
    (empty / "batches.meta").write_bytes(pickle.dumps({}))
    with pytest.raises(FileError, match=r"batches.meta does not name the classes of CIFAR-10"):
        datasets.cifar10(empty)
    (empty / "batches.meta").unlink()
    assert len(datasets.cifar10(empty)) == 60
    (empty / "data_batch_3").write_bytes(pickle.dumps(batch | {b"labels": list(range(9))}))
    with pytest.raises(FileError, match=r"^datasets: data_batch_3 in .* has 10 images and 9 labels"):
        datasets.cifar10(empty)


@pytest.fixture
def folder(tmp_path):
    for c, name in enumerate(("cat", "dog")):
        (tmp_path / name).mkdir()
        for i in range(2):
            Image.new("RGB", (40 + 10 * i, 20), (100 * c, 50 * i, 7)).save(tmp_path / name / f"{i}.png")
    return tmp_path


def test_an_image_folder(folder):
    items = datasets.image_folder(folder, size=16)
    assert items.classes == ("cat", "dog")
    assert items.labels.tolist() == [[True, False]] * 2 + [[False, True]] * 2
    batch = items[[0, 3]]
    assert batch.shape == (2, 3, 16, 16)
    assert batch.dtype == torch.uint8
    assert batch[:, :, 3, 5].tolist() == [[0, 0, 7], [100, 50, 7]]


def test_an_image_is_cut_to_its_middle(tmp_path):
    pixels = np.zeros((8, 24, 3), np.uint8)
    pixels[:, 8:16] = 200  # the middle third
    Image.fromarray(pixels).convert("L").save(tmp_path / "a.png")
    (tmp_path / "list.txt").write_text("a.png 0\n")
    batch = datasets.image_list(tmp_path / "list.txt", size=8)[[0]]
    assert batch.unique().tolist() == [200]
    Image.fromarray(np.full((9, 9), 30000, np.uint16)).save(tmp_path / "a.png")  # 16 bits
    batch = datasets.image_list(tmp_path / "list.txt", size=8)[[0]]
    assert batch.unique().tolist() == [30000 // 256]


def test_images_that_are_not_right(folder):
    items = datasets.image_folder(folder, size=16)
    whole = (folder / "cat" / "0.png").read_bytes()
    (folder / "cat" / "0.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileError, match=r"^datasets: the image .*cat/0.png cannot be decoded \(.*\)\.$"):
        items[[0]]
    (folder / "cat" / "0.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"^datasets: the image .*cat/0.png is missing\.$"):
        items[[0]]
    (folder / "empty").mkdir()
    with pytest.raises(FileError, match=r"^datasets: the class 'empty' has no items\.$"):
        datasets.image_folder(folder)
    with pytest.raises(FileError, match=r"must hold one folder per class, got none\.$"):
        datasets.image_folder(folder / "cat")
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        datasets.image_folder(folder / "none")


def test_lists_with_columns_and_with_ids(folder):
    (folder / "multi.txt").write_text("cat/0.png 1 0 1\n\ncat/1.png 0 0 0\ndog/0.png 0 1 0\n")
    items = datasets.image_list(folder / "multi.txt", classes=["sky", "sea", "sun"])
    assert items.labels.tolist() == [[True, False, True], [False] * 3, [False, True, False]]
    assert items[[2]][0, 0, 0, 0] == 100
    (folder / "train.txt").write_text("cat/0.png 0\ndog/0.png 1\n")
    (folder / "val.txt").write_text("dog/1.png 1\n")
    items = datasets.image_list([folder / "train.txt", folder / "val.txt"], root=folder)
    assert items.labels.tolist() == [[True, False], [False, True], [False, True]]
    assert items.list_number.tolist() == [0, 0, 1]


def test_paths_in_lists_may_have_spaces(folder):
    (folder / "my cats 2").mkdir()
    for name in ("a  grey cat.png", "7.png"):
        (folder / "cat" / "0.png").rename(folder / "my cats 2" / name)
        Image.new("RGB", (20, 20)).save(folder / "cat" / "0.png")
    paths = ["my cats 2/a  grey cat.png", "my cats 2/7.png"]
    for labels in (("0", "1"), ("1 0 0", "0\t1 1")):
        lines = [f"  {path} {label} \n" for path, label in zip(paths, labels, strict=True)]
        (folder / "list.txt").write_text("".join(lines))
        items = datasets.image_list(folder / "list.txt")
        assert [str(path.relative_to(folder)) for path in items.paths] == paths
        assert len(items.classes) == (2 if labels == ("0", "1") else 3)
        assert items[[0, 1]].shape[0] == 2
    assert items.labels.tolist() == [[True, False, False], [False, True, True]]


def test_names_of_classes(tmp_path):
    (tmp_path / "classes.txt").write_text("grey wolf\n\n sea \n")
    assert datasets.read_classes(tmp_path / "classes.txt") == ["grey wolf", "sea"]
    for text in ("sea\nsea\n", "\n"):
        (tmp_path / "classes.txt").write_text(text)
        with pytest.raises(FileError, match=r"classes.txt must have a different class name in each line\.$"):
            datasets.read_classes(tmp_path / "classes.txt")


def test_settings_name_the_classes_of_lists(folder):
    (folder / "list.txt").write_text("cat/0.png 0\ndog/0.png 1\n")
    (folder / "classes.txt").write_text("a grey cat\ndog\n")
    (folder / "words.txt").write_text("dog 1 0\na 0 1\ngrey 0 1\ncat 0 1\n")
    settings = Settings(data=(str(folder / "list.txt"),), classes=str(folder / "classes.txt"))
    items = read_items(settings)
    assert items.classes == ("a grey cat", "dog")
    assert datasets.read_words(folder / "words.txt", items.classes).tolist() == [[0, 1], [1, 0]]
    assert read_items(dataclasses.replace(settings, classes=None)).classes == ("0", "1")
    with pytest.raises(ValueError, match=r"^train: classes must be left out unless the data are lists of images, got"):
        read_items(dataclasses.replace(settings, data=(str(folder),)))
    (folder / "classes.txt").write_text("cat\n")
    with pytest.raises(FileError, match=r"line 2 of .*list.txt has class 1, not one of 0\.\.0\.$"):
        read_items(settings)


@pytest.mark.parametrize(
    ("text", "classes", "message"),
    [
        ("a 0\nb 3\nc 1\n", ["x", "y"], r"line 2 of .* has class 3, not one of 0\.\.1\.$"),
        ("a 0\nb -1\n", None, r"line 2 of .* has class -1, not one of 0\.\.0\.$"),
        ("a 0 1\nb 1\n", None, r"line 2 of .* must have 2 columns of 0 or 1 after the path\.$"),
        ("a 0 1\nb 1 2\n", None, r"line 2 of .* must have 2 columns of 0 or 1 after the path\.$"),
        ("a 0 1\n", ["x", "y", "z"], r"line 1 of .* must have 3 columns of 0 or 1 after the path\.$"),
        ("a 1\nb 0\nc 0 1\n", None, r"line 3 of .* must have one class after the path, like the lines before it\.$"),
        ("a 3000000000\n", None, r"line 1 of .* has class 3000000000, not one of 0\.\.0\.$"),
        ("a 0\nb\n", None, r"line 2 of .* must be a path and integers, got 'b'\.$"),
        ("a zero\n", None, r"line 1 of .* must be a path and integers, got 'a zero'\.$"),
        ("\n", None, r"lists no images\.$"),
        ("a 1 0\nb 1 0\n", ["x", "y"], r"^datasets: the class 'y' has no items\.$"),
    ],
)
def test_lists_that_are_not_right(tmp_path, text, classes, message):
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(FileError, match=message):
        datasets.image_list(tmp_path / "list.txt", classes=classes)


def test_an_image_is_no_list_of_images(tmp_path):
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    with pytest.raises(FileError, match=r"photo.png is not a text file that lists images\.$"):
        datasets.image_list(tmp_path / "photo.png")


def test_features(tmp_path):
    x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float16)
    label = np.array([0, 1, 2, 2, 1, 0])
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "label.npy", label)
    items = datasets.features(tmp_path / "x.npy", tmp_path / "label.npy")
    assert isinstance(items.x, np.memmap)
    assert items[[1, 5]].dtype == torch.float32
    np.testing.assert_array_equal(items[[1, 5]].numpy(), x[[1, 5]])
    assert items.labels.float().argmax(dim=1).tolist() == label.tolist()
    step = np.array([1.0, 0.5, 0.25, 2.0], np.float32)
    numbers = np.arange(24, dtype=np.uint8).reshape(6, 4)
    np.savez(tmp_path / "x.npz", x=numbers, step=step, label=label)
    np.testing.assert_array_equal(datasets.features(tmp_path / "x.npz")[range(6)].numpy(), numbers * step)
    flags = np.array([[1, 1], [0, 1], [1, 0], [0, 0], [1, 0], [0, 1]])
    assert datasets.features(tmp_path / "x.npz", flags).labels.tolist() == flags.astype(bool).tolist()


def test_features_that_are_not_right(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"x.npy cannot be read: No such file or directory\.$"):
        datasets.features(tmp_path / "x.npy")
    np.save(tmp_path / "x.npy", np.zeros((6, 4)))
    with pytest.raises(FileError, match=r"holds no labels; they need --labels FILE\.npy \(labels= in Python\)\.$"):
        datasets.features(tmp_path / "x.npy")
    with pytest.raises(FileError, match=r"labels must be of 6 items, as .*x\.npy has, got 5\.$"):
        datasets.features(tmp_path / "x.npy", np.zeros(5, int))
    np.savez(tmp_path / "x.npz", x=np.zeros((6, 4)))
    with pytest.raises(FileError, match=r"\(labels= in Python\), or an array named label in it\.$"):
        datasets.features(tmp_path / "x.npz")
    np.savez(tmp_path / "y.npz", y=np.zeros((6, 4)))
    with pytest.raises(FileError, match=r"has no array 'x'\.$"):
        datasets.features(tmp_path / "y.npz")
    with pytest.raises(FileError, match=r"is an archive of arrays, not a \.npy file\.$"):
        datasets.features(tmp_path / "x.npz", tmp_path / "y.npz")
    (tmp_path / "x.npz").write_bytes((tmp_path / "x.npz").read_bytes()[:100])
    with pytest.raises(FileError, match=r"is not a complete \.npz file of numbers \(.*\)\.$"):
        datasets.features(tmp_path / "x.npz")
    np.savez(tmp_path / "x.npz", x=np.zeros((60, 40)), label=np.zeros(60, int))
    damaged = bytearray((tmp_path / "x.npz").read_bytes())
    damaged[5000] ^= 1
    (tmp_path / "x.npz").write_bytes(damaged)
    with pytest.raises(FileError, match=r"is not a complete \.npz file of numbers \(Bad CRC-32.*\)\.$"):
        datasets.features(tmp_path / "x.npz")


def test_a_feature_that_is_not_finite_is_named(tmp_path):
    x = np.zeros((6, 4))
    x[4, 1] = np.nan
    items = datasets.FeatureArray(x, datasets.one_hot(np.arange(6) % 2, 2), ["a", "b"])
    assert items[[0, 5]].tolist() == items[[True, False, False, False, False, True]].tolist() == [[0] * 4] * 2
    with pytest.raises(FileError, match=r"^datasets: item 4 has a feature that is not finite in float32\.$"):
        items[[5, 4]]
    with pytest.raises(FileError, match=r"^datasets: 6 items cannot have 5 rows of labels\.$"):
        datasets.FeatureArray(x, datasets.one_hot(np.arange(5) % 2, 2), ["a", "b"])


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_features_are_checked_when_they_are_read(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(datasets, "_NUMBERS", 10)  # several blocks of two rows
    x, label = np.ones((7, 4), np.float16), np.arange(7) % 2
    x[6, 3] = np.inf
    path = tmp_path / f"x{suffix}"
    if suffix == ".npy":
        np.save(path, x)
    else:
        np.savez(path, x=x)
    with pytest.raises(FileError, match=r"^datasets: item 6 has a feature that is not finite in float32\.$"):
        datasets.features(path, label)
    whole = np.full((7, 4), 2**40)
    np.savez(path := tmp_path / "step.npz", x=whole, label=label, step=np.full(4, 1e30))
    with pytest.raises(FileError, match=r"item 0 has a feature that is not finite"):
        datasets.features(path)


def test_labels_and_steps_that_are_not_right(tmp_path):
    x = np.ones((6, 4), np.int8)
    wrong = "must be class numbers \\[N\\] or flags \\[N, C\\] of 0 and 1, got"
    strings = np.array(["a", "b"] * 3)
    for label in (np.arange(1, 7)[:, None], np.full((6, 2), 5), np.full(6, 0.7), np.full(6, 3_000_000_000), strings):
        np.savez(tmp_path / "x.npz", x=x, label=label)
        with pytest.raises(FileError, match=wrong) as error:
            datasets.features(tmp_path / "x.npz")
        assert ("; numpy.unique(labels, return_inverse=True)[1] numbers them." in str(error.value)) == (label.ndim == 1)
    np.savez(tmp_path / "x.npz", x=x, label=np.arange(6) % 2, step=np.ones(3))
    with pytest.raises(FileError, match=r"must have a step for each of 4 dimensions, got \[3\] of float64\.$"):
        datasets.features(tmp_path / "x.npz")
    np.savez(tmp_path / "x.npz", x=x, label=np.arange(6) % 2, step=np.full(4, np.nan))
    with pytest.raises(FileError, match=r"has a step that is not finite\.$"):
        datasets.features(tmp_path / "x.npz")
    np.savez(tmp_path / "x.npz", x=x, label=np.zeros((6, 0), int))
    with pytest.raises(FileError, match=r"labels must be \[N, C\], got \[6, 0\]\.$"):
        datasets.features(tmp_path / "x.npz")
    np.savez(tmp_path / "x.npz", x=x, label=np.arange(6) % 2, step=np.ones(4))
    assert datasets.features(tmp_path / "x.npz")[[0]].dtype == torch.float32
    for x in (np.empty((0, 4)), np.empty((6, 0)), np.full((6, 4), "a")):
        np.savez(tmp_path / "x.npz", x=x, label=np.zeros(len(x), int))
        with pytest.raises(FileError, match="must hold at least one row of numbers, got"):
            datasets.features(tmp_path / "x.npz")
    with pytest.raises(FileError, match="at least one list of images is needed"):
        datasets.image_list([])


def test_a_member_that_is_not_an_array(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", b"not an array")
        archive.writestr("label.npy", b"not an array")
    with pytest.raises(FileError, match=r"not a complete .npz file of numbers \(a member is not an array\)\.$"):
        datasets.features(tmp_path / "x.npz")


def test_word_vectors(tmp_path):
    matrix = np.arange(1.0, 9.0).reshape(2, 4)
    np.savetxt(tmp_path / "matrix.txt", matrix)
    np.save(tmp_path / "matrix.npy", matrix)
    for name in ("matrix.txt", "matrix.npy"):
        assert datasets.read_words(tmp_path / name, ["cat", "dog"]).tolist() == matrix.tolist()
    lines = ["the 9 9 9", "cat 1 2 3", "Grey 2 2 2", "wolf 4 0 2"]
    (tmp_path / "glove.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "word2vec.txt").write_text("\n".join(["4 3", *lines]) + "\n")
    for name in ("glove.txt", "word2vec.txt"):
        words = datasets.read_words(tmp_path / name, ["cat", "grey_wolf"])
        assert words.tolist() == [[1, 2, 3], [3, 1, 2]]
    (tmp_path / "numbers.txt").write_text("2 3\n0 1 2 3\n1 4 5 6\n")  # words that are numbers
    assert datasets.read_words(tmp_path / "numbers.txt", ["1", "0"]).tolist() == [[4, 5, 6], [1, 2, 3]]
    np.savetxt(tmp_path / "narrow.txt", matrix[:, :2])
    assert datasets.read_words(tmp_path / "narrow.txt", ["cat", "dog"]).tolist() == matrix[:, :2].tolist()
    (tmp_path / "glove.txt").write_bytes(b"\xff 1 2 3\n" + (tmp_path / "word2vec.txt").read_bytes())
    assert datasets.read_words(tmp_path / "glove.txt", ["cat"]).tolist() == [[1, 2, 3]]
    np.save(tmp_path / "matrix.npy", matrix.astype(complex))
    with pytest.raises(FileError, match=r"words must be 2 rows of numbers, one per class, got \[2, 4\] of complex128"):
        datasets.read_words(tmp_path / "matrix.npy", ["cat", "dog"])
    assert datasets.read_words(None, ["a", "b", "c"]).tolist() == torch.eye(3).tolist()


def test_word_vectors_that_are_not_right(tmp_path):
    path = tmp_path / "words.txt"
    np.savetxt(path, np.ones((3, 4)))
    with pytest.raises(
        FileError, match=r"words must be 2 rows of numbers, one per class, got \[3, 4\] of float32 in .*words.txt\.$"
    ):
        datasets.read_words(path, ["cat", "dog"])
    np.savetxt(path, np.array([[1.0, 2, 3], [0, 0, 0]]))
    with pytest.raises(FileError, match=r"words.txt has a row that is 0 or not finite\.$"):
        datasets.read_words(path, ["cat", "dog"])
    path.write_text("cat 1 2 3\n")
    with pytest.raises(FileError, match=r"words must be vectors of .*, got none of 'dog' in .*words.txt\.$"):
        datasets.read_words(path, ["cat", "dog"])
    path.write_text("cat 1 2 3\ndog 1 2\n")
    with pytest.raises(FileError, match=r"words.txt has vectors of 2 and of 3 numbers\.$"):
        datasets.read_words(path, ["cat", "dog"])
    path.write_text("cat 1 2 3\ndog 1 2 x\n")
    with pytest.raises(FileError, match=r"words.txt has a line of 'dog' that is not numbers\.$"):
        datasets.read_words(path, ["cat", "dog"])
    path.write_text("1 2 3\n4 5\n")
    with pytest.raises(FileError, match=r"words.txt cannot be read as a matrix \(.*\)\.$"):
        datasets.read_words(path, ["cat", "dog"])
    with pytest.raises(FileNotFoundError, match=r"none.txt cannot be read: No such file or directory\.$"):
        datasets.read_words(tmp_path / "none.txt", ["cat", "dog"])
