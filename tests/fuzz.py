"""Random attacks on the library for a given time; a failure prints the attack and the seed that repeats it.

make fuzz SECONDS=1800
python tests/fuzz.py --seconds 60
python tests/fuzz.py --only files --seed 7 --cases 1
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from attacks import sanitizers
from attacks.calls import calls
from attacks.commands import commands
from attacks.common import Child, Finding
from attacks.differences import differences
from attacks.files import files
from attacks.indexes import indexes
from attacks.inputs import inputs
from attacks.kernels import kernels
from attacks.kills import kills
from attacks.runs import runs
from attacks.searches import searches
from attacks.threads import threads

ATTACKS: dict[str, Callable[[random.Random, Path], int]] = {
    "files": files,
    "inputs": inputs,
    "indexes": indexes,
    "runs": runs,
    "calls": calls,
    "differences": differences,
    "threads": threads,
    "searches": searches,
    "kills": kills,
    "commands": commands,
    "sanitizers": sanitizers.sanitizers,
}
if importlib.util.find_spec("triton"):
    ATTACKS["kernels"] = kernels
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
MEMORY = {"files": 2 << 30, "inputs": 2 << 30, "runs": 2 << 30}  # bytes that an attack may take
SECONDS = 300.0  # that one attack may take
SHARES = {"differences": 2.0, "commands": 2.0}  # of the time; 1 for others


def attack(name: str, seed: int) -> int:
    """One attack, in a folder of its own; returns the number of cases."""
    if name == "sanitizers":
        sanitizers.wait()
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        return ATTACKS[name](random.Random(f"{name} {seed}"), Path(folder))


def isolated(name: str, seed: int) -> int:
    """The same in a process of its own, so that a crash or an endless loop is a finding like others."""
    if name == "sanitizers":
        sanitizers.wait()  # here, because the builder is a child of this process
        return attack(name, seed)
    return Child(lambda: attack(name, seed), MEMORY.get(name), one_thread=False).result(SECONDS)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random attacks on the library.")
    parser.add_argument("--seconds", type=float, default=60, help="how long to attack, in all")
    parser.add_argument("--only", choices=sorted(ATTACKS), help="one kind of attack")
    parser.add_argument("--seed", type=int, default=None, help="the first seed; the time by default")
    parser.add_argument("--cases", type=int, default=None, help="how many seeds, instead of --seconds")
    options = parser.parse_args()
    first = seed = int(time.time()) % 1_000_000_000 if options.seed is None else options.seed
    names = [options.only] if options.only else sorted(ATTACKS)
    warnings.simplefilter("ignore")  # of few vectors for many codewords
    if "sanitizers" in names and (reason := sanitizers.reason_to_skip()):  # else the build has begun
        print(f"sanitizers: skipped, {reason}")
        names.remove("sanitizers")
    cases, findings, spent = dict.fromkeys(names, 0), dict.fromkeys(names, 0), dict.fromkeys(names, 0.0)

    def go(name: str) -> None:
        start = time.monotonic()
        try:
            cases[name] += isolated(name, seed)
        except Exception as error:
            findings[name] += 1
            text = str(error) if isinstance(error, Finding) else traceback.format_exc()
            print(f"\nFINDING: python tests/fuzz.py --only {name} --seed {seed} --cases 1\n{text}", flush=True)
        spent[name] += time.monotonic() - start

    end = time.monotonic() + options.seconds
    while options.cases is None and time.monotonic() < end:
        # The attack that has had the least of its share of the time so far.
        possible = [name for name in names if name != "sanitizers" or options.only or sanitizers.ready()]
        possible = [name for name in possible if findings[name] < 20]
        if not possible:
            break
        go(min(possible, key=lambda name: spent[name] / SHARES.get(name, 1.0)))
        seed += 1
    for _ in range(options.cases or 0):
        for name in names:
            go(name)
        seed += 1
    for name in names:
        if spent[name] == 0:  # every attack is made at least once; sanitizers wait for their build
            go(name)
    print(f"seeds {first} to {seed}: {sum(findings.values())} findings")
    for name in names:
        print(f"{name:12} {cases[name]:>9,} cases {spent[name]:>9.1f} s")
    return 1 if any(findings.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
