"""Indexes and codecs from and to faiss: the same ids by the real library, and what cannot be expressed."""

from __future__ import annotations

import functools
import re
import sys

import numpy as np
import pytest
import torch

import drq_fast
from drq_fast import Codec, Index

faiss = pytest.importorskip("faiss")
bridge = pytest.importorskip("drq_fast.interop.faiss")

N, D = 1500, 12
# (K, M, codebooks): K of one bit, of a byte and more, not a power of two; levels that end within a byte
SIZES = [(256, 4, 1), (100, 6, 1), (300, 4, 4), (16, 6, 3), (2, 20, 20)]


def vectors(count: int = N, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed)) + 1


@functools.cache
def fitted(K: int, M: int, codebooks: int) -> Codec:
    layer = drq_fast.RecurrentQuantizer(D, K, M, codebooks=codebooks)
    layer.fit(vectors(), rounds=1, beam=1, seed=0)
    return layer.codec()


@pytest.fixture(params=SIZES, ids=str)
def codec(request) -> Codec:
    K, M, codebooks = request.param
    codec = fitted(K, M, codebooks)
    return Codec(*codec.tensors(), codebooks=(1, 2, 3)) if codebooks == 3 else codec


def filled(codec: Codec, metric: str, lists: int | None = None, **options) -> Index:
    """An index of vectors with ids of their own, of which some were removed."""
    index = Index(codec, metric, centroids=None if lists is None else vectors(lists, seed=1), **options)
    index.add(vectors(), ids=torch.arange(N) * 3)
    index.remove(range(0, 300, 3))
    return index


def assert_same(found, expected) -> None:
    """The same scores (but for rounding) and the same ids, except where neighbours of the result have equal scores."""
    scores, wanted = (torch.as_tensor(np.asarray(each[0])).double() for each in (found, expected))
    tolerance = 1e-5 * float(wanted.abs().max())
    torch.testing.assert_close(scores, wanted, rtol=0, atol=tolerance)
    gaps = torch.nn.functional.pad(wanted.diff(dim=1).abs(), (1, 1), value=0)
    clear = (gaps[:, 1:] > 2 * tolerance) & (gaps[:, :-1] > 2 * tolerance)
    clear[:, 0] = gaps[:, 1] > 2 * tolerance
    assert clear.double().mean() > 0.5
    ids, wanted_ids = (torch.as_tensor(np.asarray(each[1])) for each in (found, expected))
    assert torch.equal(ids[clear], wanted_ids[clear])


