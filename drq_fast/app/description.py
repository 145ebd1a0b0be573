"""What commands print of an index, and tables as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..index import Index
from ..index.tuning import Tuning


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 vector` or `2,000 vectors`; plural: the form of a noun that takes no s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def describe(path: Path, index: Index) -> tuple[dict[str, Any], str]:
    """The settings, sizes and tuning of an index in a file: for JSON, and as text."""
    size, tuning = path.stat().st_size, index.tuning
    facts = {
        "index": str(path),
        "size": len(index),
        **{name: getattr(index, name) for name in ("dim", "bits", "metric", "lists", "vectors")},
        "bytes": size,
        "parts": index.sizes,
        "tuning": None if tuning is None else _facts(tuning),
    }
    N = max(len(index), 1)
    parts = [(name, f"{part:,}", f"{part / N:,.2f}") for name, part in (*index.sizes.items(), ("file", size))]
    text = [
        f"{path}: {counted(len(index), 'vector')} of {counted(index.dim, 'dimension')} in {index.bits} bits, "
        f"metric {index.metric}, "
        f"{'no lists' if index.lists is None else counted(index.lists, 'list')}, "
        f"{'no vectors kept' if index.vectors is None else f'vectors kept as {index.vectors}'}",
        table(("part", "bytes", "per vector"), parts) + "\n(an id takes 8 bytes in the file)",
        "not tuned: no recall was measured" if tuning is None else _tuning(tuning),
    ]
    return facts, "\n\n".join(text)


def _facts(tuning: Tuning) -> dict[str, Any]:
    return tuning._asdict() | {"settings": [setting._asdict() for setting in tuning.settings]}


def _tuning(tuning: Tuning) -> str:
    """The settings of `search`, cheapest first, with the recall that they reached."""
    rows = [
        (f"{setting.recall:.4f}", *(_number(each) for each in (setting.probes, setting.refine, round(setting.cost))))
        for setting in tuning.settings
    ]
    head = (f"recall@{tuning.k}", "probes", "refine", "cost")
    asked = counted(tuning.queries, "query", "queries")
    measured = f"measured with {asked} on {counted(tuning.size, 'vector')}"
    return f"{table(head, rows)}\n{measured}; cost: estimated, in codes scanned"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table in columns, of which the first is aligned to the left and all others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(cells, widths[1:], strict=True))])
        for first, *cells in (head, *rows)
    )
