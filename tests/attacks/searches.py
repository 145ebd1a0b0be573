"""Many searches on one index: memory, open files and threads stay as they are."""

from __future__ import annotations

import gc
import os
import random
import resource
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from drq_fast import Index

from .common import METRICS, random_codec, random_vectors, require

COUNT = 8000
RESIDENT = 2 << 20  # bytes by which a process may grow: pages that the allocator has not used before
BLOCKS = 500  # likewise, objects of Python


class Usage(NamedTuple):
    """What this process holds: resident bytes, objects of Python, open files, threads."""

    resident: int
    blocks: int
    files: int
    threads: int


def usage() -> Usage:
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    return Usage(
        resident, sys.getallocatedblocks(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    )


def searches(dice: random.Random, folder: Path) -> int:
    codec = random_codec(dice, D=dice.choice((4, 16, 31)))
    index = Index(codec, dice.choice(METRICS))
    index.add(random_vectors(dice, dice.choice((100, 1000, 4000)), codec.dim))
    if dice.random() < 0.3:
        index.save(folder / "a.drq")
        index = Index.load(folder / "a.drq", mmap=True)
    queries = [random_vectors(dice, count, codec.dim) for count in (1, 1, 1, 1, 1, 1, 2, 9, 40)]
    masks = [None, None, torch.rand(len(index)) < 0.3, dice.sample(range(len(index)), 20)]
    jobs = [
        (dice.choice(queries), dice.choice((1, 3, 10, 50)), dice.randint(1, codec.levels), dice.choice(masks))
        for _ in range(40)
    ]

    def search(count: int) -> None:
        for number in range(count):
            query, k, levels, keep = jobs[number % len(jobs)]
            found = index.search(query, k, levels, keep)
            require(found.ids.shape == (len(query), k), "a search returned another number of results")

    search(COUNT // 4)  # fills caches
    before = usage()
    search(COUNT - COUNT // 4)
    after = usage()
    what = f"{COUNT} searches: {before} before, {after} after"
    require(after.resident - before.resident < RESIDENT, f"memory grew in {what}")
    require(after.blocks - before.blocks < BLOCKS, f"objects of Python were kept in {what}")
    require(after.files <= before.files and after.threads <= before.threads, f"files or threads were left in {what}")
    return COUNT
