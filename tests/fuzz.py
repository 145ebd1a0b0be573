"""Random attacks on the library for a given time; a failure prints the attack and the seed that repeats it.

make fuzz SECONDS=1800
python tests/fuzz.py --seconds 60
python tests/fuzz.py --only files --seed 7 --cases 1
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import drq_fast
from drq_fast import Codec, FileError, Index, RecurrentQuantizer, SemanticIds, functional
from drq_fast.backends import plain_torch
from drq_fast.backends.native import extension
from drq_fast.files import checksum, header_checksum

METRICS = ("l2", "ip", "cosine")
ODD: tuple[Any, ...] = (
    None,
    -1,
    0,
    1,
    3,
    10**400,
    0.5,
    float("nan"),
    float("inf"),
    "x",
    b"",
    True,
    [],
    [[]],
    {},
    object(),
)


class Finding(Exception):
    """The library did what it promises not to do."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Finding(what)


def random_codec(dice: random.Random, D: int | None = None, K: int | None = None) -> Codec:
    D, K, M = D or dice.randint(1, 40), K or dice.choice((2, 3, 16, 100, 256, 300)), dice.randint(1, 6)
    generator = torch.Generator().manual_seed(dice.getrandbits(32))
    scale = torch.tensor([dice.choice((1, -1, 1)) * dice.uniform(0.3, 1) ** m for m in range(M)])
    offset = torch.randn(D, generator=generator) if dice.random() < 0.5 else None
    return Codec(torch.randn(K, D, generator=generator), scale, offset)


def random_vectors(dice: random.Random, N: int, D: int) -> torch.Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(dice.getrandbits(32)))


# Files: damaged bytes, and headers that lie but carry right checksums.


def saved(dice: random.Random, path: Path) -> Callable[[], object]:
    """Writes a file of some kind; returns what loads and uses it."""
    codec = random_codec(dice)
    x = random_vectors(dice, dice.randint(1, 60), codec.dim)
    kind = dice.choice(("index", "codec", "quantizer", "semantic"))
    if kind == "index":
        index = Index(codec, dice.choice(METRICS))
        index.add(x, ids=dice.sample(range(1000), len(x)) if dice.random() < 0.5 else None)
        index.save(path)
        mmap = dice.random() < 0.5
        return lambda: Index.load(path, mmap=mmap).search(torch.zeros(2, Index.load(path).dim), k=3)
    if kind == "codec":
        codec.save(path)
        return lambda: Codec.load(path).decode(torch.zeros(1, 1, dtype=torch.int64))
    if kind == "quantizer":
        layer = RecurrentQuantizer(codec.dim, codec.codewords, codec.levels, loss=dice.choice(("squared", "paper")))
        layer.initialise(x, seed=0)
        layer.save(path)
        return lambda: RecurrentQuantizer.load(path).decode(torch.zeros(1, 1, dtype=torch.int64))
    few = x[: max(1, min(len(x), codec.codewords**codec.levels))]
    SemanticIds.build(codec, few).save(path)
    return lambda: SemanticIds.load(path).find([0])


def damaged(dice: random.Random, content: bytes) -> bytes:
    """Some bytes changed, cut off or repeated."""
    data, way = bytearray(content), dice.randrange(3)
    if way == 0:
        return bytes(data[: dice.randrange(len(data))])
    if way == 1:
        return bytes(data) + bytes(data[: dice.randint(1, 64)])
    for _ in range(dice.randint(1, 8)):
        data[dice.randrange(min(len(data), dice.choice((64, 1024, len(data)))))] = dice.randrange(256)
    return bytes(data)


def forged(dice: random.Random, content: bytes) -> bytes:
    """A header, config or tensor that was changed on purpose, with checksums that match."""
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), bytearray(content[8 + size :])
    meta = header["__metadata__"]
    config, sums = json.loads(meta["config"]), json.loads(meta["checksums"])
    way = dice.randrange(4)
    name = dice.choice(sorted(set(header) - {"__metadata__"}))
    if way == 0 and config:
        config[dice.choice(sorted(config))] = dice.choice(
            (None, -1, 0, 1 << 62, 10**400, 1e308, "x", [], [1e30], {}, True)
        )
    elif way == 1:
        header[name]["shape"] = [dice.choice((0, 1, 7, 1 << 20, 1 << 40, -1)) for _ in header[name]["shape"]]
    elif way == 2:
        header[name]["dtype"] = dice.choice(("F32", "F64", "U8", "I16", "I64", "BOOL", "BF16"))
    elif len(data):
        for _ in range(dice.randint(1, 9)):
            data[dice.randrange(len(data))] = dice.choice((0, 127, 128, 255))
        for each, entry in header.items():
            if each != "__metadata__" and each in sums:
                begin, end = entry["data_offsets"]
                dtype = {"F32": np.float32, "I64": np.int64, "U8": np.uint8, "I16": np.int16, "BOOL": np.bool_}.get(
                    entry["dtype"]
                )
                if dtype is not None:
                    array = np.frombuffer(bytes(data[begin:end]), dtype).reshape(entry["shape"])
                    sums[each] = checksum(torch.from_numpy(array.copy()))
    meta["config"], meta["checksums"] = json.dumps(config, sort_keys=True), json.dumps(sums, sort_keys=True)
    meta["header"] = header_checksum({key: value for key, value in meta.items() if key != "header"})
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(data)


