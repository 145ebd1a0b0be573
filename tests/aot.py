"""Compiles Triton kernels ahead of time for GPUs that are not here: `python aot.py 80 90` prints one JSON line each.

A program of its own, because kernels imported under TRITON_INTERPRET=1 cannot be compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from drq_fast.kernels.decode import decode_kernel

# name -> (kernel, signature of the run-time arguments, compile-time constants)
KERNELS = {
    "decode": (
        decode_kernel,
        {
            "codes": "*u8",
            "codebook": "*fp32",
            "scale": "*fp32",
            "offset": "*fp32",
            "out": "*fp32",
            "N": "i64",
            "D": "i32",
        },
        {"M": 4, "HAS_OFFSET": True, "ROWS": 8, "COLUMNS": 128},
    ),
}


def compile_kernel(name: str, arch: int) -> dict[str, int | str]:
    """Registers a thread, bytes spilled and bytes of shared memory a block, as ptxas and triton report them."""
    kernel, signature, constants = KERNELS[name]
    described = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    compiled = triton.compile(described, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = compiled.asm["ptx"]
    target = re.search(r"\.target (\w+)", ptx).group(1)
    ptxas = get_ptxas(arch).path
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [ptxas, "-v", f"-arch={target}", str(source), "-o", f"{folder}/kernel.cubin"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "kernel": name,
        "arch": arch,
        "registers": int(re.search(r"Used (\d+) registers", text).group(1)),
        "spilled": int(re.search(r"(\d+) bytes spill stores", text).group(1)),
        "shared": compiled.metadata.shared,
    }


if __name__ == "__main__":
    for arch in map(int, sys.argv[1:]):
        for name in KERNELS:
            print(json.dumps(compile_kernel(name, arch)))
