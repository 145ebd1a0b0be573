"""page.html of a report: the images retrieved at every code length, in one file that loads nothing from the network."""

from __future__ import annotations

import base64
import html
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .. import checks
from ..files import FileError, read_array
from ..index import Index
from ..retrieval.datasets import Items
from ..retrieval.experiment import Experiment
from .run import Run

if TYPE_CHECKING:
    from .report import Part

Pixels = Callable[[int], np.ndarray]  # the row of an item to uint8 [H, W] or [H, W, 3]

SHOWN = 24  # images per query and length
_SIDES = (128, 96, 64, 48, 32)  # of thumbnails; the largest size within _BUDGET is used
_BUDGET = 1_200_000  # bytes of all thumbnails on the page


def build(
    part: Part,
    beside: Iterable[Part],
    experiment: Experiment,
    query: Tensor,
    pixels: Pixels | None,
    count: int,
) -> str:
    """The page for `count` of the queries with features `query` [Q, dim]; without pixels, tiles show class names."""
    split, labels = experiment.split, experiment.items.labels
    if len(query) != len(split.query):
        raise FileError(
            f"report: queries.npy has {len(query)} rows, not the {len(split.query)} of the split; evaluate again."
        )
    asked = choose(labels[split.query], count)
    index = Index(part.layer, metric=part.metrics["metric"])
    order = torch.randperm(len(part.codes), generator=torch.Generator().manual_seed(0))
    index.add_codes(part.codes[order], order)  # equal codes come oldest first, and files are often sorted by class
    shown = min(SHOWN, len(index))
    found = [index.search(query[asked], shown, L).ids for L in range(1, part.layer.levels + 1)]
    rows = split.query[asked].tolist()
    answers = [[split.database[ids[q]].tolist() for ids in found] for q in range(len(asked))]
    items = list(dict.fromkeys([*rows, *itertools.chain.from_iterable(itertools.chain.from_iterable(answers))]))
    number = {row: n for n, row in enumerate(items)}
    data = {
        "run": part.name,
        "measured": part.measured,
        "totals": {"queries": len(query), "database": len(index)},
        "bytes": 4 * part.layer.dim,
        "lengths": _lengths(part),
        "exact": (part.metrics.get("exact") or {}).get(part.measure),
        "beside": [{"run": other.name, "lengths": _lengths(other)} for other in beside],
        "classes": list(experiment.items.classes),
        "labels": [labels[row].nonzero().squeeze(1).tolist() for row in items],
        "images": None if pixels is None else thumbnails(pixels(row) for row in items),
        "queries": [
            {"item": number[row], "found": [[number[other] for other in ids] for ids in answer]}
            for row, answer in zip(rows, answers, strict=True)
        ],
    }
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # so that no `</script>` ends it early
    before, between, after = re.split(r"\{\{title\}\}|\{\{data\}\}", template)
    return before + html.escape(part.name) + between + embedded + after


def _lengths(part: Part) -> list[dict[str, Any]]:
    return [{name: row[name] for name in ("bits", "bytes", part.measure)} for row in part.metrics["lengths"]]


def choose(labels: Tensor, count: int) -> list[int]:
    """Rows of labels [Q, C], about as many of every class: the first of each class, then the second, and so on."""
    count = min(count, len(labels))
    classes = torch.linspace(0, labels.shape[1] - 1, min(count, labels.shape[1])).round().long().tolist()
    waiting = [labels[:, c].nonzero().squeeze(1).tolist() for c in classes]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*waiting))
    rest = range(len(labels))  # those of other classes, or of none
    chosen = dict.fromkeys(row for row in itertools.chain(turns, rest) if row is not None)
    return list(itertools.islice(chosen, count))


def query_features(run: Run, dim: int) -> Tensor:
    """The features [Q, dim] of the queries, which `evaluate` has written."""
    run.need(run.queries, f"`drq-fast evaluate {run.folder} --force`")
    query = read_array("report", run.queries, mmap=True)
    if query.dtype != np.float32 or query.ndim != 2 or query.shape[1] != dim:
        raise FileError(f"report: {run.queries} must hold float32 [Q, {dim}], got {query.dtype} {list(query.shape)}.")
    return torch.from_numpy(np.array(query))


def item_pixels(items: Items) -> Pixels:
    """The pixels of items that are images."""
    return lambda row: items[[row]][0].permute(1, 2, 0).numpy()


def array_pixels(path: Path, count: int) -> Pixels:
    """The pixels of `count` items in a file, which stays on disk."""
    pixels = read_array("report", path, mmap=True)
    grey_or_colour = pixels.ndim == 3 or (pixels.ndim == 4 and pixels.shape[3] == 3)
    if pixels.dtype != np.uint8 or not grey_or_colour or len(pixels) != count or 0 in pixels.shape:
        expected = f"uint8 [{count}, H, W] or [{count}, H, W, 3], a picture per item"
        checks.fail("report", "images", expected, f"{pixels.dtype} {list(pixels.shape)}")
    return lambda row: pixels[row]


def thumbnails(pictures: Iterable[np.ndarray]) -> list[str]:
    """Pictures uint8 [H, W] or [H, W, 3] as data URIs, none enlarged, as large as the page has room for."""
    from PIL import Image

    small = []
    for picture in pictures:
        image = Image.fromarray(np.ascontiguousarray(picture)).convert("RGB")
        image.thumbnail((_SIDES[0], _SIDES[0]))
        small.append(image)
    for side in _SIDES:
        encoded = [_data_uri(image, side) for image in small]
        if sum(map(len, encoded)) <= _BUDGET:
            break
    return encoded


def _data_uri(image: Any, side: int) -> str:
    image = image.copy()
    image.thumbnail((side, side))
    file = io.BytesIO()
    image.save(file, "WEBP", quality=82, method=4)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"