@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("lists", [None, 1, 9])
def test_faiss_finds_what_the_index_finds_and_the_other_way_round(codec, metric, lists, tmp_path):
    index, query = filled(codec, metric, lists), vectors(40, seed=2)
    theirs = index.to_faiss()
    assert theirs.ntotal == len(index)
    probes = {} if lists is None else {"probes": 1 + lists // 3}
    if lists is not None:
        assert isinstance(theirs, faiss.IndexIVFResidualQuantizer)
        theirs.nprobe = probes["probes"]
    expected = index.search(query, k=10, **probes)
    assert_same(theirs.search(query.numpy(), 10), expected)
    faiss.write_index(theirs, str(tmp_path / "x.faiss"))
    again = Index.from_faiss(faiss.read_index(str(tmp_path / "x.faiss")))
    assert (again.metric, again.lists, again.codec.codebooks) == (metric, lists, codec.levels)
    assert (again.bits, again.codec.codewords) == (index.bits, codec.codewords)
    assert_same(again.search(query, k=10, **probes), expected)
    order, other = index.ids.argsort(), again.ids.argsort()
    assert torch.equal(index.ids[order], again.ids[other])
    assert torch.equal(index.codes[order], again.codes[other])


@pytest.mark.parametrize("lists", [None, 9])
def test_both_sides_can_go_on(codec, lists):
    """Vectors that are added after the conversion are found by both; ids that are their own stay."""
    index = filled(codec, "l2", lists)
    theirs = index.to_faiss()
    more, ids = vectors(50, seed=3), np.arange(10_000, 10_050)
    theirs.add_with_ids(more.numpy(), ids)
    assert theirs.remove_ids(ids[:5]) == 5
    again = Index.from_faiss(theirs)
    assert len(again) == len(index) + 45
    assert set(ids[5:].tolist()) <= set(again.ids.tolist())
    if lists is not None:
        theirs.nprobe = lists
    probes = {} if lists is None else {"probes": lists}
    assert_same(again.search(more, k=5, **probes), theirs.search(more.numpy(), 5))
    assert again.add(more[:1]).item() == 10_050


def test_ids_that_are_row_numbers_need_no_map(codec):
    index = Index(codec)
    index.add(vectors())
    theirs = index.to_faiss()
    assert isinstance(theirs, faiss.IndexResidualQuantizer)
    np.testing.assert_allclose(theirs.reconstruct_n(0, N), index.reconstruct(range(N)), atol=1e-4)
    assert torch.equal(Index.from_faiss(theirs).ids, torch.arange(N))
    index.remove(range(5))
    mapped = index.to_faiss()
    assert isinstance(mapped, faiss.IndexIDMap2)
    np.testing.assert_allclose(mapped.reconstruct(7), index.reconstruct([7])[0], atol=1e-4)


@pytest.mark.parametrize("lists", [None, 3])
def test_an_empty_index(codec, lists):
    index = Index(codec, centroids=None if lists is None else vectors(lists))
    again = Index.from_faiss(index.to_faiss())
    assert (len(again), again.lists) == (0, lists)
    assert again.to_faiss().search(vectors(2).numpy(), 3)[1].tolist() == [[-1] * 3] * 2


def test_blocks_of_codes(codec, monkeypatch):
    index = filled(codec, "l2")
    monkeypatch.setattr(bridge, "_BLOCK", 101)
    again = Index.from_faiss(index.to_faiss())
    assert torch.equal(again.ids, index.ids)
    assert torch.equal(again.codes, index.codes)


@pytest.mark.parametrize(
    "kind", ["ST_decompress", "ST_LUT_nonorm", "ST_norm_from_LUT", "ST_norm_float", "ST_norm_qint8"]
)
@pytest.mark.parametrize("lists", [None, 5])
def test_what_faiss_trained(kind, lists):
    """Codes of different lengths, whatever faiss keeps beside them; K is that of the longest."""
    x, kind = vectors(800).numpy(), getattr(faiss.AdditiveQuantizer, kind)
    bits = faiss.UInt64Vector()
    for each in (5, 3, 4):
        bits.push_back(each)
    if lists is None:
        theirs = faiss.IndexResidualQuantizer(D, bits, faiss.METRIC_L2, kind)
    else:
        theirs = faiss.IndexIVFResidualQuantizer(faiss.IndexFlatL2(D), D, lists, bits, faiss.METRIC_L2, kind)
    theirs.rq.train_type = faiss.ResidualQuantizer.Train_default
    theirs.train(x)
    theirs.add(x)
    ours = Index.from_faiss(theirs)
    assert (ours.codewords, ours.levels, len(ours), ours.lists) == (32, 3, 800, lists)
    if lists is not None:
        theirs.make_direct_map()
    np.testing.assert_allclose(ours.reconstruct(range(800)), theirs.reconstruct_n(0, 800), atol=1e-5)
    assert ours.codec == Codec.from_faiss(theirs.rq)


def test_a_codec_decodes_and_encodes_as_faiss_does():
    x = vectors(700).numpy()
    theirs = faiss.ResidualQuantizer(D, 3, 4)
    theirs.max_beam_size = 1
    theirs.train(x)
    codec = Codec.from_faiss(theirs)
    assert (codec.codebooks, codec.codewords, codec.levels, codec.offset) == (3, 16, 3, None)
    packed = theirs.compute_codes(x)
    assert np.array_equal(codec.encode(x), faiss.unpack_bitstrings(packed, 3, 4))
    np.testing.assert_allclose(codec.decode(codec.encode(x)), theirs.decode(packed), atol=1e-5)


def test_codewords_that_are_copies():
    """Codebooks are padded with copies of the last codeword, which faiss may choose; they are one codeword here."""
    book = torch.eye(5, D)
    theirs = Index(Codec(book, torch.ones(2))).to_faiss()
    packed = np.array([[7 | 5 << 3], [4 | 4 << 3]], np.uint8)
    norms = np.zeros((2, 4), np.uint8)
    theirs.add_sa_codes(np.concatenate([packed, norms], axis=1))
    ours = Index.from_faiss(theirs)
    assert (ours.codewords, ours.codes.tolist()) == (5, [[4, 4], [4, 4]])
    same = Codec(torch.ones(4, D), torch.ones(2))
    assert Index.from_faiss(Index(same).to_faiss()).codewords == 2


def untrained():
    return faiss.IndexResidualQuantizer(D, 2, 4)


def by_whole_vectors():
    index = filled(Codec(torch.randn(4, D), torch.ones(2)), "l2", 3).to_faiss()
    index.by_residual = False
    return index


def with_lists_by_another_metric():
    index = filled(Codec(torch.randn(4, D), torch.ones(2)), "l2", 3).to_faiss()
    index.quantizer.metric_type = faiss.METRIC_INNER_PRODUCT
    return index


def with_metric(metric):
    index = Index(Codec(torch.eye(4, D), torch.ones(2))).to_faiss()
    index.metric_type = metric
    return index


def with_ids(*ids):
    index = faiss.IndexIDMap(Index(Codec(torch.eye(4, D), torch.ones(2))).to_faiss())
    index.add_with_ids(np.eye(len(ids), D, dtype=np.float32), np.array(ids))
    return index


CODEC = Codec(torch.eye(4, D), torch.ones(2))
ONE_OF_FAISS = "an IndexResidualQuantizer or an IndexIVFResidualQuantizer, perhaps in an IndexIDMap"
REFUSED = [
    (
        lambda: Index(CODEC, "cosine").to_faiss(),
        ValueError,
        "to_faiss: index.metric must be 'l2' or 'ip', as faiss does not divide decoded vectors by their lengths, "
        "got 'cosine'.",
    ),
    (
        lambda: Index(Codec(*CODEC.tensors(), unit=True), "ip").to_faiss(),
        ValueError,
        "to_faiss: codec.unit must be False, as faiss does not divide vectors by their lengths, got True.",
    ),
    (
        lambda: Index.from_faiss(faiss.IndexPQ(D, 4, 4)),
        TypeError,
        f"from_faiss: index must be {ONE_OF_FAISS}, got IndexPQ.",
    ),
    (lambda: Index.from_faiss("x.faiss"), TypeError, f"from_faiss: index must be {ONE_OF_FAISS}, got str."),
    (
        lambda: Index.from_faiss(untrained()),
        ValueError,
        "from_faiss: quantizer must be trained, got one without codebooks.",
    ),
    (
        lambda: Index.from_faiss(by_whole_vectors()),
        ValueError,
        "from_faiss: index.by_residual must be True, as codes of lists are relative to the centroids here, got False.",
    ),
    (
        lambda: Index.from_faiss(with_lists_by_another_metric()),
        ValueError,
        "from_faiss: index.quantizer.metric_type must be that of the index, by which lists are chosen here, got 0.",
    ),
    (
        lambda: Index.from_faiss(with_metric(faiss.METRIC_L1)),
        ValueError,
        "from_faiss: index.metric_type must be METRIC_L2 or METRIC_INNER_PRODUCT, got 2.",
    ),
    (
        lambda: Index.from_faiss(with_ids(3, 3)),
        ValueError,
        "from_faiss: ids must be unique, got 3 more than once.",
    ),
    (
        lambda: Index.from_faiss(with_ids(3, -3)),
        ValueError,
        f"from_faiss: ids must be an integer from 0 to {(1 << 62) - 1}, got -3.",
    ),
    (
        lambda: Codec.from_faiss(faiss.ProductQuantizer(D, 4, 4)),
        TypeError,
        "from_faiss: quantizer must be a faiss.ResidualQuantizer, got ProductQuantizer.",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_expressed(call, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()


def test_codes_of_a_damaged_file_do_not_reach_faiss(tmp_path):
    index = filled(CODEC, "l2")
    index.save(tmp_path / "x.drq")
    content = bytearray((tmp_path / "x.drq").read_bytes())
    header = int.from_bytes(content[:8], "little")
    mapped = Index.load(tmp_path / "x.drq", mmap=True)
    content[8 + header :] = content[8 + header :].replace(bytes(index.codes[:8].flatten().tolist()), b"\xff" * 16, 1)
    (tmp_path / "x.drq").write_bytes(content)
    with pytest.raises(drq_fast.FileError, match="corrupted"):
        (mapped if b"\xff" * 16 in content else index).to_faiss()


def test_without_faiss_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "drq_fast.interop.faiss")
    monkeypatch.setitem(sys.modules, "faiss", None)
    message = "drq_fast.interop.faiss: faiss is missing; `pip install 'drq_fast[faiss]'` installs it."
    with pytest.raises(ModuleNotFoundError, match=f"^{re.escape(message)}$"):
        Index(CODEC).to_faiss()
