"""Eight threads on one index, each with ids of its own."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import torch

from drq_fast import Index

from .common import METRICS, random_codec, require


def threads(dice: random.Random, folder: Path) -> int:
    codec = random_codec(dice, D=8, K=dice.choice((16, 256)))
    index, failures, count = Index(codec, dice.choice(METRICS)), [], 60

    def work(number: int) -> None:
        mine, own, fresh = random.Random(dice.random() + number), set[int](), iter(range(number, 1 << 30, 8))
        try:
            for _ in range(count):
                act = mine.randrange(4)
                if act == 0 or not own:
                    ids = [next(fresh) for _ in range(mine.randint(1, 9))]
                    index.add(torch.randn(len(ids), 8), ids=ids)
                    own |= set(ids)
                elif act == 1:
                    gone = mine.sample(sorted(own), mine.randint(1, len(own)))
                    index.remove(gone)
                    own -= set(gone)
                elif act == 2:
                    index.upsert(torch.randn(1, 8), [mine.choice(sorted(own))])
                if own:
                    found = index.search(torch.randn(1, 8), k=len(own) + 2, keep=sorted(own)).ids[0].tolist()
                    require(set(found) - {-1} == own, "a search does not find a thread's own vectors")
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    return 8 * count
