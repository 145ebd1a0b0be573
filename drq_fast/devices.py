"""What lies on a GPU: numbers of Python, copied there once; rows from host memory; and what its streams share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_MOST = 4096  # tensors that are kept; further ones are copied in every call

_kept: dict[tuple[float | tuple[float, ...], torch.dtype, torch.device], Tensor] = {}


def tensor_of(values: float | tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values as a tensor, which nobody may change: later calls return the same.

    A copy from the host makes it wait for a GPU, and cannot be captured in a CUDA graph. The first call copies.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return torch.tensor(values, dtype=dtype, device=device)
    key = values, dtype, device
    found = _kept.get(key)
    if found is None:
        with torch.inference_mode(False):
            found = torch.tensor(values, dtype=dtype, device=device)
        if type(found) is Tensor and len(_kept) < _MOST:  # others, such as those of FakeTensorMode, belong to a trace
            found = _kept.setdefault(key, found)
    return found


def moved(parts: Iterable[Tensor], device: torch.device, dtype: torch.dtype) -> Iterator[Tensor]:
    """The parts on a device. From host memory to a GPU each is copied while the one before is computed with.

    parts: [n, D] each, none longer than the first. Two pinned buffers take turns: while the GPU copies from one, on a
    stream of its own, the host fills the other.
    """
    buffers: list[tuple[Tensor, torch.cuda.Event]] = []
    stream = None
    for i, part in enumerate(parts):
        if device.type != "cuda" or part.device.type != "cpu":
            yield part.to(device, dtype)
            continue
        stream = stream or torch.cuda.Stream(device)
        if i < 2:
            shape = buffers[0][0].shape if buffers else part.shape
            buffers.append((torch.empty(shape, dtype=dtype, pin_memory=True), torch.cuda.Event()))
        buffer, copied = buffers[i % 2]
        copied.synchronize()  # returns at once where nothing was copied yet
        pinned = buffer[: len(part)].copy_(part)
        with torch.cuda.stream(stream):
            tile = pinned.to(device, non_blocking=True)
            copied.record(stream)
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        tile.record_stream(current)
        yield tile


def captures(device: torch.device) -> bool:
    """Whether the current stream of a GPU is being captured in a CUDA graph."""
    return device.type == "cuda" and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


def finish(device: torch.device) -> None:
    """Waits until the current stream of a GPU has done its work: other streams may read the results from now on."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def read_here(tensors: Iterable[Tensor | None], device: torch.device) -> None:
    """Keeps the memory of tensors until the current stream of a GPU has read them, whatever stream made them."""
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)
