"""What vLLM's workers share through /dev/shm, so that it can be removed when they were killed and could not do it."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

MAPPED = re.compile(r"/dev/shm/((?:psm_|vllm_dist_)[^\s/]+)")
"""vLLM's message queues are named by Python (``psm_``), its shared-memory communicator on CPU ``vllm_dist_``."""


def shared_by_group(group: int) -> set[str]:
    """Names of the segments that processes of a group have mapped now."""
    names: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile, or is another user's
            if os.getpgid(int(process.name)) == group:
                names.update(MAPPED.findall((process / "maps").read_text(encoding="utf-8")))
    return names


def remove(names: set[str]) -> None:
    """Removes segments that are still there."""
    for name in names:
        (Path("/dev/shm") / name).unlink(missing_ok=True)
