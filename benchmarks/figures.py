"""The figures that benchmarks leave in JSON files, and how numbers and their origin are written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

GROUPS = {
    "quantize": "Training step: the loss and its gradients by x, codebook and w",
    "encode": "Encode",
    "fit": "Fit without labels",
    "search": "Search",
    "recall": "Recall against speed",
    "index": "Index: add, remove and add, load",
    "evaluate": "mAP evaluation",
}
OURS = "drq_fast"
BOUND = "the product"  # how the names of those begin that are a limit, not a peer
TRAINING = {"N": 2048, "D": 1024, "M": 4, "K": 256}
ENCODING = {"N": 16384, "D": 512, "M": 4, "K": 256}
SEARCH = {"N": 1_000_000, "Q": 256, "K": 256, "M": 4, "metric": "l2", "k": 10, "codes": "clustered"}


class Figure(NamedTuple):
    """What one benchmark found; ours and peers have rate, peak_mib and perhaps quality, peers ratio and interval."""

    name: str
    group: str
    sizes: dict[str, Any]
    unit: str
    quick: bool
    device: str
    ours: dict[str, Any]
    peers: dict[str, dict[str, Any]]
    provenance: dict[str, Any]

    def present(self) -> dict[str, dict[str, Any]]:
        """Ours, and the peers that were there."""
        return {OURS: self.ours, **{name: peer for name, peer in self.peers.items() if "absent" not in peer}}

    def steady(self) -> dict[str, dict[str, Any]]:
        """Ours, and the peers whose speed may be published."""
        return {name: side for name, side in self.present().items() if not side.get("wide")}


def load(folder: Path) -> list[Figure]:
    """The figures of all JSON files in a folder, at least one, in the order of GROUPS."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            file = json.loads(path.read_text())
            for name, figure in file["figures"].items():
                fields = {field: figure[field] for field in Figure._fields if field in figure}
                found.append(Figure(name=name, provenance=file["provenance"], **fields))
                GROUPS[found[-1].group]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SystemExit(f"report: {path} is not a file of figures ({error!r}).") from error
    if not found:
        raise SystemExit(f"report: {folder} holds no figures.")
    return sorted(found, key=lambda figure: list(GROUPS).index(figure.group))


def of_sizes(figures: Iterable[Figure], group: str, sizes: dict[str, Any]) -> Figure | None:
    """The first figure of a group with exactly these sizes."""
    return next((figure for figure in figures if figure.group == group and figure.sizes == sizes), None)


def origin(figures: Iterable[Figure]) -> str:
    """One line: processor, threads, versions, commits and days of the figures."""
    figures = list(figures)
    files = [figure.provenance for figure in figures]
    versions: dict[str, set[str]] = {}
    for file in files:
        for library, version in file["versions"].items():
            versions.setdefault(library, set()).add(version or "absent")
    commits = {f"{(file['commit'] or 'unknown')[:9]}{' with changes' * bool(file['dirty'])}" for file in files}
    isa = {"AVX-512" if any("avx512" in i for i in file["instructions"]) else "no AVX-512" for file in files}
    gpus = [f"{figure.provenance['gpu']}, " * (figure.device == "cuda") for figure in figures]
    places = {f"{gpu}{file['processor']}" for gpu, file in zip(gpus, files, strict=True)}
    threads = {f"{file['torch_threads']} threads" for file in files}
    return ", ".join(
        [
            *(joined(values) for values in (places, isa, threads)),
            *(f"{library} {joined(found)}" for library, found in versions.items() if library != "triton"),
            f"commit {joined(commits)}",
            joined({file["date"][:10] for file in files}),
        ]
    )


def joined(values: set[str]) -> str:
    return " and ".join(sorted(values))


def number(value: float) -> str:
    """Three digits with a unit: 13.4 G, 240 k, 0.07."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= 0.9995 * size:
            return f"{value / size:.{0 if value >= 99.95 * size else 1}f}{unit}"
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def size_text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
