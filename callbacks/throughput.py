"""Tokens per second, and where the time of a step goes."""

from __future__ import annotations

import resource
import sys
import time

import lightning.pytorch as pl
import torch
from typing_extensions import override

from lightning_rlhf.callbacks.on_policy import as_on_policy
from lightning_rlhf.types import PromptBatch


class Throughput(pl.Callback):
    """Measures each RL step as a whole, and adds its metrics to the module's ``last_metrics`` and to the loggers.

    - ``time/step``: seconds from the batch's arrival to the step's end: rollout, rewards, update, weight sync;
    - ``time/other``: seconds of the step that no other ``time/`` metric covers;
    - ``memory/peak_host`` and, on CUDA, ``memory/peak_device``: bytes, of this process so far and of this step;
    - ``throughput/tokens_per_second``: prompt and response tokens of all ranks' rollouts over ``time/step``.

    It puts itself before the other callbacks: its clock must start before the rollout, and others show what it finds.
    Each rank measures its own time; the loggers get rank 0's.
    """

    def __init__(self) -> None:
        self._started = 0.0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        as_on_policy(pl_module, callback=self)
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        # A new list: Lightning is iterating over the old one.
        trainer.callbacks = [self, *(c for c in callbacks if c is not self)]  # type: ignore[attr-defined]

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: PromptBatch, batch_idx: int
    ) -> None:
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: PromptBatch, batch_idx: int
    ) -> None:
        module = as_on_policy(pl_module, callback=self)
        seconds = time.perf_counter() - self._started
        known = sum(value for name, value in module.last_metrics.items() if name.startswith("time/"))
        measured = {"time/step": seconds, "time/other": seconds - known}
        if "rollout/num_tokens" in module.last_metrics:
            measured["throughput/tokens_per_second"] = module.last_metrics["rollout/num_tokens"] / seconds
        measured.update(_peak_memory(trainer.strategy.root_device))
        module.last_metrics.update(measured)
        for logger in trainer.loggers:
            logger.log_metrics(measured, step=module.rl_step)


def _peak_memory(device: torch.device) -> dict[str, float]:
    """Bytes; the device's peak starts again with each step."""
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    peak = {"memory/peak_host": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}
    if device.type == "cuda":
        peak["memory/peak_device"] = float(torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
    return peak
