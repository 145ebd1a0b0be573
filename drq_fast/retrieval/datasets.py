"""Images and features with their labels: CIFAR-10, lists of files, folders, arrays; and word vectors of class names.

Labels are bool [N, C]. Indexing items with row numbers gives a batch, so worker processes can decode images. Nothing
here is random.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .. import checks
from ..files import FileError, read_array
from . import pickles

Source = str | os.PathLike[str]
_NUMBERS = 1 << 22  # numbers that are checked at once
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
CIFAR_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff"}


class Items(Dataset[Tensor]):
    """N items with labels [N, C] bool and the names of the C classes; `items[rows]` is a batch.

    list_number [N] int64: the list that an item came from if several were read, else 0.
    """

    def __init__(self, labels: Tensor, classes: Sequence[str], list_number: Tensor | None = None) -> None:
        if labels.ndim != 2 or labels.shape[1] == 0:
            raise FileError(f"datasets: labels must be [N, C], got {list(labels.shape)}.")
        empty = (~labels.any(dim=0)).nonzero().squeeze(1).tolist()
        if empty:
            raise FileError(f"datasets: the class {classes[empty[0]]!r} has no items.")
        self.labels, self.classes = labels, tuple(classes)
        self.list_number = torch.zeros(len(labels), dtype=torch.int64) if list_number is None else list_number

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Any) -> Tensor:
        raise NotImplementedError


class Images(Items):
    """Pixels in memory, uint8 [N, 3, H, W]."""

    def __init__(self, pixels: np.ndarray, labels: Tensor, classes: Sequence[str]) -> None:
        super().__init__(labels, classes)
        self.pixels = _one_each(pixels, labels)

    def __getitem__(self, rows: Any) -> Tensor:
        return torch.from_numpy(self.pixels[np.asarray(rows)])


class ImageFiles(Items):
    """Image files, decoded by Pillow: a batch is uint8 [n, 3, size, size], the resized centre crop of each image."""

    def __init__(
        self,
        paths: Sequence[Any],
        labels: Tensor,
        classes: Sequence[str],
        size: int = 256,
        list_number: Tensor | None = None,
    ) -> None:
        super().__init__(labels, classes, list_number)
        self.paths, self.size = list(paths), checks.integer("datasets", "size", size, 1)

    def __getitem__(self, rows: Any) -> Tensor:
        return torch.stack([_decode(self.paths[row], self.size) for row in rows])


class FeatureArray(Items):
    """Features of any real dtype [N, D], in memory or in a mapped file; a batch is float32, times `step` if given."""

    def __init__(self, x: np.ndarray, labels: Tensor, classes: Sequence[str], step: np.ndarray | None = None) -> None:
        super().__init__(labels, classes)
        self.x, self.step = _one_each(x, labels), step

    def __getitem__(self, rows: Any) -> Tensor:
        numbers = np.asarray(rows)
        numbers = np.flatnonzero(numbers) if numbers.dtype == bool else numbers
        batch = np.asarray(self.x[numbers], dtype=np.float32)
        batch = batch if self.step is None else batch * self.step
        wrong = numbers[~np.isfinite(batch).all(axis=-1)]
        if wrong.size:
            raise FileError(f"datasets: item {wrong.flat[0]} has a feature that is not finite in float32.")
        return torch.from_numpy(batch)


def _one_each(items: np.ndarray, labels: Tensor) -> np.ndarray:
    if len(items) != len(labels):
        raise FileError(f"datasets: {len(items)} items cannot have {len(labels)} rows of labels.")
    return items


def cifar10(folder: Source) -> Images:
    """CIFAR-10 from its binary files or Python batches: 50,000 training images, then 10,000 test images."""
    root, names = Path(folder), CIFAR_BATCHES
    if (root / f"{names[0]}.bin").exists():
        parts = [_binary_batch(root / f"{name}.bin") for name in names]
        listed = root / "batches.meta.txt"
        classes = _text(listed).split() if listed.exists() else []
    elif (root / names[0]).exists():
        parts = [_python_batch(root / name) for name in names]
        listed = root / "batches.meta"
        classes = _class_names(listed) if listed.exists() else []
    else:
        raise FileNotFoundError(f"datasets: {root} holds neither data_batch_1.bin nor data_batch_1 of CIFAR-10.")
    classes = classes if len(classes) == 10 else [str(c) for c in range(10)]
    for name, (pixels, label) in zip(names, parts, strict=True):
        if not len(pixels) == len(label) == len(parts[0][0]):
            there = f"{len(pixels)} images and {len(label)} labels"
            raise FileError(f"datasets: {name} in {root} has {there}, but {names[0]} has {len(parts[0][0])} images.")
    label = np.concatenate([part[1] for part in parts])
    return Images(np.concatenate([part[0] for part in parts]), one_hot(label, 10), classes)


def image_folder(folder: Source, size: int = 256) -> ImageFiles:
    """Images in one folder per class, which has the name of the class."""
    root = Path(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"datasets: {root} is not a folder.")
    classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise FileError(f"datasets: {root} must hold one folder per class, got none.")
    found = [pictures_in(root / c) for c in classes]
    label = np.repeat(np.arange(len(classes)), [len(paths) for paths in found])
    return ImageFiles([p for paths in found for p in paths], one_hot(label, len(classes)), classes, size)


def pictures_in(folder: Path) -> list[Path]:
    """The images in a folder and the folders in it, sorted."""
    return [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in SUFFIXES]


def pictures(images: Iterable[Any], size: int) -> ImageFiles:
    """Images without labels: paths of files, Pillow's images, or arrays uint8 [H, W] or [H, W, 3]."""
    found = [image if isinstance(image, (str, os.PathLike)) else _image(image) for image in images]
    return ImageFiles(found, torch.ones(len(found), 1, dtype=torch.bool), ["any"], size)


