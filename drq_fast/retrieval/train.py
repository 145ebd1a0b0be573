"""Training in three stages: features alone, then one level of codes, then all levels.

All randomness of a step is derived from (seed, epoch, step, rank). A killed run therefore resumes from its last
checkpoint and reaches the same weights, bit by bit, without stored generator states.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from tqdm import tqdm

from .. import checks
from ..files import FileError, checksum, describing
from . import checkpoint
from .augment import augment
from .average import Average
from .backbones import Precomputed
from .datasets import Items
from .losses import adaptive_margin_loss, batch_triplet_loss
from .model import Model
from .settings import NEW_IN_CONFIG, Config

CHECKPOINT = "checkpoint.safetensors"
_SAMPLED = 16  # items whose values a checkpoint records, to detect other data


class Losses(NamedTuple):
    """Losses of one batch, or their means over an epoch; error is the quantizer's loss."""

    semantic: Any
    triplet: Any
    error: Any


class _Ranks(NamedTuple):
    """The rank of this process and the number of processes in torch.distributed."""

    rank: int
    world: int

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all processes in a fixed order; gradients flow to the rows of this process."""
        if self.world == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.world)]
        dist.all_gather(parts, x.detach().contiguous())
        parts[self.rank] = x
        return torch.cat(parts)


@dataclasses.dataclass
class _Position:
    """The position of a run: steps done in the epoch, the sums of their losses, and the means of earlier epochs."""

    epoch: int = 0
    step: int = 0
    sums: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0, 0.0])
    history: list[dict[str, float]] = dataclasses.field(default_factory=list)

    def check(self, epochs: int, steps: int) -> None:
        """Raises an error unless this is a position in a run of so many epochs, each of so many steps."""
        self.epoch = checks.integer("train", "epoch", self.epoch, 0, epochs)
        self.step = checks.integer("train", "step", self.step, 0, steps if self.epoch < epochs else 0)
        means = [{"levels": 0, **Losses(*self.sums)._asdict()}, *self.history]
        if len(self.history) != self.epoch or any(entry.keys() != means[0].keys() for entry in means):
            checks.fail("train", "history", f"the losses of {self.epoch} epochs", f"{len(self.history)} entries")
        for value in (value for entry in means for value in entry.values()):
            if type(value) not in (int, float) or not math.isfinite(value):
                checks.fail("train", "history", "finite numbers", repr(value))
        self.history = [{name: entry[name] for name in means[0]} for entry in self.history]  # JSON has sorted the names

    def next_step(self, losses: Losses) -> None:
        """Counts a step and its losses."""
        self.step += 1
        self.sums = [total + float(loss.detach()) for total, loss in zip(self.sums, losses, strict=True)]

    def next_epoch(self, levels: int) -> None:
        """Records the means of a finished epoch."""
        self.history.append({"levels": levels, **self.means()._asdict()})
        self.epoch, self.step, self.sums = self.epoch + 1, 0, [0.0, 0.0, 0.0]

    def means(self) -> Losses:
        """Mean losses of the steps done in this epoch."""
        return Losses(*(total / max(self.step, 1) for total in self.sums))


def train(
    model: Model,
    items: Items,
    rows: Tensor | None = None,
    config: Config | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
) -> list[dict[str, float]]:
    """Trains the model in place on these rows of the items, by default all; returns the mean losses of every epoch.

    With a folder the run can be killed at any moment; the same call resumes from its last checkpoint. Under
    torch.distributed every process takes its part of each batch, triplets are mined in the whole batch, and rank 0
    writes checkpoints. The model stays on its device and ends in eval mode.
    """
    config = config or Config()
    rows = _rows("train", rows, len(items))
    if items.labels.shape[1] != len(model.words):
        checks.fail("train", "words", f"a vector per class, {items.labels.shape[1]}", len(model.words))
    if model.head is None:  # nothing to learn from labels
        model.quantizer.fit(features(model, items, rows, workers=config.workers), seed=config.seed)
        model.eval()
        return []
    run = _Run(model, items, rows, config, None if folder is None else Path(folder) / CHECKPOINT)
    devices = range(torch.cuda.device_count()) if run.device.type == "cuda" else ()
    bar = tqdm(
        total=run.total, initial=run.done, desc="train", unit="step", disable=None if run.ranks.rank == 0 else True
    )
    if run.ranks.rank == 0 and 0 < run.done < run.total:
        bar.write(f"train: resumes after {run.done:,} of {run.total:,} steps, from {run.path}.", file=sys.stderr)
    with bar, torch.random.fork_rng(devices):
        while run.position.epoch < sum(config.epochs):  # also after a checkpoint between the last step and its record
            run.epoch(bar)
    model.eval()
    return run.position.history


class _Run:
    """The state of one training."""

    def __init__(self, model: Model, items: Items, rows: Tensor, config: Config, path: Path | None) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.ranks = _Ranks(dist.get_rank(), dist.get_world_size()) if distributed else _Ranks(0, 1)
        self.model, self.items, self.rows, self.config, self.path = model, items, rows, config, path
        self.device = model.words.device
        self.batch = min(config.batch, len(rows))
        if self.batch < 2:
            checks.fail("train", "rows", "at least 2", len(rows))
        if self.batch % self.ranks.world:
            checks.fail("train", "batch", f"a multiple of {self.ranks.world}, the number of processes", self.batch)
        self.steps = len(rows) // self.batch
        self.total = sum(config.epochs) * self.steps
        self.optimiser = _optimiser(model, config)
        self.position = _Position()
        averages: dict[str, Tensor] = {}
        self.saved = time.monotonic()
        self.wrapped: dict[bool, DistributedDataParallel] = {}
        if path is not None:
            checkpoint.make_folder(path.parent)
        if path is not None and path.exists():
            stored, averages = checkpoint.restore(path, model, self.optimiser, self.settings())
            with describing(path, "a position in this training"):
                self.position = _Position(**stored)
                self.position.check(sum(config.epochs), self.steps)
        elif isinstance(model.backbone, Precomputed):
            model.backbone.calibrate(items[rows[:: -(-len(rows) // (1 << 16))].tolist()].to(self.device))
        self.average = Average(model, config.average, averages) if config.average else None

    @property
    def done(self) -> int:
        """Steps done in the whole run."""
        return self.position.epoch * self.steps + self.position.step

    def settings(self) -> dict[str, Any]:
        """The settings that a checkpoint must match: all but checkpoint interval and number of workers."""
        config = dataclasses.asdict(self.config)
        for name in ("workers", "checkpoint_seconds", *(n for n, v in NEW_IN_CONFIG.items() if config[n] == v)):
            del config[name]
        head = self.model.head
        return {
            "config": config,
            "ablation": self.model.ablation,
            "activation": None if head is None else head.activation,
            "backbone": _digest(repr(self.model.backbone)),
            "quantizer": self.model.quantizer._config(),
            "words": checksum(self.model.words.cpu()),
            "rows": checksum(self.rows),
            "labels": checksum(self.items.labels[self.rows]),
            "items": checksum(self.items[self.rows[:: -(-len(self.rows) // _SAMPLED)].tolist()]),
        }

    def epoch(self, bar: Any) -> None:
        """Runs the remaining steps of an epoch."""
        levels = self.config.levels(self.position.epoch, self.model.quantizer.levels)
        self.train_mode()
        if levels and not self.model.quantizer.initialised:
            self.model.quantizer.initialise(self.views(), seed=self.config.seed)
            if self.average is not None:
                self.average.restart("quantizer.")
        for chosen, inputs in _loaded(self.items, self.batches()[self.position.step :], self.config.workers):
            self.position.next_step(self.step(inputs, self.items.labels[chosen], levels))
            if self.average is not None:
                self.average.add(self.done)
            bar.update()
            bar.set_postfix({n: f"{v:.3f}" for n, v in self.position.means()._asdict().items()}, levels=levels)
            if time.monotonic() - self.saved >= self.config.checkpoint_seconds:
                self.save()
        self.position.next_epoch(levels)
        if self.done == self.total:
            if self.average is not None:
                self.average.apply()
            self.save()

    def batches(self) -> list[Tensor]:
        """This process's rows of every batch; an incomplete last batch is dropped (rows are reshuffled every epoch)."""
        generator = torch.Generator().manual_seed(_seed(self.config.seed, self.position.epoch))
        order = self.rows[torch.randperm(len(self.rows), generator=generator)[: self.steps * self.batch]]
        return [batch.chunk(self.ranks.world)[self.ranks.rank] for batch in order.split(self.batch)]

    def step(self, inputs: Tensor, labels: Tensor, levels: int) -> Losses:
        """One step of the optimiser."""
        config, place = self.config, (self.config.seed, self.position.epoch, self.position.step)
        torch.manual_seed(_seed(*place, self.ranks.rank))
        self.set_rates()
        inputs, labels = self.view(inputs), labels.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=config.amp):
            output = self.module(levels)(inputs, levels, config.detach)
        # Every process mines triplets in the whole batch and must draw the same ones.
        generator = torch.Generator().manual_seed(_seed(*place, -1))
        semantic, triplet = self.supervision(output.x, output.z, labels, generator)
        # DDP averages gradients over processes, but those of the triplets must be summed.
        total = config.semantic * semantic + config.triplet * self.ranks.world * triplet
        total = total + config.quantization * output.error
        if not math.isfinite(total.item()):
            checks.fail("train", "the loss", "finite", f"{total.item()} in step {self.position.step} of this epoch")
        self.optimiser.zero_grad()
        total.backward()
        self.optimiser.step()
        return Losses(semantic, triplet, output.error)

    def view(self, inputs: Tensor) -> Tensor:
        """A batch as used in training: augmented if it has images."""
        inputs = inputs.to(self.device)
        if not self.config.augment or inputs.ndim != 4:
            return inputs
        pixels = getattr(self.model.backbone, "pixels", None)
        size, config = inputs.shape[-1] if pixels is None else pixels.size, self.config
        return augment(inputs, size, config.crop, config.colour, config.hole)

    @torch.no_grad()
    def views(self) -> Tensor:
        """x [n, dim] of all batches as in training, augmented and with dropout, up to four times.

        The network separates training images better than new ones, so codewords fitted to plain training features
        would suit new images less well.
        """
        torch.manual_seed(_seed(self.config.seed, self.position.epoch, -1, self.ranks.rank))
        wanted = 64 * self.model.quantizer.codewords  # as many as `initialise` uses
        times = min(4, -(-wanted // (self.steps * self.batch)))
        parts = []
        for _, inputs in _loaded(self.items, self.batches() * times, self.config.workers):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.amp):
                parts.append(self.ranks.gather(self.model.features(self.view(inputs)).x.float()))
        return torch.cat(parts)

    def supervision(
        self, x: Tensor, z: Tensor | None, labels: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """l_s and l_t; a loss that the ablation removes is 0."""
        semantic = triplet = x.new_zeros((), dtype=torch.float32)
        if self.model.setting.semantic and z is not None:
            semantic = adaptive_margin_loss(z, labels, self.model.words)
        if self.model.setting.triplet:
            x, labels = self.ranks.gather(x.float()), self.ranks.gather(labels.to(torch.uint8)).bool()
            triplet = batch_triplet_loss(x, labels, self.config.margin, self.config.mining, generator)
        return semantic, triplet

    def module(self, levels: int) -> nn.Module:
        """The model, wrapped in DDP for several processes; wrapped again when the set of used parameters changes."""
        if self.ranks.world == 1:
            return self.model
        quantized = levels > 0
        if quantized not in self.wrapped:
            self.wrapped = {quantized: DistributedDataParallel(self.model, find_unused_parameters=not quantized)}
        return self.wrapped[quantized]

    def set_rates(self) -> None:
        """Sets the learning rates of this step."""
        done = self.done / self.total
        factor = 0.5 * (1 + math.cos(math.pi * done)) if self.config.schedule == "cosine" else 1.0
        for group in self.optimiser.param_groups:
            group["lr"] = group["base"] * factor

    def train_mode(self) -> None:
        """Sets training mode, except for frozen batch norms."""
        self.model.train()
        if self.config.freeze_norms:
            for norm in _norms(self.model):
                norm.eval()

    def save(self) -> None:
        """Writes a checkpoint, on rank 0."""
        if self.path is not None and self.ranks.rank == 0:
            position = dataclasses.asdict(self.position)
            average = {} if self.average is None else self.average.values
            checkpoint.save(self.path, self.model, self.optimiser, self.settings(), position, average)
        self.saved = time.monotonic()


@torch.no_grad()
def features(
    model: Model,
    items: Items,
    rows: Tensor | None = None,
    *,
    batch: int = 256,
    workers: int = 0,
    amp: bool = False,
    of_backbone: bool = False,
) -> Tensor:
    """x [n, dim] in float32 of these rows, computed in eval mode with a progress bar; restores the model's mode.

    of_backbone: what the head would be given instead, [n, backbone.dim].
    """
    rows = _rows("features", rows, len(items))
    checks.integer("features", "batch", batch, 1)
    checks.integer("features", "workers", workers, 0)
    training, device = model.training, model.words.device
    model.eval()
    try:
        width: Any = model.backbone.dim if of_backbone else model.quantizer.dim
        parts = [torch.empty(0, width, device=device)]
        with tqdm(total=len(rows), desc="features", unit="item", disable=None, leave=False) as bar:
            for chosen, inputs in _loaded(items, list(rows.split(batch)), workers):
                with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                    inputs = inputs.to(device)
                    x = model.backbone(inputs) if of_backbone else model.features(inputs).x
                parts.append(x.float())
                bar.update(len(chosen))
        x = torch.cat(parts)
        checks.finite("features", "x", x)
        return x
    finally:
        model.train(training)


def _rows(op: str, rows: Any, N: int) -> Tensor:
    """Row numbers [n] int64 below N; all rows for None."""
    if rows is None:
        return torch.arange(N)
    numbers = checks.id_array(op, "rows", rows)
    if numbers.dtype == torch.bool:
        checks.fail(op, "rows", "row numbers", "a mask; mask.nonzero().squeeze(1) gives its rows", error=TypeError)
    numbers = numbers.to(device="cpu", dtype=torch.int64)
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < N:
        checks.fail(op, "rows", f"in 0..{N - 1}", f"values from {int(numbers.min())} to {int(numbers.max())}")
    return numbers


def _loaded(items: Items, batches: Sequence[Tensor], workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(rows, inputs) of every batch, read by worker processes if `workers` > 0."""
    wanted = [batch.tolist() for batch in batches]
    workers = min(workers, len(wanted))
    loader: DataLoader[Tensor] = DataLoader(
        items, batch_size=None, sampler=wanted, num_workers=workers, generator=torch.Generator()
    )
    try:
        yield from zip(batches, loader, strict=True)
    except (FileError, OSError, ImportError) as error:
        _, kind, said = str(error).rpartition(f"{type(error).__name__}: ")
        if kind and str(error).startswith("Caught "):  # torch puts the traceback of the worker before its message
            raise type(error)(said.strip()) from None
        raise


def _optimiser(model: Model, config: Config) -> torch.optim.Optimizer:
    """Adam with decoupled weight decay, with one rate for the new layers and one for the backbone."""
    frozen = {id(p) for norm in _norms(model) for p in norm.parameters()} if config.freeze_norms else set()
    backbone = {id(p) for p in model.backbone.parameters()}
    trained = [p for p in model.parameters() if id(p) not in frozen]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if id(p) not in backbone], "base": config.rate},
        {"params": [p for p in trained if id(p) in backbone], "base": config.backbone_rate},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.rate, betas=(0.9, 0.999), weight_decay=config.weight_decay)


def _norms(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module, _BatchNorm))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=7).hexdigest()


def _seed(*parts: int) -> int:
    return int(_digest(" ".join(map(str, parts))), 16)
