"""The command line: from files to codes to figures, and one sentence for everything that goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from drq_fast import Index, RecurrentQuantizer, cli, commands
from drq_fast import run as runs
from drq_fast.files import FileError, fingerprint
from drq_fast.run import Run
from drq_fast.vectors import VectorFiles

FIT = ["--rounds", "6", "--codewords", "16", "--levels", "3"]
TRAIN = ["--train", "20", "--query", "5", "--hidden", "32", "--dim", "48", "--codewords", "16", "--levels", "3"]


def clustered(N: int, seed: int = 0, D: int = 16) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(20, D))[rng.integers(20, size=N)] + 0.3 * rng.normal(size=(N, D))).astype(np.float32)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with vectors, queries and labelled features, as the current one."""
    monkeypatch.chdir(tmp_path)
    x = clustered(3000)
    np.save("x.npy", x)
    np.save("q.npy", x[:7] + 0.01)
    rng = np.random.default_rng(1)
    label = np.arange(120) % 3
    features = (np.eye(3, 8)[label] + 0.2 * rng.normal(size=(120, 8))).astype(np.float32)
    np.savez("labelled.npz", x=features, label=label)
    return tmp_path


def ok(capsys, *arguments: str) -> str:
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def refused(capsys, *arguments: str, code: int = 1) -> str:
    """The one line on stderr; stdout stays empty."""
    capsys.readouterr()
    try:
        found = cli.main(list(arguments))
    except SystemExit as exit:
        found = exit.code
    captured = capsys.readouterr()
    assert found == code
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("drq-fast")
    assert "Traceback" not in captured.err
    return captured.err


def fitted(capsys) -> Run:
    ok(capsys, "fit", "run", "x.npy", *FIT)
    ok(capsys, "encode", "run", "x.npy")
    ok(capsys, "index", "run")
    return Run("run")


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_from_vectors_to_neighbours(here, capsys):
    printed = ok(capsys, "fit", "run", "x.npy", *FIT)
    assert "12 bits" in printed
    ok(capsys, "encode", "run", "x.npy", "--beam", "4")
    ok(capsys, "index", "run", "--metric", "ip")
    layer = RecurrentQuantizer.load("run/model.drq")
    index = Index(layer, "ip")
    index.add(np.load("x.npy"), beam=4)
    assert torch.equal(torch.from_numpy(np.load("run/codes.npy")), index.codes)
    for length, L in (("8", 2), (None, 3)):
        options = [] if length is None else ["--bits", length]
        found = json.loads(ok(capsys, "search", "run", "q.npy", "-k", "4", "--json", *options))
        scores, ids = index.search(np.load("q.npy"), 4, L)
        assert found["ids"] == ids.tolist()
        assert found["scores"] == scores.tolist()
    ok(capsys, "search", "run", "q.npy", "-k", "4", "--out", "found.npz")
    assert np.array_equal(np.load("found.npz")["ids"], ids)
    lines = ok(capsys, "search", "run", "q.npy", "-k", "2").splitlines()
    assert lines[3].split("\t")[0] == "3"
    assert lines[3].split("\t")[1].split(":")[0] == str(ids[3, 0])


def test_there_are_no_more_results_than_codes(here, capsys):
    fitted(capsys)
    found = json.loads(ok(capsys, "search", "run", "q.npy", "-k", "2147483647", "--json"))
    assert sorted(found["ids"][0]) == list(range(3000))


def test_several_files_count_as_one(here, capsys):
    x = np.load("x.npy")
    np.save("first.npy", x[:1000].astype(np.float64))
    np.save("second.npy", x[1000:])
    ok(capsys, "fit", "one", "x.npy", *FIT)
    ok(capsys, "fit", "two", "first.npy", "second.npy", *FIT)
    for run, names in (("one", ["x.npy"]), ("two", ["first.npy", "second.npy"])):
        ok(capsys, "encode", run, *names)
    assert Path("one/codes.npy").read_bytes() == Path("two/codes.npy").read_bytes()


