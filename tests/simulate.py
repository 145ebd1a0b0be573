"""Runs the launchers of kernels/ on a GPU that is simulated: their PTX for sm_80, by ptxsim and its tensor cores.

`python simulate.py FOLDER_OF_PTXSIM SEED [JOB ...]` prints one JSON line for each job: the largest error, how many
variants of its kernels two batch sizes made Triton compile, and races of threads that meet in global memory. Every
array has a buffer of its exact size. A program of its own, because kernels imported under TRITON_INTERPRET=1 cannot be
compiled.
"""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from drq_fast import functional
from drq_fast.backends import torch as definition
from drq_fast.backends.types import Parameters
from drq_fast.kernels import beam, distortion, encode, joint, quantize, squared

compiled: dict[str, set[str]] = {}
races: dict[str, int] = {}


def simulated_launch(seed: int):
    """A stand-in for JITFunction.run that compiles as Triton would and executes in the simulator."""
    import mmaext
    import ptxsim

    compile_only = JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        kernel = compile_only(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.setdefault(kernel.name, set()).add(kernel.hash)
        device = ptxsim.Device(1 << 28)
        module = ptxsim.Module(readable(kernel.asm["ptx"]), device)
        values = dict(zip(self.arg_names, args, strict=False)) | {
            k: v for k, v in kwargs.items() if k in self.arg_names
        }
        buffers: dict[int, tuple[int, torch.Tensor]] = {}
        parameters = []
        for name, kind in kernel.src.signature.items():
            if kind == "constexpr":
                continue
            value = values[name]
            if isinstance(value, torch.Tensor):
                if value.data_ptr() not in buffers:
                    buffers[value.data_ptr()] = (device.to(value.view(-1).view(torch.uint8).numpy()), value)
                parameters.append(buffers[value.data_ptr()][0])
            else:
                parameters.append(np.int64(value) if kind == "i64" else np.int32(value))
        launch = {"shared": kernel.metadata.shared, "seed": seed}
        mmaext.start_race(device)
        module.launch(kernel.name, grid, 32 * kernel.metadata.num_warps, [*parameters, 0, 0], **launch)
        races.update({f"{kernel.name}: {what}": count for what, count in mmaext.GR["warn"].items()})
        for pointer, tensor in buffers.values():
            content = device.get(pointer, np.uint8, (tensor.nbytes,))
            tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(content))

    return run


def readable(ptx: str) -> str:
    """PTX without the parts that the simulator cannot parse."""
    ptx = re.split(r"\n\s*\.section|\n\s*\.file", re.sub(r" \.ptr \.global \.align \d+", "", ptx))[0]
    return re.sub(r"\{ (%\w+) \}", r"\1", re.sub(r"\n\s*\.loc[^\n]*", "", ptx))


def problem(N: int, D: int, K: int, M: int) -> tuple[torch.Tensor, ...]:
    """x [N, D], of which every third row is a codeword plus 1 % noise, codebook [K, D], scale [M]."""
    generator = torch.Generator().manual_seed(N + K)
    x, codebook = torch.randn(N, D, generator=generator), torch.randn(K, D, generator=generator)
    x[::3] = codebook[torch.arange(len(x[::3])) % K] + 0.01 * x[::3]
    return x, codebook, torch.tensor([(-0.8) ** m for m in range(M)])


def wrong_codes(N: int, K: int, precision: str, width: int = 1, dtype: torch.dtype = torch.float32) -> float:
    """The share of codes that are not those of the definition."""
    x, codebook, scale = problem(N, 21, K, 3)
    x, codebook = x.to(dtype), codebook.to(dtype)
    omega = torch.tensor([0.1, 0.2, 1.0])
    if width == 1:
        codes = encode.encode(x, codebook, scale, precision=precision)
    else:
        weights = {"omega": omega, "still_to_come": definition.still_to_come(omega)}
        codes = beam.encode_beam(x, codebook, scale, offset=None, beam=width, precision=precision, **weights)
    inputs = x.float(), codebook.float(), scale
    wanted = functional.encode(*inputs, beam=width, level_weights=omega, backend="torch")
    return float((codes != wanted).float().mean())


def distance(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(actual, expected, strict=True))


