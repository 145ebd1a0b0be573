"""`drq-fast encode` of Parquet files, in this process or on a Ray cluster."""

from __future__ import annotations

import argparse
import glob
import os
from pathlib import Path
from typing import Any

from .. import checks
from ..codec import Codec
from ..interop import parquet
from .description import counted
from .run import Run


def encode(run: Run, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Writes RUN/codes/NAME.parquet for every file NAME.parquet; skips those that are complete."""
    sources = [path for name in options.vectors for path in _matching(name)]
    for name in sources:
        if not name.endswith(".parquet"):
            checks.fail("encode", "vectors", "Parquet files alone, or .npy files alone", name)
    if options.ray is None and options.workers is not None:
        checks.fail("encode", "workers", "left out without --ray", options.workers)
    with run.locked_model() as layer:
        codec, settings = layer.codec(), {"column": options.column or "embedding", "beam": options.beam}
        todo = parquet.tasks(codec, sources, run.parts, **settings)
        run.claim_parts([Path(task.target).name for task in todo if not task.done()], options.force)
        if options.ray is None:
            rows = parquet.encode_files(codec, todo)
        else:
            rows = _on_ray(options, codec, sources, run.parts, settings)
    result = {"codes": str(run.parts), "files": len(todo), "rows": rows, "levels": layer.levels, "bits": layer.bits}
    return result, f"{run.parts}: {counted(rows, 'code')} of {layer.bits} bits in {counted(len(todo), 'file')}"


def _on_ray(
    options: argparse.Namespace, codec: Codec, sources: list[str], folder: Path, settings: dict[str, Any]
) -> int:
    from ..interop.ray import encode_files

    import ray  # isort: skip

    try:
        ray.init(address=options.ray or None, log_to_driver=False, logging_level="error")
    except ConnectionError as error:
        raise ConnectionError(f"encode: no Ray cluster answers at {options.ray}.") from error
    try:
        return encode_files(codec, sources, folder, workers=options.workers, **settings)
    finally:
        ray.shutdown()


def _matching(name: str) -> list[str]:
    """The files that a pattern matches; the name itself if it is no pattern."""
    if not glob.has_magic(name) or os.path.exists(name):
        return [name]
    found = sorted(glob.glob(name))
    if not found:
        raise FileNotFoundError(f"encode: no file matches {name}.")
    return found
