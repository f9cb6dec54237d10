"""Waiting for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def within(seconds: float, condition: Callable[[], bool]) -> None:
    """Looks until the condition holds; fails after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether there is such a process, other than one that has ended and was not waited for."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
