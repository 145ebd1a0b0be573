"""Which files of a folder a run may replace or delete: those that commands made, and no others."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from patience import PATIENCE

from drq_fast import RecurrentQuantizer
from drq_fast.app.run import Run

TRAIN = ["--train", "20", "--query", "5", "--hidden", "32", "--dim", "48", "--codewords", "16", "--levels", "3"]
TRAIN = ["--data", "labelled.npz", *TRAIN, "--epochs", "1", "1", "1", "--batch", "20"]


def commands(shell) -> list[list[str]]:
    return [["fit", "run", "x.npy", *shell.FIT], ["train", "run", *TRAIN]]


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize(
    "name",
    ["config.json", "queries.npy", "report/notes.md", "model.drq", "checkpoint.safetensors", "run.json", "a.txt"],
)
def test_a_folder_with_files_of_the_user_does_not_become_a_run(shell, name, force):
    path = Path("run") / name
    path.parent.mkdir(parents=True)
    path.write_text('{"mine": [1, 2, 3]}')
    before = shell.tree()
    for command in commands(shell):
        said = shell.refused(*command, *force)
        assert "choose a new or an empty folder" in said or "run.json was not written by drq-fast" in said
        assert shell.tree() == before


@pytest.mark.parametrize("number", [0, 1])
def test_empty_folders_become_runs(shell, number):
    Path("run").mkdir()
    Path("run/.lock").touch()
    Path("run/.drq_fast-0123456789abcdef.tmp").mkdir()
    shell.ok(*commands(shell)[number])
    assert Path("run/model.drq").exists()
    assert not Path("run/.drq_fast-0123456789abcdef.tmp").exists()


def test_an_unfinished_training_is_not_replaced_unasked(shell):
    shell.ok("train", "run", *TRAIN)
    Path("run/model.drq").unlink()  # as if it had been killed after its last checkpoint
    Path("run/config.json").rename("config.json")
    before = shell.tree()
    assert "run holds a run already; --force replaces its model and network" in shell.refused("train", "run", *TRAIN)
    assert shell.tree() == before


@pytest.mark.parametrize("lost", [[], ["model.drq"], ["config.json"], ["checkpoint.safetensors"]])
def test_fit_never_replaces_a_training(shell, lost):
    shell.ok("train", "run", *TRAIN)
    for name in lost:
        (Path("run") / name).unlink()
    before = shell.tree()
    for force in ([], ["--force"]):
        said = shell.refused("fit", "run", "x.npy", *shell.FIT, *force)
        assert said == "drq-fast fit: run holds a training, which `fit` never replaces; choose another folder.\n"
        assert shell.tree() == before


def test_train_names_a_fitted_run_and_its_config(shell):
    shell.fitted()
    before = shell.tree()
    replaced = "--force replaces its model and deletes its codes, index, metrics and report"
    assert shell.refused("train", "run", *TRAIN) == f"drq-fast train: run holds a fitted run; {replaced}.\n"
    said = shell.refused("train", "new", "--config", "run/config.json")
    assert said == "drq-fast train: run/config.json is a config of `fit`, not of `train`.\n"
    assert shell.tree() == before
    shell.ok("train", "run", *TRAIN, "--force")
    assert not Path("run/codes.npy").exists()


def test_hints_name_what_is_missing_first(shell):
    shell.ok("fit", "run", "x.npy", *shell.FIT)
    made = "run/codes.npy does not exist; `drq-fast encode run FILE.npy` makes it.\n"
    assert shell.refused("index", "run") == f"drq-fast index: {made}"
    chain = "`drq-fast encode run FILE.npy`, then `drq-fast index run`, makes it"
    assert f"run/index.drq does not exist; {chain}." in shell.refused("search", "run", "q.npy")
    shell.ok("encode", "run", "x.npy")
    hint = "run/index.drq does not exist; `drq-fast index run` makes it."
    assert hint in shell.refused("search", "run", "q.npy")
    shell.ok("train", "trained", *TRAIN)
    assert "`drq-fast encode trained`, then `drq-fast index trained`, makes it" in shell.refused("search", "trained")
    Path("trained/model.drq").unlink()
    for command in (["search", "trained", "q.npy"], ["index", "trained"]):
        assert "model.drq does not exist; the same `drq-fast train` command, which" in shell.refused(*command)


def test_codes_of_parquet_files_are_not_indexed(shell):
    shell.ok("fit", "run", "x.npy", *shell.FIT)
    Run("run").claim_parts(["a.parquet"], force=False)
    Path("run/codes/a.parquet").write_bytes(b"")
    only = "run has codes of Parquet files only, which `index` and `evaluate` do not read"
    for command in (["index", "run"], ["evaluate", "run", "--queries", "q.npy"]):
        assert f"{only}; `drq-fast encode run FILE.npy` makes codes.npy.\n" in shell.refused(*command)
    shell.ok("encode", "run", "x.npy")
    shell.ok("index", "run")


@pytest.mark.parametrize(
    "name", ["queries.npy", "checkpoint.safetensors", "history.json", "mine.txt", "report/mine.md"]
)
def test_force_leaves_what_the_run_did_not_make(shell, name):
    shell.fitted()
    path = Path("run") / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    shell.ok("fit", "run", "x.npy", *shell.FIT, "--seed", "3", "--force")
    assert not Path("run/codes.npy").exists()
    assert not Path("run/index.drq").exists()
    shell.ok("encode", "run", "x.npy")
    assert path.read_text() == "mine"


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("codes.npy", ["encode", "run", "x.npy"]),
        ("codes.json", ["encode", "run", "x.npy"]),
        ("codes.partial", ["encode", "run", "x.npy"]),
        ("codes.partial.json", ["encode", "run", "x.npy"]),
        ("index.drq", ["encode", "run", "x.npy"]),
        ("metrics.json", ["encode", "run", "x.npy"]),
    ],
)
def test_a_file_of_the_user_in_the_way_is_named(shell, name, command, force):
    shell.ok("fit", "run", "x.npy", *shell.FIT)
    (Path("run") / name).write_text("mine")
    before = shell.tree()
    assert f"run/{name} is not a result of this run; move it" in shell.refused(*command, *force)
    assert shell.tree() == before


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_queries_of_the_user_in_a_trained_run_are_kept(shell, force):
    shell.ok("train", "run", *TRAIN)
    np.save("run/queries.npy", np.zeros((2, 48)))
    shell.ok("encode", "run")
    before = shell.tree()
    assert "run/queries.npy is not a result of this run" in shell.refused("evaluate", "run", *force)
    assert shell.tree() == before


def test_results_without_codes_are_not_deleted_unasked(shell):
    shell.fitted()
    Path("run/codes.npy").unlink()
    assert "index.drq exists already; --force replaces it" in shell.refused("encode", "run", "x.npy")
    assert Path("run/index.drq").exists()
    shell.ok("encode", "run", "x.npy", "--force")


def test_a_run_records_what_it_has(shell):
    shell.fitted()
    made = {"config.json", "model.drq", "codes.npy", "codes.json", "index.drq"}
    assert set(json.loads(Path("run/run.json").read_text())["made"]) == made
    assert {path.name for path in Path("run").iterdir()} == made | {"run.json", ".lock"}
    shutil.copytree("run", "copy")
    shell.ok("encode", "copy", "x.npy", "--force")
    assert not Path("copy/index.drq").exists()


@pytest.mark.parametrize("name", ["../x.npy", "report/../../x.npy", "x.npy", "report/..", 5])
def test_a_record_with_other_names_is_refused(shell, name):
    shell.fitted()
    Path("run/run.json").write_text(json.dumps({"drq_fast": "0.2.0", "made": ["model.drq", name]}))
    before = shell.tree()
    assert "run.json was not written by drq-fast" in shell.refused("fit", "run", "x.npy", *shell.FIT, "--force")
    assert shell.tree() == before


def test_a_run_of_version_0_1_0_has_no_record_and_is_a_run(shell):
    shell.fitted()
    Path("run/run.json").unlink()
    assert "run holds a run already" in shell.refused("fit", "run", "x.npy", *shell.FIT)
    shell.ok("encode", "run", "x.npy", "--force")
    assert not Path("run/index.drq").exists()
    shell.ok("index", "run")


def test_a_model_saved_by_python_is_no_run_but_can_encode(shell):
    shell.fitted()
    Path("mine").mkdir()
    RecurrentQuantizer.load("run/model.drq").save("mine/model.drq")
    Path("mine/queries.npy").write_text("mine")
    for force in ([], ["--force"]):
        assert "mine is not a run" in shell.refused("fit", "mine", "x.npy", *shell.FIT, *force)
    shell.ok("encode", "mine", "x.npy")
    shell.ok("encode", "mine", "x.npy", "--beam", "2", "--force")
    assert Path("mine/queries.npy").read_text() == "mine"


@pytest.mark.parametrize("recorded", [False, True])
def test_links_in_a_run_do_not_change_what_they_point_to(shell, recorded):
    run = shell.fitted()
    Path("mine").write_text("mine")
    if recorded:
        run.claim(run.partial, run.partial_state)
    for name in ("codes.partial", "codes.partial.json"):
        (run.folder / name).symlink_to("../mine")
    if recorded:
        shell.ok("encode", "run", "x.npy", "--force")
        assert not run.codes.is_symlink()
    else:
        assert "is not a result of this run" in shell.refused("encode", "run", "x.npy", "--force")
    assert Path("mine").read_text() == "mine"


def test_a_resumed_encoding_does_not_follow_a_link(shell):
    """The link points to a copy of the right partial file, which stays as it is."""
    run = shell.fitted()
    whole = run.codes.read_bytes()
    state = json.loads(run.made_by.read_text())
    run.claim(run.partial, run.partial_state)
    Path("mine").write_bytes(whole)
    run.partial.symlink_to("../mine")
    run.partial_state.write_text(json.dumps(state | {"done": 3000}))
    shell.ok("encode", "run", "x.npy", "--force")
    assert not run.codes.is_symlink()
    assert run.codes.read_bytes() == Path("mine").read_bytes() == whole


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_lock_that_is_no_file_is_refused(shell, kind):
    shell.ok("fit", "run", "x.npy", *shell.FIT)
    Path("run/.lock").unlink()
    Path("mine").write_text("mine")
    Path("run/.lock").symlink_to("../mine") if kind == "link" else os.mkfifo("run/.lock")
    signal.alarm(PATIENCE)
    said = shell.refused("encode", "run", "x.npy")
    signal.alarm(0)
    assert "run/.lock cannot be opened" in said
    assert Path("mine").read_text() == "mine"


def test_a_lock_of_the_user_keeps_its_content(shell):
    Path("run").mkdir()
    Path("run/.lock").write_text("mine")
    shell.ok("fit", "run", "x.npy", *shell.FIT)
    assert Path("run/.lock").read_text() == "mine"


@pytest.mark.parametrize("name", ["config.json", "codes.json", "model.drq", "codes.npy"])
def test_a_fifo_in_a_run_is_not_waited_for(shell, name):
    shell.fitted()
    (Path("run") / name).unlink()
    os.mkfifo(Path("run") / name)
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(PATIENCE)
    said = shell.refused("index", "run", "--force")
    signal.alarm(0)
    assert "it is not a regular file" in said


def test_numbers_in_settings_beyond_every_float_are_one_sentence(shell):
    Path("large.json").write_text(json.dumps({"margin": 10**400}))
    shell.refused("train", "new", "--data", "labelled.npz", "--config", "large.json")
    Path("deep.json").write_text("[" * 100_000)
    assert "deep.json is not JSON" in shell.refused("train", "new", *TRAIN, "--config", "deep.json")
    assert not Path("new").exists()


def test_a_result_named_by_the_user_may_be_in_the_run(shell):
    shell.fitted()
    shell.ok("search", "run", "q.npy", "--out", "run/found.npz")
    assert "exists already" in shell.refused("search", "run", "q.npy", "--out", "run/found.npz")
    shell.ok("search", "run", "q.npy", "--out", "run/found.npz", "--force")
    shell.ok("fit", "run", "x.npy", *shell.FIT, "--force")
    assert Path("run/found.npz").exists()
    assert Run("run").made() == {"config.json", "model.drq"}
