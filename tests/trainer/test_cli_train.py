"""``lightning-rlhf train`` as a user starts it: a process of its own, and the processes that it starts."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.tiny import write_tiny_model
from support.waiting import alive

TESTS = Path(__file__).parents[1]
PARTS = ["--config-dir", str(TESTS / "support" / "cli_configs"), "experiment=parts"]


def start(
    folder: Path, *arguments: str, by: tuple[str, ...] = ("-m", "lightning_rlhf.cli.main"), timeout: float = 200
) -> subprocess.CompletedProcess[str]:
    """Runs the command in ``folder``; the process and its children are ended if it takes too long."""
    process = subprocess.Popen(
        [sys.executable, *by, "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(TESTS), "COLUMNS": "120"},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def reports(folder: Path) -> list[dict[str, Any]]:
    """What ``support.cli_parts.Algorithm`` wrote on each rank, by rank."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]


def assert_all_end(ranks: list[dict[str, Any]], *, why: str) -> None:
    """Each of them is given 30 s to end: far below the timeout of a collective that it could be waiting in."""
    end = time.monotonic() + 30
    while any(alive(one["pid"]) for one in ranks):
        assert time.monotonic() < end, why
        time.sleep(0.1)


def console_script(folder: Path) -> tuple[str, ...]:
    """A file as pip writes it for an entry point: no ``__spec__``, and its own folder first on the path."""
    script = folder / "bin" / "lightning-rlhf"
    script.parent.mkdir()
    script.write_text("import sys\nfrom lightning_rlhf.cli.main import main\nsys.exit(main())\n")
    return (str(script),)


@pytest.mark.parametrize("kind", ["console script", "python -m"])
def test_two_ranks_run_the_same_configuration_in_the_same_folder(kind: str, tmp_path: Path) -> None:
    by = console_script(tmp_path) if kind == "console script" else ("-m", "lightning_rlhf.cli.main")
    changes = [
        "strategy=parts",
        "trainer.devices=2",
        "algorithm.kl_coef=0.5",
        "algorithm.options={a: [1, 2], b: 'x y'}",
    ]
    done = start(tmp_path, *PARTS, *changes, "seed=3", "run_dir=out/with space", by=by)
    assert done.returncode == 0, done.stderr
    ranks = reports(tmp_path / "out" / "with space")
    assert [(one["rank"], one["world_size"]) for one in ranks] == [(0, 2), (1, 2)]
    for one in ranks:
        assert one["kl_coef"] == 0.5
        assert one["options"] == {"a": [1, 2], "b": "x y"}
        assert one["types"] == {"model": "str", "options": "dict"}  # no DictConfig below the command line
        assert one["cwd"] == str(tmp_path)
        assert one["seed"] == 3
        assert one["heavy"] == []
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["with space"]
    assert done.stdout.count("4 prompts x 4 rollouts = 16 rollouts") == 1  # rank 0 alone speaks
    assert_all_end(ranks, why="a rank outlived the command")


def test_a_failure_while_training_is_a_failure_of_the_command(tmp_path: Path) -> None:
    done = start(tmp_path, *PARTS, "algorithm.fail=fit")
    assert done.returncode != 0
    assert "RuntimeError: fail=fit was asked for." in done.stderr
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_on_one_rank_ends_the_others(rank: int, tmp_path: Path) -> None:
    done = start(tmp_path, *PARTS, "strategy=parts", "trainer.devices=2", f"algorithm.fail=rank {rank}")
    assert done.returncode != 0
    assert f"RuntimeError: fail=rank {rank} was asked for." in done.stderr
    assert_all_end(reports(tmp_path / "outputs" / "parts"), why="a rank outlived the failure of another")


def rewards(run: Path) -> list[int]:
    with (run / "reward.csv").open() as file:
        return [int(row["rl_step"]) for row in csv.DictReader(file)]


def test_grpo_trains_and_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    arguments = ["experiment=grpo-tiny-1n1r-auto", f"model.path={model}"]
    done = start(tmp_path, *arguments, "algorithm.max_rl_steps=2", "algorithm.mini_batch_size=8")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "outputs" / "grpo-tiny-1n1r-auto"
    assert {path.name for path in run.iterdir()} == {
        "checkpoints", "config.yaml", "csv", "hf", "reward.csv", "reward_curve.png", "rollouts",
    }  # fmt: skip
    assert rewards(run) == [1, 2]
    assert "4 prompts x 4 rollouts = 16 rollouts, 2 optimizer steps of 8" in done.stdout
    last_line = [line for line in done.stdout.splitlines() if line.strip()][-1]
    assert last_line.startswith("reward: start")

    done = start(tmp_path, *arguments, "algorithm.max_rl_steps=3", "algorithm.mini_batch_size=8", "ckpt_path=last")
    assert done.returncode == 0, done.stderr
    assert rewards(run) == [1, 2, 3]  # the first two from the checkpoint
    assert sorted(path.name for path in (run / "csv").iterdir()) == ["version_0", "version_1"]
    assert not (tmp_path / "outputs" / "grpo-tiny-1n1r-auto.1").exists()
