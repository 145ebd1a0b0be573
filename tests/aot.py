"""Compiles Triton kernels ahead of time for GPUs that are not here: `python aot.py 80,90` prints a JSON line each, and
`python aot.py 90 --table` the table of docs/gpu.md. `python aot.py 90 joint num_warps=8` tries other settings.

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

from drq_fast.kernels import beam, distortion, distortion_tiled, encode, joint, squared
from drq_fast.kernels.decode import decode_kernel
from drq_fast.kernels.encode import encode_kernel
from drq_fast.kernels.totals import scatter_kernel

INTEGERS = {"codes": "*i64", "next_codes": "*i32", "order": "*i64", "first": "*i64", "N": "i64", "LINES": "i64"}
INTEGERS |= dict.fromkeys(("K", "P", "T", "D", "W", "M", "m", "base", "paths", "width"), "i32")
NOT_ALIGNED = (
    "N",
    "LINES",
    "M",
    "m",
    "base",
    "paths",
    "width",
)  # arguments that Triton must not assume to be multiples of 16


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


def joint_job(precision: str = "tf32x3", lines: int = 1 << 20, **flags: bool) -> Job:
    flags = {"BY_CODEWORDS": False, "KEEP": False} | flags
    return Job(joint.joint_kernel, joint.settings(256, precision, lines) | flags, {})


PLAIN = {"num_warps": 4, "enable_fp_fusion": False}
FAST, EXACT = "tf32x3", "ieee"
NOISE = {"NOISE": 2.0**-36}
LEVEL = distortion_tiled.settings() | {"PRECISION": FAST, "COLUMNS": 16}
ERRORS, CHOICES, AGAIN = ({"AGAIN": a, "EVERY": e} for a, e in ((False, True), (False, False), (True, True)))
INT = {"codes": "*i32"}
JOBS = {
    "decode": Job(decode_kernel, {"M": 4, "HAS_OFFSET": True, "ROWS": 8, "COLUMNS": 128} | PLAIN, {"codes": "*u8"}),
    "encode float32": encode_job("*fp32", encode.on_chip_settings(256, FAST)),
    "encode float32 odd": encode_job("*fp32", encode.on_chip_settings(256, FAST), odd=("K", "D")),
    "encode float32 exact": encode_job("*fp32", encode.on_chip_settings(256, EXACT), odd=("K", "D")),
    "encode bfloat16": encode_job("*bf16", encode.on_chip_settings(256, FAST)),
    "encode float16": encode_job("*fp16", encode.on_chip_settings(256, FAST)),
    "encode float32 K=64": encode_job("*fp32", encode.on_chip_settings(64, FAST)),
    "encode float32 exact K=64": encode_job("*fp32", encode.on_chip_settings(64, EXACT), odd=("K", "D")),
    "encode float32 exact K=128": encode_job("*fp32", encode.on_chip_settings(128, EXACT), odd=("K", "D")),
    "encode float32 K=128": encode_job("*fp32", encode.on_chip_settings(128, FAST), odd=("K", "D")),
    "encode float32 K=16": encode_job("*fp32", encode.on_chip_settings(16, FAST), odd=("K", "D")),
    "encode_tiled": Job(encode.encode_tiled_kernel, encode.tiled_settings(FAST), INT),
    "encode_tiled exact": Job(encode.encode_tiled_kernel, encode.tiled_settings(EXACT), INT),
    "beam_errors": Job(beam.beam_errors_kernel, beam.errors_settings(FAST), INT),
    "beam_select": Job(beam.beam_select_kernel, beam.select_settings(16 * 256) | {"P": 256}, INT),
    "beam_select small": Job(beam.beam_select_kernel, beam.select_settings(4 * 128) | {"P": 128}, INT),
    "distortion": Job(distortion.distortion_kernel, distortion.settings(256, FAST) | ERRORS, {}),
    "distortion exact": Job(distortion.distortion_kernel, distortion.settings(256, EXACT) | ERRORS, {}),
    "distortion again": Job(distortion.distortion_kernel, distortion.settings(256, FAST, again=True) | AGAIN, {}),
    "quantize": Job(distortion.distortion_kernel, distortion.settings(256, FAST) | CHOICES, {}),
    "quantize_backward": Job(
        distortion.distortion_backward_kernel, distortion.backward_settings(256) | NOISE | {"ERRORS": False}, {}
    ),
    "distortion_backward": Job(
        distortion.distortion_backward_kernel, distortion.backward_settings(256) | NOISE | {"ERRORS": True}, {}
    ),
    "joint": joint_job(),
    "joint by codewords": joint_job(BY_CODEWORDS=True),
    "joint of few lines": joint_job(lines=1 << 8),
    "joint exact": joint_job(EXACT),
    "products": joint_job(KEEP=True),
    "level": Job(distortion_tiled.level_kernel, LEVEL | {"AGAIN": False}, {}),
    "level again": Job(distortion_tiled.level_kernel, LEVEL | {"AGAIN": True}, {}),
    "level_backward": Job(distortion_tiled.level_backward_kernel, distortion_tiled.settings() | NOISE, {}),
    "squared_errors": squared_job(squared.squared_errors_kernel),
    "squared_errors_backward": squared_job(squared.squared_errors_backward_kernel),
    "squared_errors_backward bfloat16 odd": squared_job(squared.squared_errors_backward_kernel, "*bf16", odd=("D",)),
    "own_pulls": squared_job(squared.own_pulls_kernel),
    "scatter": Job(scatter_kernel, {"SPLITS": 1, "ROWS": 8, "COLUMNS": 512} | PLAIN, {}),
}


def compile_kernel(name: str, arch: int, **changes: int) -> dict[str, int | str]:
    """Registers a thread, bytes spilled and bytes of shared memory a block, as ptxas and triton report them."""
    kernel, settings, types, odd = JOBS[name]
    settings = settings | changes
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
    registers, shared = int(re.search(r"Used (\d+) registers", text).group(1)), compiled.metadata.shared
    blocks = blocks_at_once(arch, registers, shared, options["num_warps"])
    return {
        "kernel": name,
        "arch": arch,
        "registers": registers,
        "spilled": int(re.search(r"(\d+) bytes spill stores", text).group(1)),
        "shared": shared,
        "blocks": blocks,
        "warps": blocks * options["num_warps"],
    }


# Shared memory of a multiprocessor in KB, and warps that it holds; 65536 registers everywhere.
MULTIPROCESSOR = {80: (164, 64), 90: (228, 64), 100: (228, 64), 120: (100, 48)}


def blocks_at_once(arch: int, registers: int, shared: int, warps: int) -> int:
    """Blocks that a multiprocessor holds: registers come in units of 256 a warp, and a block takes 1 KB more."""
    kilobytes, most = MULTIPROCESSOR[arch]
    by_registers = 65536 // (-(-32 * registers // 256) * 256 * warps)
    return min(by_registers, kilobytes * 1024 // (shared + 1024), most // warps)


def occupancy(arch: int) -> str:
    """Markdown: registers, shared memory, and blocks and warps on a multiprocessor at once."""
    columns = ("kernel", "registers", "spilled", "shared", "blocks", "warps")
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for name in JOBS:
        row = compile_kernel(name, arch)
        lines.append(f"| {' | '.join(str(row[column]) for column in columns)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if "--table" in sys.argv:
        print(occupancy(int(sys.argv[1])))
        sys.exit()
    given = sys.argv[2:]
    changes = {name: int(value) for name, _, value in (each.partition("=") for each in given if each not in JOBS)}
    for arch in map(int, sys.argv[1].split(",")):
        for name in [each for each in given if each in JOBS] or JOBS:
            print(json.dumps(compile_kernel(name, arch, **changes)), flush=True)
