"""Codec: a value that encodes, decodes and is searched with; files of older versions."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from drq_fast import Codec, FileError, Index, RecurrentQuantizer, functional
from drq_fast.backends.native.encode import Levels
from drq_fast.backends.native.extension import native

DATA = Path(__file__).parent / "data"
needs_native = pytest.mark.skipif(native is None, reason="the extension is not built")


def vectors(N: int, D: int, seed: int) -> torch.Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def layer() -> RecurrentQuantizer:
    torch.manual_seed(0)
    layer = RecurrentQuantizer(6, 16, 3, level_weights=(1, 2, 3))
    layer.initialise(vectors(200, 6, 1), seed=0)
    return layer


def test_it_is_the_layer_at_that_moment(layer):
    codec, x = layer.codec(), vectors(50, 6, 2)
    codes = layer.encode(x)
    assert torch.equal(codec.encode(x), codes)
    assert torch.equal(codec.encode(x, beam=4), layer.encode(x, beam=4))
    assert torch.equal(codec.decode(codes, levels=2), layer.decode(codes, levels=2))
    with torch.no_grad():
        layer.codebook.mul_(-1)
    assert torch.equal(codec.encode(x), codes)
    assert not torch.equal(layer.encode(x), codes)
    assert (codec.dim, codec.codewords, codec.levels, codec.bits) == (6, 16, 3, 12)
    assert repr(codec) == "Codec(dim=6, codewords=16, levels=3, 12 bits)"


def test_torch_and_numpy_in_kind(layer):
    codec, x = layer.codec(), vectors(12, 6, 2)
    codes = codec.encode(x.numpy().reshape(3, 4, 6))
    assert isinstance(codes, np.ndarray)
    assert codes.shape == (3, 4, 3)
    assert np.array_equal(codes.reshape(12, 3), codec.encode(x).numpy())
    assert isinstance(codec.decode(codes), np.ndarray)
    same = Codec(*(None if t is None else t.numpy() for t in codec.tensors()), level_weights=[1, 2, 3])
    assert same == codec


def test_it_cannot_be_changed(layer):
    codec = layer.codec()
    for name in ("codebook", "scale", "offset", "level_weights", "new"):
        with pytest.raises(AttributeError, match=f"Codec: {name} cannot be set; make another codec instead."):
            setattr(codec, name, None)
    assert not codec.codebook.requires_grad


def test_equal_values_are_equal(layer):
    codec = layer.codec()
    assert codec == layer.codec()
    assert codec != codec.prefix(2)
    assert codec != Codec(codec.codebook, codec.scale, None, level_weights=(1, 2, 3))
    assert codec != Codec(codec.codebook, codec.scale, codec.offset)
    assert codec != 3


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_and_pickles(layer, copied):
    codec = layer.codec()
    codec.encode(vectors(100, 6, 2))  # fills the cache of tables, which is not copied
    assert copied(codec) == codec
    assert len(pickle.dumps(codec)) < 4000


def test_prefix_has_the_first_columns_of_greedy_codes(layer):
    codec, x = layer.codec(), vectors(40, 6, 2)
    short = codec.prefix(2)
    assert short.level_weights == (1, 2)
    assert torch.equal(short.encode(x), codec.encode(x)[:, :2])
    assert torch.equal(short.decode(short.encode(x)), codec.decode(codec.encode(x), levels=2))
    assert Codec(codec.codebook, codec.scale, level_weights=(0, 0, 1)).prefix(2).level_weights is None


def test_an_index_of_a_codec_is_that_of_its_layer(layer):
    x = vectors(100, 6, 2)
    one, other = Index(layer, "cosine"), Index(layer.codec(), "cosine")
    for index in (one, other):
        index.add(x, beam=3)
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.search(x[:9]).ids, other.search(x[:9]).ids)
    assert other.codec is Index(other.codec).codec  # shared, because nobody can change it


@needs_native
def test_tables_are_made_once(layer, monkeypatch):
    made, plain = [], Levels.__init__
    monkeypatch.setattr(Levels, "__init__", lambda *arguments: (made.append(1), plain(*arguments))[1])
    codec, x = layer.codec(), vectors(100, 6, 2)
    for _ in range(3):
        codec.encode(x)
    index = Index(codec)
    index.add(x)
    assert len(made) == 1
    threads = [threading.Thread(target=codec.encode, args=(x,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_files(layer, tmp_path):
    codec, path = layer.codec(), tmp_path / "a.drq"
    codec.save(path)
    assert Codec.load(path) == codec
    with pytest.raises(FileError, match=r"a\.drq holds a codec, not an index\."):
        Index.load(path)
    plain = Codec(codec.codebook, codec.scale)
    plain.save(path)
    assert Codec.load(path) == plain
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(FileError, match="is corrupted"):
        Codec.load(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda c, s, o: (c, s[None]), r"Codec: scale must be \[M\] with M >= 1, got \[1, 3\]\."),
        (lambda c, s, o: (c, s, o[:2]), r"Codec: offset must be \[6\], one entry per dimension of the codebook, got"),
        (lambda c, s, o: (c / 0, s, o), "Codec: codebook must be finite, got NaN or infinity in row 0."),
        (lambda c, s, o: (c[:1], s, o), "Codec: codebook must be .K, D. with K from 2 to 65536 and D >= 1, got"),
        (lambda c, s, o: (c.int(), s, o), "Codec: codebook must be a float tensor, got torch.int32."),
        (lambda c, s, o: (c.tolist(), s, o), "Codec: codebook must be a torch.Tensor or a numpy array, got list."),
    ],
)
def test_bad_parameters(layer, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Codec(*arguments(*layer.codec().tensors()))


def test_bad_arguments(layer):
    codec = layer.codec()
    for call, message in (
        (lambda: codec.encode(vectors(3, 5, 0)), r"encode: x must be \[..., 6\], got \[3, 5\]\."),
        (lambda: codec.decode(torch.full((2, 3), 16)), r"decode: codes must be in 0..15, got values from 16 to 16\."),
        (lambda: codec.prefix(4), r"prefix: levels must be an integer from 1 to 3, got 4\."),
        (lambda: Codec(codec.codebook, codec.scale, level_weights=(1, 2)), "Codec: level_weights must be 3 finite"),
        (lambda: RecurrentQuantizer(6, 16, 3).codec(), "codec: the layer has not seen data yet"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            call()


# What version 0.1.0 wrote: the files are in tests/data.


def test_a_quantizer_of_version_0_1_0():
    layer = RecurrentQuantizer.load(DATA / "quantizer-0.1.0.drq")
    assert layer._config() == {
        "dim": 6, "codewords": 16, "levels": 3, "codebooks": 1, "scale": "per_level", "offset": True, "gamma": None,
        "joint": "mse", "weights": (1.0, 0.5, 0.25), "level_weights": (1.0, 2.0, 3.0), "init": "kmeans",
        "gradient": "soft", "loss": "paper", "commitment": None, "pull": None, "update": "gradient",
    }  # fmt: skip
    assert float(layer(vectors(5, 6, 7)).loss.detach()) == pytest.approx(
        11.135027885437012, rel=1e-5
    )  # as 0.1.0 has it


def test_an_index_of_version_0_1_0_with_ids():
    index, layer = Index.load(DATA / "index-ids-0.1.0.drq"), RecurrentQuantizer.load(DATA / "quantizer-0.1.0.drq")
    assert index.metric == "cosine"
    assert index.codec == layer.codec()
    assert index.ids.tolist() == [i for i in range(100, 130) if i not in (103, 110)]
    assert torch.equal(index.codes, layer.encode(vectors(30, 6, 2))[[i for i in range(30) if i not in (3, 10)]])
    assert index.add(vectors(1, 6, 9)).tolist() == [130]


def test_an_index_of_version_0_1_0_with_two_byte_codes():
    index = Index.load(DATA / "index-wide-0.1.0.drq", mmap=True)
    index.verify()
    assert (index.metric, index.codewords, index.codec.offset, len(index)) == ("l2", 300, None, 20)
    x = vectors(20, 5, 3)
    assert torch.equal(index.codes, functional.encode(x, index.codec.codebook, index.codec.scale))
    assert int(index.search(index.codec.decode(index.codes[:1]), k=1).ids) == 0


def test_the_fixtures_say_version_1():
    for path in DATA.glob("*-0.1.0.drq"):
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert header["__metadata__"]["version"] == "1"
