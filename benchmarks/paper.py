"""The paper's retrieval tables: one training, mAP at every code length, beside codes of faiss on the same features.

    python benchmarks/paper.py --data features.npz --words words.txt --protocol cifar10-2 --seeds 3 --peers
    python benchmarks/paper.py --data cifar-10-batches-bin --words words.txt --protocol cifar10-2 --run out/run
    python benchmarks/paper.py --data features.npz --words words.txt --protocol cifar10-2 --ablations
    python benchmarks/paper.py --data features.npz --words words.txt --protocol cifar10-2 --validate
    python benchmarks/paper.py --data cifar-10-batches-bin --words words.txt --protocol cifar10-1 --size 96 \
        --run out/run --stage-one out/stage-one --set epochs=8,2,4 detach=true checkpoint_seconds=180

--data is a file of features with labels, or the folder of CIFAR-10's images. The table is printed and, with --name,
written between the marks of that name in docs/results.md. --validate trains on four fifths of the training images and
ranks the others among themselves: choices are made with this, and queries and database are looked at once, for the
table. --set takes fields of the training's Config, as in `--set margin=0.5 epochs=20,5,10`. With --stage-one, models
with different codebooks share stage 1, kept by seed in that folder, and stages 2 and 3 train on its features. Its
features.npz serves as --data for a table of ablations on fine-tuned features.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from provenance import provenance
from quality import PAGE
from report import fill
from torch import Tensor

from drq_fast import files
from drq_fast.retrieval.evaluate import evaluate_codes, evaluate_vectors
from drq_fast.retrieval.experiment import Experiment
from drq_fast.retrieval.model import Model
from drq_fast.retrieval.protocols import Split
from drq_fast.retrieval.settings import PROTOCOLS, Config, Settings

LEVELS = 4
PAPER = {  # AlexNet, fine-tuned
    "cifar10-1": ("0.942", "0.943", "0.943", "0.943"),
    "cifar10-2": ("0.803", "0.824", "0.832", "0.837"),
}
VALIDATED = " on training images alone, a tenth of them ranked for another tenth"
SHARED = " in stage 1, which all models share; stages 2 and 3 train on its features"
RANKINGS = {"ip": "", "l2": ", by distance"}  # and how rows are called
PEERS = {  # faiss's names; its RQ has a beam of 5, OPQ goes to 240 dimensions, since 2048 take it many minutes
    "faiss PQ, trained for each length": "PQ{L}x8",
    "faiss OPQ, trained for each length": "OPQ{L}_240,PQ{L}x8",
    "faiss RQ, trained for each length": "RQ{L}x8",
    "faiss LSQ, trained for each length": "LSQ{L}x8",
}
ROWS = {
    "unsupervised": "Unsupervised: the features as they are, by distance",
    "no_semantic": "Remove l_s",
    "no_triplet": "Remove l_t",
    "soft_only": "soft only",
    "no_joint": "Remove E_j",
    "no_concat": "Remove concat",
    "none": "DRQ",
}


class Run(NamedTuple):
    """mAP by row and code length of one seed, seconds, and the losses of every epoch (of the last model)."""

    values: dict[str, list[float]]
    seconds: dict[str, float]
    history: list[dict[str, float]]


class Task:
    """Data, protocol and settings of a table."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rule = options, PROTOCOLS[options.protocol]
        self.settings = Settings(
            (str(options.data),),
            words=options.words,
            protocol=options.protocol,
            size=options.size,
            test_size=options.test_size,
            codewords=self.rule.codewords[0],
        )
        self.config, self.images = override(self.settings.config, options.set), not self.settings.of_features
        self.peers = PEERS if options.peers else {}
        if self.peers and self.rule.codewords != (256,):
            raise SystemExit(f"--peers: faiss has 8 bits for a level here, and {options.protocol} other lengths")

    def made_by(self) -> dict[str, Any]:
        """What decides the figures of a run, but for seed and ablation."""
        return {
            "data": self.options.data.name,
            "words": self.options.words and self.options.words.name,
            "protocol": self.options.protocol,
            "size": self.options.size if self.images else None,
            "test_size": self.options.test_size,
            "stage_one": self.options.stage_one is not None or None,  # files of runs without it do not say so
            "peers": self.options.peers,
            "limits": self.options.limits,
            "validate": self.options.validate,
            "config": json.loads(json.dumps(dataclasses.asdict(self.config))),
        }

    def run(self, seed: int, ablation: str = "none") -> Run:
        """Trains as many models as the protocol says, one as a rule, and evaluates them."""
        values: dict[str, list[float]] = {}
        seconds: dict[str, float] = {}
        first = self.options.stage_one and str(self.options.stage_one / f"{ablation}-{seed}")
        for codewords in self.rule.codewords:
            settings = dataclasses.replace(self.settings, codewords=codewords, ablation=ablation, stage_one=first)
            experiment = Experiment(settings, dataclasses.replace(self.config, seed=seed))
            if self.options.validate:
                experiment.split = halves(experiment.split.train, seed)
            folder = self.options.run and self.options.run / f"{ablation}-{codewords}-{seed}"
            start = time.perf_counter()
            model, history = experiment.train(folder)
            add(seconds, "ours", time.perf_counter() - start)
            x = {name: experiment.features(model, part) for name, part in experiment.split._asdict().items()}
            self.evaluate(model, x, experiment, values, seconds)
        return Run(values, seconds, history)

    def evaluate(
        self,
        model: Model,
        x: dict[str, Tensor],
        experiment: Experiment,
        values: dict[str, list[float]],
        seconds: dict[str, float],
    ) -> None:
        rows, of_items = experiment.split, experiment.items.labels
        asked = {"query": x["query"], "query_labels": of_items[rows.query], "R": self.rule.R}
        labels, several = of_items[rows.database], len(self.rule.codewords) > 1
        codes = model.quantizer.encode(x["database"])
        for metric, suffix in RANKINGS.items():
            start = time.perf_counter()
            length = LEVELS if several else None  # with several models each has one length
            shown = evaluate_codes(model.quantizer, codes, labels, metric=metric, levels=length, **asked)
            add(seconds, f"evaluation by {metric}", time.perf_counter() - start)
            values.setdefault(f"ours{suffix}", []).extend(figures.mean_average_precision for figures in shown)
            exact = evaluate_vectors(x["database"], labels, metric=metric, **asked).mean_average_precision
            values.setdefault(f"learned features, exact{suffix}", []).extend([exact] * len(shown))
        if self.options.limits:
            found_limits = limits(model, x["query"], of_items[rows.query], x["train"], of_items[rows.train])
            for name, limit in found_limits.items():
                values.setdefault(name, []).extend([limit] * len(shown))
        for name, recipe in self.peers.items():
            for L in range(1, LEVELS + 1):
                start = time.perf_counter()
                decoded, copies = faiss_codes(recipe.format(L=L), x["train"], x["database"])
                add(seconds, name, time.perf_counter() - start)
                for metric, suffix in RANKINGS.items():
                    figures = evaluate_vectors(decoded, labels, metric=metric, copies=copies, **asked)
                    values.setdefault(f"{name}{suffix}", []).append(figures.mean_average_precision)


