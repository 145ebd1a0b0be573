"""Eight threads search, change, save and load one index for a given time; every answer is compared with a model.

make soak SECONDS=3600
python tests/soak.py --seconds 60 --vectors 100000 --lists 200 --kept float16

The ids of thread t are t, t + 8, t + 16 and so on. Only it changes them, so that it knows what a search must find.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from attacks.common import decoded
from torch import Tensor

from drq_fast import Index, RecurrentQuantizer
from drq_fast.index.rows import Content
from drq_fast.index.vectors import DTYPES

THREADS = 8
D, K, M = 64, 256, 4
VERSIONS = 1 << 16  # of a thread's contents, kept to be compared with files
WEIGHTS = {"search": 3000, "batch": 40, "add": 50, "remove": 50, "upsert": 50, "check": 20, "file": 2}
SLOWEST = 20  # times the median: 99.9 % of single queries must take less


class Finding(Exception):
    """The index did what it must not do."""


def require(condition: object, what: str) -> None:
    if not condition:
        raise Finding(what)


class Clusters:
    """Vectors around random centres."""

    def __init__(self, seed: int) -> None:
        self.centres = torch.randn(1000, D, generator=torch.Generator().manual_seed(seed))

    def vectors(self, N: int, generator: torch.Generator) -> Tensor:
        which = torch.randint(len(self.centres), (N,), generator=generator)
        return self.centres[which] + 0.4 * torch.randn(N, D, generator=generator)


def mixed(ids: Tensor, content: Content) -> Tensor:
    """A hash [n] of ids [n] and what is stored for them; the sum over some rows identifies them, in any order."""
    value = ids * -7046029254386353131
    for tensor, factor in zip(content, (5871781006564002453, 6364136223846793005, 1, 3202034522624059733), strict=True):
        if tensor is not None:
            words = (tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None]).contiguous().view(torch.int16)
            sums = [(part * weights(part.shape[1])).sum(dim=1) for part in words.split(4096)]
            value = value + factor * torch.cat(sums)
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        value = (value ^ (value >> shift)) * factor
    return value ^ (value >> 31)


def weights(n: int) -> Tensor:
    """Odd numbers [n]."""
    return (torch.arange(1, n + 1) * 3935559000370003845) | 1


class Model:
    """What one thread has in the index, by slot: id = thread + THREADS * slot."""

    def __init__(self, thread: int, slots: int, kind: Content) -> None:
        self.thread = thread
        self.content = kind.map(lambda tensor: tensor.new_zeros(slots, *tensor.shape[1:]))
        self.age = torch.zeros(slots, dtype=torch.int64)  # 0: not in the index; else larger where it came later
        self.clock = self.living = 0
        self.hash = 0
        self.hashes = [0] * VERSIONS  # after each change, those of the last VERSIONS
        self.begun = self.done = 0  # changes

    def ids(self, slots: Tensor) -> Tensor:
        return self.thread + THREADS * slots

    def at(self, slots: Tensor) -> Content:
        """What is stored for them."""
        return self.content.map(lambda tensor: tensor[slots])

    @contextlib.contextmanager
    def change(self, gone: Tensor, come: Tensor, content: Content):
        """Around the call that takes the living slots `gone` out and puts content into slots `come`."""
        total = int(mixed(self.ids(come), content).sum()) - int(mixed(self.ids(gone), self.at(gone)).sum())
        self.hash = (self.hash + total) % (1 << 64)
        self.hashes[(self.begun + 1) % VERSIONS] = self.hash
        self.begun += 1
        yield
        self.age[gone] = 0
        for own, new in zip(self.content, content, strict=True):
            if own is not None:
                own[come] = new
        self.age[come] = torch.arange(self.clock + 1, self.clock + 1 + len(come))
        self.clock += len(come)
        self.living += len(come) - len(gone)
        self.done += 1


class Latencies:
    """Durations in buckets of 1 %."""

    def __init__(self) -> None:
        self.counts, self.worst = np.zeros(4000, dtype=np.int64), 0.0

    def note(self, seconds: float) -> None:
        self.counts[int(math.log(max(seconds, 1e-7) * 1e7) / math.log(1.01))] += 1
        self.worst = max(self.worst, seconds)

    def add(self, other: Latencies) -> None:
        self.counts += other.counts
        self.worst = max(self.worst, other.worst)

    def quantile(self, share: float) -> float:
        """The end of the bucket that the quantile is in."""
        total = self.counts.cumsum()
        return 1e-7 * 1.01 ** (1 + int(np.searchsorted(total, share * total[-1])))


class Soak:
    """One index, eight workers, and what was measured."""

    def __init__(
        self,
        vectors: int,
        seed: int,
        pause: float,
        folder: Path,
        *,
        lists: int | None = None,
        kept: str | None = None,
    ) -> None:
        self.seed, self.pause, self.folder = seed, pause, folder
        generator = torch.Generator().manual_seed(seed)
        self.clusters = Clusters(seed)
        sample, centroids = self.clusters.vectors(min(vectors, 20_000), generator), None
        if lists is None:
            layer = RecurrentQuantizer(D, K, M)
            layer.fit(sample, rounds=5, seed=seed)
            codec = layer.codec()
        else:
            built = Index.build(sample, bits=8 * M, lists=lists, beam=1, sample=5000, seed=seed, tune=False)
            codec, centroids = built.codec, built._coarse.centroids + built.codec.offset
        self.empty = Index(codec, metric="l2", vectors=kept, centroids=centroids)
        self.index = copy.deepcopy(self.empty)
        slots = vectors // THREADS
        self.target = slots
        self.models = [Model(thread, slots + slots // 4, self.encoded(sample[:0])) for thread in range(THREADS)]
        for first in range(0, slots, 4096):
            some = torch.arange(first, min(first + 4096, slots))
            for model in self.models:
                x = self.clusters.vectors(len(some), generator)
                with model.change(some[:0], some, self.encoded(x)):
                    self.index.add(x, ids=model.ids(some))
        self.workers = [Worker(self, model) for model in self.models]
        self.stop = threading.Event()
        self.findings: list[str] = []
        self.memory: list[float] = []  # MB, one per second, without what the index holds
        self.descriptors: list[int] = []

    def encoded(self, x: Tensor) -> Content:
        """What the index stores for x [n, D]."""
        return self.empty._content("add", x, 1)

    def run(self, seconds: float, progress: float = 30) -> None:
        """Works for so long, or until Ctrl-C."""
        self.stop.clear()
        threads = [threading.Thread(target=worker.run, daemon=True) for worker in self.workers]
        for thread in threads:
            thread.start()
        start = time.monotonic()
        shown = start + progress
        try:
            while time.monotonic() < start + seconds and not self.findings:
                self.stop.wait(min(1.0, seconds / 20))
                self.memory.append(resident() - held(self.index))
                self.descriptors.append(len(os.listdir("/proc/self/fd")))
                if time.monotonic() >= shown:
                    shown += progress
                    self.print_progress(time.monotonic() - start)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        self.stop.set()
        for thread in threads:
            thread.join()
        if not self.findings:
            try:
                self.check_everything()
            except Finding as finding:
                self.findings.append(str(finding))

    def check_everything(self) -> None:
        """While nothing changes: ids, codes and order are those of the models."""
        ids, content = self.index.ids, self.index._rows.living().content
        require(len(self.index) == len(ids) == sum(model.living for model in self.models), "the length is wrong")
        for model in self.models:
            own = ids % THREADS == model.thread
            slots = ids[own] // THREADS
            require(len(slots) == model.living and bool((model.age[slots] > 0).all()), "ids are wrong")
            in_order = self.index.lists is not None or bool((model.age[slots].diff() > 0).all())
            require(in_order, "vectors are not in the order of their insertion")
            for name, tensor in content._asdict().items():
                wanted = getattr(model.at(slots), name)
                require(wanted is None if tensor is None else torch.equal(tensor[own], wanted), f"{name} are wrong")

    def latencies(self) -> Latencies:
        total = Latencies()
        for worker in self.workers:
            total.add(worker.latencies)
        return total

    def counts(self) -> Counter[str]:
        return sum((worker.counts for worker in self.workers), Counter[str]())

    def print_progress(self, seconds: float) -> None:
        found, counts = self.latencies(), self.counts()
        print(
            f"{seconds:6.0f} s  {len(self.index):,} vectors  {counts.total():,} operations  {self.memory[-1]:.0f} MB"
            f"  {self.descriptors[-1]} files  median {1e3 * found.quantile(0.5):.2f} ms"
            f"  p99.9 {1e3 * found.quantile(0.999):.2f} ms  worst {1e3 * found.worst:.1f} ms",
            flush=True,
        )

    def violations(self, latency: bool) -> list[str]:
        """Wrong answers, growth, and slow searches if `latency`."""
        found = list(self.findings)
        kept = len(self.memory) // 5  # warm-up
        for name, series, slack in (("memory", self.memory[kept:], 32), ("files", self.descriptors[kept:], 2)):
            quarter = len(series) // 4
            if quarter:
                first, last = statistics.median(series[:quarter]), statistics.median(series[-quarter:])
                if last > 1.05 * first + slack:
                    found.append(f"{name} grew from {first:.0f} to {last:.0f}")
        times = self.latencies()
        ratio = times.quantile(0.999) / times.quantile(0.5)
        if latency and ratio > SLOWEST:
            found.append(f"99.9 % of searches take up to {ratio:.1f} times the median; at most {SLOWEST} are allowed")
        return found

    def report(self) -> str:
        times, counts = self.latencies(), self.counts()
        slow = sum((worker.slow for worker in self.workers), Counter[str]())
        step = max(1, len(self.memory) // 20)
        quantiles = ", ".join(
            f"{name} {1e3 * times.quantile(share):.3f}"
            for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999), ("p99.99", 0.9999))
        )
        return "\n".join(
            [
                "operations: " + ", ".join(f"{name} {counts[name]:,}" for name in sorted(counts)),
                f"memory beside the index, MB: {' '.join(f'{value:.0f}' for value in self.memory[::step])}",
                f"open files: {' '.join(str(value) for value in self.descriptors[::step])}",
                f"single queries: {times.counts.sum():,}; ms: {quantiles}, worst {1e3 * times.worst:.1f}; "
                f"p99.9 is {times.quantile(0.999) / times.quantile(0.5):.1f} times the median",
                "other threads during searches over 20 times the median: "
                + ", ".join(f"{name} {count}" for name, count in slow.most_common()),
            ]
        )


class Worker:
    """One thread and its model."""

    def __init__(self, soak: Soak, model: Model) -> None:
        self.soak, self.model, self.index = soak, model, soak.index
        self.dice = random.Random(f"{soak.seed} {model.thread}")
        self.generator = torch.Generator().manual_seed(self.dice.getrandbits(32))
        self.counts, self.slow, self.latencies = Counter[str](), Counter[str](), Latencies()
        self.doing, self.limit = "", math.inf
        self.queries = soak.clusters.vectors(512, self.generator)
        self.path = soak.folder / f"{model.thread}.drq"

    def run(self) -> None:
        names, weights = list(WEIGHTS), list(WEIGHTS.values())
        try:
            while not self.soak.stop.is_set():
                name = self.dice.choices(names, weights)[0]
                self.doing = name
                getattr(self, name)()
                self.doing = ""
                self.counts[name] += 1
                if self.soak.pause:
                    time.sleep(self.dice.expovariate(1 / self.soak.pause))
        except BaseException:
            self.soak.findings.append(f"thread {self.model.thread}: {traceback.format_exc()}")
            self.soak.stop.set()

    def some_slots(self, count: int, living: bool) -> Tensor:
        """At most so many slots of one kind, in random order."""
        slots = torch.randint(len(self.model.age), (16 * count,), generator=self.generator).unique()
        slots = slots[(self.model.age[slots] > 0) == living]
        return slots[torch.randperm(len(slots), generator=self.generator)][:count]

    def search(self) -> None:
        query = self.queries[self.dice.randrange(len(self.queries))]
        start = time.perf_counter()
        scores, ids = self.index.search(query, k=10)
        seconds = time.perf_counter() - start
        self.latencies.note(seconds)
        if seconds > self.limit:
            self.slow.update({worker.doing for worker in self.soak.workers if worker is not self} or {"nothing"})
        if self.dice.random() < 0.1:
            self.check_own(query[None], scores[None], ids[None])
            if self.latencies.counts.sum() > 100:
                self.limit = SLOWEST * self.latencies.quantile(0.5)

    def batch(self) -> None:
        query = self.queries[self.dice.randrange(len(self.queries) - 32) :][: self.dice.randint(2, 32)]
        refine = None if self.index.vectors is None else self.dice.choice((None, 20, 200))
        levels = self.dice.choice((None, None, M))
        self.check_own(query, *self.index.search(query, k=20, levels=levels, refine=refine), refine is not None)

    def check_own(self, query: Tensor, scores: Tensor, ids: Tensor, refined: bool = False) -> None:
        """What was found is sorted, complete in number, and right where it is this thread's."""
        require(bool((ids >= 0).all()), "a search found too few vectors")
        require(bool((scores.diff(dim=1) >= 0).all()), "scores are not in order")
        rows, columns = (ids % THREADS == self.model.thread).nonzero(as_tuple=True)
        slots = ids[rows, columns] // THREADS
        require(bool((self.model.age[slots] > 0).all()), "a search found a vector that was removed")
        exact = (query[rows].double() - self.stands_for(slots, refined)).square().sum(dim=1)
        require(torch.allclose(scores[rows, columns].double(), exact, rtol=1e-4, atol=1e-3), "scores are wrong")

    def stands_for(self, slots: Tensor, refined: bool) -> Tensor:
        """What distances are measured to [n, D]: the stored vectors if `refined`, else what the codes stand for."""
        content = self.model.at(slots)
        stored = content.stored() if refined else None
        return decoded(self.index, content) if stored is None else stored.floats(torch.arange(len(slots))).double()

    def add(self) -> None:
        slots = self.some_slots(self.dice.choice((1, 1, 1, 10, 100)), living=False)
        if self.model.living > self.soak.target + 500:
            return self.remove()
        x = self.soak.clusters.vectors(len(slots), self.generator)
        with self.model.change(slots[:0], slots, self.soak.encoded(x)):
            self.index.add(x, ids=self.model.ids(slots))
        return None

    def remove(self) -> None:
        slots = self.some_slots(self.dice.choice((1, 1, 1, 10, 100)), living=True)
        if self.model.living < self.soak.target - 500:
            return self.add()
        with self.model.change(slots, slots[:0], self.model.at(slots[:0])):
            self.index.remove(self.model.ids(slots))
        return None

    def upsert(self) -> None:
        slots = self.some_slots(self.dice.choice((1, 1, 1, 10)), living=True)
        x = self.soak.clusters.vectors(len(slots), self.generator)
        with self.model.change(slots, slots, self.soak.encoded(x)):
            self.index.upsert(x, self.model.ids(slots))

    def check(self) -> None:
        """A search among some own ids is that of a new index; one among all vectors has all of the own ones."""
        model, query = self.model, self.queries[self.dice.randrange(len(self.queries))][None]
        kept = self.some_slots(500, living=True)
        kept = kept[model.age[kept].argsort()]
        small = copy.deepcopy(self.soak.empty)
        small._append("add", model.at(kept), model.ids(kept))
        keep = torch.cat([model.ids(kept), model.ids(self.some_slots(50, living=False))])
        refined = self.index.vectors is not None and self.dice.random() < 0.5
        options = {"k": len(kept) + 3, "probes": self.index.lists, "refine": 1000 if refined else None}
        expected, found = small.search(query, **options), self.index.search(query, keep=keep, **options)
        require(torch.equal(found.scores, expected.scores), "a filtered search found other scores")
        require(pairs(found) == pairs(expected), "a filtered search found other ids")
        exact = (query.double() - self.stands_for(kept, refined)).square().sum(dim=1)
        best = exact.sort().values
        require(torch.allclose(found.scores[0, : len(kept)].double(), best, rtol=1e-4, atol=1e-3), "scores are wrong")
        all_own = torch.zeros(THREADS * len(model.age), dtype=torch.bool)
        all_own[model.ids(torch.arange(len(model.age)))] = True
        options = {"k": 100, "probes": self.index.lists}
        own, everything = self.index.search(query, keep=all_own, **options), self.index.search(query, **options)
        self.check_own(query, *own)
        self.check_own(query, *everything)
        mine = everything.ids % THREADS == model.thread
        first = int(mine.sum())
        require(torch.equal(everything.scores[mine], own.scores[0, :first]), "equal vectors have different scores")
        found = pairs((everything.scores[mine], everything.ids[mine]))
        require(found == pairs((own.scores[0, :first], own.ids[0, :first])), "a search missed vectors")

    def file(self) -> None:
        """A file has what each thread had at some moment during the save."""
        before = [model.done for model in self.soak.models]
        self.doing = "save"
        self.index.save(self.path)
        after = [model.begun for model in self.soak.models]
        mmap = self.dice.random() < 0.5
        self.doing = f"load, mmap={mmap}"
        loaded = Index.load(self.path, mmap=mmap)
        self.doing = "comparison of a file"
        if mmap:
            loaded.verify()
        ids, content = loaded.ids, loaded._rows.living().content
        require(len(loaded) == len(ids) == len(content.codes), "the parts of a file disagree")
        values, owners = mixed(ids, content), ids % THREADS
        for model, first, last in zip(self.soak.models, before, after, strict=True):
            require(last - first < VERSIONS, "too many changes during a save: raise VERSIONS")
            total = int(values[owners == model.thread].sum()) % (1 << 64)
            versions = {model.hashes[number % VERSIONS] for number in range(first, last + 1)}
            require(total in versions, "a file is not what the index was at any moment of the save")
        query = self.queries[:3]
        self.check_own(query, *loaded.search(query, k=10))
        if self.dice.random() < 0.5:  # what was loaded can be changed, and the file stays
            gone = loaded.search(query[0], k=1).ids
            loaded.remove(gone)
            loaded.upsert(query[:1], gone)
            require(len(loaded) == len(ids), "a loaded index was changed wrongly")


def pairs(found: tuple[Tensor, Tensor]) -> list[tuple[float, int]]:
    """(score, id) of all results but those that tie with the last: with lists, ties change places when rows do."""
    scores, ids = found[0].flatten().tolist(), found[1].flatten().tolist()
    return sorted((score, i) for score, i in zip(scores, ids, strict=True) if score != scores[-1])


def held(index: Index) -> float:
    """MB of the index. Removed rows stay until they are half of all, so this goes up and down by design."""
    return index.nbytes / 1e6


def resident() -> float:
    """Resident memory in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description="Mixed load on one index, compared with a model.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--pause", type=float, default=0.01, help="mean pause of a thread after each operation, s")
    parser.add_argument("--lists", type=int, default=None, help="inverted lists of the index; none by default")
    parser.add_argument("--kept", choices=list(DTYPES), default=None, help="how it keeps vectors; not by default")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = {"lists": options.lists, "kept": options.kept}
        soak = Soak(options.vectors, options.seed, options.pause, Path(folder), **given)
        soak.run(options.seconds)
    print(soak.report())
    violations = soak.violations(latency=True)
    print("\n".join(f"VIOLATION: {what}" for what in violations) or "no violation")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
