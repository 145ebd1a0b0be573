"""A run folder: codes that resume, know their model and their vectors, and are written by one process at a time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from drq_fast import RecurrentQuantizer, files
from drq_fast.app import commands, metrics
from drq_fast.app import run as runs
from drq_fast.app.vectors import VectorFiles
from drq_fast.files import FileError

TRAIN = ["--train", "20", "--query", "5", "--hidden", "32", "--dim", "48", "--codewords", "16", "--levels", "3"]


class Counted(VectorFiles):
    """Vectors that cannot be read from row `fails_at` on."""

    fails_at: int | None = None
    rows_read = 0

    def read(self, first: int, last: int) -> torch.Tensor:
        if self.fails_at is not None and first >= self.fails_at:
            raise OSError("the disk is gone")
        Counted.rows_read += last - first
        return super().read(first, last)


def encode_two_thirds(shell, monkeypatch) -> None:
    """Encodes until row 2000 of 3000, where reading fails; it succeeds when it is repeated."""
    monkeypatch.setattr(runs, "_SECONDS", 0.0)
    monkeypatch.setattr(runs, "block_rows", lambda dim: 250)
    monkeypatch.setattr(commands, "VectorFiles", Counted)
    monkeypatch.setattr(Counted, "fails_at", 2000)
    assert "the disk is gone" in shell.refused("encode", "run", "x.npy", "--force")
    monkeypatch.setattr(Counted, "fails_at", None)


def test_encoding_goes_on_where_it_was(shell, monkeypatch):
    whole = shell.fitted().codes.read_bytes()
    encode_two_thirds(shell, monkeypatch)
    assert Path("run/codes.npy").read_bytes() == whole  # the old ones are kept
    Path("run/codes.npy").write_bytes(b"")
    with Path("run/codes.partial").open("ab") as file:
        file.write(b"half a block that nobody has counted")
    monkeypatch.setattr(Counted, "rows_read", 0)
    shell.ok("encode", "run", "x.npy", "--force")
    assert Counted.rows_read == 1000
    assert Path("run/codes.npy").read_bytes() == whole
    assert not list(Path("run").glob("codes.partial*"))


@pytest.mark.parametrize("change", ["beam", "file", "model"])
def test_an_encoding_of_something_else_starts_anew(shell, monkeypatch, change):
    shell.fitted()
    encode_two_thirds(shell, monkeypatch)
    if change == "file":
        np.save("x.npy", shell.clustered(3000, seed=5))
    elif change == "model":
        kept = {Path("run") / name: b"" for name in ("codes.partial", "codes.partial.json", "run.json")}
        kept = {path: path.read_bytes() for path in kept}
        shell.ok("fit", "run", "x.npy", *shell.FIT, "--seed", "3", "--force")
        for path, content in kept.items():
            path.write_bytes(content)
    beam = 4 if change == "beam" else 1
    shell.ok("encode", "run", "x.npy", "--force", "--beam", str(beam))
    expected = RecurrentQuantizer.load("run/model.drq").encode(np.load("x.npy"), beam=beam)
    assert np.array_equal(np.load("run/codes.npy"), expected)


@pytest.mark.parametrize("damage", ["shorter", "other bytes", "state"])
def test_a_damaged_partial_file_is_not_trusted(shell, monkeypatch, damage):
    whole = shell.fitted().codes.read_bytes()
    encode_two_thirds(shell, monkeypatch)
    partial = Path("run/codes.partial")
    if damage == "shorter":
        partial.write_bytes(partial.read_bytes()[:500])
    elif damage == "other bytes":
        partial.write_bytes(partial.read_bytes()[:500] + b"x" + partial.read_bytes()[501:])
    else:
        Path("run/codes.partial.json").write_text("{")
    shell.ok("encode", "run", "x.npy", "--force")
    assert Path("run/codes.npy").read_bytes() == whole


def test_vectors_that_change_meanwhile_are_refused(shell):
    vectors = VectorFiles(["x.npy"])
    assert len(vectors.read(0, 10)) == 10
    np.save("y.npy", shell.clustered(3000, seed=3))
    Path("y.npy").replace("x.npy")
    for read in (lambda: vectors.read(0, 10), lambda: vectors.pick(torch.arange(5))):
        with pytest.raises(FileError, match=r"x\.npy has changed since it was opened"):
            read()


def test_one_process_at_a_time(shell):
    run = shell.fitted()
    with run.writing():
        for command in (
            ["fit", "run", "x.npy", *shell.FIT, "--force"],
            ["encode", "run", "x.npy", "--force"],
            ["index", "run", "--force"],
            ["evaluate", "run", "--queries", "q.npy"],
        ):
            assert "another process is writing to run" in shell.refused(*command)
    shell.ok("encode", "run", "x.npy", "--force")


def test_remains_of_a_kill_are_removed(shell):
    shell.fitted()
    Path("run/.drq_fast-0123456789abcdef.tmp").mkdir()
    Path("run/.drq_fast-0123456789abcdef.tmp/new").write_bytes(b"half")
    Path("run/.mine.tmp").write_bytes(b"mine")
    shell.ok("index", "run", "--force")
    assert not Path("run/.drq_fast-0123456789abcdef.tmp").exists()
    assert Path("run/.mine.tmp").exists()


def test_files_can_be_read_by_others(shell):
    shell.fitted()
    modes = {path.name: path.stat().st_mode & 0o777 for path in Path("run").iterdir()}
    assert len(set(modes.values())) == 1, modes


def test_a_fit_that_cannot_be_saved_leaves_the_old_model(shell, monkeypatch):
    shell.fitted()
    before = shell.tree()

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(RecurrentQuantizer, "save", full)
    assert "No space left" in shell.refused("fit", "run", "x.npy", *shell.FIT, "--seed", "4", "--force")
    assert shell.tree() == before


def test_data_that_changed_after_training_are_noticed(shell):
    command = ["train", "run", "--data", "labelled.npz", *TRAIN, "--epochs", "1", "1", "1", "--batch", "20"]
    shell.ok(*command)
    shell.ok("encode", "run")
    pack = dict(np.load("labelled.npz"))
    pack["x"][runs.Run("run").experiment().split.database] += 1
    np.savez("labelled.npz", **pack)
    assert "the data have changed since run/codes.npy was encoded" in shell.refused("evaluate", "run")


def test_a_run_without_names_of_classes_is_read_as_before(shell):
    """Version 0.1.0 did not write them."""
    shell.ok("train", "run", "--data", "labelled.npz", *TRAIN, "--epochs", "1", "1", "1", "--batch", "20")
    shell.ok("encode", "run")
    config = json.loads(Path("run/config.json").read_text())
    assert config.pop("classes") is None
    Path("run/config.json").write_text(json.dumps(config))
    assert "classes" not in json.loads(Path("run/codes.json").read_text())["source"]
    shell.ok("evaluate", "run")


def test_codes_of_other_vectors_than_the_database_are_noticed(shell):
    shell.ok("train", "run", "--data", "labelled.npz", *TRAIN, "--epochs", "1", "1", "1", "--batch", "20")
    np.save("wide.npy", np.zeros((45, 48), np.float32))
    shell.ok("encode", "run", "wide.npy")
    assert "run/codes.npy has other vectors' codes; encode again with --force" in shell.refused("evaluate", "run")


def test_a_network_that_is_lost_is_not_trained_again(shell):
    shell.ok("train", "run", "--data", "labelled.npz", *TRAIN, "--epochs", "1", "1", "1", "--batch", "20")
    Path("run/checkpoint.safetensors").unlink()
    assert "so the network is lost" in shell.refused("evaluate", "run")


def test_commands_read_model_and_codes_once(shell, monkeypatch):
    load, read, opened = RecurrentQuantizer.load, files.read_array, []
    monkeypatch.setattr(RecurrentQuantizer, "load", lambda path: opened.append("model") or load(path))
    monkeypatch.setattr(files, "read_array", lambda op, path: opened.append("codes") or read(op, path))
    shell.ok("fit", "run", "x.npy", *shell.FIT)
    assert opened == []
    for command, expected in (
        (["encode", "run", "x.npy"], ["model"]),
        (["index", "run"], ["model", "codes"]),
        (["search", "run", "q.npy"], []),
        (["evaluate", "run", "--queries", "q.npy"], ["model", "codes"]),
    ):
        opened.clear()
        shell.ok(*command)
        assert opened == expected


def test_codes_of_another_model_are_refused(shell):
    shell.fitted()
    shell.ok("fit", "other", "x.npy", *shell.FIT, "--seed", "5")
    Path("other/model.drq").replace("run/model.drq")
    for command in (["index", "run", "--force"], ["evaluate", "run", "--queries", "q.npy"]):
        assert "was made by another model" in shell.refused(*command)


def test_codes_that_were_changed_are_refused(shell):
    shell.fitted()
    codes = np.load("run/codes.npy")
    codes[5] += 1
    np.save("run/codes.npy", codes)
    assert "does not match" in shell.refused("index", "run", "--force")


@pytest.mark.parametrize("sample", [1 << 14, 500])
def test_the_error_of_a_fitted_run_is_that_of_its_codes(shell, monkeypatch, sample):
    monkeypatch.setattr(metrics, "_SAMPLE", sample)
    shell.ok("fit", "run", "x.npy", *shell.FIT)
    layer, x, found = RecurrentQuantizer.load("run/model.drq"), torch.from_numpy(np.load("x.npy")), []
    for beam in (1, 8):
        shell.ok("encode", "run", "x.npy", "--beam", str(beam), "--force")
        measured = json.loads(shell.ok("evaluate", "run", "--queries", "q.npy", "--json"))
        found.append(measured["lengths"][-1]["error"])
        assert layer.offset is not None
        error = (x - layer.decode(layer.encode(x, beam=beam))).square().sum() / (x - layer.offset).square().sum()
        assert found[-1] == pytest.approx(float(error.detach()), rel=1e-4 if sample > 3000 else 0.2)
    assert found[1] < found[0]


def test_the_error_of_a_trained_run_has_the_beam_of_its_codes(shell):
    shell.ok("train", "run", "--data", "labelled.npz", *TRAIN, "--epochs", "1", "1", "1", "--batch", "20")
    layer = RecurrentQuantizer.load("run/model.drq")
    for beam in (1, 8):
        shell.ok("encode", "run", "--beam", str(beam), "--force")
        error = json.loads(shell.ok("evaluate", "run", "--json"))["lengths"][-1]["error"]
        x = torch.from_numpy(np.load("run/queries.npy"))
        around = 0 if layer.offset is None else layer.offset.detach()
        expected = (x - layer.decode(layer.encode(x, beam=beam))).square().sum() / (x - around).square().sum()
        assert error == pytest.approx(float(expected.detach()), rel=1e-4)


def test_new_codes_leave_nothing_that_was_made_of_the_old(shell):
    shell.fitted()
    shell.ok("evaluate", "run", "--queries", "q.npy")
    shell.ok("encode", "run", "x.npy", "--beam", "8", "--force")
    assert not Path("run/index.drq").exists()
    assert not Path("run/metrics.json").exists()


@pytest.mark.parametrize("source", [None, "x", [1], [{}], [{"path": 1}]])
def test_codes_without_their_vectors_are_refused(shell, source):
    run = shell.fitted()
    made_by = json.loads(run.made_by.read_text())
    run.made_by.write_text(json.dumps(made_by | {"source": source}))
    said = shell.refused("evaluate", "run", "--queries", "q.npy")
    assert "run/codes.json does not describe codes of vectors in files (" in said
    del made_by["source"]
    run.made_by.write_text(json.dumps(made_by))
    assert "files ('source')." in shell.refused("evaluate", "run", "--queries", "q.npy")
