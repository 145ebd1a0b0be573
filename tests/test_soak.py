"""A few seconds of soak.py on a small index; `make soak` goes on for as long as you like."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from patience import wait_until

SPEC = importlib.util.spec_from_file_location("drq_soak", Path(__file__).with_name("soak.py"))
soak = sys.modules["drq_soak"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(soak)

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc, which memory is read from")


@pytest.mark.parametrize(("lists", "kept"), [(None, None), (30, "int8")])
def test_a_few_seconds_of_mixed_load(tmp_path, monkeypatch, lists, kept):
    monkeypatch.setattr(soak, "WEIGHTS", soak.WEIGHTS | {"search": 300, "file": 20})
    monkeypatch.setattr("drq_fast.index.coarse._SHORT", 500)
    load = soak.Soak(vectors=20_000, seed=1, pause=0.001, folder=tmp_path, lists=lists, kept=kept)

    def everything_happened() -> bool:
        load.run(seconds=4)
        return bool(load.findings) or set(load.counts()) == set(soak.WEIGHTS)

    wait_until(everything_happened)
    assert load.violations(latency=False) == [], load.report()


def test_violations_are_noticed(tmp_path):
    load = soak.Soak(vectors=2000, seed=2, pause=0, folder=tmp_path)
    model = load.models[3]
    model.content.codes[:, 0] ^= 1
    with pytest.raises(soak.Finding, match="a filtered search found other scores"):
        load.workers[3].check()
    with pytest.raises(soak.Finding, match="codes are wrong"):
        load.check_everything()
    load.index.remove([model.thread])
    with pytest.raises(soak.Finding, match="at any moment of the save"):
        load.workers[0].file()
    load.memory, load.descriptors = [100.0] * 50 + [200.0] * 50, [6] * 80 + [9] * 20
    load.workers[0].latencies.counts[[100, 900]] = 1000, 2
    assert [what.split(" from")[0] for what in load.violations(latency=True)] == [
        "memory grew",
        "files grew",
        "99.9 % of searches take up to 2864.8 times the median; at most 20 are allowed",
    ]
