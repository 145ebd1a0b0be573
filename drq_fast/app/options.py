"""The options of the `drq-fast` command. This module does not import torch, so `--help` and wrong options are fast."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import sys
import typing
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from .. import __version__
from ..constants import METRICS, ROUNDS, ROUNDS_APART, ROUNDS_LARGE, VECTORS
from ..retrieval.settings import (
    ABLATIONS,
    FOR_FEATURES,
    FOR_IMAGES,
    MINING,
    PATHS,
    PROTOCOLS,
    SCHEDULES,
    Config,
    Settings,
)

_CHOICES = {
    "protocol": tuple(PROTOCOLS),
    "ablation": tuple(ABLATIONS),
    "metric": METRICS,
    "schedule": SCHEDULES,
    "mining": MINING,
}

_ELSEWHERE = {  # what options of other commands are here
    ("search", "--metric"): "; the metric is that of the index",
    ("tune", "--vectors"): "; the vectors are those that the index keeps",
}
_CODEBOOKS = "codebooks, each of which as many neighbouring levels share; more have less error and take longer to fit"


def nearest(wrong: str, known: Iterable[str]) -> str:
    """`, did you mean ...?` if a known name is similar; else the list of names, if it is short and not of options."""
    names = {name.lstrip("-"): name for name in known}  # dashes alone do not make options similar
    close = difflib.get_close_matches(wrong.lstrip("-"), names, n=1)
    if close:
        return f", did you mean {names[close[0]]}?"
    listed = len(names) < 12 and not wrong.startswith("-")
    return f" (choose from {', '.join(names.values())})" if listed else ""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and name the nearest known option or choice."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            what = action.metavar if isinstance(action.metavar, str) else action.dest
            raise argparse.ArgumentError(None, f"unknown {what} {value!r}{nearest(str(value), names)}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line; `command` is the name of the command and `prog` starts its messages.

    `shown`: the names of all options and arguments as they are typed, by their names in Python.
    """
    parser, commands = _parsers()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        import argcomplete

        argcomplete.autocomplete(parser)
    _after_command(parser, commands, sys.argv[1:] if arguments is None else arguments)
    options, unknown = parser.parse_known_args(arguments)
    command = commands[options.command]
    options.prog = command.prog
    options.shown = {action.dest: (*action.option_strings, action.dest)[0] for action in command._actions}
    if isinstance(getattr(options, "vectors", None), list):
        options.shown["x"] = ", ".join(options.vectors)  # what the library calls the vectors
    if unknown:
        wrong = unknown[0].partition("=")[0]
        if not wrong.startswith("-"):
            command.error(f"unexpected argument {wrong!r}")
        hint = _ELSEWHERE.get((options.command, wrong)) or nearest(wrong, command._option_string_actions)
        command.error(f"unknown option {wrong!r}{hint}")
    if options.command == "search" and options.recall is not None:
        for name in ("bits", "probes", "refine", "vectors"):
            if getattr(options, name) is not None:
                why = "was not measured with vectors of yours" if name == "vectors" else "chooses --probes and --refine"
                command.error(f"--recall {why}; it cannot be given with --{name}")
    return options


