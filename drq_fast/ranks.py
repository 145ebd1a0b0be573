"""Work that all processes of torch.distributed share; alone, a process does it by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def several() -> bool:
    """Whether other processes train with this one."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def summed(*tensors: Tensor, of_rank_zero: Tensor | None = None) -> tuple[Tensor, ...]:
    """The sums over all ranks, by one collective call; `of_rank_zero`, if given, comes last and is not added up.

    All tensors have the same dtype.
    """
    own = () if of_rank_zero is None else (of_rank_zero,)
    if not several():
        return *tensors, *own
    parts = [*tensors, *(each if dist.get_rank() == 0 else torch.zeros_like(each) for each in own)]
    together = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(together)
    sums = together.split([part.numel() for part in parts])
    return tuple(part.view_as(like) for part, like in zip(sums, parts, strict=True))


def on_rank_zero(op: str, module: nn.Module, update: Callable[[], None], *others: Tensor) -> None:
    """Runs `update` on rank 0 and broadcasts the module's tensors and others; an error is raised on every rank."""
    if not several():
        return update()
    tensors = [*module.parameters(), *module.buffers(), *others]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            update()
        except Exception as error:
            failure = error
    reason = [None if failure is None else str(failure)]
    dist.broadcast_object_list(reason, src=0, device=tensors[0].device)
    if failure is not None:
        raise failure
    if reason[0] is not None:
        raise RuntimeError(f"{op}: failed on rank 0: {reason[0]}")
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0)