def files(dice: random.Random, folder: Path) -> int:
    path, use = folder / "a.drq", None
    use = saved(dice, path)
    content = path.read_bytes()
    use()
    for _ in range(50):
        path.unlink()  # a new file, so that an earlier map keeps the old one
        path.write_bytes((damaged if dice.random() < 0.5 else forged)(dice, content))
        with contextlib.suppress(FileError):
            use()
    return 50


# Calls with arguments of all sorts: an error of the documented kinds, or a result.


def calls(dice: random.Random, folder: Path) -> int:
    codec = random_codec(dice)
    layer = RecurrentQuantizer(codec.dim, codec.codewords, codec.levels)
    x = random_vectors(dice, 30, codec.dim)
    layer.initialise(x, seed=0)
    index, codes = Index(codec), codec.encode(x)
    index.add(x)

    def odd(usual: Any) -> Any:
        tensors = (
            x[:, :1],
            x.double(),
            x.half(),
            x * float("nan"),
            x.numpy()[::-1],
            x.to_sparse(),
            codes,
            codes.long() - 9,
            x[0],
        )
        return usual if dice.random() < 0.5 else dice.choice((*ODD, *tensors))

    targets: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
        (index.search, (x,), {"k": 3, "levels": None, "keep": None}),
        (index.add, (x,), {"ids": None, "beam": 1}),
        (index.remove, ([0],), {}),
        (index.upsert, (x, list(range(30))), {}),
        (codec.encode, (x,), {"beam": 2, "levels": 1}),
        (codec.decode, (codes,), {"levels": 1}),
        (codec.prefix, (1,), {}),
        (layer, (x,), {"levels": None, "mask": None, "reduction": "mean", "reconstruct": True}),
        (layer.embed, (codes,), {}),
        (layer.usage, (codes,), {}),
        (layer.observe, (codes,), {}),
        (layer.revive, (x,), {"below": 1, "seed": 0}),
        (functional.encode, (x, *codec.tensors()[:2]), {"offset": codec.offset, "beam": 1, "level_weights": None}),
        (functional.squared_errors, (x, *codec.tensors()[:2]), {"commitment": 1.0}),
        (functional.search, (x, codes, *codec.tensors()[:2]), {"k": 2, "metric": "ip", "levels": None}),
        (RecurrentQuantizer, (4,), {"codewords": 8, "levels": 2, "commitment": 1.0, "level_weights": None}),
    ]
    for _ in range(40):
        call, arguments, options = dice.choice(targets)
        given = [odd(value) for value in arguments]
        named = {name: odd(value) for name, value in options.items()}
        with contextlib.suppress(ValueError, TypeError, drq_fast.BackendUnavailable):
            call(*given, **named)
    index.search(x, k=3)  # still whole
    return 40


# The compiled code of every instruction set beside the definition.


