"""The `drq-fast` command: options, one-line errors and exit codes. What the commands do is in commands.py.

Results go to stdout, progress and errors to stderr. Exit codes: 0, 1 for what could not be done, 2 for wrong options,
130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import sys
import threading
import typing
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from . import __version__, checks, commands
from .fit import ROUNDS
from .retrieval.experiment import Settings
from .retrieval.model import ABLATIONS
from .retrieval.protocols import PROTOCOLS
from .retrieval.train import Config

_CHOICES = {"protocol": tuple(PROTOCOLS), "ablation": tuple(ABLATIONS), "metric": checks.METRICS}


class _Interrupted(BaseException):
    """Ctrl-C. Not a KeyboardInterrupt, which a fit takes as the wish to keep what it has found so far."""


class _Parser(argparse.ArgumentParser):
    """Errors in one line, with the nearest right name for a wrong one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            what = action.metavar if isinstance(action.metavar, str) else action.dest
            raise argparse.ArgumentError(None, f"{value!r} is no {what}{commands.nearest(str(value), names)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    options, unknown = build_parser().parse_known_args(arguments)
    if unknown:
        known = list(options.parser._option_string_actions)
        wrong = unknown[0].partition("=")[0]
        options.parser.error(f"{wrong!r} is not known{commands.nearest(wrong, known)}")
    name = options.parser.prog
    try:
        with _signals(), _notes(name):
            result, text = options.run(options)
        print(json.dumps(result, indent=1) if options.json else text, flush=True)
        return 0
    except (_Interrupted, KeyboardInterrupt):
        return _failed(f"{name}: interrupted; what was done is kept, what was not is not there", 130)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, TypeError, OSError, MemoryError, ImportError, RuntimeError) as error:
        # One line, without the name of a Python function and the places in C++ that torch adds.
        message = re.sub(r"^\w+: ", "", " ".join(str(error).partition("\nException raised")[0].split()))
        return _failed(f"{name}: {message or type(error).__name__}", 1)