def test_many_codewords(here, capsys):
    ok(capsys, "fit", "run", "x.npy", "--rounds", "2", "--codewords", "300", "--levels", "2")
    ok(capsys, "encode", "run", "x.npy")
    assert np.load("run/codes.npy").dtype == np.int32
    ok(capsys, "index", "run")
    assert json.loads(ok(capsys, "search", "run", "q.npy", "--bits", "9", "--json"))["ids"][0]


def test_own_ids(here, capsys):
    fitted(capsys)
    np.save("ids.npy", np.arange(3000) * 10)
    ok(capsys, "index", "run", "--ids", "ids.npy", "--force")
    found = json.loads(ok(capsys, "search", "run", "q.npy", "--json"))
    assert {i % 10 for row in found["ids"] for i in row} == {0}


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_recall_of_a_fitted_run(here, capsys, metric):
    fitted(capsys)
    metrics = json.loads(ok(capsys, "evaluate", "run", "--queries", "q.npy", "--metric", metric, "-k", "5", "--json"))
    x, query = torch.from_numpy(np.load("x.npy")), torch.from_numpy(np.load("q.npy"))
    if metric == "cosine":
        x, query = (torch.nn.functional.normalize(v, dim=1) for v in (x, query))
    scores = -torch.cdist(query, x) if metric == "l2" else query @ x.T
    exact = scores.topk(5, dim=1).indices
    index = Index(RecurrentQuantizer.load("run/model.drq"), metric)
    index.add(np.load("x.npy"))
    found = index.search(torch.from_numpy(np.load("q.npy")), 5, 2).ids
    hits = sum(len(set(f) & set(e)) for f, e in zip(found.tolist(), exact.tolist(), strict=True))
    assert metrics["lengths"][1]["recall"] == pytest.approx(hits / 35)
    errors = [row["error"] for row in metrics["lengths"]]
    assert errors == sorted(errors, reverse=True)
    assert json.loads(Path("run/metrics.json").read_text()) == metrics


def test_the_papers_way(here, capsys):
    command = ["train", "run", "--data", "labelled.npz", *TRAIN, "--epochs", "6", "2", "3", "--batch", "20"]
    result = json.loads(ok(capsys, *command, "--json"))
    assert (result["train"], result["query"], result["database"]) == (60, 15, 45)
    metrics = json.loads(ok(capsys, "evaluate", "run", "--exact", "--json"))
    assert [row["bits"] for row in metrics["lengths"]] == [4, 8, 12]
    assert metrics["R"] == 45
    assert metrics["metric"] == "ip"
    assert 0.6 < metrics["lengths"][-1]["mAP"] <= 1
    assert metrics["exact"]["mAP"] > 0.6
    assert np.load("run/queries.npy").shape == (15, 48)
    ok(capsys, "index", "run")
    assert len(ok(capsys, "search", "run").splitlines()) == 15
    assert Index.load("run/index.drq").metric == "ip"
    assert "is there already" in refused(capsys, *command)
    said = refused(capsys, *command, "--margin", "0.25")
    assert "margin is 0.5 there and 0.25 here" in said
    ok(capsys, *command, "--margin", "0.25", "--force")
    assert not Path("run/metrics.json").exists()
    assert not Path("run/codes.npy").exists()


def test_a_config_file_repeats_a_run(here, capsys):
    ok(capsys, "train", "run", "--data", "labelled.npz", *TRAIN, "--epochs", "1", "1", "1", "--batch", "20")
    ok(capsys, "train", "again", "--config", "run/config.json")
    assert fingerprint("run/model.drq", "quantizer") == fingerprint("again/model.drq", "quantizer")


def test_unsupervised(here, capsys):
    ok(capsys, "train", "run", "--data", "labelled.npz", *TRAIN, "--ablation", "unsupervised")
    metrics = json.loads(ok(capsys, "evaluate", "run", "--json"))
    assert metrics["metric"] == "l2"
    assert metrics["lengths"][0]["mAP"] > 0.4


def test_a_run_of_another_protocol_needs_its_codewords(here, capsys):
    said = refused(capsys, "train", "run", "--data", "labelled.npz", "--protocol", "cifar10-1", "--query", "5")
    assert "one of 16, 64, 512, 4096" in said


