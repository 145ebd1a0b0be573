"""Train once on handwritten numbers, then search with 8, 16, 24 and 32 bits of the same codes.

    python examples/digits.py [--out out/digits] [--epochs 12 3 6] [--numbers 1000]

Needs `pip install 'drq_fast[demo]'` (scikit-learn, matplotlib, Pillow).

A picture shows a number of three digits, 000 to 999. Its digits are drawn at random, with a fixed seed, from
scikit-learn's 1,797 handwritten ones; a query is a new combination of them. There are more numbers than an 8-bit code
has values, so the first byte alone must confuse some, and longer codes tell them apart.

Every step is a `drq-fast` command, which is printed before it runs. A second run, fitted without labels, is compared
with the trained one in the table, in the figures and on the page with retrieved pictures.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

try:
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f"examples/digits.py: {error.name} is missing; `pip install 'drq_fast[demo]'` installs it.")

from drq_fast.app.cli import main as drq_fast

PLACES = (100, 10, 1)
TRAIN, QUERY, DATABASE = 10, 1, 25  # pictures of each number
SIDE = 16  # pixels of a digit on the page, enlarged from 8


def write_data(folder: Path, numbers: int) -> tuple[Path, Path, Path]:
    """Writes features (3 x 64 pixels) with labels, vectors of the numbers, and pictures uint8 [N, 48, 48].

    The vector of a number has a 1 for each of its digits, so numbers are the nearer the more digits they share.
    """
    digits, rng = load_digits(), np.random.default_rng(0)
    label = np.repeat(np.arange(numbers), TRAIN + QUERY + DATABASE)
    drawn = np.empty((len(label), len(PLACES)), np.int64)  # rows of `digits`
    for column, place in enumerate(PLACES):
        for digit in range(10):
            wanted = label // place % 10 == digit
            drawn[wanted, column] = rng.choice(np.flatnonzero(digits.target == digit), wanted.sum())
    folder.mkdir(parents=True, exist_ok=True)
    features, words, pictures = folder / "digits.npz", folder / "words.npy", folder / "pictures.npy"
    names = np.array([f"{number:03}" for number in range(numbers)])
    np.savez(features, x=digits.data[drawn].reshape(len(label), -1).astype(np.float32), label=label, classes=names)
    np.save(words, np.concatenate([np.eye(10)[np.arange(numbers) // place % 10] for place in PLACES], axis=1))
    small = [Image.fromarray(np.uint8(255 - 255 * digit / 16)) for digit in digits.images]
    large = np.stack([np.asarray(digit.resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for digit in small])
    pixels = np.full((len(label), 3 * SIDE, 3 * SIDE), 255, np.uint8)
    for column in range(len(PLACES)):
        pixels[:, SIDE : 2 * SIDE, column * SIDE : (column + 1) * SIDE] = large[drawn[:, column]]
    np.save(pictures, pixels)
    return features, words, pictures


def call(*arguments: Any) -> None:
    """Prints a command and runs it; exits if it fails."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ drq-fast {shlex.join(words)}", flush=True)
    code = drq_fast(words)
    if code:
        sys.exit(code)


def print_table(report: Path) -> None:
    """Prints mAP of both runs by bytes per vector."""
    facts = json.loads(report.read_text())
    first, second = (run["metrics"] for run in facts["runs"])
    print(f"\n{first['database']:,} pictures to search, {first['queries']:,} queries\n")
    print(f"{'':18}{'bytes/vector':>13}{'mAP':>8}{'mAP without labels':>20}")
    rows = [(f"code, {a['bits']} bits", a, b) for a, b in zip(first["lengths"], second["lengths"], strict=True)]
    for name, a, b in rows:
        print(f"{name:18}{a['bytes']:13}{a['mAP']:8.3f}{b['mAP']:20.3f}")
    print(f"{'features, exact':18}{first['exact']['bytes']:13}{first['exact']['mAP']:8.3f}")


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/digits"))
    parser.add_argument("--epochs", type=int, nargs=3, default=(12, 3, 6), help="of the three stages of training")
    parser.add_argument("--numbers", type=int, default=1000, help="how many numbers, from 000 on")
    options = parser.parse_args()
    features, words, pictures = write_data(options.out, options.numbers)
    full, without_labels = options.out / "full", options.out / "unsupervised"
    data = ("--data", features, "--train", TRAIN, "--query", QUERY, "--metric", "l2")
    # Detached: the quantizer's loss does not train the network, which would give up what short codes cannot keep.
    network = ("--words", words, "--hidden", 512, "--dropout", 0.2, "--dim", 256, "--detach")
    call("train", full, *data, *network, "--epochs", *options.epochs, "--force")
    call("train", without_labels, *data, "--ablation", "unsupervised", "--force")
    call("evaluate", full, "--exact", "--force")
    call("evaluate", without_labels, "--force")
    call("report", full, "--beside", without_labels, "--images", pictures, "--points", 1000, "--force")
    print_table(full / "report" / "report.json")
    print(f"\nopen in a browser: {full / 'report' / 'page.html'}")


if __name__ == "__main__":
    main()
