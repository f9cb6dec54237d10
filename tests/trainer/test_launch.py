"""The launch scripts, and what several processes leave behind: one run, one record."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support import wandb_file
from support.tiny import write_tiny_model

from lightning_rlhf.cli.run_records import read_history

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda script: script.name)
def test_a_script_is_valid_bash_and_can_be_run(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.access(script, os.X_OK)


def test_slurm_is_told_what_it_gave(tmp_path: Path) -> None:
    """With an ``srun`` that prints its arguments: what the script makes of SLURM's variables."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    srun.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_NNODES": "4", "SLURM_NTASKS_PER_NODE": "8"}

    def words(**more: str) -> list[str]:
        command = [str(LAUNCH / "slurm.sh"), "experiment=x", "name=a b"]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env={**env, **more}
        ).stdout.splitlines()

    expected = ["trainer.num_nodes=4", "trainer.devices=8", "experiment=x", "name=a b"]
    assert words()[-4:] == expected
    assert words(SLURM_RESTART_COUNT="1")[-5:] == [*expected, "ckpt_path=last"]


def test_torchrun_starts_two_ranks_and_rank_0_alone_logs(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    model = write_tiny_model(tmp_path / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["experiment=grpo-tiny-1n2r-fsdp2_rl", f"model.path={model}", "algorithm.max_rl_steps=2"]
    done = subprocess.run(
        [str(LAUNCH / "torchrun.sh"), *arguments, "logger=csv_wandb", "algorithm.optimizer.lr=2e-3"],
        cwd=tmp_path,
        env={
            **os.environ, "PYTHON": sys.executable, "PROCESSES": "2", "PORT": str(port), "MASTER": "127.0.0.1",
            "WANDB_SILENT": "true", "COLUMNS": "120",
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = tmp_path / "outputs" / "grpo-tiny-1n2r-fsdp2_rl"
    assert done.stdout.count("FSDP2RLStrategy, 2 processes on cpu") == 1
    assert [path.name for path in (run / "csv").iterdir()] == ["version_0"]
    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")  # i04: only rank 0 has a W&B run
    assert wandb_file.config(file)["algorithm"]["optimizer"]["lr"] == 2e-3
    assert wandb_file.axes(file)["*"] == "rl_step"
    rewards = {row["rl_step"]: row["reward/mean"] for row in wandb_file.history(file) if "reward/mean" in row}
    assert rewards == read_history(run)["reward/mean"]
    assert set(rewards) == {1, 2}
