"""A codec fitted to all vectors of a Ray Dataset, which workers hold in their memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
import ray.data
import torch

from ... import checks, functional
from ... import fit as fitting
from ...blocks import Blocks, Nodes, sum_of
from ...codec import Codec, directions
from .. import parquet
from .data import check_column, in_order


class FittedCodec(NamedTuple):
    """A codec, and the relative squared error of the vectors after each level."""

    codec: Codec
    errors: tuple[float, ...]


def fit(
    dataset: ray.data.Dataset,
    codewords: int = 256,
    levels: int = 4,
    *,
    dim: int,
    column: str = "embedding",
    codebooks: int | Sequence[int] = 1,
    workers: int = 1,
    threads: int = 1,
    rounds: int | None = None,
    beam: int = 16,
    seed: int | None = None,
    level_weights: Sequence[float] | None = None,
    unit: bool = False,
    block: int = fitting.BLOCK,
    **options: Any,
) -> FittedCodec:
    """Fits a codec to all vectors [dim] of a column, as `RecurrentQuantizer.fit` does to a sample in one process.

    Each worker holds consecutive blocks of `block` rows, of which every round needs sums only. They are added in an
    order that does not depend on the number of workers, so that this does not change a bit of the codec; threads, of
    each worker, may. The vectors must fit in the memory of the workers, twice. A fit waits until the cluster has a core
    for each thread. unit: fit to directions, for cosine. options: of the workers, as Ray takes them. RuntimeError if a
    worker dies.

    >>> codec, errors = fit(ray.data.read_parquet("vectors/"), dim=768, workers=16, seed=0)
    """
    workers, threads = (checks.integer("fit", *each, 1) for each in (("workers", workers), ("threads", threads)))
    if checks.integer("fit", "block", block, 2) % 2:
        checks.fail("fit", "block", "even", block)
    check_column("fit", dataset, column)
    weights = checks.level_weights("fit", level_weights, levels) or functional.default_weights(levels)
    checks.groups("fit", codebooks, levels)
    settings = {"num_cpus": threads, "scheduling_strategy": "SPREAD"} | options
    try:
        data = _loaded(dataset.select_columns([column]), dim, workers, threads, unit, block, settings)
        fitting.warn_of_few("fit", data.N, codewords)
        omega = torch.tensor(weights, dtype=torch.float32)
        how: dict[str, Any] = {"rounds": rounds, "beam": beam, "seed": checks.seed("fit", seed)}
        found = fitting.fit(data, codewords, levels, codebooks=codebooks, omega=omega, **how)
    except ray.exceptions.RayActorError as error:
        raise RuntimeError(f"fit: a worker died ({type(error).__name__}); start again.") from error
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    return FittedCodec(Codec(found.codebook, found.scale, found.offset, codebooks=codebooks, unit=unit), found.errors)


class _Worker:
    """Consecutive blocks of vectors."""

    def load(self, dataset: Any, column: str, dim: int, first: int, block: int, unit: bool, threads: int) -> int:
        """Reads the vectors of a dataset, the first of which has the number first * block; returns how many."""
        torch.set_num_threads(threads)
        blocks, where = [], f"column {column!r}"
        tables = dataset.iter_batches(batch_size=block, batch_format="pyarrow")
        for number, table in enumerate(tables, first):
            x = torch.from_numpy(parquet.vectors("fit", table.column(column), dim, where, number * block).copy())
            x = directions(x) if unit else x
            checks.squarable("fit", column, x)
            blocks.append(fitting.Block(x, number, block))
        self.blocks = Blocks(blocks, first)
        return sum(len(each.x) for each in blocks)

    def each(self, method: str, *arguments: Any) -> list[Any]:
        """See blocks.Calls."""
        return self.blocks.each(method, *arguments)

    def nodes(self, method: str, *arguments: Any) -> Nodes:
        """See blocks.Blocks."""
        return self.blocks.nodes(method, *arguments)


class _Data(NamedTuple):
    """The blocks of all workers; see blocks.Calls."""

    workers: list[Any]
    N: int

    def each(self, method: str, *arguments: Any) -> list[Any]:
        """See blocks.Calls."""
        calls = [worker.each.remote(method, *arguments) for worker in self.workers]
        return [result for part in ray.get(calls) for result in part]

    def total(self, method: str, *arguments: Any) -> Any:
        """See blocks.Calls."""
        calls = [worker.nodes.remote(method, *arguments) for worker in self.workers]
        return sum_of({place: value for nodes in ray.get(calls) for place, value in nodes.items()})


def _loaded(
    dataset: ray.data.Dataset, dim: int, workers: int, threads: int, unit: bool, block: int, settings: dict[str, Any]
) -> _Data:
    with in_order(dataset):
        dataset = dataset.materialize()
        blocks = -(-dataset.count() // block)
        if blocks == 0:
            checks.fail("fit", "dataset", "at least one vector", "none")
        workers = min(workers, blocks)
        bounds = [blocks * w // workers for w in range(workers + 1)]
        parts = dataset.split_at_indices([bound * block for bound in bounds[1:-1]]) if workers > 1 else [dataset]
    column = dataset.schema().names[0]
    actors = [ray.remote(_Worker).options(**settings).remote() for _ in parts]
    loads = [
        actor.load.remote(part, column, dim, first, block, unit, threads)
        for actor, part, first in zip(actors, parts, bounds, strict=False)
    ]
    return _Data(actors, sum(ray.get(loads)))
