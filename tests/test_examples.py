"""The examples run, and do what they promise."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from statistics import mean
from types import ModuleType

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_digits(tmp_path):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(EXAMPLES / "digits.py"), "--epochs", "20", "3", "8", "--out", str(tmp_path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    codes = [map(float, line.split()[3:]) for line in lines if line.startswith("code,")]
    sizes, full, without_labels = zip(*codes, strict=True)
    exact = float(next(line.split()[-1] for line in lines if line.startswith("features, exact")))
    assert sizes == (1, 2, 3, 4)
    assert min(full) > max(exact - 0.05, max(without_labels) + 0.1)
    assert any(line.startswith(f"$ drq-fast report {tmp_path / 'full'} --beside") for line in lines)
    page = Path(lines[-1].removeprefix("open in a browser: "))
    assert page.stat().st_size > 20_000


@pytest.mark.slow
def test_the_autoencoder_is_no_worse_than_with_the_layer_it_replaces():
    pytest.importorskip("sklearn")
    pytest.importorskip("vector_quantize_pytorch")
    module = load("autoencoder")
    ours, peer = ([module.run(make, seed, 1000) for seed in range(3)] for make in (module.ours, module.peer))
    assert mean(error for error, _ in ours) <= mean(error for error, _ in peer)
    assert mean(used for _, used in ours) >= mean(used for _, used in peer)


def test_the_autoencoder_learns():
    pytest.importorskip("sklearn")
    module = load("autoencoder")
    untrained, trained = module.run(module.ours, 0, 1), module.run(module.ours, 0, 300)
    assert trained[0] < 0.5 * untrained[0]
    assert trained[1] > 0.9 * module.CODEWORDS


def test_texts_are_found_and_longer_codes_find_more():
    pytest.importorskip("sklearn")
    command = [sys.executable, str(EXAMPLES / "text_search.py"), "the calendar of a month"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    recalls = [int(line.split("%")[0].split()[-1]) for line in text.splitlines() if "of the 10 nearest" in line]
    assert len(recalls) == 3
    assert recalls == sorted(set(recalls))
    assert "calendar.monthcalendar" in text.splitlines()[-1]


def test_the_paper_in_twenty_lines(tmp_path):
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    np.savez(tmp_path / "digits.npz", x=digits.data.astype(np.float32), label=digits.target)
    command = [sys.executable, str(EXAMPLES / "paper.py"), "digits.npz", "--train", "50", "--query", "10"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    rows = [line.split() for line in text.splitlines()]
    assert [row[0] for row in rows] == ["8", "16", "24", "32"]
    assert all(float(row[-1]) > 0.7 for row in rows)
    assert (tmp_path / "out/paper/checkpoint.safetensors").exists()
