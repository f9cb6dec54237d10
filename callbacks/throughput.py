"""Tokens per second, and where the time of a step goes."""

from __future__ import annotations

import resource
import sys
import time

import lightning.pytorch as pl
import torch
from typing_extensions import override

from lightning_rlhf.callbacks.on_policy import as_on_policy
from lightning_rlhf.modules import OnPolicyModule
from lightning_rlhf.strategies import RLStrategy
from lightning_rlhf.types import PromptBatch


class Throughput(pl.Callback):
    """Measures each RL step as a whole, and adds its metrics to the module's ``last_metrics`` and to the loggers.

    - ``time/step``: seconds from the batch's arrival to the step's end: rollout, rewards, update, weight sync;
    - ``time/other``: seconds of the step that no other ``time/`` metric covers;
    - ``memory/peak_host`` and, on CUDA, ``memory/peak_device``: bytes, of this process so far and of this step;
    - ``throughput/tokens_per_second``: prompt and response tokens of all ranks' rollouts over ``time/step``;
    - ``throughput/mfu``, with ``peak_flops``: model FLOPs of the actor's update over what the devices could do in
      ``time/update``. A dense model with N parameters takes 6 N for each token and epoch (Kaplan et al.,
      arXiv:2001.08361); attention's own products and recomputed activations are left out.

    It puts itself before the other callbacks: its clock must start before the rollout, and others show what it finds.
    Each rank measures its own time; the loggers get rank 0's.

    Args:
        peak_flops: floating-point operations a second that one device can do in the compute dtype, as its maker or a
            measurement of large matrix products says; None leaves ``throughput/mfu`` out.

    Raises:
        ValueError: if ``peak_flops`` is not positive, or under ``megatron_rl``, whose ranks know their share of the
            parameters alone.
    """

    def __init__(self, *, peak_flops: float | None = None) -> None:
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"peak_flops must be positive, got {peak_flops}.")
        self.peak_flops = peak_flops
        self._started = 0.0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        as_on_policy(pl_module, callback=self)
        strategy = trainer.strategy
        if self.peak_flops is not None and isinstance(strategy, RLStrategy) and strategy.backend == "megatron":
            raise ValueError(
                "Throughput(peak_flops=...) counts parameters, and under megatron_rl each rank holds a share of them. "
                "Leave peak_flops out."
            )
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
        measured.update(self._utilisation(trainer, module))
        measured.update(_peak_memory(trainer.strategy.root_device))
        module.last_metrics.update(measured)
        for logger in trainer.loggers:
            logger.log_metrics(measured, step=module.rl_step)

    def _utilisation(self, trainer: pl.Trainer, module: OnPolicyModule) -> dict[str, float]:
        metrics = module.last_metrics
        if self.peak_flops is None or not {"rollout/num_tokens", "time/update"} <= metrics.keys():
            return {}
        # sharded parameters count whole: a DTensor's size is the global one
        parameters = sum(parameter.numel() for parameter in module.engine_modules["actor"].parameters())
        done = 6.0 * parameters * metrics["rollout/num_tokens"] * module.num_epochs
        return {"throughput/mfu": done / (metrics["time/update"] * self.peak_flops * trainer.world_size)}


def _peak_memory(device: torch.device) -> dict[str, float]:
    """Bytes; the device's peak starts again with each step."""
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    peak = {"memory/peak_host": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}
    if device.type == "cuda":
        peak["memory/peak_device"] = float(torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
    return peak
