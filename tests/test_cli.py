"""The command line: from files to codes to figures, and one sentence for everything that goes wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from drq_fast import Index, RecurrentQuantizer
from drq_fast.app import cli, options
from drq_fast.app.options import _parsers
from drq_fast.files import fingerprint
from drq_fast.retrieval.settings import PROTOCOLS

TRAIN = ["--train", "20", "--query", "5", "--hidden", "32", "--dim", "48", "--codewords", "16", "--levels", "3"]


def test_from_vectors_to_neighbours(shell):
    printed = shell.ok("fit", "run", "x.npy", *shell.FIT)
    assert "12 bits" in printed
    shell.ok("encode", "run", "x.npy", "--beam", "4")
    shell.ok("index", "run", "--metric", "ip")
    layer = RecurrentQuantizer.load("run/model.drq")
    index = Index(layer, "ip")
    index.add(np.load("x.npy"), beam=4)
    assert torch.equal(torch.from_numpy(np.load("run/codes.npy")), index.codes)
    for length, L in (("8", 2), (None, 3)):
        options = [] if length is None else ["--bits", length]
        found = json.loads(shell.ok("search", "run", "q.npy", "-k", "4", "--json", *options))
        scores, ids = index.search(np.load("q.npy"), 4, L)
        assert found["ids"] == ids.tolist()
        assert found["scores"] == scores.tolist()
    shell.ok("search", "run", "q.npy", "-k", "4", "--out", "found.npz")
    assert np.array_equal(np.load("found.npz")["ids"], ids)
    lines = shell.ok("search", "run", "q.npy", "-k", "2").splitlines()
    assert lines[3].split("\t")[0] == "3"
    assert lines[3].split("\t")[1].split(":")[0] == str(ids[3, 0])


def test_candidates_scored_again_by_the_vectors(shell):
    shell.fitted()
    x, q = np.load("x.npy"), np.load("q.npy")
    found = json.loads(
        shell.ok("search", "run", "q.npy", "-k", "3", "--refine", "3000", "--vectors", "x.npy", "--json")
    )
    exact = torch.cdist(torch.from_numpy(q).double(), torch.from_numpy(x).double()).topk(3, largest=False).indices
    assert found["ids"] == exact.tolist()
    said = shell.refused("search", "run", "q.npy", "--refine", "20", code=2)
    assert "--vectors must be given with --refine" in said
    np.save("short.npy", x[:20])
    np.save("narrow.npy", x[:, :3])
    np.save("flags.npy", x > 0)
    Path("cut.npy").write_bytes(Path("x.npy").read_bytes()[:5000])
    for name, said in (
        ("missing.npy", "search: missing.npy cannot be read: No such file or directory."),
        ("cut.npy", "search: cut.npy is not a complete .npy file of numbers."),
        ("short.npy", "search: --vectors must be [n, D] with a row for id 2"),
        ("narrow.npy", "search: --vectors must be [n, 16], by id, got float32 [3000, 3]."),
        ("flags.npy", "search: --vectors must be floats or integers, got bool."),
    ):
        arguments = ("search", "run", "q.npy", "-k", "3", "--refine", "3000", "--vectors", name)
        assert said in shell.refused(*arguments, code=2 if " must be " in said else 1)


def test_filter_and_removal_by_id(shell):
    shell.fitted()
    np.save("ids.npy", np.array([5, 2000, 7]))
    kept = json.loads(shell.ok("search", "run", "q.npy", "-k", "3", "--keep", "ids.npy", "--json"))
    assert all(sorted(row) == [5, 7, 2000] for row in kept["ids"])
    np.save("flags.npy", np.arange(3000) < 3)
    kept = json.loads(shell.ok("search", "run", "q.npy", "-k", "3", "--keep", "flags.npy", "--json"))
    assert all(sorted(row) == [0, 1, 2] for row in kept["ids"])
    assert shell.ok("remove", "run", "ids.npy") == "run/index.drq: 3 ids removed, 2,997 left\n"
    found = json.loads(shell.ok("search", "run", "q.npy", "-k", "3000", "--json"))
    assert sorted(found["ids"][0]) == [i for i in range(3000) if i not in (5, 7, 2000)]
    before = shell.tree()
    assert "ids must be in the index, got 5, which is not" in shell.refused("remove", "run", "ids.npy", code=2)
    assert shell.tree() == before


def test_there_are_no_more_results_than_codes(shell):
    shell.fitted()
    found = json.loads(shell.ok("search", "run", "q.npy", "-k", "2147483647", "--json"))
    assert sorted(found["ids"][0]) == list(range(3000))


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_results_that_do_not_exist_are_left_out(shell, metric):
    shell.fitted()
    shell.ok("index", "run", "--metric", metric, "--force")
    np.save("two.npy", np.array([5, 7, 999_999]))
    command = ["search", "run", "q.npy", "-k", "3", "--keep", "two.npy"]

    def refuse(name):
        raise AssertionError(name)

    found = json.loads(shell.ok(*command, "--json"), parse_constant=refuse)
    assert all(sorted(row) == [5, 7] for row in found["ids"])
    assert all(len(row) == 2 for row in found["scores"])
    lines = shell.ok(*command).splitlines()
    assert all(re.fullmatch(r"\d\t[57]:[-.\de]+\t[57]:[-.\de]+", line) for line in lines)
    shell.ok(*command, "--out", "found.npz")
    assert np.load("found.npz")["ids"].shape == (7, 3)


def test_squared_distances_are_not_negative(shell):
    shell.fitted()
    codec = RecurrentQuantizer.load("run/model.drq").codec()
    decoded = codec.decode(torch.from_numpy(np.load("run/codes.npy"))).numpy()
    np.save("same.npy", decoded)
    assert float(Index.load("run/index.drq").search(decoded, 1).scores.min()) < 0
    found = json.loads(shell.ok("search", "run", "same.npy", "-k", "1", "--json"))
    assert min(row[0] for row in found["scores"]) == 0
    shell.ok("search", "run", "same.npy", "-k", "1", "--out", "found.npz")
    assert np.load("found.npz")["scores"].min() == 0


def test_json_has_null_for_what_is_not_finite(capsys):
    value = {"a": [1.5, float("nan"), (float("inf"), -1)], "b": {"c": float("-inf")}, "d": True}
    assert json.loads(cli._as_json(value)) == {"a": [1.5, None, [None, -1]], "b": {"c": None}, "d": True}


def test_one_is_not_plural(shell):
    np.save("one.npy", np.load("x.npy")[:1])
    assert "1 vector is few for 16 codewords" in _said(shell, "fit", "run", "one.npy", *shell.FIT)
    assert shell.ok("encode", "run", "one.npy") == "run/codes.npy: 1 code of 12 bits\n"
    assert "run/index.drq: 1 code, metric l2" in shell.ok("index", "run")
    assert shell.ok("add", "run", "one.npy") == "run/index.drq: 1 vector added with id 1, 2 in all\n"
    assert "run/index.drq: 2 vectors of 16 dimensions" in shell.ok("info", "run")
    np.save("ids.npy", np.array([1]))
    assert shell.ok("remove", "run", "ids.npy") == "run/index.drq: 1 id removed, 1 left\n"
    assert "run/index.drq: 1 vector of 16 dimensions" in shell.ok("info", "run")


def test_advice_is_for_the_shell(shell):
    said = _said(
        shell, "train", "run", "--data", "labelled.npz", *TRAIN, "--codewords", "64", "--epochs", "1", "1", "1"
    )
    assert "vectors are few for 64 codewords; take fewer --codewords, or more --train to have at least 256." in said


def _said(shell, *arguments: str) -> str:
    """What a command that succeeds writes to stderr."""
    shell.capsys.readouterr()
    assert cli.main(list(arguments)) == 0
    return shell.capsys.readouterr().err


def test_several_files_count_as_one(shell):
    x = np.load("x.npy")
    np.save("first.npy", x[:1000].astype(np.float64))
    np.save("second.npy", x[1000:])
    shell.ok("fit", "one", "x.npy", *shell.FIT)
    shell.ok("fit", "two", "first.npy", "second.npy", *shell.FIT)
    for run, names in (("one", ["x.npy"]), ("two", ["first.npy", "second.npy"])):
        shell.ok("encode", run, *names)
    assert Path("one/codes.npy").read_bytes() == Path("two/codes.npy").read_bytes()


def test_many_codewords(shell):
    shell.ok("fit", "run", "x.npy", "--rounds", "2", "--codewords", "300", "--levels", "2")
    shell.ok("encode", "run", "x.npy")
    assert np.load("run/codes.npy").dtype == np.int32
    shell.ok("index", "run")
    assert json.loads(shell.ok("search", "run", "q.npy", "--bits", "9", "--json"))["ids"][0]


def test_own_ids(shell):
    shell.fitted()
    np.save("ids.npy", np.arange(3000) * 10)
    shell.ok("index", "run", "--ids", "ids.npy", "--force")
    found = json.loads(shell.ok("search", "run", "q.npy", "--json"))
    assert {i % 10 for row in found["ids"] for i in row} == {0}


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_recall_of_a_fitted_run(shell, metric):
    shell.fitted()
    metrics = json.loads(shell.ok("evaluate", "run", "--queries", "q.npy", "--metric", metric, "-k", "5", "--json"))
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


def test_a_run_is_evaluated_by_the_metric_of_its_index(shell):
    shell.fitted()
    shell.ok("index", "run", "--metric", "cosine", "--force")
    printed = shell.ok("evaluate", "run", "--queries", "q.npy")
    assert printed.endswith("run/metrics.json: metric cosine\n")
    assert json.loads(Path("run/metrics.json").read_text())["metric"] == "cosine"
    shell.ok("evaluate", "run", "--queries", "q.npy", "--metric", "ip", "--force")
    assert json.loads(Path("run/metrics.json").read_text())["metric"] == "ip"


def test_the_papers_way(shell):
    command = ["train", "run", "--data", "labelled.npz", *TRAIN, "--epochs", "6", "2", "3", "--batch", "20"]
    result = json.loads(shell.ok(*command, "--json"))
    assert (result["train"], result["query"], result["database"]) == (60, 15, 45)
    assert "-k must be left out for a trained run" in shell.refused("evaluate", "run", "-k", "5", code=2)
    metrics = json.loads(shell.ok("evaluate", "run", "--exact", "--json"))
    assert [row["bits"] for row in metrics["lengths"]] == [4, 8, 12]
    assert metrics["R"] == 45
    assert metrics["metric"] == "ip"
    assert 0.6 < metrics["lengths"][-1]["mAP"] <= 1
    assert metrics["exact"]["mAP"] > 0.6
    assert np.load("run/queries.npy").shape == (15, 48)
    shell.ok("index", "run")
    assert len(shell.ok("search", "run").splitlines()) == 15
    assert Index.load("run/index.drq").metric == "ip"
    assert "run holds a run already" in shell.refused(*command)
    said = shell.refused(*command, "--margin", "0.25")
    assert "margin is 0.5 there and 0.25 here" in said
    shell.ok(*command, "--margin", "0.25", "--force")
    assert not Path("run/metrics.json").exists()
    assert not Path("run/codes.npy").exists()


def test_missing_images_are_named_before_the_training(shell):
    Path("list.txt").write_text("".join(f"a photo {i}.jpg {i // 3}\n" for i in range(6)))
    before = shell.tree()
    said = shell.refused("train", "run", "--data", "list.txt", "--train", "1", "--query", "1", code=1)
    where = Path.cwd().resolve()
    assert f"the image {where}/a photo 0.jpg is missing; paths in lists are relative to {where} (--root)." in said
    assert shell.tree() == before


def test_data_that_have_moved_are_found_by_a_link(shell):
    shell.ok("train", "run", "--data", "labelled.npz", *TRAIN, "--epochs", "1", "1", "1", "--batch", "20")
    here, moved = Path("labelled.npz"), Path("moved.npz").resolve()
    here.rename(moved)
    said = shell.refused("evaluate", "run", code=1)
    assert f"{here.resolve()}, on which run was trained, does not exist; if it has moved, make a link there." in said
    here.symlink_to(moved)
    shell.ok("evaluate", "run")


def test_a_config_file_repeats_a_run(shell):
    shell.ok("train", "run", "--data", "labelled.npz", *TRAIN, "--epochs", "1", "1", "1", "--batch", "20")
    shell.ok("train", "again", "--config", "run/config.json")
    assert fingerprint("run/model.drq", "quantizer") == fingerprint("again/model.drq", "quantizer")


def test_unsupervised(shell):
    shell.ok("train", "run", "--data", "labelled.npz", *TRAIN, "--ablation", "unsupervised")
    metrics = json.loads(shell.ok("evaluate", "run", "--json"))
    assert metrics["metric"] == "l2"
    assert metrics["lengths"][0]["mAP"] > 0.4


def test_a_run_of_another_protocol_needs_its_codewords(shell):
    command = ["train", "run", "--data", "labelled.npz", "--protocol", "cifar10-1", "--query", "5"]
    assert "--codewords must be chosen for cifar10-1, one of 16, 64, 512, 4096" in shell.refused(*command, code=2)


def test_nothing_is_replaced_unasked(shell):
    shell.fitted()
    shell.ok("evaluate", "run", "--queries", "q.npy")
    Path("found.npz").write_bytes(b"mine")
    before = shell.tree()
    assert "run holds a run already; --force replaces" in shell.refused("fit", "run", "x.npy", *shell.FIT)
    for command in (
        ["encode", "run", "x.npy"],
        ["index", "run"],
        ["evaluate", "run", "--queries", "q.npy"],
        ["search", "run", "q.npy", "--out", "found.npz"],
    ):
        assert "exists already; --force replaces it" in shell.refused(*command)
    assert shell.tree() == before


WRONG = [
    (["fit", "new", "missing.npy"], "missing.npy cannot be read: No such file"),
    (["fit", "new", "text.npy"], "text.npy is not a complete .npy file"),
    (["fit", "new", "objects.npy"], "objects.npy must hold numbers, got Python objects (dtype object)"),
    (["fit", "new", "flags.npy"], "flags.npy must hold real numbers [N, D] with N and D of at least 1, got bool [30"),
    (["fit", "new", "cut.npy"], "cut.npy is not a complete .npy file of numbers."),
    (["fit", "new", "cut.parquet"], "numbers; Parquet files are read by `drq-fast encode` alone."),
    (["fit", "new", "flat.npy"], "must hold real numbers [N, D]"),
    (["fit", "new", "complex.npy"], "must hold real numbers [N, D] with N and D of at least 1, got complex64"),
    (["fit", "x.npy", "new"], "x.npy is a file, not the folder of a run, which comes first."),
    (["fit", "new", "labelled.npz"], "is an archive of arrays"),
    (["fit", "new", "pk.npy"], "pk.npy is not a complete .npy file"),
    (["fit", "new", "header.npy"], "header.npy is not a complete .npy file"),
    (["fit", "new", "nan.npy"], "row 11 of nan.npy is not finite"),
    (["fit", "new", "columns.npy"], "is stored by columns"),
    (["fit", "x.npy/run", "x.npy"], "x.npy/run cannot be made: Not a directory"),
    (["fit", "/proc/run", "x.npy"], "/proc/run cannot be made"),
    (["encode", "new", "x.npy"], "new does not exist; `drq-fast fit` or `train` makes a run"),
    (["encode", "run", "nan.npy", "--force"], "row 11 of nan.npy is not finite"),
    (["encode", "run", "--force"], "was fitted without labels"),
    (["index", "new"], "new does not exist"),
    (["index", "run", "--ids", "missing.npy", "--force"], "missing.npy cannot be read"),
    (["search", "new", "q.npy"], "new does not exist"),
    (["search", "run", "q.npy", "--keep", "missing.npy"], "missing.npy cannot be read"),
    (["remove", "new", "twice.npy"], "new does not exist"),
    (["remove", "run", "missing.npy"], "missing.npy cannot be read"),
    (["search", "run", "q.npy", "--out", "/proc/found.npz"], "/proc/found.npz cannot be written"),
    (["search", "run", "nan.npy", "--out", "none/found.npz"], "none/found.npz cannot be written: none does not exist"),
    (["evaluate", "new"], "new does not exist"),
    (["evaluate", "x.npy"], "x.npy is a file, not the folder of a run"),
    (["train", "new", "--data", "missing"], "missing does not exist"),
    (["train", "new", "--data", "nan.npy", "--labels", "classes.npy"], "item 11 has a feature that is not finite"),
    (["train", "new", "--data", "x.npy"], "x.npy holds no labels; they need --labels FILE.npy (labels= in Python)."),
    (["train", "new", "--data", "test_batch.bin"], "test_batch.bin is one of six files of CIFAR-10; name the folder"),
    (["train", "new", "--data", "labelled.npz", "--words", "missing.txt"], "missing.txt cannot be read"),
    (["train", "new", "--data", "labelled.npz", "--config", "typo.json"], "setting 'margn', did you mean margin?"),
    (["train", "new", "--data", "labelled.npz", "--config", "x.npy"], "x.npy is not JSON"),
    (["train", "run", "--data", "labelled.npz", *TRAIN], "run holds a fitted run; --force replaces its model"),
    (["train", "/proc/run", "--data", "labelled.npz", *TRAIN], "/proc/run cannot be made"),
    (["report", "new"], "new does not exist"),
]  # fmt: skip

WRONG_VALUES = [
    (["remove", "run", "twice.npy"], "ids must be unique"),
    (["remove", "run", "x.npy"], "ids must be integers, got float32."),
    (["fit", "new", "x.npy", "narrow.npy"], "vectors must be of 16 dimensions, as x.npy is, got 3 in narrow.npy."),
    (["train", "new", "--data", "x.npy", "--labels", "five.npy"], "--labels must be of 3000 items, as "),
    (["train", "new", "--data", "labelled.npz", *TRAIN, "--words", "x.npy"], "--words must be 3 rows of numbers"),
    (["train", "new", "--data", "labelled.npz", *TRAIN, "--words", "words.txt"], "--words must be vectors of all"),
    (["encode", "run", "narrow.npy", "--force"], "vectors must be of 16 dimensions, as the model is, got 3"),
    (["search", "run", "narrow.npy"], "queries must be of 16 dimensions, as the index is, got 3"),
    (["evaluate", "run", "--queries", "q.npy", "--exact"], "--exact must be left out for a fitted run"),
    (["train", "new", "--data", "labelled.npz"], "--query must be small enough to leave items to train on, got 100"),
    (["train", "new", "--data", "labelled.npz"], "per class of 120 items by protocol cifar10-2 (the options"),
    (["train", "new", "--data", "labelled.npz", "--query", "9"], "--train must be small enough to leave items for the"),
    (["train", "new", "--data", "labelled.npz", "--classes", "x.txt"], "--classes must be left out unless"),
    (["fit", "new", "x.npy", "--levels", "1000000000"], "--levels must be an integer from 1 to 1000, got 1000000000"),
    (["fit", "new", "x.npy", "--codewords", "1"], "--codewords must be"),
    (["fit", "new", "x.npy", "--sample", "0"], "--sample must be"),
    (["encode", "run", "x.npy", "--ray"], "--ray must be left out unless files are Parquet, got --ray."),
    (["search", "run", "q.npy", "--recall", ".9"], "--recall must be left out, as the recall of run/index.drq was not"),
    (["search", "run", "q.npy", "--probes", "2"], "--probes must be left out, as run/index.drq has no inverted lists"),
    (["fit", "run", "run/codes.npy", "--force"], "vectors must be outside of run"),
    (["encode", "run", "x.npy", "--beam", "0", "--force"], "--beam must be"),
    (["index", "run", "--ids", "x.npy", "--force"], "--ids must be"),
    (["index", "run", "--ids", "twice.npy", "--force"], "--ids must be unique"),
    (["search", "run"], "queries must be a file of vectors"),
    (["search", "run", "q.npy", "--out", "q.npy", "--force"], "--out must be a .npz file, got q.npy"),
    (["search", "run", "q.npy", "--bits", "5"], "--bits must be one of 4, 8, 12, got 5"),
    (["search", "run", "q.npy", "-k", "0"], "-k must be"),
    (["evaluate", "run"], "--queries must be a file of vectors for a fitted run, got none"),
    (["evaluate", "run", "--queries", "q.npy", "-k", "3001"], "-k must be"),
    (["train", "new"], "--data must be a folder or a file, got nothing"),
    (["train", "new", "--config", "numbers.json"], "--data must be the name of"),
    (["train", "new", "--data", "labelled.npz", "--config", "words.json"], "--hidden must be"),
    (["train", "new", "--data", "labelled.npz", *TRAIN, "--dropout", "2"], "--dropout must be"),
    (["train", "new", "--data", "labelled.npz", *TRAIN, "--epochs", "1", "0", "0"], "--epochs must be at least 1 in"),
    (["train", "new", "--data", "labelled.npz", *TRAIN, "--dim", "2"], "--dim must be"),
    (["train", "new", "--data", "labelled.npz", *TRAIN, "--hidden", "-5"], "--hidden must be"),
    (["train", "trained", "--data", "labelled.npz", *TRAIN, "--dim", "2", "--force"], "--dim must be"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "arguments", "said"),
    [(1, *case) for case in WRONG] + [(2, *case) for case in WRONG_VALUES],
    ids=[" ".join(a[:4]) for a, _ in WRONG + WRONG_VALUES],
)
def test_bad_input_is_one_sentence(shell, code, arguments, said):
    x = np.load("x.npy")
    shell.fitted()
    Path("text.npy").write_text("not an array")
    Path("cut.npy").write_bytes(Path("x.npy").read_bytes()[:5000])
    Path("cut.parquet").write_bytes(b"PAR1")
    np.save("flat.npy", x[0])
    np.save("flags.npy", x > 0)
    np.save("complex.npy", x.astype(np.complex64))
    np.save("objects.npy", x[:2].astype(object))
    np.save("narrow.npy", x[:, :3].copy())
    np.save("columns.npy", np.asfortranarray(x))
    np.save("nan.npy", np.where(np.arange(3000)[:, None] == 11, np.nan, x))
    np.save("twice.npy", np.zeros(3000, np.int64))
    np.save("classes.npy", np.arange(3000) % 3)
    Path("test_batch.bin").write_bytes(bytes(3073))
    Path("pk.npy").write_bytes(b"PK\3\4junk")
    Path("header.npy").write_bytes(
        Path("x.npy").read_bytes().replace(b"'shape': (3000, 16), }", b"'shape': (3000, 16  ")
    )
    np.save("five.npy", np.zeros(5, np.int64))
    Path("words.txt").write_text("horse 1 2 3\n")
    Path("numbers.json").write_text('{"data": 5}')
    Path("words.json").write_text('{"hidden": "x"}')
    Path("typo.json").write_text('{"margn": 0.5}')
    if "trained" in arguments:
        shell.ok("train", "trained", "--data", "labelled.npz", *TRAIN, "--epochs", "1", "1", "1", "--batch", "20")
    before = shell.tree()
    assert said in shell.refused(*arguments, code=code)
    after = shell.tree()
    if Path("run/codes.partial").exists():  # may stay, so that encoding can go on
        before |= {n: c for n, c in after.items() if "codes.partial" in n or n.endswith("/run.json")}
    assert after == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serch", "run"], "unknown command 'serch', did you mean search?"),
        (["fit", "run", "x.npy", "--codeword", "5"], "unknown option '--codeword', did you mean --codewords?"),
        (["fit", "run", "x.npy", "--levels=two"], "invalid int value: 'two'"),
        (["fit", "run", "x.npy", "--scale", "foo"], "unknown scale 'foo'"),
        (["evaluate", "run", "q.npy"], "unexpected argument 'q.npy'"),
        (["train", "run", "--mining", "hard"], "unknown mining 'hard', did you mean semi_hard?"),
        (["train", "run", "--schedule", "x"], "unknown schedule 'x' (choose from cosine, constant)"),
        (["index", "run", "--metric", "cosin"], "unknown metric 'cosin', did you mean cosine?"),
        (["train", "run", "--protocol", "cifar10"], "unknown protocol 'cifar10', did you mean cifar10-2?"),
        (["train", "run", "--epoch", "1", "1", "1"], "unknown option '--epoch', did you mean --epochs?"),
        (["train", "run", "--backbone_rate", "1"], "did you mean --backbone-rate?"),
        (["--json", "fit", "run", "x.npy"], "options come after the command: drq-fast fit --json ..."),
        (["-k", "3", "search", "run", "q.npy"], "options come after the command: drq-fast search -k ..."),
        (["--force"], "options come after the command: drq-fast COMMAND --force ..."),
        (["search", "run", "q.npy", "--metric", "l2"], "unknown option '--metric'; the metric is that of the index ("),
        (["tune", "run", "q.npy", "--vectors", "v.npy"], "'--vectors'; the vectors are those that the index keeps ("),
        (["tune", "run", "q.npy", "--metric", "l2"], "unknown option '--metric' (see drq-fast tune --help)"),
        ([], "the following arguments are required: command"),
    ],
)
def test_wrong_options_name_the_nearest_right_one(shell, arguments, said):
    assert said in shell.refused(*arguments, code=2)


@pytest.mark.parametrize("name", sorted(options._parsers()[1]))
def test_every_command_shows_an_example(capsys, name):
    with pytest.raises(SystemExit) as exit:
        cli.main([name, "--help"])
    assert exit.value.code == 0
    printed = capsys.readouterr().out
    assert f"example:\n  drq-fast {name} " in printed
    assert "--json" in printed
    for action in options._parsers()[1][name]._actions:
        assert action.help is not None, action.dest


def test_help_of_train_has_the_defaults_of_runs(shell):
    """Each option has a sentence; its default is what a run on features has in config.json."""
    shell.ok("train", "run", "--data", "labelled.npz", *TRAIN, "--ablation", "unsupervised")
    config, given = json.loads(Path("run/config.json").read_text()), {"ablation", "metric", "hidden", "dim", "levels"}
    told = set()
    for action in _parsers()[1]["train"]._actions:
        text, _, default = (action.help or "").partition(" (default: ")
        if action.dest in ("train", "query"):
            count = getattr(PROTOCOLS[config["protocol"]], action.dest)
            assert default == f"the protocol's, {count} per class for {config['protocol']})"
        assert len(text.split()) > 2, action.dest
        assert not action.choices or ", ".join(action.choices) in text
        first = default.rstrip(")").partition(" for features")[0].split()
        stored = config.get(action.dest)
        if default and action.dest not in given and "protocol's" not in default and stored is not None:
            stored = stored if isinstance(stored, list) else [stored]
            shown = [
                {True: "yes", False: "no"}[v] if isinstance(v, bool) else f"{v:g}" if isinstance(v, float) else str(v)
                for v in stored
            ]
            assert first == shown, action.dest
            told.add(action.dest)
    assert {"margin", "semantic", "rate", "backbone_rate", "weight_decay", "amp", "batch", "epochs"} <= told