def image_list(
    lists: Source | Sequence[Source], root: Source | None = None, classes: Sequence[str] | None = None, size: int = 256
) -> ImageFiles:
    """Images listed in text files, one per line: `path 0 1 0 ...` (a column per class) or `path class_id`.

    Paths may contain spaces; they are relative to `root`, by default the folder of the first list. Class ids start at
    0. With several lists, such as ImageNet's for training and validation, `list_number` tells which one an image came
    from.
    """
    files = [Path(lists)] if isinstance(lists, (str, os.PathLike)) else [Path(name) for name in lists]
    if not files:
        raise FileError("datasets: at least one list of images is needed, got none.")
    base = files[0].parent if root is None else Path(root)
    lines = [line for number, file in enumerate(files) for line in _lines(number, file)]
    ids = len(lines[0].values) == 1
    named = len(lines[0].values) if classes is None else len(classes)
    C = max(max(line.values[0] for line in lines) + 1, 1) if ids and classes is None else named
    for line in lines:
        where = f"line {line.place} of {files[line.number]}"
        if ids:
            if len(line.values) != 1:
                raise FileError(f"datasets: {where} must have one class after the path, like the lines before it.")
            if not 0 <= line.values[0] < min(C, len(lines)):
                raise FileError(
                    f"datasets: {where} has class {line.values[0]}, not one of 0..{min(C, len(lines)) - 1}."
                )
        elif len(line.values) != C or not set(line.values) <= {0, 1}:
            raise FileError(f"datasets: {where} must have {C} columns of 0 or 1 after the path.")
    values = np.array([line.values for line in lines])
    labels = one_hot(values[:, 0], C) if ids else torch.from_numpy(values.astype(bool))
    names = [str(c) for c in range(C)] if classes is None else list(classes)
    numbers = torch.tensor([line.number for line in lines])
    return ImageFiles([base / line.path for line in lines], labels, names, size, numbers)


def read_classes(path: Source) -> list[str]:
    """The names of classes in a text file, one per line."""
    names = [line.strip() for line in _text(Path(path)).splitlines() if line.strip()]
    if len(set(names)) != len(names) or not names:
        raise FileError(f"datasets: {path} must have a different class name in each line.")
    return names


