"""The command line when it is interrupted or killed: what it leaves, what it says, and what goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from patience import PATIENCE, wait_until

from drq_fast import RecurrentQuantizer, functional
from drq_fast.app import cli
from drq_fast.app.run import Run
from drq_fast.files import fingerprint
from drq_fast.retrieval.experiment import Experiment

TRAIN = ["--train", "20", "--query", "5", "--hidden", "32", "--dim", "48", "--codewords", "16", "--levels", "3"]


@pytest.mark.parametrize("rounds", [0, 4])
def test_ctrl_c_keeps_the_best_codec_so_far(shell, monkeypatch, rounds):
    calls, encode = [], functional.encode_checked

    def counted(*arguments):
        calls.append(1)
        if len(calls) == rounds + 1:
            os.kill(os.getpid(), signal.SIGINT)
        return encode(*arguments)

    monkeypatch.setattr(functional, "encode_checked", counted)
    assert cli.main(["fit", "run", "x.npy", *shell.FIT]) == 130
    assert len(calls) == rounds + 1
    out, err = shell.capsys.readouterr()
    if rounds == 0:
        assert (out, err) == ("", "drq-fast fit: interrupted; no codec was written\n")
        assert [path.name for path in Path("run").iterdir()] == [".lock"]
        return
    kept = "fit: interrupted after 4 of 6 rounds; the best codec so far is kept.\n"
    assert err == f"{kept}drq-fast fit: interrupted; the best codec so far was written\n"
    assert out.endswith("run/model.drq: fitted to 3,000 vectors\n")
    shell.ok("encode", "run", "x.npy")
    shell.ok("index", "run")


def test_ctrl_c_leaves_a_whole_run_or_none(shell):
    process = shell.start("fit", "run", "x.npy", "--rounds", "1000000")
    wait_until(Path("run/.lock").exists)
    time.sleep(1)  # until the fit has begun; it may also be interrupted before
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert err.strip().splitlines()[-1].startswith("drq-fast fit: interrupted")
    assert "Traceback" not in err
    if "the best codec so far is kept" in err:
        assert RecurrentQuantizer.load("run/model.drq").initialised
        assert "run/model.drq: fitted to" in out
    else:
        assert out == ""
        assert [path.name for path in Path("run").iterdir()] == [".lock"]


@pytest.mark.parametrize("command", ["train", "encode"])
def test_ctrl_c_says_what_resumes(shell, monkeypatch, command):
    shell.ok("fit", "run", "x.npy", *shell.FIT)

    def interrupted(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Experiment, "train", interrupted)
    monkeypatch.setattr(Run, "encode", lambda *_, **__: interrupted())
    arguments = {"train": ["new", "--data", "labelled.npz", *TRAIN], "encode": ["run", "x.npy"]}[command]
    assert cli.main([command, *arguments]) == 130
    assert shell.capsys.readouterr().err == f"drq-fast {command}: interrupted; the same command resumes\n"


@pytest.mark.parametrize("caught", ["", "except BaseException: pass", "except BaseException: raise ImportError"])
def test_ctrl_c_while_torch_is_imported(shell, caught):
    """`torch` is a module that imports slowly; some modules swallow exceptions or replace them."""
    slow = "import pathlib, time\ntry:\n    pathlib.Path('begun').touch()\n    time.sleep(600)\n"
    Path("torch.py").write_text(slow + (caught or "finally: pass"))
    process = shell.start("info")
    wait_until(Path("begun").exists)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert (out, err) == ("", "drq-fast info: interrupted; finished files are kept\n")


KILLED = """
import os, signal, sys
from pathlib import Path
import drq_fast.retrieval.train as loop
from drq_fast.app import cli

step = loop._Run.step

def step_until_there_is_a_checkpoint(*arguments):
    if Path("run/checkpoint.safetensors").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*arguments)

loop._Run.step = step_until_there_is_a_checkpoint
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize("forced", [False, True])
def test_training_that_was_killed_goes_on(shell, forced):
    command = ["train", "run", "--data", "labelled.npz", *TRAIN, "--epochs", "40", "5", "5", "--batch", "20"]
    options = ["--checkpoint-seconds", "0", *(["--force"] if forced else [])]
    killed = subprocess.run([sys.executable, "-c", KILLED, *command, *options], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert Path("run/checkpoint.safetensors").exists()
    assert not Path("run/model.drq").exists()
    assert cli.main([*command, *options]) == 0
    said = shell.capsys.readouterr().err
    assert re.search(r"^train: resumes after \d+ of 150 steps, from run/checkpoint.safetensors\.$", said, re.MULTILINE)
    shell.ok("train", "whole", *command[2:], "--checkpoint-seconds", "0")
    assert fingerprint("run/model.drq", "quantizer") == fingerprint("whole/model.drq", "quantizer")


def test_who_reads_no_further_sees_no_error(shell):
    shell.fitted()
    np.save("q.npy", np.repeat(np.load("q.npy"), 3000, axis=0))
    process = shell.start("search", "run", "q.npy", "-k", "20")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.wait()