def _after_command(parser: _Parser, commands: Iterable[str], given: Sequence[str]) -> None:
    """Ends the process if an option of a command is in front of the command."""
    first = given[0].partition("=")[0] if given else ""
    if first.startswith("-") and first not in parser._option_string_actions:
        command = next((each for each in given if each in commands), "COMMAND")
        parser.error(f"options come after the command: drq-fast {command} {first} ...")


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    """The parser of the program and those of its commands."""
    parser = _Parser(
        prog="drq-fast",
        description="Deep Recurrent Quantization: one training, and codes of vectors that can be cut at any length.\n\n"
        "For vectors without labels, call build and search; or fit, encode, index and search, which keep what they\n"
        "make in a folder, the run. For the paper's image retrieval, call train, evaluate and report.",
        epilog="example:\n  drq-fast build vectors.npy vectors.drq --vectors float16\n"
        "  drq-fast search vectors.drq queries.npy --recall 0.95",
    )
    parser.add_argument("--version", action="version", version=f"drq_fast {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for add in (_build, _tune, _fit, _encode, _index, _search, _add, _remove, _ids, _train, _evaluate, _report, _info):
        add(commands.add_parser)
    return parser, dict(commands.choices)


def _command(
    add: Any, name: str, summary: str, description: str, example: str, on: str = "RUN", replaces: bool = True
) -> _Parser:
    """Adds a command with the options that all commands share.

    on: its first argument, "" if the command adds its own. replaces: whether it then has --force for its results.
    """
    parser: _Parser = add(name, help=summary, description=description, epilog=f"example:\n  drq-fast {example}")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    if on:
        also = "" if on == "RUN" else ", or the file of an index"
        parser.add_argument("folder", metavar=on, help=f"folder of the run{also}")
    if on and replaces:
        _force(parser)
    return parser


def _build(add: Any) -> None:
    parser = _command(
        add,
        "build",
        "make an index of vectors in .npy files by one command",
        "Fits a codec and inverted lists to a sample of the vectors, adds all vectors, measures the recall of\n"
        "searches and writes INDEX. Prints its size by part, and the recall that each setting of search reached.\n"
        "The files may be larger than memory; the codes, and the vectors that --vectors keeps, must fit.",
        "build vectors.npy vectors.drq --metric cosine --vectors float16",
        on="",
    )
    parser.add_argument(
        "vectors", nargs="+", metavar="FILE.npy", help="numbers [N, D]; several files are read as one array"
    )
    parser.add_argument("index", metavar="INDEX", help="file to write")
    _force(parser)
    _number(parser, "--bits", 64, "bits per code, a multiple of 8")
    _number(parser, "--codebooks", 1, _CODEBOOKS)
    text = f"{_listed(METRICS)}: what is searched by (default: {METRICS[0]})"
    parser.add_argument("--metric", choices=METRICS, default=METRICS[0], metavar="metric", help=text)
    text = "number of inverted lists, none, or auto: about 2 sqrt(N), but none for N < 50,000 (default: auto)"
    parser.add_argument("--lists", type=_lists, default="auto", metavar="lists", help=text)
    kinds = (*VECTORS, "none")
    text = f"how vectors are kept beside their codes, to score candidates again: {_listed(kinds)} (default: none)"
    parser.add_argument("--vectors", dest="keep", choices=kinds, default="none", metavar="kind", help=text)
    parser.add_argument("--ids", metavar="FILE.npy", help="integers [N], one id per vector (default: row numbers)")
    _number(parser, "--beam", 16, "beam width of the encoder; wider is more accurate and slower")
    _number(parser, "--sample", None, "vectors that the codec is fitted to (default: 65,536)")
    _number(parser, "--seed", 0, "seed of sample, fit and measurement")
    _plot(parser)


def _tune(add: Any) -> None:
    parser = _command(
        add,
        "tune",
        "measure which settings of search reach a recall, with queries of your own",
        "Compares searches with the true neighbours of the queries, which are found among the vectors that INDEX\n"
        "keeps (build --vectors), and replaces the measurement in INDEX, which search --recall reads.",
        "tune vectors.drq queries.npy -k 10",
        on="",
    )
    parser.add_argument("index", metavar="INDEX", help="file of an index that keeps vectors")
    parser.add_argument("queries", metavar="FILE.npy", help="numbers [Q, D], queries like yours")
    _number(parser, "-k", 10, "neighbours per query")
    _plot(parser)
    _force(parser, "replace an existing figure")


def _fit(add: Any) -> None:
    parser = _command(
        add,
        "fit",
        "learn a codec from vectors in .npy files, without labels",
        "Learns a codec from a random sample of the vectors and writes RUN/model.drq. Files may be larger than memory.",
        "fit run vectors.npy --levels 4",
    )
    parser.add_argument(
        "vectors", nargs="+", metavar="FILE.npy", help="numbers [N, D]; several files are read as one array"
    )
    _number(parser, "--codewords", 256, "codewords K in a codebook")
    _number(parser, "--levels", 4, "levels M: rounds of quantization")
    _number(parser, "--codebooks", 1, _CODEBOOKS)
    rounds = f"{ROUNDS}, or {ROUNDS_APART} with several codebooks, or {ROUNDS_LARGE} above 8192 codewords"
    _number(parser, "--rounds", None, f"rounds of fitting (default: {rounds})")
    _number(parser, "--beam", 16, "beam width of the encoder in the last rounds of fitting")
    _number(parser, "--sample", None, "vectors in the sample (default: 65,536, or 256 per codeword if that is more)")
    _number(parser, "--seed", 0, "seed of sample and fit")
    text = "scales of the levels: w**m (shared, the default) or one factor per level (per_level)"
    parser.add_argument("--scale", choices=("shared", "per_level"), default="shared", metavar="scale", help=text)


def _encode(add: Any) -> None:
    parser = _command(
        add,
        "encode",
        "write the codes of vectors, or of a trained run's database",
        "Writes RUN/codes.npy; of Parquet files, RUN/codes/*.parquet, with codes in place of the vectors. After an\n"
        "interruption, the same command resumes where it stopped.",
        "encode run vectors.npy --beam 16\n  drq-fast encode run 'folder/*.parquet' --column embedding --ray",
    )
    text = "numbers [N, D] in .npy files, or Parquet files or patterns of them (default: the database of a trained run)"
    parser.add_argument("vectors", nargs="*", metavar="FILE", help=text)
    _number(parser, "--beam", 1, "beam width of the encoder; wider is more accurate and slower")
    parser.add_argument("--column", metavar="NAME", help="of Parquet files: the vectors (default: embedding)")
    text = "encode Parquet files on a Ray cluster; without ADDRESS on RAY_ADDRESS, else on a new one on this machine"
    parser.add_argument("--ray", nargs="?", const="", metavar="ADDRESS", help=text)
    _number(parser, "--workers", None, "with --ray: processes that encode, of one core each (default: Ray decides)")


def _index(add: Any) -> None:
    parser = _command(add, "index", "make an index of the codes", "Writes RUN/index.drq.", "index run --metric cosine")
    _metric(parser, "that of a trained run, else l2")
    parser.add_argument("--ids", metavar="FILE.npy", help="integers [N], one id per vector (default: row numbers)")


def _search(add: Any) -> None:
    parser = _command(
        add,
        "search",
        "find the nearest codes of every query, at any code length",
        "Prints one line per query: ids and scores, best first. Scores of metric l2 are squared distances. For a run\n"
        "that was trained on images, queries may be images, and results are the names of files.",
        "search vectors.drq queries.npy -k 5 --recall 0.95 --out found.npz\n  drq-fast search run photo.png",
        on="RUN|INDEX",
        replaces=False,
    )
    text = "numbers [Q, D] in a .npy, an image, or a folder of images (default: the queries of a trained run)"
    parser.add_argument("queries", nargs="?", metavar="FILE", help=text)
    _number(parser, "-k", 10, "results per query")
    _number(parser, "--bits", None, "use only the first bits of every code (default: all)")
    text = "choose the cheapest --probes and --refine that reached this recall, 0 to 1, when they were measured"
    parser.add_argument("--recall", type=float, metavar="float", help=text)
    text = "inverted lists to look at (default: a sixteenth of them, at least 16; all of them with --keep)"
    _number(parser, "--probes", None, text)
    text = "candidates, the best by their codes, to score again by the vectors that the index keeps, or by --vectors "
    text += "(default: none)"
    _number(parser, "--refine", None, text)
    text = "numbers [N, D] for --refine: row i is the vector of id i (default: the vectors that the index keeps)"
    parser.add_argument("--vectors", metavar="FILE.npy", help=text)
    parser.add_argument("--keep", metavar="FILE.npy", help="only these ids: integers [n], or flags by id")
    parser.add_argument("--out", metavar="FILE.npz", help="write arrays `ids` and `scores` instead of printing them")
    _force(parser, "replace an existing file of --out")


def _add(add: Any) -> None:
    parser = _command(
        add,
        "add",
        "add vectors in .npy files to an index",
        "Encodes the vectors by the codec of the index and replaces its file by one that has them too. If there is an\n"
        "error, nothing is added. An index that was tuned with fewer vectors should then be tuned again.",
        "add vectors.drq more.npy",
        on="RUN|INDEX",
        replaces=False,
    )
    parser.add_argument(
        "vectors", nargs="+", metavar="FILE.npy", help="numbers [N, D]; several files are read as one array"
    )
    text = "integers [N], one new id per vector (default: the numbers after the highest id ever used)"
    parser.add_argument("--ids", metavar="FILE.npy", help=text)
    _number(parser, "--beam", 16, "beam width of the encoder; wider is more accurate and slower")


def _remove(add: Any) -> None:
    parser = _command(
        add,
        "remove",
        "remove vectors from an index by id",
        "Replaces the file of the index by one without these ids. All of them must be in it, else nothing is removed.",
        "remove vectors.drq ids.npy",
        on="RUN|INDEX",
        replaces=False,
    )
    parser.add_argument("ids", metavar="FILE.npy", help="integers [n]: the ids")


def _ids(add: Any) -> None:
    parser = _command(
        add,
        "ids",
        "give every vector a unique code (semantic IDs)",
        "Writes RUN/ids.drq and prints how good the ids are. Vectors must fit in memory. Without FILE.npy, the\n"
        "ids that exist are read.",
        "ids run vectors.npy --out ids.json",
    )
    parser.add_argument("vectors", nargs="*", metavar="FILE.npy", help="numbers [N, D], one vector per item")
    parser.add_argument("--add", action="store_true", help="add the vectors to the ids that exist, which do not change")
    _number(parser, "--beam", 16, "beam width of the encoder; wider is more accurate and slower")
    parser.add_argument("--out", metavar="FILE", help="also write the tokens of all items to a .json or .parquet file")


def _train(add: Any) -> None:
    parser = _command(
        add,
        "train",
        "train the paper's network on images or features with labels",
        "Trains in three stages and writes RUN/model.drq. After an interruption, the same command resumes from the\n"
        "last checkpoint. The data are CIFAR-10's folder, a folder with one folder of images per class, features in\n"
        ".npz or .npy, or text files that list images. Images need pip install 'drq_fast[retrieval]'.",
        "train run --data cifar-10-batches-bin --protocol cifar10-2 --words words.txt",
    )
    parser.add_argument("--config", metavar="FILE.json", help="settings by name, in the format of RUN/config.json")
    for title, options in (("data and network", Settings), ("training", Config)):
        group, kinds = parser.add_argument_group(title), typing.get_type_hints(options)
        for field in dataclasses.fields(options):
            _setting(group, field, kinds[field.name])


def _evaluate(add: Any) -> None:
    parser = _command(
        add,
        "evaluate",
        "mAP of a trained run, or recall of a fitted one, at every code length",
        "Writes RUN/metrics.json. For a trained run: mAP, precision and the P-R curve of its protocol. For a fitted\n"
        "run: recall of the exact nearest neighbours of the queries in a file.",
        "evaluate run --queries queries.npy -k 10",
    )
    parser.add_argument("--queries", metavar="FILE.npy", help="for a fitted run: numbers [Q, D]")
    _metric(parser, "that of the index, else of a trained run, else l2")
    parser.add_argument("--exact", action="store_true", help="for a trained run: also rank by the features themselves")
    _number(parser, "-k", None, "for a fitted run: neighbours per query (default: 10)")


def _report(add: Any) -> None:
    parser = _command(
        add,
        "report",
        "tables, figures and a page with retrieved images",
        "Writes RUN/report: report.md, report.json, figures, and page.html, where a slider over the code length\n"
        "re-ranks retrieved images.",
        "report run --beside no_triplet_run --beside unsupervised_run",
    )
    text = "another run on the same data, to compare with; several by repeating the option"
    parser.add_argument("--beside", action="append", default=[], metavar="RUN", help=text)
    text = "for data that are features: pixels of all items, uint8 [N, H, W] or [N, H, W, 3]"
    parser.add_argument("--images", metavar="FILE.npy", help=text)
    _number(parser, "--queries", 12, "sample queries on the page")
    _number(parser, "--points", 5000, "database items in the t-SNE figure; 0 for no figure")


def _info(add: Any) -> None:
    parser = _command(
        add,
        "info",
        "versions and the backend of every operation, or what is in an index",
        "Prints versions, instruction set, GPUs, and the backend of every operation with the reason why it is not a\n"
        "faster one. With INDEX: its settings, its size by part, and the recall that each setting of search reached.",
        "info vectors.drq --json",
        on="",
    )
    parser.add_argument("index", nargs="?", metavar="INDEX", help="file of an index, or folder of a run that has one")


def _force(parser: _Parser, text: str = "replace existing results") -> None:
    parser.add_argument("--force", action="store_true", help=text)


def _plot(parser: _Parser) -> None:
    text = "draw recall against cost to a .svg or .png file; needs pip install 'drq_fast[report]'"
    parser.add_argument("--plot", metavar="FILE", help=text)


def _lists(text: str) -> int | str | None:
    """A value of --lists."""
    if text == "none":
        return None
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, none or a number") from None


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _metric(parser: _Parser, default: str) -> None:
    text = f"l2, ip or cosine (default: {default})"
    parser.add_argument("--metric", choices=METRICS, metavar="metric", help=text)


def _number(parser: _Parser, name: str, default: int | None, text: str) -> None:
    shown = f" (default: {default})" if default is not None else ""
    parser.add_argument(name, type=int, default=default, metavar="int", help=text + shown)


def _setting(group: Any, field: dataclasses.Field[Any], kind: Any) -> None:
    """Adds a field of Settings or Config as an option; if it is not given, the namespace does not have it."""
    name = field.name
    keywords: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(field)}
    if kind is bool:
        keywords["action"] = argparse.BooleanOptionalAction
    elif name == "data":
        keywords |= {"nargs": "+", "metavar": "PATH"}
    elif name in PATHS:
        keywords["metavar"] = "PATH"
    elif name == "epochs":
        keywords |= {"nargs": 3, "type": int, "metavar": "int"}
    else:
        plain = next((part for part in typing.get_args(kind) if part is not type(None)), kind)  # `int | None` -> int
        keywords |= {"type": plain, "metavar": plain.__name__}
        if name in _CHOICES:
            keywords |= {"choices": _CHOICES[name], "metavar": name}
    group.add_argument(f"--{name.replace('_', '-')}", **keywords)


