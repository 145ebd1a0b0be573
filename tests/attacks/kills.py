"""A process that is killed while it adds to an index and saves it leaves the old file or the new one, whole."""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch

from drq_fast import Index
from drq_fast.index import coarse

from .common import METRICS, Child, random_codec, random_index, random_vectors, require, require_in_step

BATCH = 3000  # vectors that are added, and removed, between two saves
HELD = 3  # batches in a file


def kills(dice: random.Random, folder: Path, count: int = 5) -> int:
    path, codec, seed = folder / "killed.drq", random_codec(dice, D=8), dice.getrandbits(32)
    mmap = dice.random() < 0.5  # each save replaces the file that the index is mapped from

    def ids_of(step: int) -> range:
        return range(step * BATCH, (step + 1) * BATCH)

    def vectors_of(step: int) -> torch.Tensor:
        return random_vectors(random.Random(seed + step), BATCH, 8)

    def add_and_save_forever() -> None:
        coarse._SHORT = 100  # rows are put in the order of lists again and again
        index = Index.load(path, mmap=mmap)
        while True:
            step = int(index.ids.max()) // BATCH + 1
            index.add(vectors_of(step), ids=ids_of(step))
            index.remove(ids_of(step - HELD))
            index.search(torch.zeros(1, 8), k=1)
            index.save(path)
            if mmap:
                index = Index.load(path, mmap=True)

    first = random_index(dice, codec, dice.choice(METRICS))
    for step in range(HELD):
        first.add(vectors_of(step), ids=ids_of(step))
    first.save(path)
    step = HELD - 1
    for _ in range(count):
        Child(add_and_save_forever).kill(dice.uniform(0.005, 0.3))
        Index.load(path, mmap=True).verify()
        index = Index.load(path)
        ids, before = index.ids, step
        step = int(ids.max()) // BATCH
        held = range(ids_of(step - HELD + 1)[0], ids_of(step)[-1] + 1)
        require(step >= before and ids.sort().values.tolist() == list(held), "a killed save left other ids")
        require((index.vectors, index.lists) == (first.vectors, first.lists), "a killed save left another index")
        x = torch.cat([vectors_of(step - number) for number in reversed(range(HELD))])
        require_in_step(dice, index, x[ids - held[0]])
    first.save(path)
    require(sorted(os.listdir(folder)) == ["killed.drq"], "remains of a killed save were not deleted")
    return count
