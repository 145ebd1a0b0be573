"""`drq-fast build`, `tune`, `search` and `info` on the file of an index."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from patience import PATIENCE, wait_until

from drq_fast import Index
from drq_fast.app import cli

BUILD = ["--bits", "16", "--sample", "500", "--beam", "2"]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with an index that has lists and vectors, and one of codes alone."""
    from tests.conftest import Shell

    folder = tmp_path_factory.mktemp("built")
    x = Shell.clustered(3000)
    Index.build(x, bits=16, lists=16, vectors="float16", sample=500, beam=2, seed=0).save(folder / "lists.drq")
    Index.build(x, bits=16, sample=500, beam=2, seed=0, tune=False).save(folder / "codes.drq")
    Index.build(x, bits=16, sample=500, beam=2, seed=0).save(folder / "by_codes.drq")
    return folder


def test_from_vectors_to_an_index_to_neighbours(shell):
    printed = shell.ok("build", "x.npy", "x.drq", *BUILD, "--lists", "16", "--vectors", "float16", "--metric", "cosine")
    x, q = np.load("x.npy"), np.load("q.npy")
    options = {"bits": 16, "sample": 500, "beam": 2, "seed": 0, "lists": 16, "vectors": "float16", "metric": "cosine"}
    index, written = Index.build(x, **options), Index.load("x.drq")
    assert torch.equal(index.codes, written.codes)
    assert index.tuning == written.tuning
    lines = printed.splitlines()
    assert "3,000 vectors of 16 dimensions in 16 bits, metric cosine, 16 lists, vectors kept as float16" in lines[0]
    cells = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert cells["codes"] == ["6,000", "2.00"]
    assert cells["vectors"] == ["96,000", "32.00"]
    assert cells["file"][0] == f"{Path('x.drq').stat().st_size:,}"
    rows = lines[next(n for n, line in enumerate(lines) if line.startswith("recall@10")) + 1 : -1]
    for row, setting in zip(rows, index.tuning.settings, strict=True):
        refine = "-" if setting.refine is None else str(setting.refine)
        assert row.replace(",", "").split()[:3] == [f"{setting.recall:.4f}", str(setting.probes), refine]
    for options, keywords in (
        (["--recall", ".9"], {"recall": 0.9}),
        (["--probes", "3", "--refine", "40"], {"probes": 3, "refine": 40}),
        (["--bits", "8"], {"levels": 1}),
        ([], {}),
    ):
        found = json.loads(shell.ok("search", "x.drq", "q.npy", "-k", "4", "--json", *options))
        scores, ids = index.search(q, 4, **keywords)
        assert found == {"ids": ids.tolist(), "scores": scores.tolist()}


def test_own_ids_and_several_files_of_any_numbers(shell):
    x = np.round(20 * np.load("x.npy"))
    np.save("first.npy", x[:1000].astype(np.int16))
    np.save("second.npy", x[1000:].astype(">f8"))
    np.save("whole.npy", x)
    np.save("ids.npy", np.arange(3000)[::-1] * 7)
    for names, to in ((["first.npy", "second.npy"], "two.drq"), (["whole.npy"], "one.drq")):
        shell.ok("build", *names, to, *BUILD, "--ids", "ids.npy", "--lists", "none", "--vectors", "none")
    assert Path("one.drq").read_bytes() == Path("two.drq").read_bytes()
    index = Index.load("one.drq")
    assert torch.equal(index.ids, torch.arange(3000).flip(0) * 7)
    assert (index.lists, index.vectors) == (None, None)


def test_tuning_with_queries_of_ones_own(shell, built):
    shutil.copy(built / "lists.drq", "x.drq")
    np.save("q.npy", shell.clustered(200, seed=5))
    before = Index.load("x.drq")
    facts = json.loads(shell.ok("tune", "x.drq", "q.npy", "-k", "20", "--json"))
    before.tune(np.load("q.npy"), k=20)
    assert Index.load("x.drq").tuning == before.tuning
    assert (facts["tuning"]["k"], facts["tuning"]["queries"], facts["tuning"]["size"]) == (20, 200, 3000)
    settings = [
        tuple(row[name] for name in ("probes", "refine", "recall", "cost")) for row in facts["tuning"]["settings"]
    ]
    assert settings == list(before.tuning.settings)
    assert len(shell.ok("search", "x.drq", "q.npy", "-k", "20", "--recall", ".8").splitlines()) == 200


