"""What calls of the Triton backend ask of torch, traced on the meta device without running a kernel: no read by the
host, no copy from it, few operations, and every launch on the device of its arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import drq_fast
from drq_fast import backends, functional, modes

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are replaced in the interpreter only", allow_module_level=True)

# Each waits for a GPU, or copies numbers from the host.
HOST = ("tensor", "as_tensor", "asarray", "from_numpy", "new_tensor", "item", "tolist", "cpu", "numpy", "nonzero")
HOST += ("__bool__", "__float__", "__int__", "__index__", "masked_select")
FREE = ("detach", "alias", "lift_fresh", "_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty")


def as_tuple(index: object) -> tuple[object, ...]:
    return index if isinstance(index, tuple) else (index,)


class Calls(TorchFunctionMode):
    """Keeps the names of functions that involve the host."""

    def __init__(self) -> None:
        super().__init__()
        self.host: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        by_mask = name in ("__getitem__", "__setitem__") and getattr(args[1], "dtype", None) == torch.bool
        by_list = name == "__getitem__" and any(isinstance(part, list) for part in as_tuple(args[1]))
        if name in HOST or by_mask or by_list:
            self.host.append(name)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Counts operations that start something on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not (func.is_view or func.overloadpacket.__name__ in FREE)
        return func(*args, **(kwargs or {}))


class Trace:
    """Of the second run of a call: the first one copies what later ones share."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.guards = self.launches = self.unguarded = 0
        from triton.runtime import interpreter

        from drq_fast.backends import triton as column

        def choose(op: str, device: str, *_: object) -> object:
            return column if hasattr(column, op) else backends.plain_torch

        monkeypatch.setattr(backends, "choose", choose)
        monkeypatch.setattr(modes, "precise", lambda _: nullcontext())  # autocast does not know the meta device
        monkeypatch.setattr(torch.cuda, "device_of", self.guard)
        monkeypatch.setattr(interpreter.InterpretedFunction, "__getitem__", lambda *_: self.launch)

    @contextmanager
    def guard(self, _: torch.Tensor) -> Iterator[None]:
        self.guards += 1
        yield
        self.guards -= 1

    def launch(self, *_: object, **__: object) -> None:
        self.launches += 1
        self.unguarded += self.guards == 0

    def of(self, call: Callable[[], object]) -> int:
        """The number of torch's operations; nothing may involve the host, and every launch has a guard."""
        call()
        self.launches = 0
        with Calls() as calls, Operations() as operations:
            call()
        assert calls.host == []
        assert self.launches
        assert self.unguarded == 0
        return operations.count


@pytest.fixture
def trace(monkeypatch) -> Trace:
    return Trace(monkeypatch)


def on_meta(**options: object) -> drq_fast.RecurrentQuantizer:
    layer = drq_fast.RecurrentQuantizer(6, 64, 4, **options)
    layer.initialised = True
    return layer.to("meta")


def step(layer: drq_fast.RecurrentQuantizer, **options: object) -> Callable[[], None]:
    """A forward and a backward pass."""
    x = torch.empty(9, 6, device="meta", requires_grad=True)
    upstream = torch.empty(9, 6, device="meta"), torch.empty((), device="meta")

    def run() -> None:
        layer.zero_grad()
        x.grad = None
        quantized, _, loss = layer(x, **options)
        torch.autograd.backward([quantized, loss], upstream)

    return run


WEIGHTS = {"level_weights": (1, 2, 3, 4)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"codebooks": 4, **WEIGHTS},
        {"update": "gradient"},
        {"update": "gradient", "scale": "per_level", "offset": False, **WEIGHTS},
        {"update": "gradient", "codebooks": 2, "gradient": "soft"},
        {"loss": "paper"},
        {"loss": "paper", "gamma": 2.0, "joint": "mse", **WEIGHTS},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", ["plain", "masked"])
def test_a_step_of_the_layer_never_involves_the_host(trace, options, batch):
    some = {"mask": torch.empty(9, dtype=torch.bool, device="meta"), "levels": 3} if batch == "masked" else {}
    assert trace.of(step(on_meta(**options), **some)) > 0  # and `of` asserts that nothing involves the host


@pytest.mark.parametrize(
    ("most", "options"),
    [
        (24, {"update": "gradient", "scale": "per_level"}),
        (30, {"update": "gradient"}),
        (89, {"loss": "paper"}),
        (206, {}),
    ],
)
def test_a_step_of_the_layer_takes_few_operations(trace, most, options):
    assert trace.of(step(on_meta(**options))) <= most


@pytest.mark.parametrize("codebooks", [1, 2])
def test_other_calls_never_involve_the_host(trace, codebooks):
    layer = on_meta(codebooks=codebooks, update="gradient")
    x, codes = torch.empty(9, 6, device="meta"), torch.empty(9, 4, dtype=torch.uint8, device="meta")
    inputs, options = (x, layer.codebook, layer.scale), {"offset": layer.offset, "codebooks": codebooks}
    codec = layer._as_codec()
    trace.of(lambda: functional.encode_checked(x, codec, 1, None))
    trace.of(lambda: functional.encode_checked(x, codec, 8, (1.0, 2.0, 3.0, 4.0)))
    trace.of(lambda: functional.encode_checked(x, codec, 8, None))
    trace.of(lambda: functional.decode_checked(codes, codec))
    trace.of(lambda: functional.quantize(*inputs, gamma=2.0, **options))
    trace.of(lambda: functional.distortion(*inputs, gamma=2.0, **options))
    trace.of(lambda: functional.loss(*inputs, gamma=2.0, level_weights=(1, 2, 3, 4), **options))
    trace.of(lambda: functional.codeword_sums_checked(x, codes.long(), codec, x[:, :4]))
