"""The progress bar of an RL run: a live line on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import math
import time
from datetime import timedelta

import lightning.pytorch as pl
import rich
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from typing_extensions import override

from lightning_rlhf.callbacks.on_policy import as_on_policy
from lightning_rlhf.modules.on_policy import OnPolicyModule
from lightning_rlhf.types import PromptBatch


class RLProgressBar(ProgressBar):
    """Shows RL steps, reward, tokens per second and policy version, on rank 0.

    On a terminal it is a bar that stays at the bottom; without one (a log file, CI) each step prints one plain line.

    Args:
        console: where to print; None is rich's own, which keeps tables of other callbacks above the bar.
    """

    def __init__(self, *, console: Console | None = None) -> None:
        super().__init__()
        self.console = rich.get_console() if console is None else console
        self._enabled = True
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._first_step = 0
        self._started = 0.0

    @override
    def disable(self) -> None:
        self._enabled = False
        self._stop()

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def print(self, *args: object, **kwargs: object) -> None:
        if self._enabled:
            self.console.print(*args, markup=False, highlight=False, soft_wrap=True)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = as_on_policy(pl_module, callback=self)
        self._first_step, self._started = module.rl_step, time.monotonic()
        if self._enabled and self.console.is_terminal:
            columns = (
                "[bold]RL step",
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[shown]}", markup=False),
            )
            self._progress = Progress(*columns, TimeElapsedColumn(), console=self.console, refresh_per_second=2)
            self._task = self._progress.add_task(
                "", total=total_rl_steps(trainer, module), completed=module.rl_step, shown=""
            )
            self._progress.start()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: PromptBatch, batch_idx: int
    ) -> None:
        if not self._enabled:
            return
        module = as_on_policy(pl_module, callback=self)
        total = total_rl_steps(trainer, module)
        parts = [*_shown(module), *self._time_left(module, total)]
        if self._progress is None:
            self.print("  ".join([f"step {module.rl_step}{'' if total is None else f'/{total}'}", *parts]))
        else:
            self._progress.update(self._task, completed=module.rl_step, total=total, shown="  ".join(parts))

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        reward = trainer.callback_metrics.get("val/reward")
        if not trainer.sanity_checking and reward is not None:
            module = as_on_policy(pl_module, callback=self)
            self.print(f"validation after step {module.rl_step}: reward {float(reward):.4f}")

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        """Gives the terminal back; the last state of the bar stays."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _time_left(self, module: OnPolicyModule, total: int | None) -> list[str]:
        done = module.rl_step - self._first_step
        if total is None or done < 1 or total <= module.rl_step:
            return []
        seconds = (time.monotonic() - self._started) / done * (total - module.rl_step)
        return [f"{timedelta(seconds=round(seconds))} left"]


def total_rl_steps(trainer: pl.Trainer, module: OnPolicyModule) -> int | None:
    """RL steps of the whole run, those before a resume included; None if nothing bounds them."""
    bounds: list[float] = [] if module.max_rl_steps is None else [module.max_rl_steps]
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        bounds.append(trainer.max_epochs * trainer.num_training_batches)
    total = min(bounds, default=math.inf)
    return None if math.isinf(total) else int(total)


def _shown(module: OnPolicyModule) -> list[str]:
    """What the bar says about a step; what the step has no metric for is left out."""
    formats = {
        "reward/mean": "reward {:.4f}",
        "throughput/tokens_per_second": "{:,.0f} tok/s",
        "time/step": "{:.1f} s/step",
    }
    metrics = module.last_metrics
    shown = [text.format(metrics[name]) for name, text in formats.items() if name in metrics]
    return [*shown, f"policy version {module.policy_version}"]
