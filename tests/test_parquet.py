"""Parquet files: encoded in this process, resumed by file, and the errors that name a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import drq_fast
from drq_fast.app.cli import main
from drq_fast.files import FileError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
parquet = pytest.importorskip("drq_fast.interop.parquet")

DIM = 6


@pytest.fixture
def codec(codec):
    _, codebook, scale, offset = codec(N=300, D=DIM, K=16, M=3)
    return drq_fast.Codec(codebook, scale, offset)


def column_of(x, kind="list"):
    if kind == "tensor":
        return pa.FixedShapeTensorArray.from_numpy_ndarray(x)
    if kind == "fixed":
        return pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), x.shape[1])
    return pa.array(list(x), pa.large_list(pa.float32()) if kind == "large" else pa.list_(pa.float64()))


def write(path, x, kind="list", name="embedding"):
    table = pa.table({"id": np.arange(len(x)), name: column_of(x, kind)})
    pq.write_table(table, path, row_group_size=7)
    return str(path)


def vectors(count, seed=0):
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


def codes_in(path):
    table = pq.read_table(path)
    return np.array(table["codes"].to_pylist()).reshape(-1, 3), table


@pytest.mark.parametrize("kind", ["list", "large", "fixed", "tensor"])
def test_codes_replace_the_vectors(tmp_path, codec, kind, monkeypatch):
    monkeypatch.setattr(parquet, "_NUMBERS", 10 * DIM)  # several batches
    x = vectors(33)
    source, out = write(tmp_path / "a.parquet", x, kind), tmp_path / "out"
    out.mkdir()
    todo = parquet.tasks(codec, [source], out, beam=4)
    assert parquet.encode_files(codec, todo) == 33
    codes, table = codes_in(out / "a.parquet")
    np.testing.assert_array_equal(codes, codec.encode(x, beam=4))
    assert table.column_names == ["id", "codes"]
    assert table["id"].to_pylist() == list(range(33))
    assert os.listdir(out) == ["a.parquet"]


def test_complete_files_are_not_encoded_again(tmp_path, codec):
    sources = [write(tmp_path / f"{name}.parquet", vectors(5, seed)) for seed, name in enumerate("ab")]
    out = tmp_path / "out"
    out.mkdir()
    parquet.encode_files(codec, parquet.tasks(codec, sources, out))
    before = {path.name: path.stat().st_ino for path in out.iterdir()}
    write(tmp_path / "b.parquet", vectors(6, 9))
    assert parquet.encode_files(codec, parquet.tasks(codec, sources, out)) == 11
    after = {path.name: path.stat().st_ino for path in out.iterdir()}
    assert before["a.parquet"] == after["a.parquet"]
    assert before["b.parquet"] != after["b.parquet"]
    again = parquet.tasks(codec, sources, out, beam=2)
    assert not any(task.done() for task in again)
    (out / "a.parquet").write_bytes(b"PAR1")
    assert not parquet.tasks(codec, sources, out)[0].done()


def test_a_killed_encoding_leaves_no_file_and_the_next_one_removes_its_remains(tmp_path, codec, monkeypatch):
    source, out = write(tmp_path / "a.parquet", vectors(5)), tmp_path / "out"
    out.mkdir()
    todo = parquet.tasks(codec, [source], out)
    monkeypatch.setattr(drq_fast.Codec, "encode", lambda *_: os._exit(9))
    child = os.fork()
    if child == 0:
        parquet.encode_files(codec, todo)
    os.waitpid(child, 0)
    monkeypatch.undo()
    assert not (out / "a.parquet").exists()
    assert os.listdir(out)
    parquet.encode_files(codec, todo)
    assert os.listdir(out) == ["a.parquet"]


def test_errors_name_the_file(tmp_path, codec):
    out = tmp_path / "out"
    out.mkdir()

    def error_of(path, **options):
        with pytest.raises(ValueError, match=path.rsplit("/", 1)[-1]) as error:
            parquet.encode_files(codec, parquet.tasks(codec, [path], out, **options))
        assert not list(out.glob("*.parquet"))
        return str(error.value).replace(str(tmp_path), "")

    good = write(tmp_path / "a.parquet", vectors(5))
    assert error_of(good, column="x") == "encode: /a.parquet has no column 'x'; its columns are id, embedding."
    assert error_of(good, output="id") == "encode: /a.parquet has a column 'id' already."
    assert error_of(good, column="id") == "encode: /a.parquet must have lists of numbers as vectors, got int64."
    wide = np.ones((5, 9), np.float32)
    expected = "encode: /b.parquet has a vector of 9 dimensions in row 0, and the codec has 6."
    assert error_of(write(tmp_path / "b.parquet", wide)) == expected
    assert error_of(write(tmp_path / "b.parquet", wide, "fixed")) == expected
    x = vectors(20)
    x[17, 2] = np.inf
    assert error_of(write(tmp_path / "c.parquet", x)) == "encode: row 17 of /c.parquet is not finite in float32."
    rows = [*map(list, vectors(9)), None]
    pq.write_table(pa.table({"embedding": pa.array(rows)}), tmp_path / "d.parquet")
    assert error_of(str(tmp_path / "d.parquet")) == "encode: /d.parquet has no vector in row 9."
    rows[9] = [1.0, None, 1.0, 1.0, 1.0, 1.0]
    pq.write_table(pa.table({"embedding": pa.array(rows)}), tmp_path / "e.parquet")
    assert error_of(str(tmp_path / "e.parquet")) == "encode: /e.parquet has a missing number in row 9."
    (tmp_path / "f.parquet").write_bytes(b"no Parquet")
    assert error_of(str(tmp_path / "f.parquet")).startswith("encode: /f.parquet is not a complete Parquet file (")
    damaged = tmp_path / "g.parquet"
    content = bytearray(Path(write(damaged, vectors(5))).read_bytes())
    content[4:60] = b"\xff" * 56  # the data, which pyarrow reads after the schema
    damaged.write_bytes(content)
    assert error_of(str(damaged)).startswith("encode: /g.parquet is not a complete Parquet file (")
    twice = pa.Table.from_arrays([column_of(vectors(5))] * 2, ["embedding"] * 2)
    pq.write_table(twice, tmp_path / "h.parquet")
    assert error_of(str(tmp_path / "h.parquet")) == "encode: /h.parquet has several columns 'embedding'."
    (tmp_path / "other").mkdir()
    same = write(tmp_path / "other" / "a.parquet", vectors(5))
    with pytest.raises(ValueError, match=r"^encode: files must be of different names, got .*a\.parquet and "):
        parquet.tasks(codec, [good, same], out)
    with pytest.raises(ValueError, match=r"^encode: files must be outside of .*, where codes are written, got "):
        parquet.tasks(codec, [good], tmp_path)


def test_command_line(tmp_path, capsys):
    x, run = vectors(400), tmp_path / "run"
    np.save(tmp_path / "x.npy", x)
    assert main(["fit", str(run), str(tmp_path / "x.npy"), "--levels", "3", "--codewords", "16", "--rounds", "3"]) == 0
    sources = [write(tmp_path / f"{name}.parquet", x[i::2]) for i, name in enumerate("ab")]
    pattern = str(tmp_path / "*.parquet")
    capsys.readouterr()
    assert main(["encode", str(run), pattern, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["files"], result["rows"]) == (2, 400)
    layer = drq_fast.RecurrentQuantizer.load(run / "model.drq")
    codes, _ = codes_in(run / "codes" / "b.parquet")
    np.testing.assert_array_equal(codes, layer.encode(torch.from_numpy(x[1::2])).numpy())
    assert main(["encode", str(run), pattern]) == 0  # nothing is left to do
    capsys.readouterr()
    assert main(["encode", str(run), pattern, "--beam", "4"]) == 1
    assert "codes/a.parquet exists already; --force replaces it." in capsys.readouterr().err
    assert main(["encode", str(run), *sources, "--beam", "4", "--force"]) == 0
    assert main(["fit", str(run), str(tmp_path / "x.npy"), "--levels", "2", "--rounds", "2", "--force"]) == 0
    assert not (run / "codes").exists()  # they were made by the earlier model
    (run / "codes").mkdir()
    write(run / "codes" / "a.parquet", x)
    assert main(["encode", str(run), pattern, "--force"]) == 1
    assert "codes/a.parquet is not a result of this run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["no/*.parquet"], 1, "no file matches no/*.parquet."),
        (["a.parquet", "x.npy"], 2, "vectors must be Parquet files alone, or .npy files alone, got x.npy."),
        (["a.parquet", "--workers", "2"], 2, "--workers must be left out without --ray, got 2."),
        (["x.npy", "--column", "y"], 2, "--column must be left out unless files are Parquet, got y."),
    ],
)
def test_command_line_refuses(tmp_path, capsys, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    assert main(["encode", "run", *arguments]) == code
    assert message in capsys.readouterr().err


def test_a_file_error_is_one(tmp_path, codec):
    with pytest.raises(FileError, match=r"^fit: column 'x' has a vector of 2 dimensions in row 7"):
        parquet.vectors("fit", pa.chunked_array([pa.array([[1.0, 2.0]])]), DIM, "column 'x'", 7)
