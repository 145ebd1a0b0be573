"""torch.autograd.Functions around the compiled kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from . import _native


class QuantizationLoss(torch.autograd.Function):
    """`reference.loss` by the native kernels. The gradients are formed in the forward pass, while a tile is in cache:
    the loss is a scalar, so backward only has to multiply them."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
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
        of_hard, of_soft, of_joint = (weight / max(len(x), 1) for weight in weights)

        def weigh(hard: Tensor, soft: Tensor, squared_gap: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
            e_hard, e_soft = hard @ omega, soft @ omega
            value, djoint = of_hard * e_hard.sum() + of_soft * e_soft.sum(), torch.zeros_like(squared_gap)
            if joint == "mse":
                djoint[:, -1] = of_joint
                value = value + of_joint * squared_gap[:, -1].sum()
                sign = torch.zeros_like(e_hard)
            else:
                sign = of_joint * (e_hard - e_soft).sign()
                value = value + of_joint * (e_hard - e_soft).abs().sum()
            return value, ((of_hard + sign)[:, None] * omega, (of_soft - sign)[:, None] * omega, djoint)

        needed = any(ctx.needs_input_grad[:4])  # type: ignore[attr-defined]
        result = _native.loss(x, codebook, scale, gamma=gamma, offset=offset, weigh=weigh, gradients=needed)
        ctx.mark_non_differentiable(result.codes)
        ctx.gradients = (result.dx, result.dcodebook, result.dscale)  # type: ignore[attr-defined]
        ctx.dtypes = (x.dtype, codebook.dtype, scale.dtype)  # type: ignore[attr-defined]
        ctx.offset_dtype = None if offset is None else offset.dtype  # type: ignore[attr-defined]
        return result.value, result.codes

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, codebook, scale and offset."""
        if torch.is_grad_enabled():  # create_graph=True: a silent zero would be wrong
            raise RuntimeError('loss: the native backend has no second derivatives; backend="torch" has.')
        dx, dcodebook, dscale = (
            (g if dloss == 1 else g * dloss).to(dtype) for g, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
        )
        doffset = None if ctx.offset_dtype is None else -dx.sum(dim=0).to(ctx.offset_dtype)
        return dx, dcodebook, dscale, doffset, None, None, None, None
