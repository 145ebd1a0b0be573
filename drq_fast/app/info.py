"""Facts for `drq-fast info`: versions, hardware, and the backend of every operation."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from typing import Any

import torch

from .. import __version__, backends
from ..backends.native import extension


def collect_info() -> dict[str, Any]:
    """Versions, the state of the extension and of CUDA, and the backend of every operation on every device."""
    versions = extension.cuda_versions()
    native = extension.native
    return {
        "drq_fast": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None,
        "native": extension.why_not("cpu") if native is None else f"built with {native.compiler}",
        "isa": _instruction_set(),
        "cuda": {
            "in the extension": f"runtime {versions[0]}" if versions else "built without CUDA",
            "driver": versions[1] if versions else "unknown (needs the extension with CUDA)",
            "in torch": torch.version.cuda or "built without CUDA",
            "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "backends": {
            device: [{"operation": op, "backend": taken, "why not": reason} for op, taken, reason in rows]
            for device, rows in ((d, backends.table(d)) for d in ("cpu", "cuda"))
        },
    }


def _instruction_set() -> str:
    """The instruction set in use and the supported ones, or the reason why there is none."""
    if extension.native is None:
        return "none"
    try:
        return f"{extension.instruction_set()} (of {', '.join(extension.supported_isas())})"
    except ValueError as error:
        return f"none: {error}"


def format_info(facts: dict[str, Any]) -> str:
    """The result of `collect_info` as text."""
    lines = [
        f"{name:9} {facts[name] or 'not installed'}"
        for name in ("drq_fast", "python", "machine", "torch", "triton", "native", "isa")
    ]
    cuda = facts["cuda"]
    lines.append(
        f"{'CUDA':9} extension: {cuda['in the extension']}; driver: {cuda['driver']}; torch: {cuda['in torch']}"
    )
    lines.append(f"{'GPUs':9} {', '.join(cuda['devices']) or 'none'}")
    lines += ["", f"{'operation':15}{'device':8}{'backend':9}why not a faster one"]
    for device, rows in facts["backends"].items():
        lines += [f"{row['operation']:15}{device:8}{row['backend']:9}{row['why not']}".rstrip() for row in rows]
    return "\n".join(lines)
