"""The examples run, and do what they promise."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from statistics import mean
from types import ModuleType

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
    command = [sys.executable, str(EXAMPLES / "digits.py"), "--epochs", "30", "--out", str(tmp_path / "a.png")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line.rsplit(maxsplit=3) for line in text.splitlines() if line.startswith(("code,", "features,"))]
    exact, *codes = ([float(n) for n in numbers] for _, *numbers in lines)
    assert [size for size, _, _ in codes] == [1, 2, 3, 4]
    assert all(precision > exact[1] - 0.05 for _, precision, _ in codes)
    recalls = [recall for _, _, recall in codes]
    assert recalls == sorted(recalls)
    assert (tmp_path / "a.png").stat().st_size > 10_000


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
