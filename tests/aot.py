"""Compiles Triton kernels ahead of time for GPUs that are not here: `python aot.py 80,90` prints a JSON line each.

A program of its own, because kernels imported under TRITON_INTERPRET=1 cannot be compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from drq_fast.kernels.beam import beam_errors_kernel, beam_select_kernel
from drq_fast.kernels.decode import decode_kernel
from drq_fast.kernels.distortion import distortion_backward_kernel, distortion_kernel
from drq_fast.kernels.distortion_tiled import level_backward_kernel, level_kernel
from drq_fast.kernels.encode import encode_kernel, encode_tiled_kernel
from drq_fast.kernels.scatter import scatter_kernel

INTEGERS = {"codes": "*i64", "next_codes": "*i32", "order": "*i64", "first": "*i64", "N": "i64"}
INTEGERS |= dict.fromkeys(("K", "P", "D", "M", "m", "paths", "width"), "i32")
NOT_ALIGNED = ("N", "M", "m", "paths", "width")  # numbers that are not told to be multiples of 16


class Job(NamedTuple):
    """A kernel as its launcher compiles it; types: of arguments that are not float32 or in INTEGERS."""

    kernel: object
    constants: dict
    options: dict
    types: dict = {}  # noqa: RUF012


def encode_job(dtype: str, precision: str, KP: int, rows: int, warps: int, narrow: bool = False) -> Job:
    types = {"x": dtype, "codebook": dtype, "offset": dtype, "codes": "*u8"}
    constants = {"HAS_OFFSET": not narrow, "NARROW": narrow, "PRECISION": precision, "ROWS": rows, "KP": KP}
    return Job(encode_kernel, constants | {"COLUMNS": 16}, {"num_warps": warps}, types)


ROOMY = {"num_warps": 8, "num_stages": 2, "maxnreg": 255}
TILES = {"ROWS": 16, "TILE": 128, "COLUMNS": 16}
ON_CHIP = {"ROWS": 16, "KP": 256, "TILE": 64, "COLUMNS": 16}
INT_CODES = {"codes": "*i32"}
JOBS = {
    "decode": Job(
        decode_kernel, {"M": 4, "HAS_OFFSET": True, "ROWS": 8, "COLUMNS": 128}, {"num_warps": 4}, {"codes": "*u8"}
    ),
    "encode float32": encode_job("*fp32", "tf32x3", 256, 32, 8),
    "encode float32 exact": encode_job("*fp32", "ieee", 256, 32, 8),
    "encode bfloat16": encode_job("*bf16", "tf32x3", 256, 32, 8, narrow=True),
    "encode float16": encode_job("*fp16", "tf32x3", 256, 32, 8, narrow=True),
    "encode float32 K=64": encode_job("*fp32", "tf32x3", 64, 64, 4),
    "encode_tiled": Job(encode_tiled_kernel, TILES | {"PRECISION": "tf32x3"}, {"num_warps": 8}, INT_CODES),
    "encode_tiled exact": Job(encode_tiled_kernel, TILES | {"PRECISION": "ieee"}, {"num_warps": 8}, INT_CODES),
    "beam_errors": Job(beam_errors_kernel, TILES | {"PRECISION": "tf32x3"}, {"num_warps": 4}, INT_CODES),
    "beam_select": Job(beam_select_kernel, {"ROWS": 1, "TILE": 4096}, {"num_warps": 8}, INT_CODES),
    "beam_select narrow": Job(beam_select_kernel, {"ROWS": 4, "TILE": 512}, {"num_warps": 8}, INT_CODES),
    "distortion": Job(distortion_kernel, ON_CHIP | {"AGAIN": False, "PRECISION": "tf32x3"}, ROOMY),
    "distortion exact": Job(distortion_kernel, ON_CHIP | {"AGAIN": False, "PRECISION": "ieee"}, ROOMY),
    "distortion again": Job(distortion_kernel, ON_CHIP | {"AGAIN": True, "PRECISION": "tf32x3"}, ROOMY),
    "distortion_backward": Job(distortion_backward_kernel, ON_CHIP | {"NOISE": 2.0**-36, "PRECISION": "tf32x3"}, ROOMY),
    "distortion_backward exact": Job(
        distortion_backward_kernel, ON_CHIP | {"NOISE": 2.0**-36, "PRECISION": "ieee"}, ROOMY
    ),
    "level": Job(level_kernel, TILES | {"AGAIN": False, "PRECISION": "tf32x3"}, ROOMY),
    "level again": Job(level_kernel, TILES | {"AGAIN": True, "PRECISION": "tf32x3"}, ROOMY),
    "level_backward": Job(level_backward_kernel, {"NOISE": 2.0**-36, "ROWS": 16, "TILE": 128}, ROOMY),
    "scatter": Job(scatter_kernel, {"SPLITS": 4, "ROWS": 16, "COLUMNS": 128}, {"num_warps": 4}),
}


def compile_kernel(name: str, arch: int) -> dict[str, int | str]:
    """Registers a thread, bytes spilled and bytes of shared memory a block, as ptxas and triton report them."""
    kernel, constants, options, types = JOBS[name]
    arguments = [argument for argument in kernel.arg_names if argument not in constants]
    signature = {argument: (INTEGERS | types).get(argument, "*fp32") for argument in arguments}
    aligned = {(i,): [["tt.divisibility", 16]] for i, argument in enumerate(arguments) if argument not in NOT_ALIGNED}
    described = ASTSource(
        kernel, signature | dict.fromkeys(constants, "constexpr"), constexprs=constants, attrs=aligned
    )
    options = {"enable_fp_fusion": False} | options
    compiled = triton.compile(described, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = compiled.asm["ptx"]
    target = re.search(r"\.target (\w+)", ptx).group(1)
    ptxas = get_ptxas(arch).path
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [ptxas, "-v", "--fmad=false", f"-arch={target}", str(source), "-o", f"{folder}/kernel.cubin"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "kernel": name,
        "arch": arch,
        "registers": int(re.search(r"Used (\d+) registers", text).group(1)),
        "spilled": int(re.search(r"(\d+) bytes spill stores", text).group(1)),
        "shared": compiled.metadata.shared,
    }


if __name__ == "__main__":
    for arch in map(int, sys.argv[1].split(",")):
        for name in sys.argv[2:] or JOBS:
            print(json.dumps(compile_kernel(name, arch)), flush=True)