def differences(dice: random.Random, folder: Path) -> int:
    codec, isas = random_codec(dice), extension.supported_isas()
    N, Q = dice.choice((1, 7, 64, 500, 3000)), dice.choice((1, 2, 5, 40, 70))
    x, query = random_vectors(dice, N, codec.dim), random_vectors(dice, Q, codec.dim)
    metric, k, levels = dice.choice(METRICS), dice.choice((1, 3, 10, 100)), dice.randint(1, codec.levels)
    keep = torch.rand(N, generator=torch.Generator().manual_seed(1)) < 0.4 if dice.random() < 0.4 else None
    index = Index(codec, metric)
    before = os.environ.get("DRQ_FAST_ISA")
    try:
        os.environ["DRQ_FAST_ISA"] = dice.choice(isas)
        index.add(x)
        found = index.search(query, k, levels, keep)
        errors = functional.squared_errors(x, *codec.tensors()[:2], offset=codec.offset)
    finally:
        os.environ.pop("DRQ_FAST_ISA") if before is None else os.environ.update(DRQ_FAST_ISA=before)
    codes, wide = index.codes[:, :levels].long(), [None if t is None else t.double() for t in codec.tensors()]
    scores = functional.adc(
        query.double(), codes, wide[0], wide[1][:levels], offset=wide[2], metric=metric, backend="torch"
    )
    if keep is not None:
        scores[:, ~keep] = float("inf") if metric == "l2" else float("-inf")
    order = plain_torch.rank(scores, k, metric)
    best = plain_torch.pad_result(scores.gather(1, order), order, k, metric).scores
    largest = (1 + query.double().square().sum(dim=1, keepdim=True)) * (1 + float(codec.codebook.abs().max()) ** 2)
    # A cosine is uncertain where offset and codewords cancel: its norm is a sum of squares that are much larger.
    certain = metric != "cosine" or float(codec.decode(codes).norm(dim=1).min()) > 0.1
    close = ((best - found.scores).abs() < 1e-3 * largest) | ~best.isfinite()
    require(bool((best.isfinite() == found.scores.isfinite()).all()), "search found another number of codes")
    require(not certain or bool(close.all()), "search found other scores than the definition")
    exact = x.double() - (0 if wide[2] is None else wide[2])
    for m in range(codec.levels):
        exact = exact - wide[1][m] * wide[0][errors.codes[:, m]]
        near = (2 * exact.square().sum(dim=1) - errors.errors[:, m]).abs() <= 1e-4 * (1 + errors.errors[:, m])
        require(bool(near.all()), "squared errors differ from those of their codes")
    return 1


# Eight threads on one index, each with ids of its own.


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


# A process that is killed while it saves leaves the old file or the new one.


def kills(dice: random.Random, folder: Path) -> int:
    path, codec = folder / "killed.drq", random_codec(dice, D=8)
    versions = [Index(codec), Index(codec)]
    for number, version in enumerate(versions):
        version.add(random_vectors(dice, 20_000 * (number + 1), 8))
    versions[0].save(path)
    for _ in range(5):
        child = os.fork()
        if child == 0:
            try:
                while True:
                    for version in versions:
                        version.save(path)
            finally:
                os._exit(1)
        time.sleep(dice.uniform(0.005, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        codes = Index.load(path).codes
        require(any(torch.equal(codes, version.codes) for version in versions), "a killed save left another index")
    versions[0].save(path)
    require(sorted(os.listdir(folder)) == ["killed.drq"], "remains of a killed save were not deleted")
    return 5


ATTACKS: dict[str, Callable[[random.Random, Path], int]] = {
    "files": files,
    "calls": calls,
    "differences": differences,
    "threads": threads,
    "kills": kills,
}


def attack(name: str, seed: int) -> int:
    """One attack, in a folder of its own; returns the number of cases."""
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        return ATTACKS[name](random.Random(f"{name} {seed}"), Path(folder))


def main() -> int:
    parser = argparse.ArgumentParser(description="Random attacks on the library.")
    parser.add_argument("--seconds", type=float, default=60, help="how long to attack, in all")
    parser.add_argument("--only", choices=sorted(ATTACKS), help="one kind of attack")
    parser.add_argument("--seed", type=int, default=None, help="the first seed; the time by default")
    parser.add_argument("--cases", type=int, default=None, help="how many seeds, instead of --seconds")
    options = parser.parse_args()
    seed = int(time.time()) % 1_000_000_000 if options.seed is None else options.seed
    names = [options.only] if options.only else sorted(ATTACKS)
    warnings.simplefilter("ignore")  # of few vectors for many codewords
    cases, findings, end = dict.fromkeys(names, 0), 0, time.monotonic() + options.seconds
    spent = dict.fromkeys(names, 0.0)
    first = seed
    while (time.monotonic() < end) if options.cases is None else (seed < first + options.cases):
        # The attack that has had the least time so far.
        for name in [min(names, key=spent.__getitem__)] if options.cases is None else names:
            start = time.monotonic()
            try:
                cases[name] += attack(name, seed)
            except Exception:
                findings += 1
                print(
                    f"\nFINDING: python tests/fuzz.py --only {name} --seed {seed} --cases 1\n{traceback.format_exc()}",
                    flush=True,
                )
            spent[name] += time.monotonic() - start
        seed += 1
    print(f"seeds {first} to {seed - 1}: {findings} findings")
    for name in names:
        print(f"{name:12} {cases[name]:>9,} cases {spent[name]:>9.1f} s")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
