"""Rollouts that one run has recorded, trained on by another: what differs then is the training alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_rlhf.callbacks import HFRollout
from lightning_rlhf.contracts.callback import RLCallback
from lightning_rlhf.types import PromptBatch, Rollouts


class RolloutRecorder(RLCallback):
    """Keeps the rollouts of each RL step."""

    def __init__(self) -> None:
        self.rollouts: list[Rollouts] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        assert batch.rollouts is not None
        self.rollouts.append(batch.rollouts)


class ReplayRollout(HFRollout):
    """Gives each batch the rollouts that were recorded for its prompts at this step, with their rewards."""

    def __init__(self, recorded: Sequence[Rollouts], **rollout: Any) -> None:
        super().__init__(**rollout)
        self.recorded = recorded

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: PromptBatch, batch_idx: int) -> None:
        if not pl_module.finished:
            step = self.recorded[pl_module.rl_step]
            rows = [row for uid in batch.uids for row, other in enumerate(step.uids) if other == uid]
            batch.rollouts = step.select(rows)


def joined(per_rank: Sequence[Sequence[Rollouts]]) -> list[Rollouts]:
    """By step, the rollouts of all ranks."""
    return [Rollouts.cat(list(step)) for step in zip(*per_rank, strict=True)]


def samples_of(rollouts: Rollouts) -> dict[tuple[str, int], list[int]]:
    """Each response's prompt and response ids, by prompt and number of the sample."""
    starts = rollouts.cu_seqlens.tolist()
    return {
        (uid, sample): rollouts.tokens[starts[row] : starts[row + 1]].tolist()
        for row, (uid, sample) in enumerate(zip(rollouts.uids, rollouts.sample_indices, strict=True))
    }
