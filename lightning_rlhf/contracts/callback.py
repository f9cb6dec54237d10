"""The callback contract: Lightning's hooks and the one that it lacks."""

from __future__ import annotations

from dataclasses import dataclass

import lightning.pytorch as pl

from lightning_rlhf.types import Role


@dataclass(frozen=True, kw_only=True)
class OptimizerStep:
    """One step of one trained engine.

    Attributes:
        role: whose parameters moved.
        stepped: False if the step was skipped because the gradient norm was not finite.
        index: which optimizer step of the RL step this is, from 0.
        is_last: whether it is the RL step's last for this role.
        rl_step: the training_step under way, from 0.
    """

    role: Role
    stepped: bool
    index: int
    is_last: bool
    rl_step: int


class RLCallback(pl.Callback):
    """A Lightning callback that is also told of every optimizer step, after the parameters moved."""

    def on_after_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: OptimizerStep) -> None:
        """Called on every rank after an engine's optimizer step, also inside one training_step.

        ``pl_module.log`` is not allowed here, and ``trainer.global_step`` does not count this step yet.
        """


RNG_STATE_KEY = "lightning_rlhf_rng"
"""Entry of a checkpoint dictionary that holds one process's random-number state; a strategy keeps one per rank."""
