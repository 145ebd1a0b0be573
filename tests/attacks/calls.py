"""Calls with arguments of all sorts: an error of the documented kinds, or a result."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drq_fast
from drq_fast import Index, RecurrentQuantizer, functional

from .common import random_codec, random_vectors, require

ODD: tuple[Any, ...] = (
    None,
    -1,
    0,
    1,
    3,
    10**400,
    0.5,
    float("nan"),
    float("inf"),
    "x",
    b"",
    True,
    [],
    [[]],
    {},
    object(),
)


def calls(dice: random.Random, folder: Path) -> int:
    codec = random_codec(dice)
    layer = RecurrentQuantizer(codec.dim, codec.codewords, codec.levels, update=dice.choice(("ema", "gradient")))
    x = random_vectors(dice, 30, codec.dim)
    layer.initialise(x, seed=0)
    index, codes = Index(codec, vectors=dice.choice((None, "int8"))), codec.encode(x)
    index.add(x)

    def odd(usual: Any) -> Any:
        tensors = (
            x[:, :1],
            x.double(),
            x.half(),
            x * float("nan"),
            x * 1e20,
            x.numpy()[::-1],
            x.to_sparse(),
            codes,
            codes.long() - 9,
            x[0],
        )
        return usual if dice.random() < 0.5 else dice.choice((*ODD, *tensors))

    targets: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
        (index.search, (x,), {"k": 3, "levels": None, "keep": None}),
        (index.search, (x,), {"k": 3, "recall": None, "probes": None, "refine": None, "vectors": None}),
        (index.tune, (x,), {"k": 3}),
        (Index, (codec,), {"metric": "ip", "vectors": "int8", "centroids": x}),
        (index.add, (x,), {"ids": None, "beam": 1}),
        (index.remove, ([0],), {}),
        (index.upsert, (x, list(range(30))), {}),
        (codec.encode, (x,), {"beam": 2, "levels": 1}),
        (codec.decode, (codes,), {"levels": 1}),
        (codec.prefix, (1,), {}),
        (layer, (x,), {"levels": None, "mask": None, "reduction": "mean", "reconstruct": True}),
        (layer.embed, (codes,), {}),
        (layer.usage, (codes,), {}),
        (layer.observe, (codes,), {}),
        (layer.revive, (x,), {"below": 1, "seed": 0}),
        (functional.encode, (x, *codec.tensors()[:2]), {"offset": codec.offset, "beam": 1, "level_weights": None}),
        (functional.squared_errors, (x, *codec.tensors()[:2]), {"commitment": 1.0}),
        (functional.search, (x, codes, *codec.tensors()[:2]), {"k": 2, "metric": "ip", "levels": None}),
        (
            RecurrentQuantizer,
            (4,),
            {"codewords": 8, "levels": 2, "commitment": 1.0, "update": "ema", "level_weights": None},
        ),
    ]
    for _ in range(40):
        call, arguments, options = dice.choice(targets)
        given = [odd(value) for value in arguments]
        named = {name: odd(value) for name, value in options.items()}
        try:
            call(*given, **named)
        except (ValueError, TypeError, drq_fast.BackendUnavailable):
            pass
        except RuntimeError as error:  # what an index does not have
            require(str(error).startswith(("search: ", "tune: ")), str(error))
    index.search(x, k=3)  # still whole
    layer(x)
    require(all(bool(v.isfinite().all()) for v in layer.state_dict().values()), "a call left a layer with NaN")
    return 40
