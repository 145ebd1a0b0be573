"""What an index holds: which ids, their vectors by the codes, how many bytes, and nothing after a reset."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drq_fast import FileError, Index, RecurrentQuantizer
from tests.test_hostile_files import rewrite

X = torch.randn(300, 5, generator=torch.Generator().manual_seed(0)) + 1


def layer(codewords: int = 16) -> RecurrentQuantizer:
    made = RecurrentQuantizer(5, codewords, 3)
    made.initialise(X, seed=0)
    return made


LAYER = layer()


def test_the_codec_of_a_loaded_index_encodes_and_decodes(tmp_path):
    index = Index(LAYER)
    index.add(X)
    index.save(tmp_path / "a.drq")
    loaded = Index.load(tmp_path / "a.drq")
    assert loaded.codec == LAYER.codec()
    assert torch.equal(loaded.codec.encode(X), loaded.codes)
    assert torch.equal(loaded.codec.decode(loaded.codes), loaded.reconstruct(loaded.ids))


def test_membership():
    index = Index(LAYER)
    assert 0 not in index
    index.add(X[:3], ids=[7, 3, 1 << 40])
    index.remove([3])
    assert 7 in index
    assert np.int64(1 << 40) in index
    assert torch.tensor(7) in index
    assert not any(i in index for i in (3, 0, -1, 1 << 62, 1 << 80))
    with pytest.raises(TypeError, match=r"^Index: an id must be an integer, got 'a'\.$"):
        "a" in index  # noqa: B015


@pytest.mark.parametrize("codewords", [16, 300])
def test_reconstruction_decodes_the_codes_of_the_ids(codewords):
    made = layer(codewords)
    index, codes = Index(made, vectors="float16"), made.encode(X)
    index.add(X, ids=range(300, 0, -1))
    index.remove(range(1, 100))
    wanted = torch.tensor([[250, 100], [300, 250]])  # one of them twice
    assert torch.equal(index.reconstruct(wanted), made.decode(codes[300 - wanted]))
    assert torch.equal(index.reconstruct([250, 100], levels=2), made.decode(codes[[50, 200]], levels=2))
    assert isinstance(index.reconstruct(wanted.numpy()), np.ndarray)
    assert index.reconstruct([]).shape == (0, 5)
    assert index.reconstruct(index.search(X[:4], k=3).ids).shape == (4, 3, 5)
    for missing in (99, -1):
        with pytest.raises(
            ValueError, match=rf"^reconstruct: ids must be in the index, got {missing}, which is not\.$"
        ):
            index.reconstruct([300, missing])
    with pytest.raises(ValueError, match=r"^reconstruct: levels must be an integer from 1 to 3, got 4\.$"):
        index.reconstruct([300], levels=4)
    with pytest.raises(TypeError, match=r"^reconstruct: ids must be a list, an array or a tensor of ids, got 300\.$"):
        index.reconstruct(300)


@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_reconstruction_with_lists_adds_the_centroid(metric):
    index = Index.build(X, bits=32, metric=metric, lists=4, seed=0, tune=False)
    added = index.add(X[:3])
    x = X / X.norm(dim=1, keepdim=True) if metric == "cosine" else X
    errors = [(index.reconstruct(np.arange(300), levels) - x.numpy()) ** 2 for levels in (1, 2, 4)]
    shares = [float(error.sum()) / float((x - x.mean(dim=0)).square().sum()) for error in errors]
    assert 0.5 > shares[0] > shares[1] > shares[2]
    assert torch.equal(index.reconstruct(added, 1), index.reconstruct([0, 1, 2], 1))


def test_a_code_of_a_mapped_file_that_no_codeword_has_is_not_decoded(tmp_path):
    index = Index(LAYER)
    index.add(X)
    index.save(tmp_path / "a.drq")
    codes = index.codes
    codes[7] = 16
    rewrite(tmp_path / "a.drq", tensors={"codes": codes})
    mapped = Index.load(tmp_path / "a.drq", mmap=True)
    assert torch.equal(mapped.reconstruct([6]), index.reconstruct([6]))
    with pytest.raises(FileError, match=r"^reconstruct: codes must be in 0\.\.15"):
        mapped.reconstruct([6, 7])


@pytest.mark.parametrize("lists", [None, 4])
def test_reset_leaves_an_index_to_be_filled_again(tmp_path, lists):
    index = Index.build(X, bits=16, lists=lists, vectors="int8", seed=0)
    before, empty = index.search(X[:4], k=3), Index(index.codec, vectors="int8")
    index.reset()
    assert (len(index), 0 in index, index.lists) == (0, False, lists)
    assert index.search(X[:4], k=3).ids.eq(-1).all()
    assert empty.nbytes <= index.nbytes <= empty.nbytes + 4 * 5 * 4  # the centroids
    index.save(tmp_path / "a.drq")
    for each in (index, Index.load(tmp_path / "a.drq", mmap=True)):
        each.reset()
        assert each.add(X, beam=16).tolist() == list(range(300, 600))
        after = each.search(X[:4], k=3)
        assert torch.equal(after.ids - 300, before.ids)
        assert torch.equal(after.scores, before.scores)


def test_bytes():
    index = Index(LAYER, metric="ip")
    codec = 4 * (16 * 5 + 3 + 5)
    assert index.nbytes == codec
    index.add(X)
    assert index.nbytes == codec + 300 * 3
    index.remove([0])
    assert index.nbytes == codec + 300 * (3 + 1)
    own = Index(LAYER, vectors="float16")
    own.add(X, ids=range(1, 301))
    own.search(X[:1])
    assert own.nbytes == codec + 300 * (3 + 10 + 4 + 4)


def test_lists_of_numbers_are_vectors_and_ids():
    index, again = Index(LAYER), Index(LAYER)
    assert torch.equal(index.add(X.tolist(), ids=list(range(300))), torch.arange(300))
    again.add(X)
    assert torch.equal(index.codes, again.codes)
    for given, query in ((X[:2].tolist(), X[:2]), (X[0].tolist(), X[0]), (tuple(X[:2]), X[:2])):
        for one, other in zip(index.search(given, k=3), again.search(query, k=3), strict=True):
            assert torch.equal(one, other)
    assert torch.equal(index.encode(X[:2].tolist()), again.encode(X[:2]))
    index.upsert([[1, 2, 3, 4, 5]], [7])
    assert torch.equal(index.reconstruct([7]), LAYER.decode(LAYER.encode(torch.arange(1.0, 6)[None])))
    assert len(Index.build(X.tolist(), bits=8, seed=0)) == 300
    for wrong in ([[1.0], [1.0, 2.0]], ["1", "2"], [None], [True]):
        with pytest.raises(TypeError, match=r"^search: query must be numbers in lists of equal length, got others\.$"):
            index.search(wrong)
    with pytest.raises(ValueError, match=r"^add: x must be \[N, 5\], got \[1, 2\]\.$"):
        index.add([[1.0, 2.0]])
