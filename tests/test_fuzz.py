"""A few of the attacks of fuzz.py; `make fuzz` goes on for as long as you like."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("drq_fuzz", Path(__file__).with_name("fuzz.py"))
fuzz = sys.modules["drq_fuzz"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fuzz)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(int(os.environ.get("DRQ_FAST_CASES", "8"))))
@pytest.mark.parametrize("name", fuzz.ATTACKS)
def test_attack(name, seed):
    """Repeat a failure by `python tests/fuzz.py --only NAME --seed SEED --cases 1`."""
    assert fuzz.attack(name, seed) > 0
