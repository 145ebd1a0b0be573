"""The passes of the Triton backend as operations of torch.library: code of torch.compile calls them as they are.

A codec is given by codebook, scale, offset and groups. Without torch.compile, `triton` calls the passes by
autograd.Functions, which cost the host less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import passes
from . import torch as definition
from .types import Parameters

_CODEC = "Tensor codebook, Tensor scale, Tensor? offset"


def _register(name: str, schema: str, run: Callable[..., Any], like: Callable[..., Any]) -> Any:
    """The operation drq_fast::name; `like` makes results of the same shapes and dtypes without computing."""
    made = torch.library.custom_op(f"drq_fast::{name}", run, mutates_args=(), schema=schema)
    made.register_fake(like)
    return made


def _gradients(found: passes.Gradients) -> list[Tensor]:
    return [gradient for gradient in found if gradient is not None]  # an offset that is None has none


def _gradients_like(x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None) -> list[Tensor]:
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format)
        for t in (x, codebook, scale, offset)
        if t is not None
    ]


def _padded(gradients: list[Tensor], count: int) -> tuple[Tensor | None, ...]:
    return *gradients, *[None] * (count - len(gradients))


def _columns(x: Tensor, scale: Tensor, count: int) -> list[Tensor]:
    return [x.new_empty(len(x), len(scale), dtype=torch.float32) for _ in range(count)]


def _codes_like(x: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(len(x), len(scale), dtype=torch.int64)


def _register_soft(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], like: Callable[..., Any]
) -> Any:
    """An operation with gamma, whose results are differentiable ones, codes, and three that its backward pass needs."""
    errors = 3 if name == "distortion" else 2
    inputs, numbers = f"Tensor x, {_CODEC}, Tensor gamma, str precision", ", ".join(["Tensor"] * (errors + 4))

    def run(x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None, gamma: Tensor, precision: str) -> Any:
        return forward(x, Parameters(codebook, scale, offset), gamma, precision)

    def run_backward(
        x: Tensor,
        codebook: Tensor,
        scale: Tensor,
        offset: Tensor | None,
        gamma: Tensor,
        precision: str,
        kept: list[Tensor],
        upstream: list[Tensor],
    ) -> list[Tensor]:
        return _gradients(
            backward(x, Parameters(codebook, scale, offset), gamma, precision, tuple(kept), tuple(upstream))
        )

    gradients = _register(
        f"{name}_backward",
        f"({inputs}, Tensor[] kept, Tensor[] upstream) -> Tensor[]",
        run_backward,
        lambda x, codebook, scale, offset, *_: _gradients_like(x, codebook, scale, offset),
    )
    made = _register(name, f"({inputs}) -> ({numbers})", run, like)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.precision = inputs
        ctx.save_for_backward(*tensors, *output[errors:])

    def differentiate(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, codes, scores, residuals, last = ctx.saved_tensors
        kept = [codes, scores, residuals, last]
        return _padded(gradients(*tensors, ctx.precision, kept, list(upstream[:errors])), 6)

    made.register_autograd(differentiate, setup_context=keep)
    return made


def _distortion_like(x: Tensor, codebook: Tensor, scale: Tensor, *_: Any) -> tuple[Tensor, ...]:
    from ..kernels.distortion import padded_codewords

    scores = x.new_empty(len(x), padded_codewords(len(codebook)), dtype=torch.float32)
    return *_columns(x, scale, 3), _codes_like(x, scale), scores, *_columns(x, scale, 2)


def _quantize_like(x: Tensor, codebook: Tensor, scale: Tensor, *_: Any) -> tuple[Tensor, ...]:
    from ..kernels.distortion import padded_codewords

    scores, delta = (x.new_empty(len(x), padded_codewords(len(codebook)), dtype=torch.float32) for _ in range(2))
    soft, hard = (x.new_empty(x.shape, dtype=torch.float32) for _ in range(2))
    return soft, hard, _codes_like(x, scale), scores, *_columns(x, scale, 1), delta


distortion = _register_soft("distortion", passes.distortion, passes.distortion_backward, _distortion_like)
quantize = _register_soft("quantize", passes.quantize, passes.quantize_backward, _quantize_like)


_squared_errors_backward = _register(
    "squared_errors_backward",
    f"(Tensor x, {_CODEC}, int[] groups, float commitment, Tensor codes, Tensor derrors) -> Tensor[]",
    lambda x, codebook, scale, offset, groups, commitment, codes, derrors: _gradients(
        passes.squared_errors_backward(
            x, Parameters(codebook, scale, offset, tuple(groups)), commitment, codes, derrors
        )
    ),
    lambda x, codebook, scale, offset, *_: _gradients_like(x, codebook, scale, offset),
)
squared_errors = _register(
    "squared_errors",
    f"(Tensor x, {_CODEC}, int[] groups, float commitment, str precision) -> (Tensor, Tensor)",
    lambda x, codebook, scale, offset, groups, commitment, precision: passes.squared_errors(
        x, Parameters(codebook, scale, offset, tuple(groups)), commitment, precision
    ),
    lambda x, codebook, scale, *_: (*_columns(x, scale, 1), _codes_like(x, scale)),
)


def _keep_codes(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.groups, ctx.commitment, _ = inputs
    ctx.save_for_backward(*tensors, output[1])


def _differentiate_squared(ctx: Any, derrors: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, codes = ctx.saved_tensors
    return _padded(_squared_errors_backward(*tensors, ctx.groups, ctx.commitment, codes, derrors), 7)


squared_errors.register_autograd(_differentiate_squared, setup_context=_keep_codes)

codeword_sums = _register(
    "codeword_sums",
    f"(Tensor x, Tensor codes, {_CODEC}, int[] groups, Tensor weights) -> (Tensor, Tensor)",
    lambda x, codes, codebook, scale, offset, groups, weights: tuple(
        passes.codeword_sums(x, codes, Parameters(codebook, scale, offset, tuple(groups)), weights)
    ),
    lambda x, codes, codebook, *_: (
        x.new_empty(codebook.shape, dtype=torch.float32),
        x.new_empty(len(codebook), dtype=torch.float32),
    ),
)
encode = _register(
    "encode",
    f"(Tensor x, {_CODEC}, int[] groups, int beam, Tensor? omega, str precision) -> Tensor",
    lambda x, codebook, scale, offset, groups, beam, omega, precision: passes.encode(
        x, Parameters(codebook, scale, offset, tuple(groups)), beam, omega, precision
    ),
    lambda x, codebook, scale, offset, groups, *_: x.new_empty(
        len(x), len(scale), dtype=definition.code_dtype(len(codebook) // (groups[-1] + 1))
    ),
)
decode = _register(
    "decode",
    f"(Tensor codes, {_CODEC}, int[] groups) -> Tensor",
    lambda codes, codebook, scale, offset, groups: passes.decode(
        codes, Parameters(codebook, scale, offset, tuple(groups))
    ),
    lambda codes, codebook, *_: codebook.new_empty(len(codes), codebook.shape[1]),
)
