"""How long tests wait for what must happen: a loaded machine may need long, and waiting ends when it has happened."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 600  # seconds after which a test fails that would otherwise wait for ever


def wait_until(happened: Callable[[], bool]) -> None:
    """Returns as soon as it has happened."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)