def features(path: Source, labels: Source | np.ndarray | None = None) -> FeatureArray:
    """Features from `.npy` [N, D], which stays on disk, with labels from another `.npy`; or both from one `.npz`.

    An `.npz` contains x and label; if x has integers also step [D], by which x is multiplied; and optionally
    classes [C], the class names. Labels are class numbers [N] or flags [N, C].
    """
    items = _features(Path(path), labels)
    if items.x.dtype.kind == "f" or items.step is not None:  # integers alone are finite
        rows = max(1, _NUMBERS // items.x.shape[1])
        for first in range(0, len(items), rows):
            items[np.arange(first, min(first + rows, len(items)))]  # raises FileError unless all are finite
    return items


def _features(file: Path, labels: Source | np.ndarray | None) -> FeatureArray:
    """The same, with only the shapes, dtypes and labels checked."""
    arrays = {"x": _array(file)} if file.suffix == ".npy" else arrays_of(file, ("x", "label", "step", "classes"))
    if labels is not None:
        arrays["label"] = labels if isinstance(labels, np.ndarray) else _array(Path(labels))
    if "x" not in arrays:
        raise FileError(f"datasets: {file} has no array 'x'.")
    if "label" not in arrays:
        own = "" if file.suffix == ".npy" else ", or an array named label in it"
        raise FileError(f"datasets: {file} holds no labels; they need --labels FILE.npy (labels= in Python){own}.")
    x, label, step, names = arrays["x"], arrays["label"], arrays.get("step"), arrays.get("classes")
    if label.ndim == 0:
        raise FileError(
            f"datasets: labels of {file} must be class numbers [N] or flags [N, C] of 0 and 1, got a number."
        )
    if labels is not None and x.ndim == 2 and len(label) != len(x):
        expected = f"of {len(x)} items, as {file} has"
        checks.fail("datasets", "labels", expected, len(label), error=FileError)
    if x.ndim != 2 or len(label) != len(x):
        raise FileError(f"datasets: {file} must hold x [N, D] and N labels, got {list(x.shape)} and {len(label)}.")
    if x.size == 0 or x.dtype.kind not in "fiu":
        raise FileError(f"datasets: {file} must hold at least one row of numbers, got {list(x.shape)} of {x.dtype}.")
    if step is not None:
        if step.shape != x.shape[1:] or step.dtype.kind not in "fiu":
            expected = f"a step for each of {x.shape[1]} dimensions"
            raise FileError(f"datasets: {file} must have {expected}, got {list(step.shape)} of {step.dtype}.")
        step = step.astype(np.float32)
        if not np.isfinite(step).all():
            raise FileError(f"datasets: {file} has a step that is not finite.")
    flags = _flags(file, label)
    if names is not None and (names.dtype.kind != "U" or names.shape != flags.shape[1:]):
        raise FileError(f"datasets: {file} must have the names of {flags.shape[1]} classes, got {list(names.shape)}.")
    return FeatureArray(x, flags, [str(c) for c in range(flags.shape[1])] if names is None else names.tolist(), step)


def _flags(file: Path, label: np.ndarray) -> Tensor:
    """Labels [N] of class numbers or [N, C] of flags as bool [N, C]."""
    if label.ndim == 2 and (label.dtype == bool or (label.dtype.kind in "iu" and not set(np.unique(label)) - {0, 1})):
        return torch.from_numpy(label.astype(bool))
    if label.ndim != 1 or label.dtype.kind not in "iu" or int(label.max()) >= len(label):
        got = f"{label.dtype} {list(label.shape)}" + (f" up to {label.max()}" if label.dtype.kind in "iu" else "")
        hint = "; numpy.unique(labels, return_inverse=True)[1] numbers them" if label.ndim == 1 else ""
        raise FileError(
            f"datasets: labels of {file} must be class numbers [N] or flags [N, C] of 0 and 1, got {got}{hint}."
        )
    return one_hot(label, int(label.max()) + 1)


def one_hot(label: np.ndarray, classes: int) -> Tensor:
    """Class numbers [N] as bool [N, classes]."""
    numbers = torch.from_numpy(np.asarray(label).astype(np.int64))
    wrong = ((numbers < 0) | (numbers >= classes)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise FileError(f"datasets: item {row} has class {int(numbers[row])}, not one of 0..{classes - 1}.")
    return torch.nn.functional.one_hot(numbers, classes).bool()


def read_words(path: Source | None, classes: Sequence[str]) -> Tensor:
    """Vectors [C, E] of class names: from a matrix with a row per class, or from a text file of word vectors.

    The matrix is text or `.npy`, with rows in the order of the classes. In a text file of word vectors (GloVe,
    word2vec) every line starts with its word; a name of several words gets the mean of their vectors. None: one-hot
    vectors, so that all margins are 1.
    """
    if path is None:
        return torch.eye(len(classes))
    file = Path(path)
    if file.suffix == ".npy":
        matrix = _array(file)
    else:
        matrix = _matrix(file) if _is_matrix(file) else _named_rows(file, classes)
    if matrix.dtype.kind not in "fiu" or matrix.ndim != 2 or len(matrix) != len(classes):
        expected = f"{len(classes)} rows of numbers, one per class"
        got = f"{list(matrix.shape)} of {matrix.dtype} in {file}"
        checks.fail("datasets", "words", expected, got, error=FileError)
    words = torch.from_numpy(matrix.astype(np.float32))
    if not bool(torch.isfinite(words).all()) or not bool(words.any(dim=1).all()):
        raise FileError(f"datasets: {file} has a row that is 0 or not finite.")
    return words


def _named_rows(file: Path, classes: Sequence[str]) -> np.ndarray:
    """The vectors of these names; other words in the file are skipped."""
    parts = [name.lower().replace("_", " ").replace("-", " ").split() for name in classes]
    wanted = {word for name in parts for word in name}
    found: dict[str, np.ndarray] = {}
    with file.open(encoding="utf-8", errors="replace") as text:
        for line in text:
            word, _, numbers = line.rstrip().partition(" ")
            word = word.lower()
            if word in wanted and word not in found:
                try:
                    found[word] = np.array(numbers.split(), dtype=np.float32)
                except ValueError:
                    raise FileError(f"datasets: {file} has a line of {word!r} that is not numbers.") from None
    missing = sorted(wanted - found.keys())
    if missing:
        got = f"none of {missing[0]!r} in {file}"
        checks.fail("datasets", "words", "vectors of all words in the names of the classes", got, error=FileError)
    widths = sorted({len(vector) for vector in found.values()})
    if len(widths) > 1:
        raise FileError(f"datasets: {file} has vectors of {widths[0]} and of {widths[1]} numbers.")
    return np.stack([np.mean([found[word] for word in name], axis=0) for name in parts])


def _matrix(file: Path) -> np.ndarray:
    try:
        return np.loadtxt(file, dtype=np.float32, ndmin=2)
    except ValueError as error:
        raise FileError(f"datasets: {file} cannot be read as a matrix ({error}).") from error


def _is_matrix(file: Path) -> bool:
    """True if the first two lines have equally many numbers. (Two numbers above more are a word2vec header.)"""
    try:
        with file.open(encoding="utf-8", errors="replace") as text:
            first = list(itertools.islice((line for line in text if line.strip()), 2))
    except OSError as error:
        raise type(error)(f"datasets: {file} cannot be read: {error.strerror or error}.") from error
    try:
        widths = [len([float(field) for field in line.split()]) for line in first]
    except ValueError:
        return False
    return len(widths) > 0 and (len(set(widths)) == 1 or widths[0] > 2)


class _Line(NamedTuple):
    """A line of an image list: number of the list, line number, path, and the integers that end the line."""

    number: int
    place: int
    path: str
    values: list[int]


def _lines(number: int, file: Path) -> list[_Line]:
    """All non-empty lines."""
    lines = []
    for place, line in enumerate(_text(file, "a text file that lists images").splitlines(), 1):
        fields = line.split()
        if not fields:
            continue
        values = [int(field) for field in itertools.takewhile(_INTEGER.fullmatch, reversed(fields[1:]))][::-1]
        if not values:
            raise FileError(f"datasets: line {place} of {file} must be a path and integers, got {line!r}.")
        lines.append(_Line(number, place, line.strip().rsplit(None, len(values))[0], values))
    if not lines:
        raise FileError(f"datasets: {file} lists no images.")
    return lines


def _text(file: Path, kind: str = "a text file") -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"datasets: {file} cannot be read ({error}).") from error
    except UnicodeDecodeError as error:
        raise FileError(f"datasets: {file} is not {kind}.") from error


def _decode(path: Any, size: int) -> Tensor:
    """The centre crop uint8 [3, size, size] of an image file, or of Pillow's image."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("Images need Pillow: `pip install 'drq_fast[retrieval]'`.") from error
    try:
        with Image.open(path) if isinstance(path, (str, os.PathLike)) else contextlib.nullcontext(path) as image:
            # Pillow would clip 16-bit pixels at 255.
            rgb = (_eight_bits(image) if image.mode.startswith("I") else image).convert("RGB")
    except FileNotFoundError:
        raise FileNotFoundError(f"datasets: the image {path} is missing.") from None
    except Exception as error:  # Pillow's decoders raise many kinds of errors
        raise FileError(f"datasets: the image {path} cannot be decoded ({error}).") from error
    side = min(rgb.size)
    left, top = ((extent - side) / 2 for extent in rgb.size)
    resized = rgb.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1).contiguous()


def _image(picture: Any) -> Any:
    """Pillow's image of pixels, or the image itself."""
    from PIL import Image

    if isinstance(picture, Image.Image):
        return picture
    pixels = np.asarray(picture)
    if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] == 3)):
        got = f"{pixels.dtype} {list(pixels.shape)}"
        checks.fail("embed", "an image", "a file, Pillow's image or an array uint8 [H, W] or [H, W, 3]", got)
    return Image.fromarray(np.ascontiguousarray(pixels))