def limits(model: Model, query: Tensor, query_labels: Tensor, train: Tensor, labels: Tensor) -> dict[str, float]:
    """What the codes cannot mend: how the features do on images that were learnt, and how often they miss the class."""
    some = torch.linspace(0, len(train) - 1, min(len(train), 1000)).long()
    known = evaluate_vectors(train, labels, train[some], labels[some], R=len(train), metric="ip")
    found = {"training images ranked for 1,000 of them, exact": known.mean_average_precision}
    if model.head is not None and model.head.fc9 is not None:
        z = query[:, -model.words.shape[1] :]
        nearest = torch.nn.functional.cosine_similarity(z[:, None], model.words, dim=2).argmax(1)
        right = query_labels.gather(1, nearest[:, None]).double().mean()
        found["share of queries nearest to a word of theirs"] = right.item()
    return found


def faiss_codes(recipe: str, x: Tensor, database: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct decoded codes [U, D] of a faiss codec trained on x, and which each row of the database has."""
    import faiss

    D = x.shape[1]
    x, database = (torch.nn.functional.pad(v, (0, -v.shape[1] % 12)) for v in (x, database))  # PQ wants equal parts
    codec = faiss.index_factory(x.shape[1], recipe)
    codec.train(np.ascontiguousarray(x))
    codes, copies = np.unique(codec.sa_encode(np.ascontiguousarray(database)), axis=0, return_inverse=True)
    return torch.from_numpy(codec.sa_decode(codes)[:, :D]), torch.from_numpy(copies.reshape(-1))


def halves(train: Tensor, seed: int) -> Split:
    """Four fifths of the training images to train with; half of the rest asks, half answers."""
    rows = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))]
    tenth = len(rows) // 10
    return Split(train=rows[2 * tenth :], query=rows[:tenth], database=rows[tenth : 2 * tenth])


def override(config: Config, settings: list[str]) -> Config:
    """The config with fields replaced, each given as name=value."""
    known = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in known:
            raise SystemExit(f"--set: {name!r} is not one of {', '.join(known)}")
        old = known[name]
        if isinstance(old, bool):
            known[name] = {"true": True, "false": False}[text.lower()]
        elif isinstance(old, tuple):
            known[name] = tuple(int(part) for part in text.split(","))
        else:
            known[name] = type(old)(text)
    return Config(**known)


def add(sums: dict[str, float], name: str, value: float) -> None:
    sums[name] = sums.get(name, 0.0) + value


def cell(values: list[float]) -> str:
    mean = f"{np.mean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def table(task: Task, runs: dict[str, list[Run]], command: str, title: str) -> str:
    """Markdown; the runs of each seed by the name of the ablation."""
    origin, rule, validated = provenance(), task.rule, task.options.validate
    bits = [LEVELS * (K.bit_length() - 1) for K in rule.codewords]
    bits = bits if len(bits) > 1 else [bits[0] * (L + 1) // LEVELS for L in range(LEVELS)]
    backbone = (
        f"EfficientNet-Lite0, fine-tuned at {task.options.size} x {task.options.size}"
        if task.images
        else "given features"
    )
    backbone += f", tested at {task.options.test_size} x {task.options.test_size}" if task.options.test_size else ""
    backbone += SHARED if task.options.stage_one else ""
    seeds = len(next(iter(runs.values())))
    lines = [
        f"### {title}",
        "",
        f"mAP@{rule.R:,} by the protocol `{task.options.protocol}`{VALIDATED if validated else ''}, "
        "ranked by inner product unless said otherwise; "
        f"{backbone}; {seeds} seed{'s: mean (least to greatest)' if seeds > 1 else ''}. "
        f"{origin['processor']}, {origin['torch_threads']} threads; drq_fast {origin['versions']['drq_fast']}, "
        f"torch {origin['versions']['torch']}. Made by",
        f"`{command}`.",
        "",
        "| | " + " | ".join(f"{b} bits" for b in bits) + " | seconds |",
        "| --- " * (len(bits) + 2) + "|",
    ]
    if task.options.protocol in PAPER and len(runs) == 1 and not validated:
        lines.append(f"| the paper: AlexNet, fine-tuned | {' | '.join(PAPER[task.options.protocol])} | |")
    for ablation, done in runs.items():
        names = (
            list(done[0].values) if len(runs) == 1 else ["ours, by distance" if ablation == "unsupervised" else "ours"]
        )
        for name in names:
            shown = name if len(runs) == 1 else ROWS[ablation]
            cells = [cell([run.values[name][i] for run in done]) for i in range(len(bits))]
            timed = name if len(runs) == 1 else "ours"
            spent = [run.seconds[timed] for run in done if timed in run.seconds]
            lines.append(f"| {shown} | {' | '.join(cells)} | {f'{np.mean(spent):.0f}' if spent else ''} |")
    return "\n".join(lines)


def sizes(D: int = 2048, K: int = 256) -> str:
    """How many numbers a codec has, by what it is made of."""
    rows = {
        "PQ: K codewords, cut into parts": lambda L: K * D,
        "OPQ: the same and a rotation": lambda L: K * D + D * D,
        "AQ, RQ: K codewords for each level": lambda L: L * K * D,
        "DRQ: codebook, w and offset": lambda L: K * D + 1 + D,
    }
    lines = ["| | " + " | ".join(f"{8 * L} bits" for L in range(1, 7)) + " |", "| --- " * 7 + "|"]
    for name, count in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{count(L):,}" for L in range(1, 7)) + " |")
    return "\n".join(
        [
            "### Codebook sizes",
            "",
            f"D = {D}, K = {K}. Made by `python benchmarks/paper.py --sizes --name sizes`.",
            "",
            *lines,
        ]
    )


def kept(path: Path | None, task: Task) -> dict[str, list[Run]]:
    """Runs of the same settings that a file has, by ablation."""
    if path is None or not path.exists():
        return {}
    found = json.loads(path.read_text())
    for name, value in task.made_by().items():
        there = found.get("made_by", {}).get(name)
        if there != value:
            raise SystemExit(f"--keep: {path} has runs of another {name}: {there}, not {value}")
    return {name: [Run(*run) for run in done] for name, done in found["runs"].items()}


def show(text: str, name: str | None) -> None:
    """Prints a table, and writes it where docs/results.md has a place of that name."""
    print(text)
    if name:
        PAGE.write_text(fill(PAGE.read_text(), "quality", {name: text}))


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", action="store_true", help="the table of codebook sizes, and nothing else")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--words", type=Path)
    parser.add_argument("--protocol", choices=PROTOCOLS, default="cifar10-2")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--size", type=int, default=128, help="of images, in pixels")
    parser.add_argument("--test-size", type=int, help="of images after training, if another")
    parser.add_argument("--run", type=Path, help="folder of checkpoints")
    parser.add_argument("--stage-one", type=Path, help="folder of stage 1, shared by models with other codebooks")
    parser.add_argument("--ablations", action="store_true")
    parser.add_argument("--peers", action="store_true", help="codes of faiss on the learned features, too")
    parser.add_argument("--limits", action="store_true", help="rows that say what the features do not tell apart")
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--keep", type=Path, help="JSON file of runs; read if it is there, written after every run")
    parser.add_argument("--name", help="of the table in docs/results.md")
    parser.add_argument("--curve", type=Path, help="SVG file for the losses of the first seed by epoch")
    options = parser.parse_args()
    if options.sizes:
        return show(sizes(), options.name)
    if options.data is None:
        parser.error("--data is needed: a file of features with labels, or the folder of CIFAR-10's images")
    task = Task(options)
    runs = kept(options.keep, task)
    for ablation in ROWS if options.ablations else ["none"]:
        done = runs.setdefault(ablation, [])
        for seed in range(len(done), options.seeds):
            done.append(task.run(seed, ablation))
            print(ablation, seed, json.dumps(done[-1]), flush=True)
            if options.keep:
                files.write_text(options.keep, json.dumps({"made_by": task.made_by(), "runs": runs}, indent=1))
    named = {"data": options.data.name, "words": options.words and options.words.name, "protocol": options.protocol}
    named |= {"seeds": options.seeds} | ({"size": options.size} if task.images else {})
    command = "python benchmarks/paper.py " + " ".join(f"--{k} {v}" for k, v in named.items() if v is not None)
    command += f" --curve {options.curve.name}" if options.curve else ""
    command += "".join(f" --{flag}" for flag in ("ablations", "peers", "limits", "validate") if getattr(options, flag))
    command += f" --test-size {options.test_size}" if options.test_size else ""
    command += f" --stage-one {options.stage_one.name}" if options.stage_one else ""
    command += f" --set {' '.join(options.set)}" if options.set else ""
    text = table(task, runs, command + (f' --name "{options.name}"' if options.name else ""), options.name or "paper")
    show(text, options.name)
    if options.curve:
        from drq_fast.app.plots import draw_losses  # needs matplotlib

        draw_losses(options.curve, runs["none"][0].history, options.name or "paper")


if __name__ == "__main__":
    main()