class Counted(VectorFiles):
    """Vectors that fail once, at a row."""

    fails_at: int | None = None
    rows_read = 0

    def read(self, first: int, last: int) -> torch.Tensor:
        if self.fails_at is not None and first >= self.fails_at:
            raise OSError("the disk is gone")
        Counted.rows_read += last - first
        return super().read(first, last)


def test_encoding_goes_on_where_it_was(here, capsys, monkeypatch):
    whole = fitted(capsys).codes.read_bytes()
    monkeypatch.setattr(runs, "_SECONDS", 0.0)
    monkeypatch.setattr(runs, "block_rows", lambda dim: 250)
    monkeypatch.setattr(commands, "VectorFiles", Counted)
    monkeypatch.setattr(Counted, "fails_at", 2000)
    assert "the disk is gone" in refused(capsys, "encode", "run", "x.npy", "--force")
    assert Path("run/codes.npy").read_bytes() == whole  # the old ones are kept
    Path("run/codes.npy").write_bytes(b"")
    with Path("run/codes.partial").open("ab") as file:
        file.write(b"half a block that nobody has counted")
    monkeypatch.setattr(Counted, "fails_at", None)
    monkeypatch.setattr(Counted, "rows_read", 0)
    ok(capsys, "encode", "run", "x.npy", "--force")
    assert Counted.rows_read == 1000
    assert Path("run/codes.npy").read_bytes() == whole
    assert not list(Path("run").glob("codes.partial*"))


@pytest.mark.parametrize("change", ["beam", "file", "model"])
def test_an_encoding_of_something_else_starts_anew(here, capsys, monkeypatch, change):
    fitted(capsys)
    monkeypatch.setattr(runs, "_SECONDS", 0.0)
    monkeypatch.setattr(runs, "block_rows", lambda dim: 250)
    monkeypatch.setattr(commands, "VectorFiles", Counted)
    monkeypatch.setattr(Counted, "fails_at", 2000)
    refused(capsys, "encode", "run", "x.npy", "--force")
    monkeypatch.setattr(Counted, "fails_at", None)
    if change == "file":
        np.save("x.npy", clustered(3000, seed=5))
    elif change == "model":
        partial = Path("run/codes.partial").read_bytes(), Path("run/codes.partial.json").read_bytes()
        ok(capsys, "fit", "run", "x.npy", *FIT, "--seed", "3", "--force")
        Path("run/codes.partial").write_bytes(partial[0])
        Path("run/codes.partial.json").write_bytes(partial[1])
    beam = 4 if change == "beam" else 1
    ok(capsys, "encode", "run", "x.npy", "--force", "--beam", str(beam))
    expected = RecurrentQuantizer.load("run/model.drq").encode(np.load("x.npy"), beam=beam)
    assert np.array_equal(np.load("run/codes.npy"), expected)


@pytest.mark.parametrize("damage", ["shorter", "other bytes", "state"])
def test_a_damaged_partial_file_is_not_trusted(here, capsys, monkeypatch, damage):
    whole = fitted(capsys).codes.read_bytes()
    monkeypatch.setattr(runs, "_SECONDS", 0.0)
    monkeypatch.setattr(runs, "block_rows", lambda dim: 250)
    monkeypatch.setattr(commands, "VectorFiles", Counted)
    monkeypatch.setattr(Counted, "fails_at", 2000)
    refused(capsys, "encode", "run", "x.npy", "--force")
    monkeypatch.setattr(Counted, "fails_at", None)
    partial = Path("run/codes.partial")
    if damage == "shorter":
        partial.write_bytes(partial.read_bytes()[:500])
    elif damage == "other bytes":
        partial.write_bytes(partial.read_bytes()[:500] + b"x" + partial.read_bytes()[501:])
    else:
        Path("run/codes.partial.json").write_text("{")
    ok(capsys, "encode", "run", "x.npy", "--force")
    assert Path("run/codes.npy").read_bytes() == whole


def test_vectors_that_change_meanwhile_are_refused(here):
    vectors = VectorFiles(["x.npy"])
    assert len(vectors.read(0, 10)) == 10
    np.save("y.npy", clustered(3000, seed=3))
    Path("y.npy").replace("x.npy")
    for read in (lambda: vectors.read(0, 10), lambda: vectors.sample(5, 0)):
        with pytest.raises(FileError, match=r"x\.npy has changed since it was opened"):
            read()


