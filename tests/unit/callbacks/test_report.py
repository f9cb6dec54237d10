from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from rich.console import Console
from support.scripted import ScriptedGRPO, scripted_fit

from lightning_rlhf.callbacks import RunReport
from lightning_rlhf.callbacks.report import reward_line


def test_the_line_by_hand() -> None:
    # means 0.3 and 0.7; both sample variances are 0.025; sqrt(0.05 / 5) = 0.1, so 4 standard errors
    rewards = [0.1, 0.2, 0.3, 0.4, 0.5, 9.0, 0.5, 0.6, 0.7, 0.8, 0.9]
    assert reward_line(rewards) == (
        "reward: start 0.3000 (first 5 steps) -> end 0.7000 (last 5 steps), +0.4000, 4.0 standard errors"
    )
    assert reward_line(rewards[::-1]) == (
        "reward: start 0.7000 (first 5 steps) -> end 0.3000 (last 5 steps), -0.4000, -4.0 standard errors"
    )


@pytest.mark.parametrize(
    ("rewards", "line"),
    [
        ([], "reward: no step has one; nothing to compare"),
        ([0.25], "reward: 0.2500, one step alone; nothing to compare"),
        (
            [0.25, 0.5, 0.75],
            "reward: start 0.2500 (first 1 step) -> end 0.7500 (last 1 step), +0.5000, no standard error",
        ),
        (  # means 1 and 5, variances 2 and 2: sqrt((2 + 2) / 2) = sqrt(2)
            [0.0, 2.0, 4.0, 6.0],
            "reward: start 1.0000 (first 2 steps) -> end 5.0000 (last 2 steps), +4.0000, 2.8 standard errors",
        ),
        (
            [1.0] * 10,
            "reward: start 1.0000 (first 5 steps) -> end 1.0000 (last 5 steps), +0.0000, no standard error",
        ),
    ],
)
def test_short_and_flat_runs(rewards: list[float], line: str) -> None:
    assert reward_line(rewards) == line


def report(console: Console | None = None, **kwargs: Any) -> RunReport:
    return RunReport(console=console or Console(file=io.StringIO()), **kwargs)


def test_files_and_last_line(tmp_path: Path) -> None:
    callback = report(dirpath=tmp_path / "made" / "here")
    scripted_fit(ScriptedGRPO([0.25, None, 0.5]), tmp_path, [callback])
    assert list(csv.reader((tmp_path / "made" / "here" / "reward.csv").open())) == [
        ["rl_step", "reward_mean", "reward_std"],
        ["1", "0.25", "0.5"],
        ["3", "0.5", "0.5"],
    ]
    png = (tmp_path / "made" / "here" / "reward_curve.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 5000
    assert (
        callback.console.file.getvalue().splitlines()[-1].startswith("reward: start 0.2500 (first 1 step) -> end 0.5")
    )


def test_the_default_folder_is_the_trainers(tmp_path: Path) -> None:
    scripted_fit(ScriptedGRPO([0.25, 0.5]), tmp_path, [report()])
    assert (tmp_path / "reward.csv").exists()
    assert (tmp_path / "reward_curve.png").exists()


def test_a_run_without_any_reward_writes_no_curve(tmp_path: Path) -> None:
    callback = report()
    scripted_fit(ScriptedGRPO([None, None]), tmp_path, [callback])
    assert not (tmp_path / "reward_curve.png").exists()
    assert "no step has one" in callback.console.file.getvalue()


def test_a_resumed_run_reports_from_its_first_step(tmp_path: Path) -> None:
    rewards = [0.1, 0.2, 0.3, 0.4, 0.5, 9.0, 0.5, 0.6, 0.7, 0.8, 0.9]

    class SaveAt(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            if pl_module.rl_step == 4:
                trainer.save_checkpoint(tmp_path / "at4.ckpt")

    first = report()
    scripted_fit(ScriptedGRPO(rewards, max_rl_steps=6), tmp_path, [first, SaveAt()])
    resumed = report()
    scripted_fit(ScriptedGRPO(rewards), tmp_path, [resumed], ckpt_path=str(tmp_path / "at4.ckpt"))
    assert [resumed.history[step][0] for step in range(1, 12)] == rewards
    assert resumed.console.file.getvalue().splitlines()[-1].endswith("+0.4000, 4.0 standard errors")
