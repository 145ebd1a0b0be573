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

from drq_fast.kernels import beam, distortion, distortion_tiled, encode, squared
from drq_fast.kernels.decode import decode_kernel
from drq_fast.kernels.encode import encode_kernel
from drq_fast.kernels.totals import scatter_kernel

INTEGERS = {"codes": "*i64", "next_codes": "*i32", "order": "*i64", "first": "*i64", "N": "i64"}
INTEGERS |= dict.fromkeys(("K", "P", "D", "M", "m", "paths", "width"), "i32")
NOT_ALIGNED = ("N", "M", "m", "paths", "width")  # arguments that Triton must not assume to be multiples of 16


class Job(NamedTuple):
    """A kernel and the settings of its launcher. types: those of arguments that are neither float32 nor in INTEGERS;
    odd: sizes that are not multiples of 16."""

    kernel: object
    settings: dict
    types: dict
    odd: tuple[str, ...] = ()


def encode_job(dtype: str, settings: dict, odd: tuple[str, ...] = ()) -> Job:
    types = {"x": dtype, "codebook": dtype, "offset": dtype, "codes": "*u8"}
    return Job(encode_kernel, {"HAS_OFFSET": True} | settings, types, odd)


def squared_job(kernel: object, dtype: str = "*fp32", odd: tuple[str, ...] = ()) -> Job:
    types = {"x": dtype, "codebook": dtype, "offset": dtype, "scale": dtype}
    return Job(kernel, {"HAS_OFFSET": True} | squared.settings(2048), types, odd)


PLAIN = {"num_warps": 4, "enable_fp_fusion": False}
FAST, EXACT = "tf32x3", "ieee"
NOISE = {"NOISE": 2.0**-36}
LEVEL = distortion_tiled.settings() | {"PRECISION": FAST, "COLUMNS": 16}
ERRORS, CHOICES, AGAIN = ({"AGAIN": a, "ERRORS": e} for a, e in ((False, True), (False, False), (True, False)))
INT = {"codes": "*i32"}
JOBS = {
    "decode": Job(decode_kernel, {"M": 4, "HAS_OFFSET": True, "ROWS": 8, "COLUMNS": 128} | PLAIN, {"codes": "*u8"}),
    "encode float32": encode_job("*fp32", encode.on_chip_settings(256, FAST)),
    "encode float32 odd": encode_job("*fp32", encode.on_chip_settings(256, FAST), odd=("K", "D")),
    "encode float32 exact": encode_job("*fp32", encode.on_chip_settings(256, EXACT), odd=("K", "D")),
    "encode bfloat16": encode_job("*bf16", encode.on_chip_settings(256, FAST)),
    "encode float16": encode_job("*fp16", encode.on_chip_settings(256, FAST)),
    "encode float32 K=64": encode_job("*fp32", encode.on_chip_settings(64, FAST)),
    "encode_tiled": Job(encode.encode_tiled_kernel, encode.tiled_settings(FAST), INT),
    "encode_tiled exact": Job(encode.encode_tiled_kernel, encode.tiled_settings(EXACT), INT),
    "beam_errors": Job(beam.beam_errors_kernel, beam.errors_settings(FAST), INT),
    "beam_select": Job(beam.beam_select_kernel, beam.select_settings(16 * 256), INT),
    "beam_select small": Job(beam.beam_select_kernel, beam.select_settings(4 * 128), INT),
    "distortion": Job(distortion.distortion_kernel, distortion.settings(256, FAST) | ERRORS, {}),
    "distortion exact": Job(distortion.distortion_kernel, distortion.settings(256, EXACT) | ERRORS, {}),
    "distortion again": Job(distortion.distortion_kernel, distortion.settings(256, FAST) | AGAIN, {}),
    "quantize": Job(distortion.distortion_kernel, distortion.settings(256, FAST) | CHOICES, {}),
    "quantize_backward": Job(
        distortion.distortion_backward_kernel, distortion.settings(256, FAST) | NOISE | CHOICES, {}
    ),
    "distortion_backward": Job(
        distortion.distortion_backward_kernel, distortion.settings(256, FAST) | NOISE | ERRORS, {}
    ),
    "distortion_backward exact": Job(
        distortion.distortion_backward_kernel, distortion.settings(256, EXACT) | NOISE | ERRORS, {}
    ),
    "level": Job(distortion_tiled.level_kernel, LEVEL | {"AGAIN": False}, {}),
    "level again": Job(distortion_tiled.level_kernel, LEVEL | {"AGAIN": True}, {}),
    "level_backward": Job(distortion_tiled.level_backward_kernel, distortion_tiled.settings() | NOISE, {}),
    "squared_errors": squared_job(squared.squared_errors_kernel),
    "squared_errors_backward": squared_job(squared.squared_errors_backward_kernel),
    "squared_errors_backward bfloat16 odd": squared_job(squared.squared_errors_backward_kernel, "*bf16", odd=("D",)),
    "own_pulls": squared_job(squared.own_pulls_kernel),
    "scatter": Job(scatter_kernel, {"SPLITS": 1, "ROWS": 8, "COLUMNS": 512} | PLAIN, {}),
}


def compile_kernel(name: str, arch: int) -> dict[str, int | str]:
    """Registers a thread, bytes spilled and bytes of shared memory a block, as ptxas and triton report them."""
    kernel, settings, types, odd = JOBS[name]
    constants = {argument: settings[argument] for argument in kernel.arg_names if argument in settings}
    options = {option: value for option, value in settings.items() if option.islower()}
    arguments = [argument for argument in kernel.arg_names if argument not in constants]
    signature = {argument: (INTEGERS | types).get(argument, "*fp32") for argument in arguments}
    signature |= dict.fromkeys(constants, "constexpr")
    unaligned = NOT_ALIGNED + odd
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(arguments) if name not in unaligned}
    described = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
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
