"""The examples of episodes run as they are, and what they train learns to take further turns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "multi_turn"


def _run(name: str, *, steps: int) -> tuple[str, list[float], list[float]]:
    """What it prints; per RL step, the mean reward and turns."""
    command = [sys.executable, str(FOLDER / name), "--steps", str(steps)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = re.findall(r"^step +\d+ .*?(-?\d+\.\d+).*?(\d+\.\d+)$", done.stdout, flags=re.MULTILINE)
    assert len(rows) == steps
    return done.stdout, [float(reward) for reward, _ in rows], [float(turns) for _, turns in rows]


def test_the_game_is_learned() -> None:
    text, rewards, turns = _run("guess_number.py", steps=12)
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.05
    assert min(turns[-3:]) > turns[0] + 1
    assert re.search(r"user +'(higher|lower)'", text)


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_the_calculator_is_called_more_and_more() -> None:
    text, rewards, turns = _run("calculator.py", steps=4)
    assert turns[-1] > turns[0] + 0.5
    assert rewards[-1] > rewards[0]
    (first, second, answer) = re.search(r'"expression": "(\d+) ([-+] \d+)".*\n +user +\'(-?\d+)\'', text).groups()  # type: ignore[union-attr]
    assert int(answer) == int(first) + int(second.replace(" ", ""))
