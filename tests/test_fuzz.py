"""A few of the attacks of fuzz.py; `make fuzz` goes on for as long as you like."""

from __future__ import annotations

import os

import fuzz
import pytest

SLOW = {"sanitizers": [pytest.mark.slow]}  # builds for a minute


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(int(os.environ.get("DRQ_FAST_CASES", "4"))))
@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in fuzz.ATTACKS])
def test_attack(name, seed):
    """Repeat a failure by `python tests/fuzz.py --only NAME --seed SEED --cases 1`."""
    if name == "sanitizers" and (reason := fuzz.sanitizers.reason_to_skip()):
        pytest.skip(reason)
    assert fuzz.attack(name, seed) > 0
