"""Damaged bytes in our files, and headers that lie but carry right checksums."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from drq_fast import Codec, FileError, Index, RecurrentQuantizer, SemanticIds
from drq_fast.files import checksum, header_checksum

from .common import METRICS, damaged, random_codec, random_index, random_vectors, require, twisted

NUMPY = {"F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "U8": np.uint8, "I8": np.int8}
NUMPY |= {"I16": np.int16, "BOOL": np.bool_}


def saved(dice: random.Random, path: Path) -> Callable[[], object]:
    """Writes a file of some kind; returns what loads and uses it."""
    codec = random_codec(dice)
    x = random_vectors(dice, dice.randint(1, 60), codec.dim)
    kind = dice.choice(("index", "codec", "quantizer", "semantic"))
    if kind == "index":
        index = random_index(dice, codec, dice.choice(METRICS))
        index.add(x, ids=dice.sample(range(1000), len(x)) if dice.random() < 0.5 else None)
        if index.lists is not None and dice.random() < 0.5:
            index._put_in_order()
        if index.vectors is not None and dice.random() < 0.7:
            index.tune(x[:3], k=1)
        index.save(path)
        mmap = dice.random() < 0.5
        return lambda: use_index(Index.load(path, mmap=mmap))
    if kind == "codec":
        codec.save(path)
        return lambda: Codec.load(path).decode(torch.zeros(1, 1, dtype=torch.int64))
    if kind == "quantizer":
        layer = RecurrentQuantizer(
            codec.dim, codec.codewords, codec.levels, **dice.choice(({}, {"update": "gradient"}, {"loss": "paper"}))
        )
        layer.initialise(x, seed=0)
        layer.save(path)
        return lambda: RecurrentQuantizer.load(path).decode(torch.zeros(1, 1, dtype=torch.int64))
    few = x[: max(1, min(len(x), codec.codewords**codec.levels))]
    SemanticIds.build(codec, few).save(path)
    return lambda: SemanticIds.load(path).find([0])


def use_index(index: Index) -> None:
    """Searches, changes and copies it, in every way that it offers; whatever is refused is refused in one sentence."""
    x = torch.zeros(2, index.dim)
    uses: list[Callable[[], object]] = [lambda: index.search(x, k=3)]
    uses += [] if index.lists is None else [lambda: index.search(x, k=3, probes=index.lists)]
    uses += [] if index.vectors is None else [lambda: index.search(x, k=3, refine=9), lambda: index.tune(x, k=1)]
    uses += [] if index.tuning is None else [lambda: index.search(x, k=1, recall=0.5)]
    uses += [lambda: index.add(x), lambda: index.search(x, k=3), lambda: copy.deepcopy(index)]
    for use in uses:
        try:
            use()
        except (FileError, ValueError, RuntimeError) as error:
            words = str(error)
            one = words.startswith(("load: ", "search: ", "add: ", "tune: ", "copy: ")) and "\n" not in words
            require(one, f"not a sentence of ours: {words}")


def forged(dice: random.Random, content: bytes) -> bytes:
    """A header, config or tensor that was changed on purpose, with checksums that match."""
    size = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + size]), bytearray(content[8 + size :])
    meta = header["__metadata__"]
    config, sums = json.loads(meta["config"]), json.loads(meta["checksums"])
    way = dice.randrange(4)
    name = dice.choice(sorted(set(header) - {"__metadata__"}))
    if way == 0 and config:
        config = twisted(dice, config)
    elif way == 1:
        header[name]["shape"] = [dice.choice((0, 1, 7, 1 << 20, 1 << 40, -1)) for _ in header[name]["shape"]]
    elif way == 2:
        header[name]["dtype"] = dice.choice(("F32", "F64", "F16", "U8", "I8", "I16", "I32", "I64", "BOOL", "BF16"))
    elif len(data):
        for _ in range(dice.randint(1, 9)):
            data[dice.randrange(len(data))] = dice.choice((0, 127, 128, 255))
        for each, entry in header.items():
            if each != "__metadata__" and each in sums:
                begin, end = entry["data_offsets"]
                dtype = NUMPY.get(entry["dtype"])
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
