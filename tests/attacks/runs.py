"""Commands on a run with damaged or forged JSON files, codes or model: a result, or one sentence and exit code 1."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import torch

from drq_fast import Index

from .commands import arguments, write_data
from .common import damaged, require, run_command, twisted_json
from .files import forged
from .inputs import changed_npy

FITTED = ("fit", "encode", "index", "ids", "evaluate")
TRAINED = ("train", "evaluate-trained", "index")
# The JSON files, and commands that read them.
READERS = {
    FITTED: {
        "run.json": ("fit", "encode", "index", "ids", "evaluate", "train"),
        "config.json": ("index", "evaluate", "train"),
        "codes.json": ("index", "evaluate"),
        "codes.partial.json": ("encode",),
    },
    TRAINED: {
        "run.json": ("train", "encode-trained", "evaluate-trained", "index", "fit"),
        "config.json": ("train", "encode-trained", "evaluate-trained", "index"),
        "codes.json": ("index", "evaluate-trained"),
    },
}
OF_REPORT = ("run.json", "config.json", "codes.json", "metrics.json", "metrics.json", "history.json")


def runs(dice: random.Random, folder: Path) -> int:
    write_data(dice, folder)
    made = dice.choice((FITTED, TRAINED))
    drawn = dice.random() < 0.3
    for name in (*made, *(("report",) if drawn else ())):
        run_command(arguments(folder, name, "whole"), codes=(0,))
    if made is FITTED:  # as if the encoding had been interrupted
        state = (folder / "whole/codes.json").read_bytes().replace(b'"checksum"', b'"done": 7, "checksum"')
        (folder / "whole/codes.partial.json").write_bytes(state)
        (folder / "whole/codes.partial").write_bytes((folder / "whole/codes.npy").read_bytes()[:-9])
        record = (folder / "whole/run.json").read_text()
        record = record.replace('"codes.npy"', '"codes.npy", "codes.partial", "codes.partial.json"')
        (folder / "whole/run.json").write_text(record)
    else:
        shutil.copy(folder / "whole/codes.npy", folder / "x.npy")  # any vectors
    (folder / "whole/notes.txt").write_text("mine")
    (folder / "mine.txt").write_text("mine")
    codes = Index.load(folder / "whole/index.drq").codes
    count = 12
    for _ in range(count):
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.copytree(folder / "whole", folder / "run")
        name = dice.choice(
            [each for each in OF_REPORT if (folder / "run" / each).exists()] if drawn else [*READERS[made]]
        )
        path = folder / "run" / name
        path.write_bytes(twisted_json(dice, path.read_bytes()))
        name = "report" if drawn else dice.choice(READERS[made][name])
        if dice.random() < 0.1:
            path = folder / "run" / dice.choice(("codes.npy", "model.drq", "index.drq"))
            change = changed_npy if path.suffix == ".npy" else dice.choice((damaged, forged))
            path.write_bytes(change(dice, path.read_bytes()))
            name = "search" if path.name == "index.drq" else name
        forced = ["--force"] if dice.random() < 0.7 else []
        code, _, _ = run_command([*arguments(folder, name), *forced])
        for path in (folder / "run/notes.txt", folder / "mine.txt", folder / "x.npy"):
            require(path.exists(), f"{path.name} of the user is lost")
        if name == "index" and code == 0:
            require(torch.equal(Index.load(folder / "run/index.drq").codes, codes), "an index of other codes")
    return count