def test_vectors_are_added_and_removed(shell, built):
    shutil.copy(built / "lists.drq", "x.drq")
    index, more = Index.load("x.drq"), shell.clustered(2500, seed=3)
    np.save("more.npy", more[:2000])
    np.save("last.npy", more[2000:].astype(np.int64))  # numpy's integers
    np.save("own.npy", np.arange(500) + 10_000)
    np.save("gone.npy", np.array([0, 2999, 10_001]))
    printed = shell.ok("add", "x.drq", "more.npy")
    assert printed == "x.drq: 2,000 vectors added with ids 3000 to 4999, 5,000 in all\n"
    added = json.loads(shell.ok("add", "x.drq", "last.npy", "--ids", "own.npy", "--beam", "2", "--json"))
    assert added == {"index": "x.drq", "added": 500, "last_id": 10_499, "size": 5500}
    assert shell.ok("remove", "x.drq", "gone.npy") == "x.drq: 3 ids removed, 5,497 left\n"
    index.add(more[:2000], beam=16)
    index.add(more[2000:].astype(np.int64), ids=np.arange(500) + 10_000, beam=2)
    index.remove([0, 2999, 10_001])
    written = Index.load("x.drq")
    assert torch.equal(written.ids, index.ids)
    assert torch.equal(written.codes, index.codes)
    found = json.loads(shell.ok("search", "x.drq", "q.npy", "--refine", "50", "--json"))
    assert found["ids"] == index.search(np.load("q.npy"), refine=50).ids.tolist()


