"""Queries that are images, embedded by the network of a run, and the names of the images that they find."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..files import FileError
from ..index import Index
from ..retrieval.datasets import SUFFIXES
from ..retrieval.embedder import Embedder, image_paths
from ..retrieval.experiment import ItemSource
from .run import Run


def is_images(path: Path) -> bool:
    """True for a folder, or the name of an image."""
    return path.is_dir() or path.suffix.lower() in SUFFIXES


class ImageQueries:
    """An image, or all in a folder, as queries [Q, dim] for the index of a run."""

    def __init__(self, run: Run, path: Path) -> None:
        if run.folder.is_file():
            expected = f"vectors in a .npy file, because {run.folder} has no network to embed images"
            checks.fail("search", "queries", expected, path)
        self.run, self.paths = run, image_paths(path)
        self.embedder = Embedder.load(run.folder)
        self.dim = self.embedder.model.quantizer.dim

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, first: int, last: int) -> Tensor:
        """The vectors of images first to last - 1, float32 [last - first, dim]."""
        return self.embedder.embed(self.paths[first:last])

    def names(self, index: Index, ids: Tensor) -> dict[str, Any]:
        """The names of the queries and, where they are known, of the images found with ids [Q, k]."""
        names = {"images": [str(path) for path in self.paths]}
        known = self._known(index)
        if known is None:
            return names
        return names | {"found": [[known.get(i, str(i)) for i in row] for row in ids.tolist()]}

    def _known(self, index: Index) -> dict[int, str] | None:
        """The image files of the database by id; None, with a note, if they are not known."""
        try:
            codes, made_by = self.run.load_codes()
            experiment = self.run.experiment()
            paths = getattr(experiment.items, "paths", None)
            source = json.loads(json.dumps(ItemSource.describe(experiment)))
            if not _are_rows(index, codes):
                why = "the index has ids of its own"
            elif paths is None:
                why = "the data have no names of files"
            elif made_by.get("source") != source:
                why = "the data have changed since they were encoded"
            else:
                return {i: str(paths[row]) for i, row in enumerate(experiment.split.database.tolist())}
        except (OSError, FileError) as error:
            why = re.sub(r"^\w+: ", "", str(error)).rstrip(".")
        warnings.warn(f"results are ids, not names of files: {why}.", stacklevel=2)
        return None


def _are_rows(index: Index, codes: Tensor) -> bool:
    """Whether the ids of an index are row numbers of codes [N, levels], except for ids from N on, which were added.

    Their order is compared too, because many items may have one code.
    """
    old = index.ids < len(codes)
    rows = index.ids[old]
    return len(rows) > 0 and bool((rows[1:] > rows[:-1]).all()) and torch.equal(index.codes[old], codes[rows])
