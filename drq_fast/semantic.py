"""Semantic IDs: a unique code for every item, whose prefixes are shared by similar items (docs/semantic_ids.md)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import checks, files, modes
from .backends.torch import code_dtype
from .codec import Array, Codec, from_file
from .quantizer import RecurrentQuantizer
from .unique import blocks, keys_of, residual, unique_codes

_QUERIES = 1000  # items whose neighbours `metrics` looks at
_TOKEN = re.compile(r"<([a-z]+)_(\d{1,9})>")


class SemanticIds:
    """Unique codes [N, M] of items 0..N-1, in the order in which they were added.

    codec: a Codec, or a layer, of whose parameters a copy is taken. An item has the code that `codec.encode` finds for
    its vector. Items that would share a code get different ones with little additional error: as a rule they differ in
    the last level only. Items that are added later never change the codes of earlier ones. Results are deterministic.

    >>> ids = SemanticIds.build(codec, x, beam=16)
    >>> ids.tokens([0])
    [['<a_12>', '<b_7>', '<c_255>', '<d_31>']]
    >>> ids.find(["<a_12>", "<b_7>"])
    tensor([  0, 811])
    """

    def __init__(self, codec: Codec | RecurrentQuantizer) -> None:
        if not isinstance(codec, (Codec, RecurrentQuantizer)):
            checks.fail(
                "SemanticIds", "codec", "a Codec or a RecurrentQuantizer", type(codec).__name__, error=TypeError
            )
        if isinstance(codec, RecurrentQuantizer):
            codec.require_initialised("SemanticIds")
            codec = codec.codec()
        empty = torch.empty(0, codec.levels, dtype=code_dtype(codec.codewords)).numpy()
        self._take(codec, empty, empty, np.zeros(3))

    def _take(self, codec: Codec, codes: np.ndarray, encoded: np.ndarray, sums: np.ndarray) -> None:
        """sums [3]: squared norms, squared errors of the encoded codes, squared errors of the unique ones."""
        keys = keys_of(codes, codec)
        order = keys.argsort(kind="stable")
        self._codec = codec
        self._set(codes, encoded, sums, keys[order], order)

    def _set(self, *state: np.ndarray) -> None:
        """All that changes when items are added, in one step."""
        self._codes: np.ndarray
        self._encoded: np.ndarray
        self._sums: np.ndarray
        self._keys: np.ndarray
        self._order: np.ndarray
        self.__dict__.update(zip(("_codes", "_encoded", "_sums", "_keys", "_order"), state, strict=True))

    @classmethod
    def build(cls, codec: Codec | RecurrentQuantizer, x: Array, beam: int = 16) -> SemanticIds:
        """The ids of x [N, D], torch or numpy; a wider beam finds better codes and takes longer."""
        ids = cls(codec)
        ids._add("build", x, beam)
        return ids

    def __len__(self) -> int:
        return len(self._codes)

    def __repr__(self) -> str:
        return f"SemanticIds({len(self)} items, codewords={self.codec.codewords}, levels={self.codec.levels})"

    @property
    def codec(self) -> Codec:
        """What encodes the vectors."""
        return self._codec

    @property
    def codes(self) -> Tensor:
        """The unique codes [N, M], uint8 for K <= 256, else int32."""
        return torch.from_numpy(self._codes.copy())

    @property
    def encoded(self) -> Tensor:
        """The codes [N, M] that `codec.encode` found, before they were made unique."""
        return torch.from_numpy(self._encoded.copy())

    def add(self, x: Array, beam: int = 16) -> Array:
        """Adds items with vectors x [n, D], torch or numpy; returns their codes [n, M] in kind."""
        return self._add("add", x, beam)

    def _add(self, op: str, x: Array, beam: int) -> Array:
        values, codec = checks.floats(checks.array(op, "x", x)), self.codec
        checks.vectors(op, "x", values, codec.dim, values.device)
        free = codec.codewords**codec.levels - len(self)
        if len(values) > free:
            checks.fail(op, "x", f"at most {free} vectors, because there are K**M different ids", len(values))
        checks.finite(op, "x", values, torch.float32)
        checks.squarable(op, "x", values)
        with modes.plain(codec.device):
            encoded = codec.encode(values, beam).cpu().numpy()
            codes = unique_codes(codec, values, encoded, self._codes[self._order], self._keys, beam)
            sums = self._sums + _errors(codec, values, encoded, codes)
        keys = keys_of(codes, codec)
        order = keys.argsort(kind="stable")
        places = self._keys.searchsorted(keys[order])
        self._set(
            np.concatenate([self._codes, codes]),
            np.concatenate([self._encoded, encoded]),
            sums,
            np.insert(self._keys, places, keys[order]),
            np.insert(self._order, places, len(self) + order),
        )
        return checks.in_kind(torch.from_numpy(codes.copy()), x)

    def find(self, prefix: str | Sequence[str] | Sequence[int] | Tensor | np.ndarray) -> Tensor:
        """The positions of the items whose codes start with `prefix` (codes or tokens), ascending, int64."""
        if isinstance(prefix, str) or (isinstance(prefix, Sequence) and prefix and isinstance(prefix[0], str)):
            values = self._parsed("find", "prefix", "".join(map(str, prefix)))
        else:
            values = checks.id_array("find", "prefix", prefix).cpu()
        if values.ndim != 1 or len(values) > self.codec.levels:
            checks.fail("find", "prefix", f"of at most {self.codec.levels} levels", checks.shape_of(values))
        checks.code_range("find", values, self.codec.codewords, name="prefix")
        bounds = [keys_of(values.numpy()[None], self.codec, None, fill)[0] for fill in (0, -1)]
        first, last = self._keys.searchsorted(bounds[0]), self._keys.searchsorted(bounds[1], side="right")
        return torch.from_numpy(np.sort(self._order[first:last]))

    def tokens(self, rows: Iterable[int] | Tensor | np.ndarray | None = None) -> list[list[str]]:
        """The ids of these items (default: all) as tokens, one list of M strings such as "<b_7>" per item."""
        codes = self._codes_of("tokens", rows)
        table = np.array(self.vocabulary(), dtype=object).reshape(self.codec.levels, -1)
        return table[np.arange(self.codec.levels), codes].tolist()

    def vocabulary(self) -> list[str]:
        """All M * K tokens: level 0 first, each level in the order of its codewords."""
        return [f"<{_letters(m)}_{k}>" for m in range(self.codec.levels) for k in range(self.codec.codewords)]

    def parse(self, tokens: str | Sequence[str] | Sequence[Sequence[str]]) -> Tensor:
        """The codes of tokens, int64: [L] of one id or prefix, as a list or one string; [n, L] of a list of them."""
        if not isinstance(tokens, str) and not all(isinstance(token, str) for token in tokens):
            parsed = [self.parse(row).tolist() for row in tokens]
            if len({len(row) for row in parsed}) > 1:
                checks.fail("parse", "tokens", "lists of one length", "several lengths")
            return torch.tensor(parsed, dtype=torch.int64)
        return self._parsed("parse", "tokens", "".join(map(str, tokens)))

    def _parsed(self, op: str, name: str, text: str) -> Tensor:
        """The codes [L] of tokens in one string; op and name: what an error calls them."""
        found = _TOKEN.findall(text)
        names = [_letters(m) for m in range(self.codec.levels)]
        right = [name for name, _ in found] == names[: len(found)] and not _TOKEN.sub("", text).strip()
        if not right or any(int(code) >= self.codec.codewords for _, code in found):
            expected = f"one of <a_0> to <a_{self.codec.codewords - 1}>, then one of the next level"
            checks.fail(op, name, expected, repr(text))
        return torch.tensor([int(code) for _, code in found], dtype=torch.int64)

    def metrics(
        self, x: Array | None = None, rows: Iterable[int] | Tensor | np.ndarray | None = None, *, k: int = 10
    ) -> dict[str, Any]:
        """How good the ids are: collisions, errors, use of the codewords and, given x, what neighbours share.

        unique: share of distinct codes before they were made unique. moved: items whose code changed. error_before and
        error_after: sum ||x - xhat||^2 / sum ||x - offset||^2. levels: per level the used codewords, and entropy (bits)
        and perplexity of their frequencies. x [n, D]: the vectors of the items `rows` (default: all); `neighbours` is
        the share of the k nearest of these that agree with an item in the first 1, .. M levels, over up to 1000 items.
        """
        codec, count = self.codec, max(1, len(self))
        energy, before, after = (float(value) for value in self._sums)
        result: dict[str, Any] = {
            "items": len(self),
            "unique": len(np.unique(keys_of(self._encoded, codec))) / count,
            "moved": int((self._codes != self._encoded).any(axis=1).sum()),
            "error_before": before / max(energy, 1e-30),
            "error_after": after / max(energy, 1e-30),
            "levels": [_usage(np.bincount(column, minlength=codec.codewords) / count) for column in self._codes.T],
        }
        if x is not None:
            values, codes = checks.array("metrics", "x", x), self._codes_of("metrics", rows)
            if values.shape != (len(codes), codec.dim) or len(codes) < 2:
                checks.fail(
                    "metrics", "x", f"[{len(codes)}, {codec.dim}] with at least two rows", checks.shape_of(values)
                )
            queries = np.unique(np.linspace(0, len(codes) - 1, _QUERIES).astype(np.int64))
            found = _neighbours(values, queries, checks.integer("metrics", "k", k, 1))
            same = (codes[found] == codes[queries, None]).cumprod(axis=2)
            result["neighbours"] = same.mean(axis=(0, 1)).tolist()
        return result

    def to_json(self, path: str | os.PathLike[str], items: Iterable[Any] | None = None) -> None:
        """Writes {item: tokens} as JSON; items [N]: names of the items, their positions by default."""
        names = map(str, self._names("to_json", items))
        files.write_text(path, json.dumps(dict(zip(names, self.tokens(), strict=True))))

    def to_parquet(self, path: str | os.PathLike[str], items: Iterable[Any] | None = None) -> None:
        """Writes a Parquet table with the columns item, codes and tokens; needs pyarrow."""
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ImportError(
                "to_parquet: pyarrow is missing; `pip install 'drq_fast[parquet]'` installs it."
            ) from error
        columns = {"item": self._names("to_parquet", items), "codes": self._codes.tolist(), "tokens": self.tokens()}
        buffer = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
        files.write_bytes(path, memoryview(buffer.getvalue()))

    def _codes_of(self, op: str, rows: Iterable[int] | Tensor | np.ndarray | None) -> np.ndarray:
        if rows is None:
            return self._codes
        chosen = checks.id_array(op, "rows", rows).cpu().numpy()
        if chosen.dtype == bool or (len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(self)):
            checks.fail(op, "rows", f"positions in 0..{len(self) - 1}", repr(rows))
        return self._codes[chosen]

    def _names(self, op: str, items: Iterable[Any] | None) -> list[Any]:
        names = list(range(len(self)) if items is None else items.tolist() if hasattr(items, "tolist") else items)
        different = len({str(name) for name in names})  # as JSON has them
        if different != len(self) or len(names) != len(self):
            checks.fail(op, "items", f"{len(self)} different names", f"{different} different of {len(names)}")
        return names

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes ids and codec to one safetensors file, atomically."""
        codec = self.codec
        tensors = {"codebook": codec.codebook, "scale": codec.scale, "codes": self.codes, "encoded": self.encoded}
        tensors |= {} if codec.offset is None else {"offset": codec.offset}
        files.write(path, "semantic_ids", tensors, {**codec.settings(), "sums": self._sums.tolist()})

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str | None = None) -> SemanticIds:
        """The ids that `save` wrote; vectors that are added are encoded on `device` (CPU by default)."""
        tensors, config, _ = files.read(path, "semantic_ids")
        ids = cls.__new__(cls)
        with files.describing(path, "semantic ids"):
            codec, codes, sums = from_file(tensors, config, device), tensors["codes"], np.array(config["sums"], float)
            if sums.shape != (3,):
                checks.fail("load", "sums", "3 numbers", config["sums"])
            for name in ("codes", "encoded"):
                value, wanted = tensors[name], (len(codes), codec.levels)
                if value.dtype != code_dtype(codec.codewords) or value.shape != wanted:
                    checks.fail("load", name, f"codes {list(wanted)}", f"{value.dtype} {checks.shape_of(value)}")
                checks.code_range("load", value, codec.codewords, name=name)
            ids._take(codec, codes.numpy(), tensors["encoded"].numpy(), sums)
            if (ids._keys[1:] == ids._keys[:-1]).any():
                checks.fail("load", "codes", "unique", "equal ones")
        return ids


