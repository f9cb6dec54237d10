"""Runs of experiment files on a toy task that a tiny model learns in seconds, and what counts as having learned it."""

from __future__ import annotations

import statistics
from pathlib import Path

import lightning.pytorch as pl

from lightning_rlhf.cli.run import build, build_trainer
from lightning_rlhf.cli.show_config import compose_run
from lightning_rlhf.cli.validate import validate
from support.toy import Recorder

TOY = [
    # the share of a response's characters that are digits, in place of a sum that a tiny model cannot learn to form
    "~reward.task",
    "~reward.task_config",
    "reward._target_=support.toy.digit_reward",
    "+reward._partial_=true",
    "algorithm.optimizer.lr=3e-3",
    # two optimizer steps in each RL step, so that ratios are not 1 and clips act
    "algorithm.mini_batch_size=8",
    "data.source.size=128",
    "logger={}",
]


def run_experiment(experiment: str, root: Path, model: Path, *overrides: str, steps: int) -> list[dict[str, float]]:
    """The metrics of every RL step of what ``lightning-rlhf train experiment=...`` runs."""
    cfg = compose_run(
        [
            f"experiment={experiment}",
            f"model.path={model}",
            f"run_dir={root / experiment}",
            f"algorithm.max_rl_steps={steps}",
            *TOY,
            *overrides,
        ]
    )
    validate(cfg)
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    data, module, trainer = build("data", cfg), build("algorithm", cfg), build_trainer(cfg)
    recorder = Recorder()
    trainer.callbacks.append(recorder)  # type: ignore[attr-defined]
    trainer.fit(module, datamodule=data)
    return [step["metrics"] for step in recorder.steps]


def rise(rewards: list[float], *, window: int = 5) -> tuple[float, float]:
    """How much the mean of the last steps exceeds that of the first, and that in standard errors."""
    first, last = rewards[:window], rewards[-window:]
    difference = statistics.mean(last) - statistics.mean(first)
    # the spread within a window also holds the trend, so that this errs on the side of noise
    error = ((statistics.variance(first) + statistics.variance(last)) / window) ** 0.5
    return difference, difference / error
