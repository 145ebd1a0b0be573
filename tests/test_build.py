"""Index.build: from vectors to an index by one call."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from drq_fast import Codec, Index
from drq_fast.codec import directions

N, D = 3000, 16


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(40, D, generator=generator)
    noise = torch.randn(N, D, generator=generator)
    return centres[torch.randint(40, (N,), generator=generator)] + 0.3 * noise


def nearest(query: torch.Tensor, x: torch.Tensor, metric: str) -> torch.Tensor:
    if metric == "l2":
        return torch.cdist(query, x).topk(10, largest=False).indices
    if metric == "cosine":
        query, x = directions(query), directions(x)
    return (query @ x.T).topk(10).indices


def recall(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found[:, :, None] == wanted[:, None]).any(dim=2).float().mean())


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_vectors_to_exact_results_by_two_calls(x, metric):
    index = Index.build(x[200:], bits=32, metric=metric, vectors="float32", sample=1000, beam=4, seed=0)
    assert (len(index), index.bits, index.metric, index.vectors) == (N - 200, 32, metric, "float32")
    wanted = nearest(x[:200], x[200:], metric)
    codes_alone = recall(index.search(x[:200], k=10).ids, wanted)
    assert recall(index.search(x[:200], k=10, refine=100).ids, wanted) > max(0.95, codes_alone)


def test_lengths_do_not_matter_to_cosine(x, tmp_path):
    """Vectors of any length have the codes of their directions, also in a copy and in a file."""
    lengths = 2.0 ** torch.randint(-8, 9, (N, 1), generator=torch.Generator().manual_seed(1))  # rounds nothing
    plain, scaled = (Index.build(x * by, bits=32, metric="cosine", sample=1000, beam=2, seed=0) for by in (1, lengths))
    assert plain.codec.unit
    assert plain.codec == scaled.codec
    assert torch.equal(plain.codes, scaled.codes)
    plain.codec.save(tmp_path / "codec.drq")
    plain.save(tmp_path / "index.drq")
    others = (
        Codec.load(tmp_path / "codec.drq"),
        Index.load(tmp_path / "index.drq").codec,
        pickle.loads(pickle.dumps(plain.codec)),
    )
    for codec in others:
        assert codec == plain.codec
        assert torch.equal(codec.encode(7 * x[:50]), plain.codec.encode(x[:50]))
    assert plain.codec.prefix(2).unit
    assert Codec(*plain.codec.tensors()) != plain.codec
    assert torch.equal(plain.codec.encode(torch.zeros(1, D)), plain.codec.encode(torch.zeros(1, D)))


def test_arrays_memory_maps_ids_and_seeds(x, tmp_path):
    np.save(tmp_path / "x.npy", x.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    ids = torch.arange(N) * 3
    made = [Index.build(each, bits=16, ids=ids, sample=500, beam=2, seed=1) for each in (x, mapped)]
    assert torch.equal(made[0].codes, made[1].codes)
    assert torch.equal(made[0].ids, ids)


def test_what_is_wrong_is_said_in_one_sentence(x):
    cases = [
        ({"bits": 12}, ValueError, "build: bits must be a multiple of 8, got 12"),
        ({"bits": 0}, ValueError, "build: bits must be an integer from 8 to"),
        ({"metric": "cos"}, ValueError, "build: metric must be one of"),
        ({"vectors": "float8"}, ValueError, "build: vectors must be one of"),
        ({"ids": range(3)}, ValueError, "build: ids must be 20 numbers, one per vector, got 3"),
        ({"sample": 0}, ValueError, "build: sample must be"),
    ]
    for options, kind, words in cases:
        with pytest.raises(kind, match=words):
            Index.build(x[:20], **{"bits": 8, "seed": 0, **options})
    with pytest.raises(ValueError, match="build: ids must be"):
        Index.build(x[:20] * torch.nan, ids=[1])  # before anything is fitted
    for bad, words in ((x[0], r"x must be \[N, D\]"), (x[:0], "at least one vector"), (x * torch.nan, "finite")):
        with pytest.raises(ValueError, match=words):
            Index.build(bad, bits=8)
