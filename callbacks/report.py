"""What a run leaves behind about its reward: a curve, a table, and one last line."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import rich
from rich.console import Console
from typing_extensions import override

from lightning_rlhf.callbacks.curves import WINDOW, draw_curve, finish_axes, new_figure, save_figure
from lightning_rlhf.callbacks.on_policy import as_on_policy
from lightning_rlhf.types import PromptBatch


class RunReport(pl.Callback):
    """Keeps each RL step's mean reward; at the end of the fit rank 0 writes and prints it.

    Writes ``reward_curve.png`` and ``reward.csv`` (columns ``rl_step``, ``reward_mean``, ``reward_std``). The history
    is part of the checkpoint, so a resumed run reports from its first step on.

    Args:
        dirpath: folder of the two files; None is the Trainer's ``default_root_dir``.
        console: where the last line goes; None is rich's own.

    Attributes:
        history: by RL step (from 1), mean and standard deviation of the rewards; steps without a reward are absent.
    """

    def __init__(self, *, dirpath: str | Path | None = None, console: Console | None = None) -> None:
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.console = rich.get_console() if console is None else console
        self.history: dict[int, tuple[float, float]] = {}

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: PromptBatch, batch_idx: int
    ) -> None:
        module = as_on_policy(pl_module, callback=self)
        mean = module.last_metrics.get("reward/mean", math.nan)
        if math.isfinite(mean):
            self.history[module.rl_step] = (mean, module.last_metrics.get("reward/std", math.nan))

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        if self.history:
            folder = Path(trainer.default_root_dir) if self.dirpath is None else self.dirpath
            folder.mkdir(parents=True, exist_ok=True)
            write_reward_csv(folder / "reward.csv", self.history)
            plot_reward_curve(folder / "reward_curve.png", self.history)
            self._say(f"reward curve: {folder / 'reward_curve.png'}")
        self._say(reward_line([mean for _, (mean, _) in sorted(self.history.items())]))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"history": {step: list(values) for step, values in self.history.items()}}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = {step: (mean, std) for step, (mean, std) in state_dict["history"].items()}

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def reward_line(rewards: list[float]) -> str:
    """Compares the first and the last steps of a run.

    The windows are ``WINDOW`` steps each, or half of the run where that is less. The standard error of the difference
    is that of two independent means, ``sqrt(s1^2 / n + s2^2 / n)``, from the sample variances of the steps' mean
    rewards in each window (Welch).

    Args:
        rewards: each step's mean reward, in order.
    """
    if len(rewards) < 2:
        found = f"{rewards[0]:.4f}, one step alone" if rewards else "no step has one"
        return f"reward: {found}; nothing to compare"
    size = min(WINDOW, len(rewards) // 2)
    first, last = rewards[:size], rewards[-size:]
    start, end = statistics.fmean(first), statistics.fmean(last)
    if size == 1:
        error = 0.0
    else:
        error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / size)
    steps = f"{size} step{'' if size == 1 else 's'}"
    compared = f"{(end - start) / error:.1f} standard errors" if error > 0 else "no standard error"
    return f"reward: start {start:.4f} (first {steps}) -> end {end:.4f} (last {steps}), {end - start:+.4f}, {compared}"


def write_reward_csv(path: Path, history: dict[int, tuple[float, float]]) -> None:
    """One row per RL step."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["rl_step", "reward_mean", "reward_std"])
        writer.writerows([step, *values] for step, values in sorted(history.items()))


def plot_reward_curve(path: Path, history: dict[int, tuple[float, float]]) -> None:
    """Mean reward of each step, and its running mean over the last ``WINDOW`` steps, as a PNG."""
    figure = new_figure(7, 4)
    axes = figure.add_subplot()
    draw_curve(axes, {step: mean for step, (mean, _) in history.items()}, color="tab:blue")
    finish_axes(axes, ylabel="mean reward")
    axes.legend(loc="best", frameon=False)
    save_figure(figure, path)