def training_error(N: int, K: int, precision: str, D: int = 21) -> float:
    """Of distortion and quantize with their gradients, against the float64 reference."""
    x, codebook, scale = problem(N, D, K, 3)
    codec, gamma = distortion.codec_of(codebook, scale), torch.tensor([1.5])
    scores = codec.scores(x)
    leaves = [t.double().requires_grad_() for t in (x, codebook, scale)]
    truth = functional.distortion(*leaves, gamma=1.5, backend="torch")
    levels = distortion.distortion(x, codec, scores, gamma, precision)
    upstream = [torch.cos(torch.arange(N * 3.0) + i).reshape(N, 3) for i in range(3)]
    found = distortion.distortion_backward(x, codec, scores, gamma, levels, *upstream, precision)
    wanted = torch.autograd.grad(truth[:3], leaves, [u.double() for u in upstream])
    values = [levels.residuals.sqrt(), levels.soft.sqrt(), levels.joint]
    worst = distance([*values, *found], [*(t.detach() for t in truth[:3]), *wanted])

    choices = quantize.choose(x, codec, scores, gamma, precision)
    upstream = [torch.sin(torch.arange(float(N * D)) + i).reshape(N, D) for i in range(2)]
    found = quantize.quantize_backward(x, codec, scores, gamma, choices, *upstream, precision)
    soft, hard, _ = functional.quantize(*leaves, gamma=1.5, backend="torch")
    wanted = torch.autograd.grad([soft, hard], leaves, [u.double() for u in upstream])
    values = quantize.approximations(codec, choices)
    return max(worst, distance([*values, *found], [soft.detach(), hard.detach(), *wanted]))


def training_error_of_many_lines(N: int, D: int) -> float:
    """The same with the large tiles of joint_kernel; D 16: the squared norm of Delta C."""
    before, joint._MANY_LINES = joint._MANY_LINES, 1
    try:
        return training_error(N, 100, FAST, D)
    finally:
        joint._MANY_LINES = before


def squared_error(N: int) -> float:
    """Of squared_errors with its gradients and of codeword_sums, given the codes, against the float64 reference."""
    x, codebook, scale = problem(N, 150, 30, 3)  # two tiles of dimensions
    inputs = (x, codebook, scale, codebook.mean(dim=0))
    leaves = [t.double().requires_grad_() for t in inputs]
    truth = functional.squared_errors(*leaves[:3], offset=leaves[3], commitment=0, backend="torch")
    upstream = torch.cos(torch.arange(N * 3.0)).reshape(N, 3)
    wanted = torch.autograd.grad(truth.errors, leaves[1:], upstream.double())
    errors = squared.squared_errors(*inputs, truth.codes)
    doffset, *found = squared.squared_errors_backward(*inputs, truth.codes, upstream)
    weights = upstream.abs()
    sums = squared.codeword_sums(*inputs, truth.codes, weights)
    exact = [t.detach() for t in leaves]
    wanted += tuple(definition.codeword_sums(exact[0], truth.codes, Parameters(*exact[1:]), weights.double()))
    return distance([errors, *found, doffset.sum(dim=0), *sums], [truth.errors.detach(), *wanted])


EXACT, FAST = "ieee", "tf32x3"
JOBS = {
    "encode exact": lambda N: wrong_codes(N, 30, EXACT),
    "encode": lambda N: wrong_codes(N, 30, FAST),
    "encode bfloat16": lambda N: wrong_codes(N, 30, FAST, dtype=torch.bfloat16),
    "encode float16": lambda N: wrong_codes(N, 30, FAST, dtype=torch.float16),
    "encode, tiled exact": lambda N: wrong_codes(N, 260, EXACT),
    "encode, tiled": lambda N: wrong_codes(N, 260, FAST),
    "beam exact": lambda N: wrong_codes(N, 30, EXACT, 4),
    "beam": lambda N: wrong_codes(N, 30, FAST, 4),
    "training exact": lambda N: training_error(N, 30, EXACT),
    "training": lambda N: training_error(N, 30, FAST),
    "training, many lines": lambda N: training_error_of_many_lines(N, 21),
    "training, many lines by codewords": lambda N: training_error_of_many_lines(N, 16),
    "training, tiled exact": lambda N: training_error(N, 260, EXACT),
    "training, tiled": lambda N: training_error(N, 260, FAST),
    "squared": squared_error,
}

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    gpu = {"get_current_target": lambda: GPUTarget("cuda", 80, 32), "get_current_device": lambda: 0}
    triton.runtime.driver.set_active(SimpleNamespace(**gpu, get_current_stream=lambda device: 0))
    JITFunction.run = simulated_launch(int(sys.argv[2]))
    for name in sys.argv[3:] or JOBS:
        compiled.clear(), races.clear()
        errors = [JOBS[name](N) for N in (17, 32)]
        variants = {kernel: len(hashes) for kernel, hashes in compiled.items()}
        print(json.dumps({"job": name, "error": max(errors), "variants": variants, "races": races}), flush=True)
