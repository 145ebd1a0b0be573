"""Semantic IDs: unique codes with the least additional error, stable when items are added, found by prefix."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from drq_fast import Codec, FileError, RecurrentQuantizer, SemanticIds, files, unique


def made(K: int, D: int, M: int, seed: int = 0) -> Codec:
    """A codec with random codewords."""
    generator = torch.Generator().manual_seed(seed)
    offset = torch.randn(D, generator=generator) / 3
    return Codec(torch.randn(K, D, generator=generator), torch.tensor([0.6**m for m in range(M)]), offset)


def vectors(N: int, D: int, seed: int = 1) -> Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(seed))


def check_unique(ids: SemanticIds, N: int) -> None:
    codes = ids.codes
    assert codes.shape == (N, ids.codec.levels)
    assert len(codes.unique(dim=0)) == N == len(ids)
    assert N == 0 or (int(codes.min()) >= 0 and int(codes.max()) < ids.codec.codewords)


LINE = Codec(torch.tensor([[0.0], [1.0], [3.0]]), torch.ones(1))  # three codewords on a line


def test_the_cheapest_item_moves():
    ids = SemanticIds.build(LINE, torch.tensor([[0.1], [0.4], [2.9]]))
    assert ids.encoded[:, 0].tolist() == [0, 0, 2]
    assert ids.codes[:, 0].tolist() == [0, 1, 2]  # 0.4 is nearer to 1 than 0.1 is


def test_a_chain_of_moves_may_be_the_cheapest():
    ids = SemanticIds.build(LINE, torch.tensor([[-0.5], [0.0], [1.6]]))
    assert ids.encoded[:, 0].tolist() == [0, 0, 1]
    assert ids.codes[:, 0].tolist() == [0, 1, 2]  # 1 + 1.4**2 for two moves; 9 for the move to the free codeword


@pytest.mark.parametrize("seed", range(12))
def test_small_groups_have_the_minimal_error(seed):
    codec, x = made(6, 2, 1, seed), vectors(5, 2, seed + 100)
    distances = torch.cdist(x, codec.decode(torch.arange(6)[:, None])).square().double()
    best = min(float(distances[range(5), list(choice)].sum()) for choice in itertools.permutations(range(6), 5))
    chosen = SemanticIds.build(codec, x).codes[:, 0].long()
    assert float(distances[range(5), chosen].sum()) == pytest.approx(best)


def test_only_the_last_level_changes_where_it_has_room():
    x = vectors(200, 8).repeat(5, 1)
    ids = SemanticIds.build(made(16, 8, 3), x)
    check_unique(ids, 1000)
    _, counts = ids.encoded[:, :2].unique(dim=0, return_counts=True)
    roomy = {tuple(row) for row in ids.encoded[:, :2].unique(dim=0)[counts <= 16].tolist()}
    assert roomy
    for before, after in zip(ids.encoded.tolist(), ids.codes.tolist(), strict=True):
        assert tuple(before[:2]) not in roomy or before[:2] == after[:2]


@pytest.mark.parametrize(
    ("K", "M", "x"),
    [
        (16, 3, vectors(1, 8).expand(1000, 8)),  # far more copies than codewords
        (256, 2, vectors(1, 8).expand(1000, 8)),
        (2, 6, vectors(64, 8)),  # every id is taken
        (5, 3, torch.zeros(125, 8)),
        (100, 1, vectors(100, 8)),
        (300, 5, vectors(400, 8).repeat(3, 1)),  # keys of more than 8 bytes
        (256, 12, vectors(300, 8).repeat(3, 1)),
        (7, 4, torch.zeros(0, 8)),
    ],
)
def test_ids_are_unique_and_deterministic(K, M, x):
    codec = made(K, 8, M)
    ids = SemanticIds.build(codec, x, beam=4)
    check_unique(ids, len(x))
    assert torch.equal(ids.encoded, codec.encode(x, beam=4))
    assert torch.equal(ids.codes, SemanticIds.build(codec, x, beam=4).codes)


def test_equal_codewords_and_scales_of_zero_do_not_stall():
    for codec in (Codec(torch.zeros(9, 2), torch.ones(2)), Codec(torch.ones(9, 2), torch.tensor([1.0, 0.0]))):
        check_unique(SemanticIds.build(codec, torch.ones(81, 2)), 81)


def test_one_far_vector_does_not_stall():
    check_unique(SemanticIds.build(made(16, 4, 2), torch.tensor([[1e9, 0, 0, 0]]).expand(100, 4)), 100)


def test_blocks_do_not_change_the_result(monkeypatch):
    codec = Codec(torch.arange(24.0).reshape(12, 2) % 7, torch.tensor([1.0, 0.5, 0.25]))  # sums without rounding
    x = (torch.arange(600.0).reshape(300, 2) * 5 % 11).repeat(4, 1)
    whole = SemanticIds.build(codec, x).codes
    monkeypatch.setattr(unique, "_TILE", 200)
    assert torch.equal(SemanticIds.build(codec, x).codes, whole)


def test_a_fitted_codec_keeps_its_error():
    x = vectors(3000, 8)
    layer = RecurrentQuantizer(8, 32, 3)
    layer.fit(x, rounds=10, seed=0)
    ids = SemanticIds.build(layer, x)
    check_unique(ids, 3000)
    metrics = ids.metrics()
    assert 0 < metrics["moved"] < 600
    assert metrics["error_before"] < metrics["error_after"] < 1.05 * metrics["error_before"]
    x_hat, offset = ids.codec.decode(ids.codes), ids.codec.offset
    assert offset is not None
    assert metrics["error_after"] == pytest.approx(float((x - x_hat).square().sum() / (x - offset).square().sum()))


def test_added_items_never_change_older_ids():
    codec, x = made(3, 4, 4), vectors(81, 4)
    ids = SemanticIds.build(codec, x[:20])
    parts = [ids.codes]
    for rows in (x[20:21], torch.zeros(30, 4), x[:0], x[51:]):
        parts.append(ids.add(rows))
        assert torch.equal(ids.codes, torch.cat(parts))
        check_unique(ids, sum(map(len, parts)))
    before = ids.codes
    with pytest.raises(
        ValueError, match=r"^add: x must be at most 0 vectors, because there are K\*\*M different ids, got 1\.$"
    ):
        ids.add(x[:1])
    assert torch.equal(ids.codes, before)


def test_an_added_item_takes_the_best_free_codeword():
    ids = SemanticIds.build(LINE, torch.tensor([[0.1]]))
    assert ids.add(np.array([[0.2]], dtype=np.float32)).tolist() == [[1]]
    assert isinstance(ids.add(np.zeros((1, 1), dtype=np.float32)), np.ndarray)
    assert ids.codes[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("K", "M"), [(5, 3), (300, 2), (256, 9)])
def test_find_by_prefix(K, M):
    ids = SemanticIds.build(made(K, 4, M), vectors(50, 4))
    ids.add(vectors(30, 4, seed=2))
    codes = ids.codes
    for row, length in itertools.product((0, 37, 79), range(M + 1)):
        expected = (codes[:, :length] == codes[row, :length]).all(dim=1).nonzero()[:, 0]
        assert torch.equal(ids.find(codes[row, :length]), expected)
        assert torch.equal(ids.find(codes[row, :length].tolist()), expected)
        assert torch.equal(ids.find(ids.tokens([row])[0][:length]), expected)
        assert torch.equal(ids.find("".join(ids.tokens([row])[0][:length])), expected)
    absent = next(c for c in itertools.product(range(5), repeat=M) if list(c) not in codes.tolist())
    assert ids.find(absent).tolist() == []


def test_tokens():
    ids = SemanticIds.build(made(3, 2, 28), vectors(4, 2))
    tokens, codes = ids.tokens(), ids.codes.long()
    assert tokens[2][:2] == [f"<a_{codes[2, 0]}>", f"<b_{codes[2, 1]}>"]
    assert tokens[0][25:] == [f"<z_{codes[0, 25]}>", f"<aa_{codes[0, 26]}>", f"<ab_{codes[0, 27]}>"]
    assert ids.tokens(np.array([3, 1])) == [tokens[3], tokens[1]]
    assert torch.equal(ids.parse(tokens), codes)
    assert torch.equal(ids.parse(tokens[1][:5]), codes[1, :5])
    vocabulary = ids.vocabulary()
    assert len(set(vocabulary)) == len(vocabulary) == 3 * 28
    assert vocabulary[:4] == ["<a_0>", "<a_1>", "<a_2>", "<b_0>"]
    assert {token for row in tokens for token in row} <= set(vocabulary)


def test_figures_by_hand():
    ids = SemanticIds.build(LINE, torch.tensor([[0.0], [0.0], [3.0]]))
    metrics = ids.metrics()
    assert metrics["unique"] == pytest.approx(2 / 3)
    assert (metrics["items"], metrics["moved"], metrics["error_before"]) == (3, 1, 0)
    assert metrics["error_after"] == pytest.approx(1 / 9)
    assert metrics["levels"] == [{"used": 3, "entropy": pytest.approx(np.log2(3)), "perplexity": pytest.approx(3)}]


def test_neighbours_share_prefixes():
    codec, x = made(8, 4, 3), vectors(300, 4)
    ids = SemanticIds.build(codec, x)
    codes = ids.codes.long()
    nearest = torch.cdist(x.double(), x.double()).fill_diagonal_(torch.inf).topk(5, largest=False).indices
    same = (codes[nearest] == codes[:, None]).cumprod(dim=2).double().mean(dim=(0, 1))
    assert ids.metrics(x, k=5)["neighbours"] == pytest.approx(same.tolist())
    rows = torch.arange(0, 300, 3)
    part = SemanticIds.build(codec, x[rows])
    assert len(ids.metrics(x[rows].numpy(), rows, k=1000)["neighbours"]) == len(part.metrics(x[rows])["neighbours"])


def test_files(tmp_path):
    ids = SemanticIds.build(made(300, 4, 2), vectors(100, 4).repeat(2, 1))
    ids.save(tmp_path / "a.drq")
    loaded = SemanticIds.load(tmp_path / "a.drq")
    assert torch.equal(loaded.codes, ids.codes)
    assert loaded.codec == ids.codec
    assert loaded.metrics() == ids.metrics()
    more = vectors(50, 4, seed=3)
    assert torch.equal(loaded.add(more), ids.add(more))
    with pytest.raises(FileError, match="holds a semantic_ids, not a codec"):
        Codec.load(tmp_path / "a.drq")


def test_a_file_with_equal_ids_is_refused(tmp_path):
    codec, codes = made(4, 2, 2), torch.zeros(2, 2, dtype=torch.uint8)
    tensors = {"codebook": codec.codebook, "scale": codec.scale, "codes": codes, "encoded": codes.clone()}
    for sums, said in (([0.0] * 3, "codes must be unique, got equal ones"), ([0.0], "sums must be 3 numbers")):
        files.write(tmp_path / "a.drq", "semantic_ids", tensors, {"level_weights": None, "sums": sums})
        with pytest.raises(FileError, match=said):
            SemanticIds.load(tmp_path / "a.drq")


def test_json(tmp_path):
    ids = SemanticIds.build(made(4, 2, 2), vectors(3, 2))
    ids.to_json(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == dict(zip("012", ids.tokens(), strict=True))
    ids.to_json(tmp_path / "a.json", items=["x", "y", "z"])
    assert list(json.loads((tmp_path / "a.json").read_text())) == ["x", "y", "z"]
    with pytest.raises(ValueError, match=r"^to_json: items must be 3 different names, got 1 different of 2\.$"):
        ids.to_json(tmp_path / "a.json", items=["x", "x"])
    ids.to_json(tmp_path / "a.json", items=np.arange(7, 10))
    assert list(json.loads((tmp_path / "a.json").read_text())) == ["7", "8", "9"]
    with pytest.raises(ValueError, match="got 2 different of 3"):
        ids.to_json(tmp_path / "a.json", items=[1, "1", 2])  # one name in JSON


def test_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    ids = SemanticIds.build(made(4, 2, 2), vectors(3, 2))
    ids.to_parquet(tmp_path / "a.parquet", items=["x", "y", "z"])
    table = parquet.read_table(tmp_path / "a.parquet").to_pydict()
    assert table == {"item": ["x", "y", "z"], "codes": ids.codes.tolist(), "tokens": ids.tokens()}


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"^to_parquet: pyarrow is missing; `pip install 'drq_fast\[parquet\]'` inst"):
        SemanticIds.build(LINE, torch.zeros(1, 1)).to_parquet(tmp_path / "a.parquet")


def test_wrong_arguments_are_named():
    ids = SemanticIds.build(made(4, 2, 2), vectors(3, 2))
    for call, said in (
        (lambda: SemanticIds(3), "SemanticIds: codec must be a Codec or a RecurrentQuantizer, got int."),
        (lambda: ids.add(torch.zeros(2, 3)), "add: x must be [N, 2], got [2, 3]."),
        (lambda: ids.add(torch.tensor([[0.0, torch.nan]])), "add: x must be finite, got NaN or infinity in row 0."),
        (lambda: ids.add(torch.zeros(1, 2), beam=0), "encode: beam must be an integer from 1 to 4096, got 0."),
        (
            lambda: SemanticIds.build(ids.codec, torch.zeros(17, 2)),
            "build: x must be at most 16 vectors, because there are K**M different ids, got 17.",
        ),
        (lambda: ids.find([0, 4]), "find: prefix must be in 0..3, got values from 0 to 4."),
        (
            lambda: ids.find("<b_0>"),
            "find: prefix must be one of <a_0> to <a_3>, then one of the next level, got '<b_0>'.",
        ),
        (lambda: ids.find([0, 0, 0]), "find: prefix must be of at most 2 levels, got [3]."),
        (lambda: ids.tokens([3]), "tokens: rows must be positions in 0..2, got [3]."),
        (
            lambda: ids.parse(["<b_0>"]),
            "parse: tokens must be one of <a_0> to <a_3>, then one of the next level, got '<b_0>'.",
        ),
        (
            lambda: ids.parse("<a_4>"),
            "parse: tokens must be one of <a_0> to <a_3>, then one of the next level, got '<a_4>'.",
        ),
        (lambda: ids.parse([["<a_1>"], []]), "parse: tokens must be lists of one length, got several lengths."),
        (lambda: ids.metrics(torch.zeros(2, 2)), "metrics: x must be [3, 2] with at least two rows, got [2, 2]."),
    ):
        with pytest.raises((ValueError, TypeError)) as error:
            call()
        assert str(error.value) == said


def test_from_the_shell(shell):
    shell.ok("fit", "run", "x.npy", *shell.FIT)
    result = json.loads(shell.ok("ids", "run", "x.npy", "--json", "--out", "ids.json"))
    expected = SemanticIds.build(RecurrentQuantizer.load("run/model.drq"), np.load("x.npy"))
    assert torch.equal(SemanticIds.load("run/ids.drq").codes, expected.codes)
    assert result == {"ids": "run/ids.drq", **expected.metrics()}
    assert list(json.loads(Path("ids.json").read_text()).values()) == expected.tokens()
    assert "exists already; --force replaces it" in shell.refused("ids", "run", "x.npy")
    assert "exists already; --force replaces it" in shell.refused("ids", "run", "--out", "ids.json")
    shell.ok("ids", "run", "q.npy", "--add")
    grown = SemanticIds.load("run/ids.drq").codes
    assert torch.equal(grown[:3000], expected.codes)
    assert len(grown) == 3007
    assert "3,007 unique ids" in shell.ok("ids", "run", "--out", "more.json")
    assert "--out must be a .json or .parquet file, got a.txt" in shell.refused("ids", "run", "--out", "a.txt", code=2)
    np.save("narrow.npy", np.zeros((2, 3), dtype=np.float32))
    assert "vectors must be given with --add, got none" in shell.refused("ids", "run", "--add", code=2)
    assert "vectors must be of 16 dimensions" in shell.refused("ids", "run", "narrow.npy", "--add", code=2)
    shell.ok("fit", "run", "x.npy", *shell.FIT, "--force")
    assert not Path("run/ids.drq").exists()
    assert "run/ids.drq does not exist" in shell.refused("ids", "run")
