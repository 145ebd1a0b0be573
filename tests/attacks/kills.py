"""A process that is killed while it saves leaves the old file or the new one."""

from __future__ import annotations

import os
import random
from pathlib import Path

import torch

from drq_fast import Index

from .common import Child, random_codec, random_vectors, require


def kills(dice: random.Random, folder: Path) -> int:
    path, codec = folder / "killed.drq", random_codec(dice, D=8)
    versions = [Index(codec), Index(codec)]
    for number, version in enumerate(versions):
        version.add(random_vectors(dice, 20_000 * (number + 1), 8))
    versions[0].save(path)

    def save_forever() -> None:
        while True:
            for version in versions:
                version.save(path)

    for _ in range(5):
        Child(save_forever).kill(dice.uniform(0.005, 0.1))
        codes = Index.load(path).codes
        require(any(torch.equal(codes, version.codes) for version in versions), "a killed save left another index")
    versions[0].save(path)
    require(sorted(os.listdir(folder)) == ["killed.drq"], "remains of a killed save were not deleted")
    return 5
