"""The x-axis of what Weights & Biases shows: RL steps."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch.loggers import Logger, WandbLogger

AXIS = "rl_step"


def show_by_rl_step(loggers: Iterable[Logger]) -> None:
    """Tells W&B runs that every metric is drawn over ``rl_step``.

    Lightning names ``trainer/global_step``, which counts optimizer steps in what it logs itself, such as
    ``val/reward``: those would stand beside the wrong RL step. What is logged without ``rl_step`` gets its last value.
    W&B's own step counts calls and is never given, so that none is dropped for going back after a resume.

    Args:
        loggers: of a Trainer; on ranks other than the first, W&B's hold no run and nothing happens.
    """
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.define_metric(AXIS)
            logger.experiment.define_metric("*", step_metric=AXIS, step_sync=True)
