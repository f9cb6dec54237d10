"""The experiments for two processes run as they stand: each algorithm on each strategy."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from support.tiny import write_tiny_model

from lightning_rlhf.cli.run_records import read_history

CONFIGS = Path(str(files("lightning_rlhf.configs")))
EXPERIMENTS = sorted(file.stem for file in (CONFIGS / "experiment").glob("*-tiny-1n2r-*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_it_runs(experiment: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    arguments = [f"experiment={experiment}", f"model.path={model}", "algorithm.max_rl_steps=2"]
    done = subprocess.run(
        [sys.executable, "-m", "lightning_rlhf.cli.main", "train", *arguments],
        cwd=tmp_path, env={**os.environ, "COLUMNS": "120"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    history = read_history(tmp_path / "outputs" / experiment)
    assert set(history["actor/loss"]) == {1, 2}
    assert ("critic/loss" in history) == experiment.startswith("ppo")
