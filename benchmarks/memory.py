"""Peak memory of one job, on the host or on the GPU it runs on, in a process that does nothing else; prints JSON.

python memory.py bench_encode.py ours '{"N": 1000, "D": 64}'
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(file: str, function: str, sizes: str) -> None:
    free_at_once()
    places = json.loads(sizes)
    run = load(file, function)(**places)
    memory = gpu_peak(run) if places.get("device") == "cuda" else peak(run)
    kernels = any(name.startswith("drq_fast.kernels.") for name in sys.modules)
    print(json.dumps({**memory, "interpreted": kernels and os.environ.get("TRITON_INTERPRET") == "1"}))


def free_at_once() -> None:
    """Lets glibc return every freed block of 256 KiB or more, else what it happens to keep varies from run to run."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_mmap_threshold = -3
        mallopt(m_mmap_threshold, 1 << 18)


def load(file: str, function: str) -> Callable[..., Callable[[], Any]]:
    """The module-level function of that name in a Python file."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)


def peak(run: Callable[[], Any]) -> dict[str, Any]:
    """{"peak_mib": MiB that one call needs beside its inputs}; where that is None, "no_peak" says why."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from what is resident now
        before = highest_mib()
    except OSError as error:
        run()
        return {"peak_mib": None, "no_peak": f"this system keeps no peak that can be reset: {error}"}
    run()
    return {"peak_mib": highest_mib() - before}


def gpu_peak(run: Callable[[], Any]) -> dict[str, Any]:
    """The same for what torch allocates on the GPU."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return {"peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}


def highest_mib() -> float:
    match = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    if match is None:
        raise OSError("/proc/self/status has no VmHWM")
    return int(match[1]) / 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
