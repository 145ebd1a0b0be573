"""The content of metrics.json: retrieval figures of a run at every code length."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import checks
from ..codes import bits, packed_bytes
from ..constants import METRICS
from ..fit import sample_rows, seeded
from ..index import Index
from ..index.source import in_blocks
from ..index.tuning import true_neighbours
from ..quantizer import RecurrentQuantizer
from ..retrieval import evaluate
from ..retrieval.experiment import Experiment
from .vectors import VectorFiles

DEPTHS = (1, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)  # of the precision curve
_SAMPLE = 1 << 14  # vectors that the error of a fitted run is measured on


def check(metrics: dict[str, Any]) -> None:
    """Raises an error unless this has what `by_labels` or `by_neighbours` return."""
    labelled = metrics["kind"] == "labels"
    rows, depths = [*metrics["lengths"], *([metrics["exact"]] if metrics.get("exact") else [])], metrics.get("depths")
    numbers = [metrics["queries"], metrics["database"], metrics["R" if labelled else "k"], *(depths or [])]
    numbers += [row["bits"] for row in metrics["lengths"]]  # exact search has none
    numbers += [row[name] for row in rows for name in ("bytes", "mAP" if labelled else "recall", "error")]
    if labelled:
        numbers += [number for row in rows for name in ("precision", "precision_at_recall") for number in row[name]]
        if depths is None or any(len(row["precision"]) != len(depths) for row in rows):
            checks.fail("metrics", "precision", "given at every depth", f"{len(depths or [])} depths")
    for number in numbers:
        if type(number) not in (int, float):
            checks.fail("metrics", "all figures", "numbers", repr(number))
    checks.choice("metrics", "metric", metrics["metric"], METRICS)


def by_labels(
    layer: RecurrentQuantizer,
    codes: Tensor,
    query: Tensor,
    experiment: Experiment,
    metric: str,
    x: Tensor | None,
    beam: int,
) -> dict[str, Any]:
    """mAP and precision of a trained run for queries [Q, dim] and the codes [N, levels] of the database.

    x [N, dim]: the features of the database, for the same figures of exact search; None leaves these out.
    beam: that of the codes, by which the queries are encoded to measure the error.
    """
    errors = _errors(layer, query, layer.encode(query, beam))
    depths = [d for d in DEPTHS if d <= len(codes)]
    labels, rows = experiment.items.labels, experiment.split
    asked = (labels[rows.database], query, labels[rows.query])
    rules: dict[str, Any] = {"R": experiment.R, "metric": metric, "depths": depths}
    found = evaluate.evaluate_codes(layer, codes, *asked, **rules)
    metrics = {
        "kind": "labels",
        "protocol": experiment.settings.protocol,
        "metric": metric,
        "R": experiment.R,
        "queries": len(query),
        "database": len(codes),
        "depths": depths,
        "lengths": [
            _figures(figures, packed_bytes(layer.codewords, L), error)
            for L, (figures, error) in enumerate(zip(found, errors, strict=True), 1)
        ],
    }
    if x is not None:
        metrics["exact"] = _figures(evaluate.evaluate_vectors(x, *asked, **rules), 4 * layer.dim, 0.0)
    return metrics


def _figures(figures: evaluate.Figures, size: int, error: float) -> dict[str, Any]:
    return {
        "bits": figures.bits,
        "bytes": size,
        "mAP": figures.mean_average_precision,
        "precision": list(figures.precision),
        "precision_at_recall": list(figures.precision_at_recall),
        "error": error,
    }


def by_neighbours(
    layer: RecurrentQuantizer, codes: Tensor, vectors: VectorFiles, query: Tensor, k: int, metric: str
) -> dict[str, Any]:
    """Recall@k of a fitted run: the share of the exact neighbours of queries [Q, dim] that the codes find."""
    blocks = in_blocks(vectors.read, len(vectors), vectors.dim, "exact neighbours")
    exact = true_neighbours(query, blocks, metric, k)
    index = Index(layer, metric=metric)
    index.add_codes(codes)
    if len(codes) <= _SAMPLE:
        errors = _errors(layer, vectors.read(0, len(codes)), codes)
    else:
        rows = sample_rows(len(codes), _SAMPLE, seeded(0))
        errors = _errors(layer, vectors.pick(rows), codes[rows])
    lengths = [
        {
            "bits": bits(layer.codewords, L),
            "bytes": packed_bytes(layer.codewords, L),
            "recall": evaluate.recall(index.search(query, k, L).ids, exact),
            "error": error,
        }
        for L, error in enumerate(errors, 1)
    ]
    sizes = {"k": k, "queries": len(query), "database": len(codes)}
    return {"kind": "neighbours", "metric": metric, **sizes, "lengths": lengths}


def _errors(layer: RecurrentQuantizer, x: Tensor, codes: Tensor) -> list[float]:
    """Squared error of codes [N, levels] of x [N, dim] after each level, relative to that of the offset alone."""
    whole = (x if layer.offset is None else x - layer.offset.detach()).square().sum().clamp_min(1e-30)
    return [float((x - layer.decode(codes, L)).square().sum() / whole) for L in range(1, layer.levels + 1)]
