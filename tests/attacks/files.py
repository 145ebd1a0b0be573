"""Damaged bytes in our files, and headers that lie but carry right checksums."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from drq_fast import Codec, FileError, Index, RecurrentQuantizer, SemanticIds
from drq_fast.files import checksum, header_checksum

from .common import METRICS, damaged, random_codec, random_vectors, twisted


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
        layer = RecurrentQuantizer(
            codec.dim, codec.codewords, codec.levels, **dice.choice(({}, {"update": "gradient"}, {"loss": "paper"}))
        )
        layer.initialise(x, seed=0)
        layer.save(path)
        return lambda: RecurrentQuantizer.load(path).decode(torch.zeros(1, 1, dtype=torch.int64))
    few = x[: max(1, min(len(x), codec.codewords**codec.levels))]
    SemanticIds.build(codec, few).save(path)
    return lambda: SemanticIds.load(path).find([0])


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
