"""Every command that writes is killed at a random moment; the same command then ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from drq_fast.files import TEMPORARY

from .common import Child, require, run_command

FIT = ("--codewords", "8", "--levels", "4", "--rounds", "3", "--beam", "2")
BUILD = ("--bits", "8", "--lists", "4", "--vectors", "int8", "--sample", "60", "--beam", "1")
TRAIN = ("--train", "8", "--query", "2", "--hidden", "6", "--dim", "8", "--codewords", "4", "--levels", "2")
TRAIN = (*TRAIN, "--epochs", "1", "1", "1", "--batch", "8", "--checkpoint-seconds", "0")
# Files that a killed command may leave in any state that a rerun completes.
UNFINISHED = {"run.json", "config.json", "codes.json", "checkpoint.safetensors", "history.json", "queries.npy"}
UNFINISHED |= {"codes.partial", "codes.partial.json", ".lock"}

Tree = dict[str, bytes]


class Scene(NamedTuple):
    """Commands that lead to a state of a run, and the command to be killed."""

    before: tuple[str, ...]
    name: str
    options: tuple[str, ...] = ()


SCENES = (
    Scene((), "build"),
    Scene(("build",), "build", ("--metric", "ip", "--force")),
    Scene(("build",), "tune"),
    Scene((), "fit"),
    Scene(("fit", "encode", "index", "ids"), "fit", ("--seed", "1", "--force")),
    Scene(("fit",), "encode"),
    Scene(("fit", "encode", "index"), "encode", ("--beam", "2", "--force")),
    Scene(("fit", "encode"), "index"),
    Scene(("fit", "encode", "index"), "index", ("--metric", "ip", "--force")),
    Scene(("fit", "encode", "index", "search"), "search", ("-k", "3", "--force")),
    Scene(("fit",), "ids"),
    Scene(("fit", "ids"), "ids", ("--beam", "3", "--force")),
    Scene((), "train"),
    Scene(("train", "evaluate-trained"), "train", ("--seed", "1", "--force")),
    Scene(("fit", "encode"), "evaluate"),
    Scene(("fit", "encode", "evaluate"), "evaluate", ("-k", "2", "--force")),
    Scene(("train",), "evaluate-trained"),
    Scene(("train",), "encode-trained"),
    Scene(("fit", "encode", "evaluate"), "report"),
    Scene(("train", "evaluate-trained", "report"), "report", ("--queries", "3", "--force")),
)


def write_data(dice: random.Random, folder: Path) -> None:
    """x.npy, queries.npy and labelled.npz, and the folder `out`."""
    numbers = np.random.default_rng(dice.getrandbits(32))
    np.save(folder / "x.npy", numbers.normal(size=(dice.choice((60, 500)), 6)).astype(np.float32))
    np.save(folder / "queries.npy", numbers.normal(size=(5, 6)).astype(np.float32))
    label = np.arange(60) % 3
    np.savez(folder / "labelled.npz", x=numbers.normal(size=(60, 5)) + label[:, None], label=label)
    (folder / "out").mkdir()


def arguments(folder: Path, name: str, run: str = "run") -> list[str]:
    """The command line of a command on the data of `write_data`."""
    x, where = str(folder / "x.npy"), str(folder / run)
    index = str(folder / "out/index.drq")
    return {
        "build": ["build", x, index, *BUILD],
        "tune": ["tune", index, str(folder / "queries.npy"), "-k", "3"],
        "fit": ["fit", where, x, *FIT],
        "encode": ["encode", where, x],
        "encode-trained": ["encode", where],
        "index": ["index", where],
        "search": ["search", where, str(folder / "queries.npy"), "--out", str(folder / "out/found.npz")],
        "ids": ["ids", where, x, "--out", str(folder / "out/ids.json")],
        "train": ["train", where, "--data", str(folder / "labelled.npz"), *TRAIN],
        "evaluate": ["evaluate", where, "--queries", str(folder / "queries.npy"), "-k", "3"],
        "evaluate-trained": ["evaluate", where],
        "report": ["report", where, "--points", "0"],
    }[name]


def tree(folder: Path) -> Tree:
    """The contents of all files of a folder, by name."""
    found = {}
    for root, folders, names in os.walk(folder):
        for path in (Path(root) / name for name in (*names, *folders)):
            found[path.relative_to(folder).as_posix()] = path.read_bytes() if path.is_file() else b""
    return found


def restore(state: Path, *folders: Path) -> None:
    """Makes these folders as they are in `state`."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        if (state / folder.name).exists():
            shutil.copytree(state / folder.name, folder)


def commands(dice: random.Random, folder: Path) -> int:
    scene = dice.choice(SCENES)
    run, out, state = folder / "run", folder / "out", folder / "state"
    write_data(dice, folder)
    for name in scene.before:
        Child(lambda name=name: run_command(arguments(folder, name), codes=(0,))).result()
    if run.exists():
        (run / "notes.txt").write_text("mine")
        (run / "mine").mkdir()
        (run / "mine/model.drq").write_text("mine")
    (out / "notes.txt").write_text("mine")
    for each in (run, out):
        if each.exists():
            shutil.copytree(each, state / each.name)
    mine = [path for each in (run, out) for path in each.rglob("*") if path.is_file() and path.read_bytes() == b"mine"]
    command = [*arguments(folder, scene.name), *scene.options]
    old, start = tree(run) | tree(out), time.monotonic()
    Child(lambda: run_command(command, codes=(0,))).result()
    duration, new = time.monotonic() - start, tree(run) | tree(out)
    for _ in range(4):
        restore(state, run, out)
        Child(lambda: run_command(command, codes=(0,))).kill(dice.uniform(0, duration))
        for path in mine:
            require(path.exists() and path.read_bytes() == b"mine", f"{path} of the user is lost")
        for name, content in (tree(run) | tree(out)).items():
            whole = content in (old.get(name), new.get(name))
            unfinished = name in UNFINISHED or TEMPORARY.fullmatch(name.partition("/")[0])
            require(whole or bool(unfinished), f"a kill left another {name}")
        again = command if "--force" in command or not _exists(scene.name, run, out) else [*command, "--force"]
        Child(lambda again=again: run_command(again, codes=(0,))).result()
        found = tree(run) | tree(out)
        differing = sorted(name for name in found.keys() | new.keys() if found.get(name) != new.get(name))
        require(not differing, f"{scene}: after a kill and a rerun, other files than without: {differing}")
    return 4


def _exists(name: str, run: Path, out: Path) -> bool:
    """Whether a command needs --force, because its result exists or it has begun to write it."""
    results = {
        "build": out / "index.drq",
        "fit": run / "run.json",
        "encode": run / "codes.npy",
        "encode-trained": run / "codes.npy",
        "index": run / "index.drq",
        "search": out / "found.npz",
        "ids": run / "ids.drq",
        "train": run / "model.drq",
        "evaluate": run / "metrics.json",
        "evaluate-trained": run / "metrics.json",
        "report": run / "report",
    }
    return name in results and results[name].exists()