def test_a_search_of_a_grown_index_says_that_it_should_be_tuned(shell, built, capsys):
    shutil.copy(built / "lists.drq", "x.drq")
    shell.ok("add", "x.drq", "x.npy")
    assert cli.main(["search", "x.drq", "q.npy", "--recall", ".8"]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 7
    assert "note: recall was measured with 3,000 vectors, and the index has 6,000 now" in said.err
    np.save("many.npy", shell.clustered(100, seed=5))
    shell.ok("tune", "x.drq", "many.npy")
    assert cli.main(["search", "x.drq", "q.npy", "--recall", ".8"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["add x.drq x.npy", "remove x.drq 0.npy", "tune x.drq q.npy"])
def test_two_commands_never_change_an_index_at_the_same_time(shell, built, command):
    fcntl = pytest.importorskip("fcntl")
    shutil.copy(built / "lists.drq", "x.drq")
    np.save("0.npy", np.zeros(1, int))
    before = shell.tree()
    with open("x.drq", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another process is writing to x.drq" in shell.refused(*command.split())
    assert shell.tree() == before


@pytest.mark.parametrize("options", ["--bits 8", "--bits 128 --vectors float16"])
def test_build_says_how_to_find_more(shell, options):
    np.save("noise.npy", np.random.default_rng(0).normal(size=(3000, 48)))
    printed = shell.ok("build", "noise.npy", "x.drq", "--sample", "500", "--beam", "1", *options.split())
    advised = printed.splitlines()[-1] == "To find 95% and more, build with --bits 128 --vectors float16."
    assert advised == (Index.load("x.drq").tuning.settings[-1].recall < 0.95)
    assert advised or options != "--bits 8"
    assert not advised or "float16" not in options


def test_info_shows_what_is_in_an_index(shell, built):
    facts = json.loads(shell.ok("info", str(built / "lists.drq"), "--json"))
    index = Index.load(built / "lists.drq")
    assert (facts["size"], facts["lists"], facts["vectors"], facts["metric"]) == (3000, 16, "float16", "l2")
    assert facts["parts"] == index.sizes
    assert "recall@10" in shell.ok("info", str(built / "lists.drq"))
    assert "no lists, no vectors kept" in shell.ok("info", str(built / "codes.drq"))
    shell.fitted()
    printed = shell.ok("info", "run")
    assert "run/index.drq: 3,000 vectors" in printed
    assert "not tuned" in printed


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_figure_of_the_tuning(shell, built, suffix):
    pytest.importorskip("matplotlib")
    shutil.copy(built / "lists.drq", "x.drq")
    shell.ok("tune", "x.drq", "q.npy", "--plot", f"a.{suffix}")
    shell.ok("build", "x.npy", "flat.drq", *BUILD, "--plot", f"b.{suffix}")  # a single setting
    first = Path(f"a.{suffix}").read_bytes()
    assert first.startswith(b"<?xml" if suffix == "svg" else b"\x89PNG")
    assert Path(f"b.{suffix}").stat().st_size > 1000
    assert "exists already" in shell.refused("tune", "x.drq", "q.npy", "--plot", f"a.{suffix}")
    shell.ok("tune", "x.drq", "q.npy", "--plot", f"a.{suffix}", "--force")
    assert Path(f"a.{suffix}").read_bytes() == first


def test_a_figure_needs_matplotlib(shell, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    said = shell.refused("build", "x.npy", "x.drq", *BUILD, "--plot", "a.svg")
    assert "matplotlib is not installed; `pip install 'drq_fast[report]'`" in said
    assert not Path("x.drq").exists()


WRONG = [
    (["build", "missing.npy", "new.drq"], "missing.npy cannot be read: No such file"),
    (["build", "x.npy", "narrow.npy", "new.drq"], "vectors must be of 16 dimensions, as x.npy is, got 3 in narrow"),
    (["build", "nan.npy", "new.drq", "--bits", "16"], "row 11 of nan.npy is not finite"),
    (["build", "x.npy", "codes.drq"], "codes.drq exists already; --force replaces it"),
    (["build", "x.npy", "labelled.npz"], "labelled.npz exists already"),
    (["build", "x.npy", "labelled.npz", "--force"], "labelled.npz is not an index, so it is not replaced"),
    (["build", "x.npy", "q.npy", "--force"], "index must be the file to write, after those of vectors, got q.npy"),
    (["build", "new.drq", "x.npy"], "index must be the file to write, after those of vectors, got x.npy"),
    (["build", "x.npy", "run/model.drq", "--force"], "run/model.drq is not an index, so it is not replaced"),
    (["build", "x.npy", "run", "--force"], "run cannot be written: it is a folder"),
    (["build", "x.npy", "new/new.drq"], "new/new.drq cannot be written: new does not exist"),
    (["build", "x.npy", "new.drq", "--bits", "12"], "bits must be a multiple of 8, got 12"),
    (["build", "x.npy", "new.drq", "--lists", "0"], "lists must be an integer from 1 to 3000, got 0"),
    (["build", "x.npy", "new.drq", "--beam", "0"], "beam must be an"),
    (["build", "x.npy", "new.drq", "--seed", "-1"], "seed must be an"),
    (["build", "x.npy", "new.drq", "--sample", "0"], "sample must be an"),
    (["build", "x.npy", "new.drq", "--ids", "twice.npy"], "ids must be unique"),
    (["build", "x.npy", "new.drq", "--ids", "q.npy"], "--ids must be integers, got float32"),
    (["build", "x.npy", "new.drq", "--plot", "a.pdf"], "plot must be a .svg or .png file, got a.pdf"),
    (["build", "x.npy", "new.drq", "--plot", "new/a.svg"], "new/a.svg cannot be written: new does not exist"),
    (["build", "one.npy", "new.drq", "--plot", "a.svg"], "plot must be left out for a single vector"),
    (["search", "new.drq", "q.npy"], "new.drq does not exist; `drq-fast build` makes an index"),
    (["search", "lists.drq"], "queries must be a file of vectors"),
    (["build", "x.npy", "q.npy/new.drq"], "q.npy/new.drq cannot be written: q.npy is not a folder"),
    (["search", "q.npy", "lists.drq"], "q.npy is not an index of drq-fast (INDEX comes first)."),
    (["search", "text.drq", "q.npy"], "text.drq is not an index of drq-fast."),
    (["add", "cut.drq", "x.npy"], "cut.drq is not a complete safetensors file"),
    (["search", "run/model.drq", "q.npy"], "holds a quantizer, not an index"),
    (["search", "lists.drq", "narrow.npy"], "queries must be of 16 dimensions, as the index is, got 3"),
    (["search", "lists.drq", "q.npy", "--recall", "1.5"], "recall must be above 0 and at most 1, got 1.5"),
    (["search", "lists.drq", "q.npy", "--recall", ".9", "-k", "11"], "-k must be at most 10 where a recall is"),
    (["search", "lists.drq", "q.npy", "--probes", "17"], "probes must be an integer from 1 to 16, got 17"),
    (["search", "codes.drq", "q.npy", "--recall", ".9"], "recall must be left out, as the recall of codes.drq was"),
    (["search", "by_codes.drq", "q.npy", "--recall", ".1", "-k", "5"], "-k must be 10 where a recall is asked"),
    (["search", "by_codes.drq", "q.npy", "--recall", ".1", "-k", "11"], "-k must be 10 where a recall is asked"),
    (["search", "codes.drq", "q.npy", "--probes", "2"], "--probes must be left out, as codes.drq has no inverted"),
    (["tune", "new.drq", "q.npy"], "new.drq does not exist"),
    (["tune", "codes.drq", "q.npy"], "index must be one that keeps vectors, which `drq-fast build --vectors"),
    (["tune", "run", "q.npy"], "index must be one that keeps vectors"),
    (["tune", "lists.drq", "narrow.npy"], "queries must be of 16 dimensions, as the index is, got 3"),
    (["tune", "lists.drq", "q.npy", "-k", "0"], "k must be an integer from 1 to 3000, got 0"),
    (["add", "new.drq", "x.npy"], "new.drq does not exist"),
    (["add", "lists.drq", "narrow.npy"], "vectors must be of 16 dimensions, as the index is, got 3"),
    (["add", "lists.drq", "x.npy", "nan.npy"], "row 11 of nan.npy is not finite"),
    (["add", "lists.drq", "x.npy", "--ids", "twice.npy"], "--ids must be unique, got 0 more than once"),
    (["add", "lists.drq", "x.npy", "--ids", "few.npy"], "--ids must be 3000 numbers, one per vector, got 3"),
    (["add", "lists.drq", "three.npy", "--ids", "few.npy"], "--ids must be new, got 0, which is in the index already"),
    (["add", "lists.drq", "x.npy", "--beam", "0"], "--beam must be an"),
    (["add", "run/model.drq", "x.npy"], "holds a quantizer, not an index"),
    (["remove", "new.drq", "few.npy"], "new.drq does not exist"),
    (["remove", "lists.drq", "late.npy"], "ids must be in the index, got 5000, which is not"),
    (["remove", "lists.drq", "x.npy"], "ids must be integers, got float32"),
    (["search", "lists.drq", "q.npy", "--refine", "9", "--vectors", "x.npy"], "--vectors must be left out, as the"),
    (["search", "lists.drq", "q.npy", "--keep", "x.npy"], "--keep must be integers, got float32"),
    (["add", "x.npy", "lists.drq"], "x.npy is not an index of drq-fast (INDEX comes first)"),
    (["tune", "x.npy", "lists.drq"], "x.npy is not an index of drq-fast (INDEX comes first)"),
    (["remove", "few.npy", "lists.drq"], "few.npy is not an index of drq-fast (INDEX comes first)"),
    (["info", "new.drq"], "new.drq does not exist"),
    (["info", "x.npy"], "x.npy is not an index of drq-fast."),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=[" ".join(a[:6]) for a, _ in WRONG])
def test_bad_input_is_one_sentence(shell, built, arguments, said):
    x = np.load("x.npy")
    for name in ("lists.drq", "codes.drq", "by_codes.drq"):
        shutil.copy(built / name, name)
    Path("text.drq").write_text("not an index")
    Path("cut.drq").write_bytes(Path("lists.drq").read_bytes()[:100])
    np.save("narrow.npy", x[:, :3].copy())
    np.save("one.npy", x[:1])
    np.save("nan.npy", np.where(np.arange(3000)[:, None] == 11, np.nan, x))
    np.save("twice.npy", np.zeros(3000, np.int64))
    np.save("three.npy", x[:3])
    np.save("few.npy", np.arange(3))
    np.save("late.npy", np.array([1, 5000]))
    if any(argument.startswith("run") for argument in arguments):
        shell.fitted()
    before = shell.tree()
    assert said in shell.refused(*arguments, code=2 if " must be " in said else 1)
    assert shell.tree() == before


def test_numbers_that_are_too_large_are_no_wrong_option(shell):
    np.save("huge.npy", 1e30 * np.load("x.npy"))
    said = "huge.npy must be scaled to a largest magnitude from 1e-12 to 1e12, got"
    assert said in shell.refused("build", "huge.npy", "new.drq", code=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["build", "x.npy"], "the following arguments are required: INDEX"),
        (["build", "x.npy", "a.drq", "--lists", "some"], "'some' is not auto, none or a number"),
        (["build", "x.npy", "a.drq", "--vectors", "float61"], "unknown kind 'float61', did you mean float16?"),
        (["build", "x.npy", "a.drq", "--metric", "cosin"], "unknown metric 'cosin', did you mean cosine?"),
        (["search", "a.drq", "q.npy", "--recall", "high"], "invalid float value: 'high'"),
        (
            ["search", "a.drq", "q.npy", "--recall", ".9", "--vectors", "x.npy"],
            "--recall was not measured with",
        ),
        (["search", "a.drq", "q.npy", "--recall", ".9", "--probes", "3"], "cannot be given with --probes"),
        (["search", "a.drq", "q.npy", "--recall", ".9", "--bits", "8"], "cannot be given with --bits"),
    ],
)
def test_wrong_options_are_named(shell, arguments, said):
    assert said in shell.refused(*arguments, code=2)


def test_force_replaces_an_index(shell, built):
    shutil.copy(built / "lists.drq", "x.drq")
    shell.ok("build", "x.npy", "x.drq", *BUILD, "--force")
    assert Index.load("x.drq").lists is None
    assert not [name for name in os.listdir() if name.endswith(".tmp")]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_leaves_the_old_index(shell, built):
    shutil.copy(built / "lists.drq", "x.drq")
    np.save("large.npy", shell.clustered(60_000, D=64))
    before = shell.tree()
    process = shell.start("build", "large.npy", "x.drq", "--force")
    wait_until(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text())
    time.sleep(2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (130, "")
    assert err.strip().splitlines()[-1] == "drq-fast build: interrupted; x.drq was not written"
    assert shell.tree() == before