def test_one_process_at_a_time(here, capsys):
    run = fitted(capsys)
    with run.writing():
        for command in (
            ["fit", "run", "x.npy", *FIT, "--force"],
            ["encode", "run", "x.npy", "--force"],
            ["index", "run", "--force"],
            ["evaluate", "run", "--queries", "q.npy"],
        ):
            assert "another process is writing to run" in refused(capsys, *command)
    ok(capsys, "encode", "run", "x.npy", "--force")


def test_remains_of_a_kill_are_removed(here, capsys):
    fitted(capsys)
    Path("run/.0123456789abcdef.tmp").write_bytes(b"half")
    Path("run/.mine.tmp").write_bytes(b"mine")
    ok(capsys, "index", "run", "--force")
    assert not Path("run/.0123456789abcdef.tmp").exists()
    assert Path("run/.mine.tmp").exists()


def test_files_can_be_read_by_others(here, capsys):
    fitted(capsys)
    modes = {path.name: path.stat().st_mode & 0o777 for path in Path("run").iterdir()}
    assert len(set(modes.values())) == 1, modes


def test_a_fit_that_cannot_be_saved_leaves_the_old_model(here, capsys, monkeypatch):
    fitted(capsys)
    before = tree(here)

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(RecurrentQuantizer, "save", full)
    assert "No space left" in refused(capsys, "fit", "run", "x.npy", *FIT, "--seed", "4", "--force")
    assert tree(here) == before


def test_data_that_changed_after_training_are_noticed(here, capsys):
    command = ["train", "run", "--data", "labelled.npz", *TRAIN, "--epochs", "1", "1", "1", "--batch", "20"]
    ok(capsys, *command)
    ok(capsys, "encode", "run")
    pack = dict(np.load("labelled.npz"))
    pack["x"][50:] += 1
    np.savez("labelled.npz", **pack)
    assert "are of other items than the database" in refused(capsys, "evaluate", "run")


def test_a_network_that_is_lost_is_not_trained_again(here, capsys):
    ok(capsys, "train", "run", "--data", "labelled.npz", *TRAIN, "--epochs", "1", "1", "1", "--batch", "20")
    Path("run/checkpoint.safetensors").unlink()
    assert "so the network is lost" in refused(capsys, "evaluate", "run")


def test_codes_of_another_model_are_refused(here, capsys):
    fitted(capsys)
    ok(capsys, "fit", "other", "x.npy", *FIT, "--seed", "5")
    Path("other/model.drq").replace("run/model.drq")
    for command in (["index", "run", "--force"], ["evaluate", "run", "--queries", "q.npy"]):
        assert "was made by another model" in refused(capsys, *command)


def test_codes_that_were_changed_are_refused(here, capsys):
    fitted(capsys)
    codes = np.load("run/codes.npy")
    codes[5] += 1
    np.save("run/codes.npy", codes)
    assert "is not what" in refused(capsys, "index", "run", "--force")


def test_new_codes_leave_nothing_that_was_made_of_the_old(here, capsys):
    fitted(capsys)
    ok(capsys, "evaluate", "run", "--queries", "q.npy")
    ok(capsys, "encode", "run", "x.npy", "--beam", "8", "--force")
    assert not Path("run/index.drq").exists()
    assert not Path("run/metrics.json").exists()


def test_nothing_is_replaced_unasked(here, capsys):
    fitted(capsys)
    ok(capsys, "evaluate", "run", "--queries", "q.npy")
    Path("found.npz").write_bytes(b"mine")
    before = tree(here)
    for command in (
        ["fit", "run", "x.npy", *FIT],
        ["encode", "run", "x.npy"],
        ["index", "run"],
        ["evaluate", "run", "--queries", "q.npy"],
        ["search", "run", "q.npy", "--out", "found.npz"],
    ):
        assert "is there already; --force replaces it" in refused(capsys, *command)
    assert tree(here) == before


