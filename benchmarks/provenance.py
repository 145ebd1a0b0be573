"""What a figure depends on beside the code that is timed: processor, threads, versions, commit; prints JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import drq_fast
from drq_fast import backends

LIBRARIES = ("torch", "numpy", "triton", "faiss-cpu", "usearch", "vector-quantize-pytorch", "turbovec")
SETTINGS = ("DRQ_FAST_BACKEND", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
INSTRUCTIONS = re.compile(r"\b(?:avx2|fma|f16c|avx512\w+|avx_vnni|amx_\w+|asimd\w*|sve\w*)\b")


def provenance() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*: (.*)$", cpuinfo, re.MULTILINE)
    return {
        "processor": model[1] if model else platform.processor() or platform.machine(),
        "instructions": sorted(set(INSTRUCTIONS.findall(cpuinfo))),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "backends": {op: taken for op, taken, _ in backends.table("cuda" if torch.cuda.is_available() else "cpu")},
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "versions": {
            "python": platform.python_version(),
            "drq_fast": drq_fast.__version__,
            **{library: version(library) for library in LIBRARIES},
        },
        **commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> dict[str, Any]:
    """The last commit that changed the code of drq_fast, and are there changes since; None where git knows no such."""
    if not git("ls-files", "__init__.py"):
        return {"commit": None, "dirty": None}
    code = [f":/{name}" for name in ("drq_fast", "kernels", "csrc", "setup.py")]
    return {
        "commit": git("log", "-1", "--format=%H", "--", *code),
        "dirty": bool(git("status", "--porcelain", "--", *code)),
    }


def git(*arguments: str) -> str:
    folder = Path(drq_fast.__file__).parent
    try:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


if __name__ == "__main__":
    print(json.dumps(provenance(), indent=2))
