"""The adapter for ann-benchmarks, driven as that project's runner does and, where there is a clone, by the runner."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

h5py = pytest.importorskip("h5py")
yaml = pytest.importorskip("yaml")

ADAPTER = Path(__file__).parents[1] / "benchmarks" / "ann_benchmarks"
COUNT = 10
BASE = """
class BaseANN:
    def done(self): pass
    def get_memory_usage(self): return 0.0
    def get_batch_results(self): return self.res
    def get_additional(self): return {}
    def __str__(self): return self.name
"""


def write_dataset(path: Path, distance: str) -> None:
    """A file as the project has them: train, test, neighbors and distances, with the name of the distance."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 16))[rng.integers(30, size=1040)] + 0.4 * rng.normal(size=(1040, 16))
    train, test = x[:1000], x[1000:]
    if distance == "angular":
        unit, of = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (train, test))
        distances = 1 - of @ unit.T
    else:
        distances = np.linalg.norm(test[:, None] - train, axis=2)
    neighbors = distances.argsort(axis=1)[:, :100]
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        file.attrs.update(type="dense", distance=distance, dimension=16, point_type="float")
        for name, value in {"train": train, "test": test, "neighbors": neighbors}.items():
            file[name] = value
        file["distances"] = np.take_along_axis(distances, neighbors, axis=1)


def arguments(distance: str) -> list[tuple[list, list[list]]]:
    """(arguments of the constructor, arguments of the queries) of every index in config.yml."""
    (algorithm,) = yaml.safe_load((ADAPTER / "config.yml").read_text())["float"]["any"]
    base = [distance if value == "@metric" else value for value in algorithm["base_args"]]
    groups = algorithm["run_groups"].values()
    queries = {name: [list(q) for q in itertools.product(*g["query_args"])] for name, g in enumerate(groups)}
    every = [([*base, *a], queries[name]) for name, g in enumerate(groups) for a in itertools.product(*g["args"])]
    assert (algorithm["module"], algorithm["constructor"]) == ("ann_benchmarks.algorithms.drq_fast", "DrqFast")
    return every


def recall(path: Path, found) -> float:
    """Of the neighbours found [Q, COUNT]."""
    with h5py.File(path) as file:
        wanted = np.array(file["neighbors"])[:, :COUNT]
    return float(np.mean([len(set(a) & set(b)) / COUNT for a, b in zip(np.asarray(found), wanted, strict=True)]))


@pytest.fixture
def constructor(tmp_path, monkeypatch):
    """DrqFast, in a package like that of the project, with a base class that has the methods of its own."""
    algorithms = tmp_path / "ann_benchmarks" / "algorithms"
    shutil.copytree(ADAPTER, algorithms / "drq_fast")
    (algorithms / "base").mkdir()
    (algorithms / "base" / "module.py").write_text(BASE)
    monkeypatch.syspath_prepend(tmp_path)
    threads = torch.get_num_threads()
    yield importlib.import_module("ann_benchmarks.algorithms.drq_fast.module").DrqFast
    torch.set_num_threads(threads)
    for name in [name for name in sys.modules if name.split(".")[0] == "ann_benchmarks"]:
        del sys.modules[name]


@pytest.mark.parametrize("distance", ["euclidean", "angular"])
def test_what_the_runner_does(constructor, tmp_path, distance):
    write_dataset(tmp_path / "data.hdf5", distance)
    with h5py.File(tmp_path / "data.hdf5") as file:
        train, test = np.array(file["train"]), np.array(file["test"])
    made, queries = arguments(distance)[0]
    algorithm = constructor(*made)
    try:
        assert algorithm.get_memory_usage() is not None
        algorithm.fit(train)
        for each in (queries[0], queries[-1]):
            algorithm.set_query_arguments(*each)
            assert str(algorithm) == f"DrqFast(bits=64, probes=None, refine={each[1]})"
            single = np.array([algorithm.query(q, COUNT) for q in test])
            algorithm.batch_query(test, COUNT)
            assert np.array_equal(algorithm.get_batch_results(), single)
            assert single.min() >= 0
        assert recall(tmp_path / "data.hdf5", single) > 0.99
        assert algorithm.get_additional() == {}
    finally:
        algorithm.done()


def test_lists_are_probed_and_other_distances_refused(constructor, monkeypatch):
    from drq_fast.index import build

    monkeypatch.setattr(build.coarse, "default_lists", lambda N: 8)
    algorithm = constructor("euclidean", 16)
    algorithm.fit(np.random.default_rng(0).normal(size=(500, 8)).astype(np.float32))
    algorithm.set_query_arguments(256, 20)
    assert str(algorithm) == "DrqFast(bits=16, probes=8, refine=20)"
    assert len(algorithm.query(np.zeros(8), COUNT)) == COUNT
    with pytest.raises(NotImplementedError, match=r"^drq_fast has no metric jaccard\.$"):
        constructor("jaccard", 64)


def test_lists_with_too_few_vectors_give_fewer_ids(constructor, monkeypatch):
    """The runner refuses an id that is given twice, as -1 would be."""
    from drq_fast.index import build

    monkeypatch.setattr(build.coarse, "default_lists", lambda N: 40)
    x = np.random.default_rng(0).normal(size=(200, 8)).astype(np.float32)
    algorithm = constructor("euclidean", 16)
    algorithm.fit(x)
    algorithm.set_query_arguments(1, 20)
    single = [algorithm.query(q, COUNT) for q in x]
    assert 1 <= min(map(len, single)) < COUNT
    assert all(len(set(ids)) == len(ids) and min(ids) >= 0 for ids in single)
    algorithm.batch_query(x, COUNT)
    assert [ids.tolist() for ids in algorithm.get_batch_results()] == [ids.tolist() for ids in single]


@pytest.mark.parametrize("batch", [False, True])
def test_the_runner_of_the_project(tmp_path, batch):
    clone = os.environ.get("DRQ_FAST_ANN_BENCHMARKS")
    if clone is None:
        pytest.skip("DRQ_FAST_ANN_BENCHMARKS names no clone of ann-benchmarks")
    shutil.copytree(Path(clone) / "ann_benchmarks", tmp_path / "ann_benchmarks")
    shutil.copytree(ADAPTER, tmp_path / "ann_benchmarks/algorithms/drq_fast", dirs_exist_ok=True)
    write_dataset(tmp_path / "data/tiny.hdf5", "euclidean")
    code = f"""
from dataclasses import replace
from ann_benchmarks.definitions import get_definitions
from ann_benchmarks.runner import run
(first, *_) = [d for d in get_definitions(
    dimension=16, point_type="float", distance_metric="euclidean", count={COUNT}
) if d.algorithm == "drq_fast"]
groups = first.query_argument_groups
run(replace(first, query_argument_groups=[groups[0], groups[-1]]), "tiny", {COUNT}, 1, {batch})
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made, queries = arguments("euclidean")[0]
    folder = tmp_path / "results/tiny" / str(COUNT) / ("drq_fast-batch" if batch else "drq_fast")
    for each in (queries[0], queries[-1]):
        name = re.sub(r"\W+", "_", json.dumps(made + each)).strip("_")
        with h5py.File(folder / f"{name}.hdf5") as file:
            assert file.attrs["name"] == f"DrqFast(bits=64, probes=None, refine={each[1]})"
            found = recall(tmp_path / "data/tiny.hdf5", file["neighbors"])
    assert found > 0.99
