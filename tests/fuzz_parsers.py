"""Coverage-guided fuzzing of the parsers that are written in Python, by atheris, starting from real files.

make fuzz-parsers SECONDS=600
python tests/fuzz_parsers.py pickles --seconds 60

A failure writes its input to a file `crash-...`, which `python tests/fuzz_parsers.py pickles FILE` repeats. Headers of
our files, `.npy` headers and JSON are parsed by Rust and C, which atheris does not see; fuzz.py forges these.
"""

from __future__ import annotations

import argparse
import contextlib
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris
import numpy as np

with atheris.instrument_imports(include=["drq_fast.retrieval", "pickletools"]):
    import pickletools  # noqa: F401

    from drq_fast import FileError
    from drq_fast.retrieval import datasets, pickles

BATCH = {b"data": np.zeros((1, 12), np.uint8), b"labels": [3], b"names": [b"a", "b", None, True], b"x": np.arange(2)}


def read_pickle(path: Path) -> None:
    """Reads a batch of CIFAR."""
    with contextlib.suppress(pickle.UnpicklingError):
        pickles.read(path.read_bytes())


def read_text(path: Path) -> None:
    """Reads a list of images, and word vectors."""
    with contextlib.suppress(FileError):
        datasets.image_list(path)
    with contextlib.suppress(FileError):
        datasets.read_words(path, ["a", "b"])


# What reads a file, and contents to start from.
TARGETS: dict[str, tuple[Callable[[Path], None], list[bytes]]] = {
    "pickles": (read_pickle, [pickle.dumps(BATCH, protocol) for protocol in (1, 2, 3, 4)]),
    "texts": (read_text, [b"a.png 0 1\nb.png 1 0\n", b"a.png 0\nb.png 1\n", b"0.5 1\n2 3\n", b"a 1 2\nb 3 4\n"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Coverage-guided fuzzing of the parsers.")
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("repeat", nargs="?", help="a file that failed")
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args()
    read, contents = TARGETS[options.target]
    with tempfile.TemporaryDirectory() as folder:
        corpus, path = Path(folder) / "corpus", Path(folder) / "input"
        corpus.mkdir()
        for number, content in enumerate(contents):
            (corpus / str(number)).write_bytes(content)

        def test(data: bytes) -> None:
            path.write_bytes(data)
            read(path)

        limits = [f"-max_total_time={options.seconds}", "-timeout=20", "-rss_limit_mb=4096", "-max_len=4096"]
        atheris.Setup([sys.argv[0], *([options.repeat] if options.repeat else [str(corpus), *limits])], test)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
