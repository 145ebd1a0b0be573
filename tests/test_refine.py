"""Candidates that are scored again by vectors: those that the index keeps, or the user's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drq_fast import Codec, Index, RecurrentQuantizer, backends
from drq_fast.backends import plain_torch
from drq_fast.backends.native import extension
from drq_fast.backends.types import Stored
from drq_fast.codec import directions
from drq_fast.files import FileError
from drq_fast.index.vectors import DTYPES, empty, stored_as

METRICS = ("l2", "ip", "cosine")
N, D = 700, 24


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, D, generator=generator) @ torch.randn(D, D, generator=generator) + 2


@pytest.fixture(scope="module")
def codec(x) -> Codec:
    layer = RecurrentQuantizer(D, 16, 3)
    layer.initialise(x, seed=0)
    return layer.codec()


def exact(query: torch.Tensor, x: torch.Tensor, metric: str, k: int) -> torch.Tensor:
    """The k nearest rows of x, in float64."""
    query, x = query.double(), x.double()
    if metric == "l2":
        return torch.cdist(query, x).topk(k, largest=False).indices
    if metric == "cosine":
        query, x = (torch.nn.functional.normalize(each, dim=1) for each in (query, x))
    return (query @ x.T).topk(k).indices


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", DTYPES)
def test_with_all_candidates_the_search_is_exact_on_the_stored_vectors(x, codec, metric, kind):
    index = Index(codec, metric, vectors=kind)
    index.add(x)
    stored = index._rows.content.stored().floats(torch.arange(N))
    given = directions(x) if metric == "cosine" else x
    error = {"float32": 0, "float16": 1e-3, "int8": 1 / 127}[kind]
    torch.testing.assert_close(stored, given, rtol=1e-3, atol=error * float(given.abs().max()))
    scores, ids = index.search(x[:40] + 0.1, k=10, refine=N)
    assert torch.equal(ids, exact(x[:40] + 0.1, stored, metric, 10))
    if metric == "l2":
        torch.testing.assert_close(scores, (x[:40, None] + 0.1 - stored[ids]).square().sum(dim=2))


@pytest.mark.parametrize("metric", METRICS)
def test_candidates_are_those_of_the_codes(x, codec, metric):
    index = Index(codec, metric, vectors="float32")
    index.add(x)
    query = x[:30] + 0.2
    _, candidates = index.search(query, k=25)
    _, ids = index.search(query, k=5, refine=25)
    for row in range(30):
        best = exact(query[row : row + 1], x[candidates[row]], metric, 5)[0]
        assert ids[row].tolist() == candidates[row][best].tolist()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("made", [np.asarray, torch.as_tensor, None])
def test_vectors_of_the_user_give_what_the_index_would(x, codec, metric, made, tmp_path):
    ids = torch.randperm(2 * N, generator=torch.Generator().manual_seed(1))[:N]
    index, beside = Index(codec, metric), Index(codec, metric, vectors="float32")
    for each in (index, beside):
        each.add(x, ids)
        each.remove(ids[::3])
    by_id = torch.zeros(2 * N, D).index_copy(0, ids, x)
    if made is None:
        np.save(tmp_path / "x.npy", by_id.numpy())
        own = np.load(tmp_path / "x.npy", mmap_mode="r")
    else:
        own = made(by_id)
    for keep in (None, ids[:400]):
        a = index.search(x[:20], k=7, refine=30, vectors=own, keep=keep)
        b = beside.search(x[:20], k=7, refine=30, keep=keep)
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.scores, b.scores)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    dim=st.sampled_from([1, 3, 15, 16, 17, 63, 64, 65, 130]),
    candidates=st.integers(1, 20),
    k=st.integers(1, 22),
    metric=st.sampled_from(METRICS),
    kind=st.sampled_from(list(DTYPES)),
    threads=st.sampled_from([1, 2]),
)
def test_compiled_code_gives_the_bits_of_the_definition(seed, dim, candidates, k, metric, kind, threads):
    if extension.why_not("cpu"):
        pytest.skip(extension.why_not("cpu"))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, dim, generator=generator)
    x[::7], x[1::9] = 0, x[2]  # zero vectors, and equal ones
    stored = stored_as("add", x, empty(kind, dim, x.device))
    positions = torch.stack([torch.randperm(40, generator=generator)[:candidates] for _ in range(5)])
    positions[torch.rand(positions.shape, generator=generator) < 0.2] = -1
    query = torch.randn(5, dim, generator=generator)
    query[1] = 0
    wanted = plain_torch.refine(query, positions, stored, metric, k)
    before = torch.get_num_threads()
    for isa in extension.native.supported_isas():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DRQ_FAST_ISA", isa)
            torch.set_num_threads(threads)
            found = backends.native.refine(query, positions, stored, metric, k)
            torch.set_num_threads(before)
        assert torch.equal(found.positions, wanted.positions)
        assert torch.equal(found.scores, wanted.scores)


def test_every_half_is_read_as_torch_reads_it():
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    bits = bits[bits.isfinite()][:, None]
    positions = torch.arange(len(bits))[:, None]
    for isa in extension.native.supported_isas() if extension.native else ():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DRQ_FAST_ISA", isa)
            found = backends.native.refine(torch.ones(len(bits), 1), positions, Stored(bits), "ip", 1)
        assert torch.equal(found.scores, bits.float())


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("kind", DTYPES)
def test_vectors_stay_in_step_with_codes(x, codec, kind, mmap, tmp_path):
    """Add, remove, upsert, compaction, save and load: always what an index made of the same vectors at once gives."""
    index = Index(codec, vectors=kind)
    index.add(x[:300])
    index.remove(range(0, 300, 3))
    index.save(tmp_path / "a.drq")
    index = Index.load(tmp_path / "a.drq", mmap=mmap)
    assert index.vectors == kind
    index.add(x[300:500])
    index.upsert(x[500:600], ids=range(100, 200))
    index.remove([i for i in index.ids.tolist() if i % 4])
    index.add(x[600:])
    index.save(tmp_path / "b.drq")
    again = Index.load(tmp_path / "b.drq", mmap=mmap)
    again.verify()
    rows = torch.arange(N)
    rows[100:200] = torch.arange(500, 600)  # upserted
    rows[300:] = torch.arange(300, N)
    fresh = Index(codec, vectors=kind)
    ids = index.ids
    source = torch.where(ids < 500, rows[ids.clamp_max(N - 1)], ids + 100)
    fresh.add(x[source], ids)
    for each in (index, again):
        assert torch.equal(each.ids, ids)
        for a, b in zip(each.search(x[:50], k=9, refine=40), fresh.search(x[:50], k=9, refine=40), strict=True):
            assert torch.equal(a, b)


def test_a_mapped_index_notices_other_vectors(x, codec, tmp_path):
    index = Index(codec, vectors="float16")
    index.add(x)
    path = tmp_path / "index.drq"
    index.save(path)
    index = Index.load(path, mmap=True)
    content = bytearray(path.read_bytes())
    at = content.find(x[100].half().numpy().tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    for use in (index.verify, lambda: index.add(x[:1]), lambda: index.save(tmp_path / "other")):
        with pytest.raises(FileError, match="checksum of 'vectors' does not match"):
            use()
    with pytest.raises(FileError, match="checksum of 'vectors' does not match"):
        Index.load(path)


def test_copies_have_vectors_of_their_own(x, codec):
    import copy
    import pickle

    index = Index(codec, vectors="int8")
    index.add(x)
    for other in (copy.deepcopy(index), pickle.loads(pickle.dumps(index))):
        assert other.vectors == "int8"
        assert torch.equal(other.search(x[:5], refine=50).ids, index.search(x[:5], refine=50).ids)


@pytest.mark.parametrize("kind", [*DTYPES, None])
def test_lengths_do_not_matter_to_cosine(x, codec, kind):
    lengths = 10.0 ** torch.linspace(-30, 30, N)[:, None]
    index = Index(codec, "cosine", vectors=kind)
    index.add(x * lengths)
    own = x * lengths if kind is None else None
    found = index.search(x[:30] + 0.1, k=5, refine=N, vectors=own)
    wanted = exact(x[:30] + 0.1, x, "cosine", 5)
    assert (found.ids == wanted).float().mean() > (0.7 if kind == "int8" else 0.97)
    assert found.scores.max() < 1.0001


def test_fewer_vectors_than_asked_for(x, codec):
    index = Index(codec, vectors="float32")
    assert index.search(x[:2], k=3, refine=10).ids.tolist() == [[-1] * 3] * 2
    index.add(x[:2])
    scores, ids = index.search(x[:1], k=4, refine=10)
    assert ids[0, 2:].tolist() == [-1, -1]
    assert sorted(ids[0, :2].tolist()) == [0, 1]
    assert scores[0, 2:].isinf().all()


def test_what_is_wrong_is_said_in_one_sentence(x, codec, tmp_path):
    index, bare = Index(codec, vectors="float16"), Index(codec)
    index.add(x[:50])
    bare.add(x[:50])
    cases = [
        (lambda: bare.search(x[:1], refine=20), RuntimeError, "refine needs vectors, and the index has codes only"),
        (lambda: index.search(x[:1], k=10, refine=9), ValueError, "refine must be an integer from 10 to"),
        (lambda: index.search(x[:1], refine=2.5), TypeError, "refine must be"),
        (lambda: bare.search(x[:1], vectors=x), TypeError, "refine must be given with vectors, got None"),
        (lambda: bare.search(x[:1], refine=20, vectors=x[:20]), ValueError, "with a row for id"),
        (lambda: bare.search(x[:1], refine=20, vectors=x[:, :3]), ValueError, r"must be \[n, 24\], by id"),
        (lambda: bare.search(x[:1], refine=20, vectors=x.to_sparse()), TypeError, "vectors must be a dense tensor"),
        (lambda: bare.search(x[:1], refine=20, vectors=x > 0), TypeError, "must be floats or integers, got bool"),
        (lambda: bare.search(x[:1], refine=20, vectors=x.numpy().astype("U")), TypeError, "that torch can read, got"),
        (lambda: bare.search(x[:1], refine=20, vectors="x.npy"), TypeError, "an array or a tensor"),
        (lambda: bare.search(x[:1], refine=20, vectors=x * torch.nan), ValueError, "vectors must be finite"),
        (lambda: index.search(x[:1], refine=20, vectors=x), ValueError, "left out, as the index keeps float16 vectors"),
        (lambda: index.search(x[:1], vectors=x), ValueError, "left out, as the index keeps float16 vectors its"),
        (lambda: index.add_codes(codec.encode(x[:1])), RuntimeError, "keeps vectors beside their codes; use add"),
        (lambda: Index(codec, vectors="int4"), ValueError, "vectors must be one of"),
        (lambda: index.add(x[:1] * 1e6), ValueError, "x must be finite in torch.float16, got NaN or infinity in row 0"),
        (
            lambda: index.add(torch.cat([x[:3], x[:1] * 1e-8])),
            ValueError,
            "x must be 0 or at least 0.0001 somewhere in each vector, for float16, got smaller numbers in row 3",
        ),
    ]
    for use, kind, words in cases:
        with pytest.raises(kind, match=words) as caught:
            use()
        assert "\n" not in str(caught.value)
    assert len(index) == 50


def test_only_vectors_of_candidates_are_read(x, codec):
    """Rows of the user's array that no candidate has may be missing or damaged; an error names the row of the array."""
    index = Index(codec)
    index.add(x[:300], ids=torch.arange(300).flip(0))  # the first row of the index has id 299
    keep, own = range(20), x[:20].clone()
    found = index.search(x[:5], k=30, refine=40, keep=keep, vectors=own)
    assert sorted(found.ids[0, :20].tolist()) == list(keep)
    assert (found.ids[:, 20:] == -1).all()
    own[13] = torch.nan
    assert index.search(x[:5], k=2, refine=40, keep=range(13), vectors=own).ids.min() >= 0
    with pytest.raises(ValueError, match=r"^search: vectors must be finite, got NaN or infinity in row 13\.$"):
        index.search(x[:5], k=2, refine=40, keep=range(5, 20), vectors=own)
    nothing = index.search(x[:5], k=3, refine=40, keep=[], vectors=own)
    assert nothing.ids.tolist() == [[-1] * 3] * 5
    assert nothing.scores.isinf().all()


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"])
@pytest.mark.parametrize("kind", DTYPES)
def test_vectors_of_integers_are_those_of_floats(codec, dtype, kind, tmp_path):
    bounds = np.iinfo(dtype)
    x = np.random.default_rng(0).integers(max(bounds.min, -1000), min(bounds.max, 1000), (N, D), dtype, endpoint=True)
    x[0, :2] = max(bounds.min, -60_000), min(bounds.max, 60_000)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    wanted, found, bare = Index(codec, vectors=kind), Index(codec, vectors=kind), Index(codec)
    assert wanted.add(x.astype(np.float32)).tolist() == found.add(mapped).tolist() == bare.add(mapped).tolist()
    assert torch.equal(found.codes, wanted.codes)
    assert np.array_equal(codec.encode(x[:9]), codec.encode(x[:9].astype(np.float32)))
    for query in (x[:7], x[3]):
        for a, b in zip(found.search(query, refine=30), wanted.search(query.astype("f4"), refine=30), strict=True):
            assert np.array_equal(a, b)
    own = [bare.search(x[:7], refine=30, vectors=each).ids for each in (mapped, torch.from_numpy(x), x.astype("f4"))]
    assert np.array_equal(own[0], own[1])
    assert np.array_equal(own[0], own[2])


def test_files_without_vectors_still_load():
    assert Index.load(Path(__file__).parent / "data" / "index-ids-0.1.0.drq").vectors is None
