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


@pytest.mark.parametrize(("lists", "vectors"), [(None, "float16"), (12, "int8"), (12, None)])
def test_very_long_and_very_short_vectors_by_cosine(x, lists, vectors, tmp_path):
    """Lengths from 1e-30 to 1e30, and a vector of zeros, are found as if all had length 1."""
    rows = x[:1000].clone()
    rows[77] = 0
    lengths = torch.tensor([1e-30, 1e-20, 1e-3, 1, 1e3, 1e20, 1e30]).repeat(143)[:1000]
    long = rows * lengths[:, None]
    made = {"bits": 16, "metric": "cosine", "sample": 500, "beam": 1, "seed": 0, "lists": lists, "vectors": vectors}
    index = Index.build(long, **made)
    assert index.tuning.settings[-1].recall > (0.95 if vectors else 0.3)
    index.save(tmp_path / "a.drq")
    query = x[:100] + 0.05
    wanted = nearest(query, rows, "cosine")
    options = {"k": 10, "refine": 300, "vectors": long if vectors is None else None}
    options |= {} if lists is None else {"probes": lists}
    for each in (index, Index.load(tmp_path / "a.drq", mmap=True)):
        for by in (1e-39, 1e-30, 1, 1e30, 1e37):
            scores, ids = each.search(query * by, **options)
            assert recall(ids, wanted) > (0.95 if vectors == "int8" else 0.99)
            cosine = torch.nn.functional.cosine_similarity(query[:, None].double(), rows[ids].double(), dim=2)
            torch.testing.assert_close(scores.double(), cosine, rtol=0, atol=0.02)
    by_codes = [each.search(query, k=10).ids for each in (index, Index.build(rows, **made))]
    assert abs(recall(by_codes[0], wanted) - recall(by_codes[1], wanted)) < 0.02


def test_an_error_names_the_row_of_the_users_array(x, monkeypatch, tmp_path):
    """Vectors are added some at a time, and fitted to a sample: rows are counted in the whole array."""
    monkeypatch.setattr("drq_fast.index.source._ROWS", 500)
    options = {"bits": 8, "beam": 1, "seed": 0, "tune": False}
    for change, kind, message in (
        (torch.nan, None, "x must be finite, got NaN or infinity in row 2600."),
        (1e5, "float16", "x must be finite in torch.float16, got NaN or infinity in row 2600."),
        (1e-5, "float16", "0.0001 somewhere in each vector, for float16, got smaller numbers in row 2600."),
    ):
        bad = x.clone()
        bad[2600] = change
        for sample, lists in ((100, None), (100, 5), (None, None)):
            with pytest.raises(ValueError, match=r"^build: x must be ") as caught:
                Index.build(bad, sample=sample, lists=lists, vectors=kind, **options)
            assert str(caught.value).endswith(message)
    twice = torch.arange(N)
    twice[2600] = 7
    with pytest.raises(ValueError, match=r"^build: ids must be unique, got 7 more than once\.$"):
        Index.build(x, ids=twice, **options)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32])
def test_vectors_of_integers(x, dtype, tmp_path):
    integers = (x * 20 + (100 if dtype is np.uint8 else 0)).clamp(0 if dtype is np.uint8 else -127, 127)
    np.save(tmp_path / "x.npy", integers.numpy().astype(dtype))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    options = {"bits": 16, "lists": 10, "vectors": "int8", "sample": 500, "beam": 2, "seed": 1}
    made = [Index.build(each, **options) for each in (mapped, mapped.astype(np.float32))]
    assert torch.equal(made[0].codes, made[1].codes)
    assert made[0].tuning == made[1].tuning
    made[0].tune(mapped[:50])
    found = made[0].search(mapped[:50], k=1, recall=0.9)
    assert (found.ids[:, 0] == np.arange(50)).mean() > 0.8


class Blocks:
    """Vectors that are read in parts; remembers how many rows were asked for at once."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.dim, self.most = x, x.shape[1], 0

    def __len__(self) -> int:
        return len(self.x)

    def read(self, first: int, last: int) -> torch.Tensor:
        self.most = max(self.most, last - first)
        return self.x[first:last].clone()

    def pick(self, rows: torch.Tensor) -> torch.Tensor:
        assert bool((rows.diff() > 0).all())
        self.most = max(self.most, len(rows))
        return self.x[rows]


@pytest.mark.parametrize("lists", [None, 20])
def test_vectors_that_are_read_in_blocks(lists, monkeypatch):
    monkeypatch.setattr("drq_fast.index.source._ROWS", 1300)
    x = torch.randn(5000, 6, generator=torch.Generator().manual_seed(2))
    source, ids = Blocks(x), torch.arange(5000) * 2
    options = {"bits": 8, "lists": lists, "vectors": "float32", "ids": ids, "sample": 700, "beam": 1, "seed": 3}
    made = [Index.build(each, **options) for each in (x, source)]
    assert source.most == 1300  # the queries of the measurement are 1,000, and the lists' sample is 1,280
    for each in made:
        found = each.search(x[:50], k=1, refine=200, probes=lists)
        assert torch.equal(found.ids[:, 0], ids[:50])
    assert torch.equal(made[0].codes, made[1].codes)
    assert made[0].tuning == made[1].tuning


def test_sizes_are_those_of_the_file_but_for_ids(x, tmp_path):
    index = Index.build(x, bits=16, lists=9, vectors="int8", sample=500, beam=1, seed=0, tune=False)
    assert index.sizes["codes"] == 2 * N
    assert index.sizes["vectors"] == D * N
    index.remove(index.ids[:100])
    assert index.sizes["codes"] == 2 * (N - 100)
    index.save(tmp_path / "a.drq")
    file = (tmp_path / "a.drq").read_bytes()
    assert sum(index.sizes.values()) + 4 * len(index) == len(file) - 8 - int.from_bytes(file[:8], "little")


def test_what_is_wrong_is_said_in_one_sentence(x):
    cases = [
        ({"bits": 12}, ValueError, "build: bits must be a multiple of 8, got 12"),
        ({"bits": 0}, ValueError, "build: bits must be an integer from 8 to"),
        ({"metric": "cos"}, ValueError, "build: metric must be one of"),
        ({"vectors": "float8"}, ValueError, "build: vectors must be one of"),
        ({"ids": range(3)}, ValueError, "build: ids must be 20 numbers, one per vector, got 3"),
        ({"sample": 0}, ValueError, "build: sample must be"),
        ({"lists": 21}, ValueError, "build: lists must be an integer from 1 to 20, got 21"),
    ]
    for options, kind, words in cases:
        with pytest.raises(kind, match=words):
            Index.build(x[:20], **{"bits": 8, "seed": 0, **options})
    with pytest.raises(ValueError, match="build: ids must be"):
        Index.build(x[:20] * torch.nan, ids=[1])  # before anything is fitted
    with pytest.raises(TypeError, match=r"^build: x must be a torch.Tensor or a numpy array, got NoneType\.$"):
        Index.build(None, ids=[1])
    for bad, words in ((x[0], r"x must be \[N, D\]"), (x[:0], "at least one vector"), (x * torch.nan, "finite")):
        with pytest.raises(ValueError, match=words):
            Index.build(bad, bits=8)