def _eight_bits(image: Any) -> Any:
    from PIL import Image

    return Image.fromarray((np.asarray(image) // 256).clip(0, 255).astype(np.uint8))


def _binary_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads records of a label and 3 x 32 x 32 pixels."""
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise type(error)(f"datasets: {path} cannot be read: {error.strerror or error}.") from error
    if len(content) == 0 or len(content) % 3073:
        raise FileError(f"datasets: {path} is truncated: {len(content)} bytes are not a multiple of 3073.")
    records = content.reshape(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def _python_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    batch = _unpickle(path)
    try:
        pixels, labels = batch[b"data"], batch[b"labels"]
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or not _are_integers(labels):
            raise TypeError("its data must be an array of uint8, its labels integers")
        return pixels.reshape(-1, 3, 32, 32), np.asarray(labels, np.int64)
    except (LookupError, ValueError, TypeError, OverflowError) as error:
        raise FileError(f"datasets: {path} is not a batch of CIFAR-10 ({error!r}).") from error


def _are_integers(labels: Any) -> bool:
    """Whether these are integers [N]: an array, or a list, which is not nested."""
    if isinstance(labels, np.ndarray):
        return labels.ndim == 1
    return isinstance(labels, list) and all(type(label) is int for label in labels)


def _class_names(path: Path) -> list[str]:
    try:
        return [name.decode() for name in _unpickle(path)[b"label_names"]]
    except (LookupError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise FileError(f"datasets: {path} does not name the classes of CIFAR-10 ({error!r}).") from error


def _unpickle(path: Path) -> Any:
    try:
        return pickles.read(path.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"datasets: {path} is missing.") from None
    except (OSError, pickle.UnpicklingError) as error:
        raise FileError(f"datasets: {path} is not a batch of CIFAR-10 ({error}).") from error


def _array(path: Path) -> np.ndarray:
    """The array of an `.npy` file, memory-mapped."""
    return read_array("datasets", path, mmap=True)


def arrays_of(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """The arrays with these names that an `.npz` file has."""
    try:
        with np.load(path, allow_pickle=False) as pack:
            arrays = {name: pack[name] for name in names if name in pack.files}
            if not all(isinstance(array, np.ndarray) for array in arrays.values()):
                raise ValueError("a member is not an array")
            return arrays
    except FileNotFoundError:
        raise FileNotFoundError(f"datasets: {path} is missing.") from None
    except Exception as error:  # zipfile and numpy raise many kinds of errors
        raise FileError(f"datasets: {path} is not a complete .npz file of numbers ({error}).") from error
