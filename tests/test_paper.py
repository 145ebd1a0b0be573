"""benchmarks/paper.py on made-up features: a table with every row, runs that are kept, and choices by validation."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "paper.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Two classes of 700 features each, as many as the protocol needs, and two words."""
    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    label = np.arange(1400) % 2
    x = generator.normal(size=(1400, 8)) + 1.5 * label[:, None]
    np.savez(folder / "x.npz", x=x.astype(np.float32), label=label)
    np.savetxt(folder / "words.txt", [[1.0, 0, 0], [0, 1, 1]])
    return folder


def run(data: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--data", str(data / "x.npz"), "--words", str(data / "words.txt")]
    settings = ["--set", "epochs=1,1,1", "batch=64"]
    return subprocess.run([*command, *arguments, *settings], capture_output=True, text=True, check=False)


def paper(data: Path, *arguments: str) -> str:
    done = run(data, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(data: Path, *arguments: str) -> str:
    done = run(data, *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    return done.stderr.strip()


def cells(table: str, row: str) -> list[str]:
    (line,) = (line for line in table.splitlines() if line.startswith(f"| {row} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_table_and_the_runs_that_are_kept(data, tmp_path):
    out = paper(data, "--seeds", "2", "--limits", "--keep", str(tmp_path / "runs.json"))
    assert "| | 8 bits | 16 bits | 24 bits | 32 bits | seconds |" in out
    assert cells(out, "the paper: AlexNet, fine-tuned")[:4] == ["0.803", "0.824", "0.832", "0.837"]
    kept = json.loads((tmp_path / "runs.json").read_text())["runs"]["none"]
    by_code = [[run[0]["ours"][i] for run in kept] for i in range(4)]
    expected = [f"{np.mean(v):.3f} ({min(v):.3f} to {max(v):.3f})" for v in by_code]
    assert cells(out, "ours")[:4] == expected
    assert min(map(min, by_code)) > 0.8  # two classes that are easy to tell apart
    assert len(cells(out, "learned features, exact")) == len(cells(out, "ours, by distance")) == 5
    assert "--seeds 2 --limits --set epochs=1,1,1 batch=64`." in out
    known, right = "training images ranked for 1,000 of them, exact", "share of queries nearest to a word of theirs"
    assert min(float(value.split()[0]) for row in (known, right) for value in cells(out, row)[:4]) > 0.8
    assert [epoch["levels"] for epoch in kept[0][2]] == [0, 1, 4]
    curve = tmp_path / "curve.svg"
    again = paper(data, "--seeds", "2", "--limits", "--keep", str(tmp_path / "runs.json"), "--curve", str(curve))
    assert curve.read_text().rstrip().endswith("</svg>")
    assert not [line for line in again.splitlines() if line.startswith("none ")]  # nothing was computed anew
    assert cells(again, "ours") == cells(out, "ours")
    assert refused(data, "--limits", "--keep", str(tmp_path / "runs.json"), "--validate") == (
        f"--keep: {tmp_path / 'runs.json'} has runs of another validate: False, not True"
    )
    assert refused(data, "--protocol", "cifar10-1", "--peers").startswith("--peers: faiss has 8 bits for a level here")


def test_stage_one_is_shared_and_found_again(data, tmp_path):
    options = ("--run", str(tmp_path / "run"), "--stage-one", str(tmp_path / "one"))
    out = paper(data, *options)
    assert "given features in stage 1, which all models share; stages 2 and 3 train on its features; 1 seed" in out
    assert "--stage-one one --set epochs=1,1,1 batch=64`." in out
    assert (tmp_path / "one" / "none-0" / "features.npz").exists()
    assert min(map(float, cells(out, "ours")[:4])) > 0.8
    (ours,) = (line for line in out.splitlines() if line.startswith("none 0 "))
    (again,) = (line for line in paper(data, *options).splitlines() if line.startswith("none 0 "))
    assert json.loads(again.removeprefix("none 0 "))[0] == json.loads(ours.removeprefix("none 0 "))[0]


@pytest.fixture
def script(monkeypatch):
    """benchmarks/paper.py as a module."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("paper")


@pytest.mark.parametrize("name", ["PQ", "OPQ", "RQ", "LSQ"])
def test_codecs_of_faiss(script, name):
    pytest.importorskip("faiss")
    recipe = script.PEERS[f"faiss {name}, trained for each length"].replace("OPQ{L}_240", "OPQ{L}_12")
    x = torch.randn(400, 12, generator=torch.Generator().manual_seed(0))
    errors = []
    for L in (1, 2):
        decoded, copies = script.faiss_codes(recipe.format(L=L), x, x[:50])
        errors.append(float((decoded[copies] - x[:50]).square().sum() / x[:50].square().sum()))
    assert decoded.shape[1] == 12
    assert errors[1] < errors[0] < 0.6


def test_validation_shares_no_image(script):
    halves = script.halves
    rows = torch.arange(7, 1007)
    split = halves(rows, 0)
    assert [len(part) for part in split] == [800, 100, 100]
    assert torch.equal(torch.cat(split).sort().values, rows)


@pytest.mark.slow
def test_ablations_by_validation(data):
    out = paper(data, "--ablations", "--validate")
    for row in ("Remove l_s", "Remove l_t", "soft only", "Remove E_j", "Remove concat", "DRQ"):
        assert all(0.5 < float(value) <= 1 for value in cells(out, row)[:4])
    assert "| the paper" not in out
    assert "on training images alone" in out
    assert "--ablations --validate" in out


def test_codebook_sizes_stand_in_the_docs():
    done = subprocess.run([sys.executable, str(SCRIPT), "--sizes"], capture_output=True, text=True, check=True)
    page = (SCRIPT.parents[1] / "docs" / "results.md").read_text()
    assert f"<!-- quality: sizes -->\n{done.stdout}<!-- end -->" in page
    assert "| DRQ: codebook, w and offset | 526,337 | 526,337 |" in done.stdout  # 256 x 2048 + 1 + 2048