WRONG = [
    (["fit", "new", "missing.npy"], "missing.npy cannot be read: No such file"),
    (["fit", "new", "text.npy"], "text.npy is not a whole .npy file"),
    (["fit", "new", "cut.npy"], "cut.npy is not a whole .npy file"),
    (["fit", "new", "flat.npy"], "must hold numbers [N, D]"),
    (["fit", "new", "labelled.npz"], "is an archive of arrays"),
    (["fit", "new", "pk.npy"], "pk.npy is not a whole .npy file"),
    (["fit", "new", "header.npy"], "header.npy is not a whole .npy file"),
    (["fit", "new", "x.npy", "--levels", "1000000000"], "levels must be"),
    (["fit", "new", "nan.npy"], "row 11 of nan.npy is not finite"),
    (["fit", "new", "columns.npy"], "is stored by columns"),
    (["fit", "new", "x.npy", "narrow.npy"], "narrow.npy has 3 dimensions and x.npy has 16"),
    (["fit", "x.npy/run", "x.npy"], "x.npy/run cannot be made: Not a directory"),
    (["fit", "/proc/run", "x.npy"], "/proc/run cannot be made"),
    (["fit", "new", "x.npy", "--codewords", "1"], "codewords must be"),
    (["fit", "new", "x.npy", "--sample", "0"], "sample must be"),
    (["fit", "run", "run/codes.npy", "--force"], "outside of run"),
    (["encode", "new", "x.npy"], "new is not there; `drq-fast fit` or `train` makes a run"),
    (["encode", "run", "narrow.npy", "--force"], "of 16 dimensions, as the model is, got 3"),
    (["encode", "run", "nan.npy", "--force"], "row 11 of nan.npy is not finite"),
    (["encode", "run", "--force"], "was fitted without labels"),
    (["encode", "run", "x.npy", "--beam", "0", "--force"], "beam must be"),
    (["index", "new"], "new is not there"),
    (["index", "run", "--ids", "missing.npy", "--force"], "missing.npy cannot be read"),
    (["index", "run", "--ids", "x.npy", "--force"], "ids must be"),
    (["index", "run", "--ids", "twice.npy", "--force"], "ids must be unique"),
    (["search", "new", "q.npy"], "new is not there"),
    (["search", "run"], "queries must be a file of vectors"),
    (["search", "run", "narrow.npy"], "of 16 dimensions, as the index is, got 3"),
    (["search", "run", "q.npy", "--bits", "5"], "bits must be one of 4, 8, 12, got 5"),
    (["search", "run", "q.npy", "-k", "0"], "k must be"),
    (["search", "run", "q.npy", "--out", "/proc/found.npz"], "/proc/found.npz cannot be written"),
    (["evaluate", "run"], "given by --queries"),
    (["evaluate", "run", "--queries", "q.npy", "-k", "3001"], "k must be"),
    (["evaluate", "new"], "new is not there"),
    (["train", "new"], "data must be given by --data"),
    (["train", "new", "--data", "missing"], "missing is not there"),
    (["train", "new", "--data", "labelled.npz", "--words", "missing.txt"], "missing.txt cannot be read"),
    (["train", "new", "--data", "labelled.npz", "--config", "typo.json"], "no setting, did you mean margin?"),
    (["train", "new", "--data", "labelled.npz", "--config", "x.npy"], "x.npy is not JSON"),
    (["train", "new", "--config", "numbers.json"], "data must be the name of"),
    (["train", "new", "--data", "labelled.npz", "--config", "words.json"], "hidden must be"),
    (["train", "new", "--data", "labelled.npz", *TRAIN, "--dropout", "2"], "dropout must be"),
    (["train", "new", "--data", "labelled.npz", *TRAIN, "--dim", "2"], "dim must be"),
    (["train", "new", "--data", "labelled.npz", *TRAIN, "--hidden", "-5"], "hidden must be"),
    (["train", "trained", "--data", "labelled.npz", *TRAIN, "--dim", "2", "--force"], "dim must be"),
    (["train", "run", "--data", "labelled.npz", *TRAIN], "run/config.json of another run (ablation is None there"),
    (["train", "/proc/run", "--data", "labelled.npz", *TRAIN], "/proc/run cannot be made"),
    (["report", "new"], "new is not there"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=[" ".join(a[:4]) for a, _ in WRONG])
def test_bad_input_is_one_sentence(here, capsys, arguments, said):
    x = np.load("x.npy")
    fitted(capsys)
    Path("text.npy").write_text("not an array")
    Path("cut.npy").write_bytes(Path("x.npy").read_bytes()[:5000])
    np.save("flat.npy", x[0])
    np.save("narrow.npy", x[:, :3].copy())
    np.save("columns.npy", np.asfortranarray(x))
    np.save("nan.npy", np.where(np.arange(3000)[:, None] == 11, np.nan, x))
    np.save("twice.npy", np.zeros(3000, np.int64))
    Path("pk.npy").write_bytes(b"PK\3\4junk")
    Path("header.npy").write_bytes(
        Path("x.npy").read_bytes().replace(b"'shape': (3000, 16), }", b"'shape': (3000, 16  ")
    )
    Path("numbers.json").write_text('{"data": 5}')
    Path("words.json").write_text('{"hidden": "x"}')
    Path("typo.json").write_text('{"margn": 0.5}')
    if "trained" in arguments:
        ok(capsys, "train", "trained", "--data", "labelled.npz", *TRAIN, "--epochs", "1", "1", "1", "--batch", "20")
    before = tree(here)
    assert said in refused(capsys, *arguments)
    after = tree(here)
    partial = {n for n in after if "codes.partial" in n}  # may stay, so that encoding can go on
    assert {n: c for n, c in after.items() if n not in partial} == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serch", "run"], "'serch' is no command, did you mean search?"),
        (["fit", "run", "x.npy", "--codeword", "5"], "'--codeword' is not known, did you mean --codewords?"),
        (["fit", "run", "x.npy", "--levels=two"], "invalid int value: 'two'"),
        (["index", "run", "--metric", "cosin"], "'cosin' is no metric, did you mean cosine?"),
        (["train", "run", "--protocol", "cifar10"], "'cifar10' is no protocol, did you mean cifar10-2?"),
        (["train", "run", "--epoch", "1", "1", "1"], "'--epoch' is not known, did you mean --epochs?"),
        (["train", "run", "--backbone_rate", "1"], "did you mean --backbone-rate?"),
        ([], "the following arguments are required: command"),
    ],
)
def test_wrong_options_name_the_nearest_right_one(capsys, arguments, said):
    assert said in refused(capsys, *arguments, code=2)


