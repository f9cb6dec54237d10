"""Processes that a run has started end with it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent dies."""


def die_with_parent() -> None:
    """Has the system kill this process when the one that started it ends, however it ends.

    Does nothing outside Linux, where a rank that has lost rank 0 ends at the next collective's timeout.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signal.SIGKILL)
