"""Train once on handwritten digits, then search with 8, 16, 24 and 32 bits of the same codes.

    python examples/digits.py [--out out/digits] [--epochs 40 5 20]

Every step is a `drq-fast` command, which is printed before it runs. A second run, fitted without labels, is compared
with the trained one in the table, in the figures and on the page with retrieved digits.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from drq_fast.app.cli import main as drq_fast

SIDE = 40  # pixels of a digit on the page, enlarged from 8 and with a margin


def write_data(folder: Path) -> tuple[Path, Path]:
    """Writes 1,797 digits: features (64 pixels) with labels, and a second file of pictures uint8 [N, 40, 40]."""
    digits = load_digits()
    folder.mkdir(parents=True, exist_ok=True)
    features, pictures = folder / "digits.npz", folder / "pictures.npy"
    np.savez(features, x=digits.data.astype(np.float32), label=digits.target)
    ink = np.pad(digits.images / 16, ((0, 0), (1, 1), (1, 1)))
    pixels = np.round(255 * (1 - ink)).astype(np.uint8)
    larger = [Image.fromarray(picture).resize((SIDE, SIDE), Image.Resampling.BICUBIC) for picture in pixels]
    np.save(pictures, np.stack([np.asarray(picture) for picture in larger]))
    return features, pictures


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
    print(f"\n{first['database']} digits to search, {first['queries']} queries\n")
    print(f"{'':18}{'bytes/vector':>13}{'mAP':>8}{'mAP without labels':>20}")
    rows = [(f"code, {a['bits']} bits", a, b) for a, b in zip(first["lengths"], second["lengths"], strict=True)]
    for name, a, b in rows:
        print(f"{name:18}{a['bytes']:13}{a['mAP']:8.3f}{b['mAP']:20.3f}")
    print(f"{'features, exact':18}{first['exact']['bytes']:13}{first['exact']['mAP']:8.3f}")


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/digits"))
    parser.add_argument("--epochs", type=int, nargs=3, default=(40, 5, 20), help="of the three stages of training")
    options = parser.parse_args()
    features, pictures = write_data(options.out)
    full, without_labels = options.out / "full", options.out / "unsupervised"
    data = ("--data", features, "--train", 100, "--query", 20)  # per digit; all others are the database
    network = ("--hidden", 512, "--dropout", 0.2, "--dim", 256, "--epochs", *options.epochs)
    call("train", full, *data, *network, "--force")
    call("train", without_labels, *data, "--ablation", "unsupervised", "--force")
    for run in (full, without_labels):
        call("evaluate", run, "--exact", "--force")
    call("report", full, "--beside", without_labels, "--images", pictures, "--force")
    print_table(full / "report" / "report.json")
    print(f"\nopen in a browser: {full / 'report' / 'page.html'}")


if __name__ == "__main__":
    main()
