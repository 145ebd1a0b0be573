"""The Triton kernels, in the interpreter or on a GPU, and the native code beside the float64 reference."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from drq_fast import functional
from drq_fast.backends.torch import levels as definition
from drq_fast.backends.types import Parameters

from .common import require

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("x", "codebook", "scale", "offset")
FEW = 1e-6  # relative error that float32 may have where the native code happens to have less
ROUNDING = 1e-5  # of squared distances, relative to the largest terms in them


class Case(NamedTuple):
    """Inputs of the kernels, some of them with strides of their own; gamma fits their magnitude."""

    x: Tensor
    codebook: Tensor
    scale: Tensor
    offset: Tensor | None
    gamma: float
    kind: str

    @property
    def given(self) -> list[Tensor]:
        return [t for t in self[:4] if isinstance(t, Tensor)]

    def __str__(self) -> str:
        (N, D), K, M = self.x.shape, len(self.codebook), len(self.scale)
        return f"{self.kind}, N {N}, D {D}, K {K}, M {M}, offset {self.offset is not None}, gamma {self.gamma:.3g}"


def kernels(dice: random.Random, folder: Path) -> int:
    case = random_case(dice)
    {"squared": squared, "distortion": distortion, "quantize": quantize, "encode": encode}[
        dice.choice(("squared", "distortion", "distortion", "quantize", "encode"))
    ](case, dice)
    return 1


def random_case(dice: random.Random) -> Case:
    """D 1 to 513, K 2 to 1025, M 1 to 20, small ones more often; of any magnitude that float32 can square.

    Long codes of many codewords are rare, because the interpreter takes seconds for each.
    """
    ranges = {"D": (1, 513), "K": (2, 1025), "M": (1, 20)}
    D, K, M = (round(math.exp(dice.uniform(*map(math.log, limits)))) for limits in ranges.values())
    if K > 256 and dice.random() < 0.95:
        M = min(M, 3)
    N = dice.randint(1, 12)
    kind = dice.choice(("plain", "plain", "hits", "near hits", "near duplicates", "small", "large"))
    generator = torch.Generator().manual_seed(dice.getrandbits(32))

    def normal(*shape: int) -> Tensor:
        values = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator)
        return values[..., ::2] if dice.random() < 0.3 else values[..., : shape[-1]].contiguous()

    x, codebook = normal(N, D), normal(K, D)
    scale = torch.tensor([dice.choice((1, 1, -1)) * dice.uniform(0.3, 1) ** m for m in range(M)])
    offset = normal(D) if dice.random() < 0.5 else None
    if kind == "near duplicates":
        codebook = codebook[torch.arange(K) // 2] * (1 + 3e-7 * normal(K, 1))
    if "hits" in kind:
        depth = dice.randint(1, M)
        codes = torch.randint(K, (N, depth), generator=generator)
        x = (scale[:depth, None] * codebook[codes]).sum(dim=1) + (0 if offset is None else offset)
        x = x + (dice.choice((1e-2, 3e-3, 1e-4)) * normal(N, D) if kind == "near hits" else 0)
    size = {"small": 10 ** dice.uniform(-14, -3), "large": 10 ** dice.uniform(3, 14)}.get(kind, 1.0)
    x, codebook, offset = x * size, codebook * size, None if offset is None else offset * size
    return Case(x, codebook, scale, offset, 10 ** dice.uniform(-1, 1) / size / math.sqrt(D), kind)


def squared(case: Case, dice: random.Random) -> None:
    commitment = dice.choice((0.0, 0.25, 1.0))

    def run(codec: Parameters, x: Tensor, backend: str) -> tuple[list[Tensor], Tensor]:
        found = functional.squared_errors(
            x, codec.codebook, codec.scale, offset=codec.offset, commitment=commitment, backend=backend
        )
        return [found.errors], found.codes

    def truth(codec: Parameters, x: Tensor, codes: Tensor) -> list[Tensor]:
        x_hat, errors = torch.zeros_like(x) if codec.offset is None else codec.offset.expand(x.shape), []
        for m, s in enumerate(codec.scale):
            x_hat = x_hat + s * codec.codebook[codes[:, m]]
            of_codec, of_x = (x.detach() - x_hat).square().sum(dim=1), (x - x_hat.detach()).square().sum(dim=1)
            errors.append(of_codec + commitment * of_x)
        return [torch.stack(errors, dim=1)]

    compare(case, run, truth, dice)


def distortion(case: Case, dice: random.Random) -> None:
    def run(codec: Parameters, x: Tensor, backend: str) -> tuple[list[Tensor], Tensor]:
        options = {"gamma": case.gamma, "offset": codec.offset, "backend": backend}
        found = functional.distortion(x, codec.codebook, codec.scale, **options)
        return list(found[:3]), found.codes

    def truth(codec: Parameters, x: Tensor, codes: Tensor) -> list[Tensor]:
        return list(definition.distortion(x, codec, case.gamma, by_codes(codes, case.gamma))[:3])

    compare(case, run, truth, dice)


def quantize(case: Case, dice: random.Random) -> None:
    def run(codec: Parameters, x: Tensor, backend: str) -> tuple[list[Tensor], Tensor]:
        options = {"gamma": case.gamma, "offset": codec.offset, "backend": backend}
        found = functional.quantize(x, codec.codebook, codec.scale, **options)
        return list(found[:2]), found.codes

    def truth(codec: Parameters, x: Tensor, codes: Tensor) -> list[Tensor]:
        return list(definition.quantize(x, codec, case.gamma, by_codes(codes, case.gamma))[:2])

    compare(case, run, truth, dice)


def encode(case: Case, dice: random.Random) -> None:
    """Greedy codes have the distances of the best ones; and decoding."""
    tensors = [t.to(DEVICE) for t in case.given]
    offset = None if case.offset is None else tensors[3]
    codes = functional.encode(*tensors[:3], offset=offset, backend="triton")
    require_best(case, codes.cpu().long())
    values = functional.decode(codes, *tensors[1:3], offset=offset, backend="triton").cpu().double()
    wide = [t.double() for t in case.given]
    expected = (wide[2][:, None] * wide[1][codes.cpu().long()]).sum(dim=1) + (0 if case.offset is None else wide[3])
    largest = wide[1].abs().max() * wide[2].abs().sum() + (0 if case.offset is None else wide[3].abs().max())
    require(bool(((values - expected).abs() <= 1e-6 * largest).all()), f"decode: {case}")


def by_codes(codes: Tensor, gamma: float) -> definition.OneLevel:
    """The definition of one level with given codes, and distances that do not cancel."""

    def level(m: int, h: Tensor, codebook: Tensor, s: Tensor) -> definition.Level:
        distance = definition.root((h[:, None] - s * codebook).square().sum(dim=2))
        soft = s * (torch.softmax(-gamma * distance, dim=1) @ codebook)
        return definition.Level(codes[:, m], s * codebook[codes[:, m]], soft)

    return level


Run = Callable[[Parameters, Tensor, str], tuple[list[Tensor], Tensor]]
Truth = Callable[[Parameters, Tensor, Tensor], list[Tensor]]


def compare(case: Case, run: Run, truth: Truth, dice: random.Random) -> None:
    """Errors of Triton's values and gradients are at most three times those of the native code.

    Native errors of a few numbers may be small by chance. Where one gradient upstream says so, 16 of them decide.
    """
    seed = dice.getrandbits(32)
    if too_large(case, run, truth, [seed]) and (found := too_large(case, run, truth, list(range(seed, seed + 16)))):
        require(False, f"{run.__qualname__}: {found}: {case}")


def too_large(case: Case, run: Run, truth: Truth, seeds: list[int]) -> str | None:
    """What is off by more, if anything is, in root mean square over gradients upstream of these seeds."""
    errors: dict[str, list[float]] = {}
    for backend, device in (("triton", DEVICE), ("native", "cpu")):
        leaves = [t.detach().to(device).requires_grad_() for t in case.given]
        values, codes = run(codec_of(leaves), leaves[0], backend)
        require_best(case, codes.cpu())
        wide = [t.detach().double().requires_grad_() for t in case.given]
        true_values = truth(codec_of(wide), wide[0], codes.cpu())
        squares, sizes = [0.0] * len(values + leaves), [0.0] * len(values + leaves)
        for seed in seeds:
            gradients = torch.autograd.grad(values, leaves, upstream_of(values, seed), retain_graph=True)
            true_gradients = torch.autograd.grad(true_values, wide, upstream_of(true_values, seed), retain_graph=True)
            found = [v.detach().cpu().double() for v in (*values, *gradients)]
            true = [v.detach() for v in (*true_values, *true_gradients)]
            require(all(bool(v.isfinite().all()) for v in found), f"not finite by {backend}: {case}")
            squares = [old + float((a - b).norm()) ** 2 for old, a, b in zip(squares, found, true, strict=True)]
            sizes = [old + float(b.norm()) ** 2 for old, b in zip(sizes, true, strict=True)]
        errors[backend] = [math.sqrt(square) for square in squares]
    names = [f"value {i}" for i in range(len(values))] + [f"gradient of {name}" for name in NAMES]
    for name, ours, native, size in zip(names, errors["triton"], errors["native"], sizes, strict=False):
        if ours > 3 * native + FEW * math.sqrt(size):
            return f"{name} is off by {ours:.3g}, native by {native:.3g}, of {math.sqrt(size):.3g}"
    return None


def codec_of(leaves: list[Tensor]) -> Parameters:
    return Parameters(leaves[1], leaves[2], leaves[3] if len(leaves) == 4 else None)


def upstream_of(values: list[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(v.shape, generator=generator).to(v) for v in values]


def require_best(case: Case, codes: Tensor) -> None:
    """At every level the chosen codeword is as near as the nearest, up to rounding."""
    h, codebook = case.x.double(), case.codebook.double()
    h = h if case.offset is None else h - case.offset.double()
    length, longest = h.norm(dim=1), float(codebook.norm(dim=1).max())
    for m, s in enumerate(case.scale.double()):
        squares = (h[:, None] - s * codebook).square().sum(dim=2)
        chosen = squares.gather(1, codes[:, m, None])[:, 0]
        largest = (h.norm(dim=1) + length / 16) * s.abs() * longest + (s * longest).square()
        excess = chosen - squares.min(dim=1).values
        require(
            bool((excess <= ROUNDING * largest).all()),
            f"level {m} is not the nearest by {float((excess / largest).max()):.3g}: {case}",
        )
        h = h - s * codebook[codes[:, m]]
