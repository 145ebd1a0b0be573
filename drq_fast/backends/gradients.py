"""What the autograd Functions of all compiled backends share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def centred(x: Tensor, offset: Tensor | None) -> Tensor:
    """x [n, D] - offset, float32 and contiguous; x itself where it is that already."""
    return (x.float() if offset is None else x.float() - offset.float()).contiguous()


def graphless(*inputs: Tensor | None) -> tuple[Tensor | None, ...]:
    """The inputs, detached where gradients are switched off: an autograd.Function would prepare them otherwise."""
    return inputs if torch.is_grad_enabled() else tuple(None if t is None else t.detach() for t in inputs)


def like_inputs(
    gradients: Iterable[Tensor], x: Tensor, codebook: Tensor, scale: Tensor, offset: Tensor | None
) -> tuple[Tensor | None, ...]:
    """dx, dcodebook, dscale and, of the offset in x - offset, doffset, in the dtypes of the inputs."""
    dx, dcodebook, dscale = gradients
    doffset = None if offset is None else -dx.sum(dim=0).to(offset.dtype)
    return dx.to(x.dtype), dcodebook.to(codebook.dtype), dscale.to(scale.dtype), doffset


def refuse_second_derivatives(op: str, backend: str) -> None:
    """Raises inside a backward pass with create_graph=True: a silent zero would be wrong."""
    if torch.is_grad_enabled():
        raise RuntimeError(f'{op}: the {backend} backend has no second derivatives; backend="torch" has.')
