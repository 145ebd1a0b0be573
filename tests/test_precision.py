"""Products of float32 stay float32, whatever torch's switches for TF32 say, and the switches stay as they were."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import drq_fast
from drq_fast import functional, modes

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "addmm_", "_cdist_forward"}
NEW = hasattr(torch.backends.cuda.matmul, "fp32_precision")


def newer(value: str = "tf32") -> None:
    torch.backends.cuda.matmul.fp32_precision = value


def of_everything() -> None:
    torch.backends.fp32_precision = "tf32"


def older() -> None:
    torch.set_float32_matmul_precision("medium")


def oldest() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def state() -> list[object]:
    """All that torch tells about its switches."""
    found: list[object] = []
    for read in (
        torch.get_float32_matmul_precision,
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda: torch.backends.cuda.matmul.fp32_precision,
        lambda: torch.backends.mkldnn.matmul.fp32_precision,
        lambda: torch.backends.fp32_precision,
    ):
        try:
            found.append(read())
        except (RuntimeError, AttributeError) as error:
            found.append(type(error))
    return found


@pytest.fixture(params=[newer, of_everything, older, oldest])
def reduced(request):
    """Switches TF32 on for one test, in each of torch's ways."""
    if request.param in (newer, of_everything) and not NEW:
        pytest.skip("this torch has one switch only")
    request.param()
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for switch in modes._SWITCHES:
        switch.fp32_precision = "none"


class Products(TorchDispatchMode):
    """Counts products of float32, and those that torch would compute in less."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = self.reduced = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in PRODUCTS and any(
            a.dtype == torch.float32 for a in args if torch.is_tensor(a)
        ):
            self.seen += 1
            self.reduced += modes._precision().reduced
        return func(*args, **(kwargs or {}))


def training(codec, backend):
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    leaves = [t.clone().to(device).requires_grad_() for t in codec(N=6)]
    options = {"gamma": 1.5, "offset": leaves[3], "backend": backend}
    values = [*functional.distortion(*leaves[:3], **options)[:3], *functional.quantize(*leaves[:3], **options)[:2]]
    with torch.no_grad():
        functional.loss(*leaves[:3], **options)
        functional.encode(*leaves[:3], backend=backend)
        functional.encode(*leaves[:3], backend=backend, beam=3)
    if backend != "torch":  # whose gradients are torch's own
        torch.autograd.backward(values, [torch.ones_like(v) for v in values])


def searching(codec, backend):
    x, codebook, scale, offset = codec(N=40)
    codes = functional.encode(x, codebook, scale, offset=offset)
    for metric in ("l2", "ip", "cosine"):
        options = {"offset": offset, "metric": metric, "backend": backend}
        functional.search(x[:5], codes, codebook, scale, k=3, **options)
        functional.adc(x[:5], codes, codebook, scale, **options)


def fitting(codec, backend):
    layer = drq_fast.RecurrentQuantizer(5, 8, 3)
    with drq_fast.use_backend(backend):
        layer.fit(codec(N=300).x, rounds=2, beam=2, seed=0)


@pytest.mark.parametrize(
    ("run", "backend"),
    [(training, "torch"), (training, "triton"), (searching, "torch"), (searching, "native"), (fitting, "torch")],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_products_are_float32_and_switches_stay(codec, reduced, run, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    before = state()
    with Products() as products:
        run(codec, backend)
    assert products.seen
    assert products.reduced == 0
    assert state() == before


def test_threads_do_not_restore_each_others_value(reduced):
    before, first, second = state(), threading.Event(), threading.Event()
    seen: list[bool] = []

    def early() -> None:
        with modes.full_float32():
            first.set()
            second.wait(60)

    def late() -> None:
        first.wait(60)
        with modes.full_float32():
            second.set()
            threads[0].join(60)
            seen.append(modes._precision().reduced)

    threads = [threading.Thread(target=early), threading.Thread(target=late)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [False]
    assert state() == before


@pytest.mark.skipif(not NEW, reason="this torch has one switch only")
def test_what_is_set_meanwhile_is_kept():
    try:
        newer("tf32")
        with modes.full_float32():
            newer("none")
        assert torch.backends.cuda.matmul.fp32_precision == "none"
    finally:
        newer("none")
