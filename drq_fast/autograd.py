"""torch.autograd.Functions around the compiled kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _native


class QuantizationLoss(torch.autograd.Function):
    """`reference.loss` by the native kernels, which form the gradients in the forward pass; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codebook: Tensor,
        scale: Tensor,
        offset: Tensor | None,
        gamma: float,
        weights: tuple[float, float, float],
        omega: Tensor,
        joint: str,
    ) -> tuple[Tensor, Tensor]:
        """(loss, codes [N, M] int64)."""
        result = _native.loss(
            x,
            codebook,
            scale,
            gamma=gamma,
            offset=offset,
            weights=weights,
            omega=omega,
            joint=joint,
            gradients=any(ctx.needs_input_grad[:4]),
        )
        ctx.mark_non_differentiable(result.codes)
        ctx.save_for_backward(result.dx, result.dcodebook, result.dscale)
        ctx.dtypes = [None if t is None else t.dtype for t in (x, codebook, scale, offset)]
        return result.loss, result.codes

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, codebook, scale and offset."""
        if torch.is_grad_enabled():  # create_graph=True: a silent zero would be wrong
            raise RuntimeError('loss: the native backend has no second derivatives; backend="torch" has.')
        dx, dcodebook, dscale = (g if dloss == 1 else g * dloss for g in ctx.saved_tensors)
        doffset = None if ctx.dtypes[3] is None else -dx.sum(dim=0)
        gradients = (dx, dcodebook, dscale, doffset)
        return *(g if g is None else g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)), *[None] * 4