def _failed(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


@contextmanager
def _signals() -> Iterator[None]:
    """Ctrl-C as an error of its own."""

    def interrupt(*_: object) -> NoReturn:
        raise _Interrupted

    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as a shell wants it of what runs in the background
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _notes(name: str) -> Iterator[None]:
    """Warnings as lines like all others."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: print(f"{name}: note: {message}", file=sys.stderr)
        yield


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = _Parser(
        prog="drq-fast",
        description="Deep Recurrent Quantization: short codes for vectors, at any length, from one training.\n\n"
        "A run is a folder. With vectors and no labels, call fit, encode, index and search on it; for the\n"
        "paper's image retrieval, call train, evaluate and report.",
        epilog="example:\n  drq-fast fit run vectors.npy && drq-fast encode run vectors.npy && drq-fast index run\n"
        "  drq-fast search run queries.npy --bits 16",
    )
    parser.add_argument("--version", action="version", version=f"drq_fast {__version__}")
    add = parser.add_subparsers(dest="command", metavar="command", required=True).add_parser
    _fit(add("fit", help="learn a codec from vectors in .npy files, without labels"))
    _encode(add("encode", help="write the codes of vectors, or of a trained run's database"))
    _index(add("index", help="make an index of the codes"))
    _search(add("search", help="the nearest codes of every query, at any code length"))
    _train(add("train", help="train the paper's network on images or features with labels"))
    _evaluate(add("evaluate", help="mAP of a trained run, or recall of a fitted one, at every code length"))
    _report(add("report", help="tables, figures and a page with retrieved images"))
    _info(add("info", help="what is installed, which backend does what, and why not a faster one"))
    return parser


def _command(parser: argparse.ArgumentParser, run: Any, description: str, example: str, writes: bool = True) -> None:
    """What all commands have in common; those that write have a run and do not replace anything unasked."""
    parser.description = description
    parser.epilog = f"example:\n  {example}"
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for scripts")
    if run is not commands.info:
        parser.add_argument("folder", metavar="RUN", help="the folder of the run")
    if writes:
        parser.add_argument("--force", action="store_true", help="replace what is there")


def _fit(parser: argparse.ArgumentParser) -> None:
    _command(
        parser,
        commands.fit,
        "Learns a codec from a sample of the vectors and writes RUN/model.drq. Files may be larger than memory.",
        "drq-fast fit run vectors.npy --levels 4",
    )
    parser.add_argument("vectors", nargs="+", metavar="FILE.npy", help="numbers [N, D]; several files count as one")
    _number(parser, "--codewords", int, 256, "in the shared codebook, K")
    _number(parser, "--levels", int, 4, "rounds of quantization, M")
    _number(parser, "--rounds", int, ROUNDS, "of fitting")
    _number(parser, "--beam", int, 16, "width of the search for codes in the last rounds")
    _number(parser, "--sample", int, None, "vectors that are drawn and held (default: 65,536, or 256 per codeword)")
    _number(parser, "--seed", int, 0, "of sample and fit")
    scales = parser.add_argument("--scale", choices=("shared", "per_level"), default="shared", metavar="scale")
    scales.help = "of levels: w**m (shared, the default) or one factor each (per_level)"


def _encode(parser: argparse.ArgumentParser) -> None:
    _command(
        parser,
        commands.encode,
        "Writes RUN/codes.npy. Interrupted or killed, the same command goes on where it was.",
        "drq-fast encode run vectors.npy --beam 16",
    )
    parser.add_argument(
        "vectors", nargs="*", metavar="FILE.npy", help="numbers [N, D]; none: the database of a trained run"
    )
    _number(parser, "--beam", int, 1, "width of the search for codes; wider is better and slower")


def _index(parser: argparse.ArgumentParser) -> None:
    _command(parser, commands.index, "Writes RUN/index.drq.", "drq-fast index run --metric cosine")
    _metric(parser)
    parser.add_argument("--ids", metavar="FILE.npy", help="integers [N], one per vector (default: row numbers)")


def _search(parser: argparse.ArgumentParser) -> None:
    _command(
        parser,
        commands.search,
        "Prints ids and scores, best first, a line per query; l2 scores are squared distances.",
        "drq-fast search run queries.npy -k 5 --bits 16 --out found.npz",
    )
    parser.add_argument("queries", nargs="?", metavar="FILE.npy", help="numbers [Q, D]; none: a trained run's queries")
    _number(parser, "-k", int, 10, "results per query")
    _number(parser, "--bits", int, None, "use only so many bits of every code (default: all)")
    parser.add_argument("--out", metavar="FILE.npz", help="write arrays `ids` and `scores` instead of printing them")


def _train(parser: argparse.ArgumentParser) -> None:
    _command(
        parser,
        commands.train,
        "Trains in three stages and writes RUN/model.drq. Killed, the same command goes on from its last checkpoint.\n"
        "The data are CIFAR-10's folder, a folder with one folder of images per class, features in .npz or .npy, or\n"
        "text files that list images.",
        "drq-fast train run --data cifar-10-batches-bin --protocol cifar10-2 --words words.txt",
    )
    parser.add_argument("--config", metavar="FILE.json", help="settings by name, as RUN/config.json has them")
    for options in (Settings, Config):
        group = parser.add_argument_group("data and network" if options is Settings else "training")
        for field, kind in typing.get_type_hints(options).items():
            _setting(group, options, field, kind)


def _evaluate(parser: argparse.ArgumentParser) -> None:
    _command(
        parser,
        commands.evaluate,
        "Writes RUN/metrics.json. A trained run: mAP, precision and the P-R curve by its protocol. A fitted run:\n"
        "which part of the exact nearest neighbours is found, for queries in a file.",
        "drq-fast evaluate run --queries queries.npy -k 10",
    )
    parser.add_argument("--queries", metavar="FILE.npy", help="numbers [Q, D], for a fitted run")
    _metric(parser)
    parser.add_argument("--exact", action="store_true", help="of a trained run: also rank the features themselves")
    _number(parser, "-k", int, 10, "neighbours of a query in a fitted run")


def _report(parser: argparse.ArgumentParser) -> None:
    _command(
        parser,
        commands.report,
        "Writes RUN/report: report.md, report.json, figures, and page.html, on which a slider over the code length\n"
        "re-ranks retrieved images.",
        "drq-fast report run --beside unsupervised_run",
    )
    parser.add_argument("--beside", metavar="RUN", help="another run on the same data, drawn in the same figures")
    parser.add_argument(
        "--images", metavar="FILE.npy", help="pixels uint8 [N, H, W] or [N, H, W, 3] of the items of a file of features"
    )
    _number(parser, "--queries", int, 12, "sample queries on the page")
    _number(parser, "--points", int, 5000, "database items in the t-SNE picture; 0 leaves it out")


def _info(parser: argparse.ArgumentParser) -> None:
    _command(parser, commands.info, "Versions, instruction set, GPUs and backends.", "drq-fast info --json", False)


def _metric(parser: argparse.ArgumentParser) -> None:
    text = "l2, ip or cosine (default: that of a trained run, else l2)"
    parser.add_argument("--metric", choices=checks.METRICS, metavar="metric", help=text)


def _number(parser: Any, name: str, kind: type, default: Any, text: str) -> None:
    shown = f" (default: {default})" if default is not None else ""
    parser.add_argument(name, type=kind, default=default, metavar=kind.__name__, help=text + shown)


def _setting(group: Any, options: Any, field: str, kind: Any) -> None:
    """One field of Settings or Config as an option; not given, it is absent."""
    option = f"--{field.replace('_', '-')}"
    default = next(f.default for f in dataclasses.fields(options) if f.name == field)
    shown = "" if default in (None, dataclasses.MISSING) else f"default: {default}"
    keywords: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _HELP.get(field, shown) or None}
    plain = [part for part in typing.get_args(kind) if part is not type(None)] or [kind]
    if kind is bool:
        group.add_argument(option, action=argparse.BooleanOptionalAction, **keywords)
    elif field == "data":
        group.add_argument(option, nargs="+", metavar="PATH", **keywords)
    elif field == "epochs":
        group.add_argument(option, nargs=3, type=int, metavar="int", **keywords)
    else:
        choices = {"choices": _CHOICES[field], "metavar": field} if field in _CHOICES else {}
        group.add_argument(option, type=plain[0], **({"metavar": plain[0].__name__} | choices), **keywords)


_HELP = {
    "data": "folder, file or lists",
    "labels": "of features in a .npy: .npy of class numbers [N] or flags [N, C]",
    "root": "folder that lists of images are relative to",
    "words": "vectors of class names: a matrix, or a text file of word vectors",
    "protocol": f"one of {', '.join(PROTOCOLS)} (default: cifar10-2)",
    "ablation": f"one of {', '.join(ABLATIONS)} (default: none)",
    "metric": "what items are ranked by: l2, ip or cosine (default: ip, l2 for unsupervised)",
    "train": "training images, per class or in all as the protocol has it",
    "query": "queries, likewise",
    "backbone": "for images: efficientnet-lite0 (default), or a state dict file of torchvision's AlexNet",
    "codewords": "in the shared codebook, K (default: the protocol's)",
    "epochs": "of the three stages",
}


if __name__ == "__main__":
    sys.exit(main())
