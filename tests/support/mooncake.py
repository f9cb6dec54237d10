"""Programs that use Mooncake, each in a process of its own: its library must be found when the process starts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch


def run_with_mooncake(program: str, folder: Path, *, timeout: float) -> None:
    """Runs the program, which prints "all right" last; skips the test where Mooncake is not installed.

    Args:
        program: Python, indented or not.
        folder: for a link to the library.
        timeout: in seconds.
    """
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("needs mooncake-transfer-engine-non-cuda")
    # Mooncake is linked to a system library that NIXL's wheel has a copy of.
    site = Path(torch.__file__).parents[1]
    for copy in site.glob("nixl_cu12.libs/libibverbs-*"):
        (folder / "libibverbs.so.1").symlink_to(copy)
    path = f"{folder}:{site / 'nixl_cu12.libs'}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "LD_LIBRARY_PATH": path, "MC_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.stdout.strip().endswith("all right"), done.stdout[-2000:] + done.stderr[-2000:]