@pytest.mark.parametrize("name", ["fit", "encode", "index", "search", "train", "evaluate", "report", "info"])
def test_every_command_shows_an_example(capsys, name):
    with pytest.raises(SystemExit) as exit:
        cli.main([name, "--help"])
    assert exit.value.code == 0
    printed = capsys.readouterr().out
    assert f"example:\n  drq-fast {name} " in printed
    assert "--json" in printed


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "drq_fast", *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip


def test_ctrl_c_leaves_no_model(here):
    process = start("fit", "run", "x.npy", "--rounds", "1000000")
    deadline = time.monotonic() + 60
    while not Path("run").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.strip().splitlines()[-1].startswith("drq-fast fit: interrupted")
    assert "Traceback" not in err
    assert [path.name for path in Path("run").iterdir()] == [".lock"]


@pytest.mark.parametrize("forced", [False, True])
def test_training_that_was_killed_goes_on(here, capsys, forced):
    command = ["train", "run", "--data", "labelled.npz", *TRAIN, "--epochs", "40", "5", "5", "--batch", "20"]
    process = start(*command, "--checkpoint-seconds", "0", *(["--force"] if forced else []))
    deadline = time.monotonic() + 60
    while not Path("run/checkpoint.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    assert not Path("run/model.drq").exists()
    ok(capsys, *command, "--checkpoint-seconds", "0", *(["--force"] if forced else []))
    ok(capsys, "train", "whole", *command[2:], "--checkpoint-seconds", "0")
    assert fingerprint("run/model.drq", "quantizer") == fingerprint("whole/model.drq", "quantizer")


def test_who_reads_no_further_sees_no_error(here, capsys):
    fitted(capsys)
    np.save("q.npy", np.repeat(np.load("q.npy"), 3000, axis=0))
    process = start("search", "run", "q.npy", "-k", "20")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.wait()
