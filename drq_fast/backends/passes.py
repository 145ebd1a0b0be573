"""The passes of the Triton backend without autograd, each on the device of its inputs and in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .. import devices, modes
from ..kernels import beam as beams
from ..kernels import decode as decoding
from ..kernels import distortion as kernels
from ..kernels import encode as encoding
from ..kernels import quantize as quantizing
from ..kernels import squared
from . import torch as definition
from .gradients import centred, like_inputs
from .types import CodewordSums, Parameters

Gradients = tuple[Tensor | None, ...]  # of x, codebook, scale and offset


@contextmanager
def _on(tensor: Tensor) -> Iterator[None]:
    """A context that launches kernels on the device of a tensor and multiplies in float32."""
    with torch.cuda.device_of(tensor), modes.precise(tensor.device.type):
        yield


def distortion(x: Tensor, codec: Parameters, gamma: Tensor, precision: str) -> tuple[Tensor, ...]:
    """(hard, soft, joint, codes), [N, M] each; then what the backward pass needs: scores, residuals, soft squared."""
    with _on(x):
        scored, h = kernels.codec_of(codec.codebook, codec.scale), centred(x, codec.offset)
        scores = scored.scores(h)
        levels = kernels.distortion(h, scored, scores, gamma, precision)
        roots = levels.residuals.clamp_min(0).sqrt(), levels.soft.clamp_min(0).sqrt()
        return *roots, levels.joint.clamp_min(0), levels.codes, scores, levels.residuals, levels.soft


def distortion_backward(
    x: Tensor,
    codec: Parameters,
    gamma: Tensor,
    precision: str,
    kept: tuple[Tensor, ...],
    upstream: tuple[Tensor, ...],
) -> Gradients:
    """Gradients from those of hard, soft and joint; kept: codes and the last three results of `distortion`."""
    with _on(x):
        codes, scores, residuals, soft = kept
        scored, levels = kernels.codec_of(codec.codebook, codec.scale), kernels.Levels(codes, residuals, soft, soft)
        inputs = centred(x, codec.offset), scored, scores, gamma, levels
        return like_inputs(kernels.distortion_backward(*inputs, *upstream, precision), x, *codec.tensors())


def quantize(x: Tensor, codec: Parameters, gamma: Tensor, precision: str) -> tuple[Tensor, ...]:
    """(soft [N, D], hard [N, D], codes [N, M]) without the offset added back; then scores, residuals and delta."""
    with _on(x):
        scored, h = kernels.codec_of(codec.codebook, codec.scale), centred(x, codec.offset)
        scores = scored.scores(h)
        choices = quantizing.choose(h, scored, scores, gamma, precision)
        approximations = quantizing.approximations(scored, choices)
        return *approximations, choices.codes, scores, choices.residuals, choices.delta


def quantize_backward(
    x: Tensor,
    codec: Parameters,
    gamma: Tensor,
    precision: str,
    kept: tuple[Tensor, ...],
    upstream: tuple[Tensor, ...],
) -> Gradients:
    """Gradients from those of soft and hard; kept: codes and the last three results of `quantize`."""
    with _on(x):
        codes, scores, residuals, delta = kept
        scored, choices = kernels.codec_of(codec.codebook, codec.scale), quantizing.Choices(codes, residuals, delta)
        inputs = centred(x, codec.offset), scored, scores, gamma, choices
        return like_inputs(quantizing.quantize_backward(*inputs, *upstream, precision), x, *codec.tensors())


def squared_errors(x: Tensor, codec: Parameters, commitment: float, precision: str) -> tuple[Tensor, Tensor]:
    """(errors, codes), [N, M] each."""
    with _on(x):
        codes = encode_greedy(x, codec, precision, torch.int64)
        return squared.squared_errors(x, *codec.tensors(), codec.rows(codes)).mul_(1 + commitment), codes


def squared_errors_backward(
    x: Tensor, codec: Parameters, commitment: float, codes: Tensor, derrors: Tensor
) -> Gradients:
    """Gradients from those of the errors."""
    with _on(x):
        codebook, scale, offset = codec.tensors()
        by_row, dcodebook, dscale = squared.squared_errors_backward(x, *codec.tensors(), codec.rows(codes), derrors)
        doffset = None if offset is None else by_row.sum(dim=0).to(offset.dtype)
        return by_row.mul_(-commitment).to(x.dtype), dcodebook.to(codebook.dtype), dscale.to(scale.dtype), doffset


def codeword_sums(x: Tensor, codes: Tensor, codec: Parameters, weights: Tensor) -> CodewordSums:
    """See `backends.torch.codeword_sums`."""
    with _on(x):
        return CodewordSums(*squared.codeword_sums(x, *codec.tensors(), codec.rows(codes), weights))


def encode(x: Tensor, codec: Parameters, beam: int, omega: Tensor | None, precision: str) -> Tensor:
    """See `backends.torch.encode`."""
    codebook, scale, offset = codec.tensors()
    with _on(x):
        if beam == 1:
            return encode_greedy(x, codec, precision)
        omega = devices.tensor_of((1.0,) * len(scale), torch.float32, x.device) if omega is None else omega
        options = {"offset": offset, "groups": codec.groups, "precision": precision}
        later = definition.still_to_come(omega)
        return beams.encode_beam(x, codebook, scale, beam=beam, omega=omega, still_to_come=later, **options)


def encode_greedy(x: Tensor, codec: Parameters, precision: str, dtype: torch.dtype | None = None) -> Tensor:
    """Greedy codes [N, M] of x [N, D], by default uint8 for K <= 256, else int32."""
    codebook, scale, offset = codec.tensors()
    if codec.shared:
        return encoding.encode(x, codebook, scale, offset=offset, precision=precision, dtype=dtype)

    def encode_group(h: Tensor, group: Parameters) -> Tensor:
        return encoding.encode(h, group.codebook, group.scale, precision=precision, dtype=dtype)

    return definition.encode_by_groups(centred(x, offset), codec, encode_group)


def decode(codes: Tensor, codec: Parameters) -> Tensor:
    """See `backends.torch.decode`."""
    with _on(codes):
        return decoding.decode(codes if codec.shared else codec.rows(codes), *codec.tensors())
