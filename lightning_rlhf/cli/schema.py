"""The keys of a run that are not those of a component."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NewType

Component = NewType("Component", dict[str, Any])
"""A node with ``_target_``: its other keys are the arguments of that class or function."""
Components = NewType("Components", dict[str, Any])
"""Components under names of the user's choice; null leaves one out."""


@dataclass(kw_only=True)
class ModelConfig:
    """Which model.

    Attributes:
        path: a Hugging Face directory or id.
    """

    path: str


@dataclass(kw_only=True)
class RunConfig:
    """The root of a run's configuration: plain values, and the components that make the run.

    Attributes:
        name: of the run, for its folder and its loggers.
        run_dir: everything that the run writes goes here.
        seed: of all that is random.
        ckpt_path: a checkpoint to go on from; ``last`` takes the newest in ``run_dir``, null starts anew.
        model: the model that is trained.
        algorithm: the LightningModule.
        reward: what scores responses.
        data: the LightningDataModule.
        rollout: the callback that generates.
        weight_sync: the callback that carries weights to the rollout engine; null for none.
        callbacks: further callbacks.
        logger: loggers.
        strategy: a component, or the name of one that Lightning knows.
        trainer: ``lightning.pytorch.Trainer``, without strategy, callbacks and logger.
    """

    name: str
    run_dir: str
    seed: int
    ckpt_path: str | None
    model: ModelConfig
    algorithm: Component
    reward: Component
    data: Component
    rollout: Component
    weight_sync: Component | None
    callbacks: Components
    logger: Components
    strategy: Component | str
    trainer: Component