def _help(field: dataclasses.Field[Any]) -> str:
    """What a setting means, its choices, and the default of a run on features and of one on images."""
    text, choices = _HELP[field.name], _CHOICES.get(field.name)
    text += f": {', '.join(choices)}" if choices else ""
    features, images = (_typed(preset.get(field.name, field.default)) for preset in (FOR_FEATURES, FOR_IMAGES))
    default = _DEFAULTS.get(
        field.name, features if features == images else f"{features} for features, {images} for images"
    )
    return f"{text} (default: {default})" if default else text


def _typed(value: Any) -> str:
    """A default as it is typed; "" if there is none."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "" if value in (None, dataclasses.MISSING) else f"{value:g}" if isinstance(value, float) else str(value)


_HELP = {
    "data": "a folder, a file or several lists of images",
    "labels": "for features in a .npy: class numbers [N] or flags [N, C] in a .npy",
    "root": "folder that the paths in lists of images are relative to",
    "classes": "for lists of images: a text file with the names of the classes, one per line",
    "words": "vectors of the class names: a matrix, or a text file of word vectors",
    "protocol": "how training images, queries and database are drawn",
    "train": "training images, per class or in total as in the protocol",
    "query": "queries, per class or in total as in the protocol",
    "backbone": "network for images: efficientnet-lite0, or a state dict file of torchvision's AlexNet",
    "size": "height and width of images as the network sees them, in pixels",
    "hidden": "for features: width of the layer above them",
    "dropout": "for features: dropout of this layer, at least 0 and below 1",
    "dim": "dimensions of the vectors that are quantized, fc8 and fc9 together",
    "codewords": "codewords K in the shared codebook",
    "levels": "levels M: rounds of quantization",
    "ablation": "the row of the paper's ablation table",
    "metric": "metric that items are ranked by",
    "test_size": "height and width of images after training, in pixels",
    "stage_one": "folder for the result of stage 1, which runs can share; stages 2 and 3 then train on its features",
    "epochs": "epochs of each stage: features alone, one level of codes, all levels",
    "batch": "items in a batch, over all processes",
    "rate": "learning rate of the new layers",
    "backbone_rate": "learning rate of the backbone",
    "schedule": "whether the learning rates fall to 0 (cosine) or stay (constant)",
    "weight_decay": "weight decay of Adam",
    "margin": "margin of the triplet loss",
    "mining": "how the negatives of triplets are chosen in a batch",
    "semantic": "weight of the adaptive margin loss l_s",
    "triplet": "weight of the triplet loss l_t",
    "quantization": "weight of the loss of the quantizer",
    "detach": "keep the loss of the quantizer from training the network",
    "freeze_norms": "keep the weights and statistics of batch norms",
    "augment": "for images: train on random crops, mirrored and in other colours",
    "crop": "least fraction of the area that random crops have",
    "colour": "how much brightness, contrast and saturation change, at most",
    "hole": "side of the grey square that half of the images get, relative to the image",
    "average": "decay per step, below 1, of a running average that replaces the weights at the end; 0 for none",
    "amp": "compute the network in bfloat16",
    "workers": "processes that read images; 0 reads them in this process",
    "checkpoint_seconds": "seconds between two checkpoints",
    "seed": "seed of split and training",
}
_PROTOCOL = PROTOCOLS[Settings.protocol]
_DEFAULTS = {
    "root": "the folder of the first list",
    "words": "all classes are equally far apart",
    "train": f"the protocol's, {_PROTOCOL.train} per class for {Settings.protocol}",
    "query": f"the protocol's, {_PROTOCOL.query} per class for {Settings.protocol}",
    "codewords": "the protocol's, 256 or 4096; cifar10-1 has several, so choose one",
    "metric": "ip, or l2 for unsupervised",
    "test_size": "--size",
}