def _errors(codec: Codec, x: Tensor, encoded: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Squared norms of x [n, D] without the offset, and squared errors of both codes [n, M], summed in float64."""
    sums = np.zeros(3)
    for rows in blocks(np.arange(len(x)), codec.dim):
        for i, part in enumerate((codes[rows, :0], encoded[rows], codes[rows])):
            sums[i] += float(residual(codec, x, rows, part).double().square().sum())
    return sums


def _letters(level: int) -> str:
    """a .. z, aa, ab, .."""
    return (_letters(level // 26 - 1) if level >= 26 else "") + chr(ord("a") + level % 26)


def _usage(share: np.ndarray) -> dict[str, float]:
    entropy = float(-(share[share > 0] * np.log2(share[share > 0])).sum())
    return {"used": int((share > 0).sum()), "entropy": entropy, "perplexity": 2**entropy}


def _neighbours(x: Tensor, rows: np.ndarray, k: int) -> np.ndarray:
    """Positions [n, k] of the vectors of x [N, D] that are nearest to x[rows], without these themselves."""
    query, own = x[torch.from_numpy(rows).to(x.device)].float(), torch.from_numpy(rows)[:, None].to(x.device)
    best, ids = query.new_empty(len(rows), 0), own[:, :0]
    first = 0
    for block in x.split(max(1, (1 << 22) // len(rows))):
        block = block.float()
        cost = block.square().sum(dim=1) - 2 * query @ block.T
        places = torch.arange(first, first + len(block), device=x.device).expand_as(cost)
        cost = torch.cat([best, cost.masked_fill(places == own, torch.inf)], dim=1)
        best, order = cost.topk(min(k, len(x) - 1, cost.shape[1]), dim=1, largest=False)
        ids = torch.cat([ids, places], dim=1).gather(1, order)
        first += len(block)
    return ids.cpu().numpy()
