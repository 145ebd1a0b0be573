"""Codec: what training leaves behind, as a value that encodes, decodes and is searched with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from . import checks, devices, files, functional, modes
from .backends.torch import code_dtype
from .backends.types import Parameters
from .codes import bits
from .pretrained import Pretrained

Array = TypeVar("Array", Tensor, np.ndarray)

_BLOCK = 1 << 24  # floats of x, times the width of the beam, between two updates of the progress bar


class Codec(Parameters, Pretrained):
    """codebook [G * K, D], scale [M] and offset [D] or None, copied as float32 and never changed; safe for threads.

    codebooks: G, the number of codebooks, each of which M / G neighbouring levels share, or how many levels each of
    them serves; 1 is the paper's one for all. Tables that encoding and search derive from them, such as C C^T, are
    computed once and kept: do not write into the tensors. level_weights [M]: how much the error after each level counts
    when a beam compares codes; by default the full length counts most. unit: vectors are divided by their length before
    they are encoded, because only directions matter. `layer.codec()` makes a codec of a trained layer. Codecs compare
    by value and can be pickled.

    >>> codec = layer.codec()
    >>> codes = codec.encode(x)
    >>> x_hat = codec.decode(codes, levels=2)
    """

    dim: int  # D
    codewords: int  # K
    levels: int  # M
    codebooks: int  # G
    level_weights: tuple[float, ...] | None
    unit: bool

    def __init__(
        self,
        codebook: Tensor | np.ndarray,
        scale: Tensor | np.ndarray,
        offset: Tensor | np.ndarray | None = None,
        *,
        codebooks: int | Sequence[int] = 1,
        level_weights: Sequence[float] | None = None,
        unit: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        unit = checks.boolean("Codec", "unit", unit)
        parts = [None if t is None else checks.array("Codec", name, t) for name, t in _named(codebook, scale, offset)]
        groups = checks.codec("Codec", parts[0], parts[1], parts[2], codebooks)
        weights = checks.level_weights("Codec", level_weights, len(groups))
        place = checks.device("Codec", device, parts[0].device)  # type: ignore[union-attr]
        with modes.plain(place):
            # Copies: a product of the same numbers gives other bits where a mapped file has them at odd addresses.
            copies = [None if t is None else t.detach().to(place, torch.float32, copy=True) for t in parts]
            copies = [None if t is None else t.contiguous() for t in copies]
            for name, value in _named(*copies):
                if value is not None:
                    checks.finite("Codec", name, value)
        super().__init__(*copies, groups)  # type: ignore[arg-type, call-arg]
        self.__dict__.update(dim=self.codebook.shape[1], levels=len(groups), codebooks=groups[-1] + 1)
        self.__dict__.update(level_weights=weights, unit=unit)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"Codec: {name} cannot be set; make another codec instead.")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"Codec: {name} cannot be deleted; make another codec instead.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Codec):
            return NotImplemented
        if self.settings() != other.settings():
            return False
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        return all((a is None) == (b is None) and (a is None or torch.equal(a.cpu(), b.cpu())) for a, b in pairs)  # type: ignore[union-attr]

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (*self.tensors(), self.settings())

    def settings(self) -> dict[str, Any]:
        """What a file says about it, beside its tensors."""
        return {"codebooks": self.sizes, "level_weights": self.level_weights, "unit": self.unit}

    def __deepcopy__(self, memo: dict[int, Any]) -> Codec:
        return self

    def __repr__(self) -> str:
        several = "" if self.shared else f", codebooks={self.codebooks}"
        unit = ", unit=True" if self.unit else ""
        sizes = f"dim={self.dim}, codewords={self.codewords}, levels={self.levels}"
        return f"Codec({sizes}{several}, {self.bits} bits{unit})"

    @classmethod
    def from_codebooks(
        cls,
        codebooks: Sequence[Tensor | np.ndarray],
        *,
        offset: Tensor | np.ndarray | None = None,
        level_weights: Sequence[float] | None = None,
        unit: bool = False,
        device: torch.device | str | None = None,
    ) -> Codec:
        """A codec of one codebook [K, D] for each level, without scales, as other libraries train them.

        >>> codec = Codec.from_codebooks([quantizer.codebook for quantizer in pretrained.quantizers])
        """
        op = "from_codebooks"
        if not isinstance(codebooks, (list, tuple)) or not codebooks:
            checks.fail(op, "codebooks", "a list of arrays [K, D]", type(codebooks).__name__, error=TypeError)
        parts = [checks.array(op, f"codebooks[{m}]", part) for m, part in enumerate(codebooks)]
        for m, part in enumerate(parts):
            if part.ndim != 2 or part.shape != parts[0].shape:
                checks.fail(op, f"codebooks[{m}]", "[K, D] as all others", checks.shape_of(part))
        scale, settings = parts[0].new_ones(len(parts)), {"level_weights": level_weights, "unit": unit}
        return cls(torch.cat(parts), scale, offset, codebooks=len(parts), **settings, device=device)  # type: ignore[arg-type]

    @classmethod
    def from_faiss(cls, quantizer: Any, device: torch.device | str | None = None) -> Codec:
        """The codebooks of a trained faiss.ResidualQuantizer, one for each level.

        >>> codec = Codec.from_faiss(theirs.rq)
        """
        from .interop.faiss import codec_from_faiss

        return codec_from_faiss(quantizer, device)

    @property
    def bits(self) -> int:
        """Length of a full code in bits; `levels` parts of equal length make it up."""
        return bits(self.codewords, self.levels)

    def encode(self, x: Array, beam: int = 1, levels: int | None = None) -> Array:
        """x [..., D], torch or numpy -> codes [..., levels] in kind: uint8 for K <= 256, else int32."""
        return encode(x, self, beam, self.level_weights, levels, unit=self.unit)

    def decode(self, codes: Array, levels: int | Tensor | None = None) -> Array:
        """codes [..., M], torch or numpy -> vectors [..., D] in kind, from the first `levels` levels."""
        return decode(codes, self, levels)

    def prefix(self, levels: int) -> Codec:
        """The codec of the first `levels` levels: its codes are the first columns of this one's greedy codes."""
        levels = checks.integer("prefix", "levels", levels, 1, self.levels)
        weights = (
            None if self.level_weights is None or not any(self.level_weights[:levels]) else self.level_weights[:levels]
        )
        part = self.part(slice(0, levels))
        return Codec(*part.tensors(), codebooks=part.sizes, level_weights=weights, unit=self.unit)

    def to(self, device: torch.device | str) -> Codec:
        """The same on a device: itself if it is there already."""
        place = checks.device("to", device, self.device)
        return self if place == self.device else Codec(*self.tensors(), **self.settings(), device=place)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the codec to a safetensors file, atomically."""
        tensors = {name: value for name, value in _named(*self.tensors()) if value is not None}
        files.write(path, "codec", tensors, self.settings())

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str | None = None) -> Codec:
        """The codec that `save` wrote, on `device` (CPU by default)."""
        tensors, config, _ = files.read(path, "codec")
        with files.describing(path, "a codec"):
            return from_file(tensors, config, device)


def from_file(tensors: dict[str, Tensor], config: dict[str, Any], device: torch.device | str | None) -> Codec:
    """The codec in the tensors and the config of a file; ValueError, TypeError or KeyError where there is none."""
    parts = {"codebook": tensors["codebook"], "scale": tensors["scale"], "offset": tensors.get("offset")}
    for name, value in parts.items():
        if value is not None and value.dtype != torch.float32:
            checks.fail("load", name, "torch.float32", value.dtype, error=TypeError)
    place = checks.device("load", device, torch.device("cpu"))
    settings = {"level_weights": config["level_weights"], "unit": config.get("unit", False)}  # new in 0.2.0
    settings |= {"codebooks": config.get("codebooks", 1)}  # likewise
    return Codec(**parts, **settings, device=place)  # type: ignore[arg-type]


def encode(
    x: Array,
    codec: Parameters,
    beam: int,
    level_weights: Sequence[float] | None,
    levels: int | None = None,
    *,
    unit: bool = False,
) -> Array:
    """x [..., D], torch or numpy -> codes [..., levels] in kind, with a progress bar where it takes long.

    level_weights: `default_weights` if None. unit: x is divided by its length first. x may be on another device than
    the codec: it is moved a block at a time.
    """
    values = checks.array("encode", "x", x)
    rows, beam = checks.rows("encode", "x", values, codec.codebook.shape[1]), checks.beam("encode", beam)
    M = checks.levels("encode", levels, len(codec.scale))
    if len(codec.scale) > M:
        codec = codec.part(slice(0, M))
    K, D, device = codec.codewords, codec.codebook.shape[1], codec.device
    weights = () if level_weights is None else level_weights[:M]
    omega = weights if any(weights) else functional.default_weights(M)
    dtype = torch.promote_types(codec.codebook.dtype, torch.float32)
    step = max(1, _BLOCK // (D * beam))

    def found(some: Tensor) -> Tensor:
        return functional.encode_checked(directions(some) if unit else some, codec, beam, omega)

    with torch.no_grad():
        if len(rows) <= step:
            codes = found(rows.to(device, dtype))
        else:
            codes = torch.empty(len(rows), M, dtype=code_dtype(K), device=device)
            with tqdm(total=len(rows), desc="encode", unit="vectors", delay=2, disable=None, leave=False) as bar:
                for part, out in zip(devices.moved(rows.split(step), device, dtype), codes.split(step), strict=True):
                    out.copy_(found(part))
                    bar.update(len(part))
    return checks.in_kind(codes.reshape(*values.shape[:-1], M), x)


def directions(x: Tensor) -> Tensor:
    """x [N, D] divided by its lengths, which may be as large or small as float32 has them; zeros stay zeros."""
    largest = x.abs().amax(dim=1, keepdim=True) if x.numel() else x.new_zeros(len(x), 1)
    x = x / torch.where(largest > 0, largest, 1)
    lengths = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return x / torch.where(lengths > 0, lengths, 1)


def decode(codes: Array, codec: Parameters, levels: int | Tensor | None) -> Array:
    """codes [..., M], torch or numpy -> vectors [..., D] in kind, from the first `levels` levels, an int or [...]."""
    values = checks.array("decode", "codes", codes, integer=True).to(codec.codebook.device)
    flat = checks.code_rows("decode", values, len(codec.scale))
    checks.code_range("decode", flat, codec.codewords)
    L, lengths = checks.level_numbers("decode", levels, flat.shape[1], values.shape[:-1], values.device)
    with torch.no_grad():
        x_hat = functional.decode_checked(flat[:, :L], codec, lengths=lengths)
    return checks.in_kind(x_hat.reshape(*values.shape[:-1], codec.codebook.shape[1]), codes)


def _named(codebook: Any, scale: Any, offset: Any) -> tuple[tuple[str, Any], ...]:
    return ("codebook", codebook), ("scale", scale), ("offset", offset)


def _made(codebook: Tensor, scale: Tensor, offset: Tensor | None, settings: Any) -> Codec:
    if not isinstance(settings, dict):  # a pickle of an earlier version has the level weights alone
        settings = {"level_weights": settings}
    return Codec(codebook, scale, offset, **settings)
