"""Flags and callbacks of the Trainer that would change an RL step behind its back: refused before anything runs."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

_MICRO_BATCHES = (
    "an optimizer step takes a whole mini-batch already, and the engine cuts it: set micro_batch_size or "
    "max_tokens_per_micro_batch on the module for memory, prompts_per_step for a larger batch"
)

REFUSED_CALLBACKS: dict[type[pl.Callback], str] = {
    StochasticWeightAveraging: (
        "it would average a copy of the LightningModule, while an engine's parameters may be sharded and responses are "
        "sampled from the last weights. Average exported checkpoints instead, or let a reference follow the actor "
        "(reference_every=, reference_share=)."
    ),
    WeightAveraging: (
        "it would swap averaged weights into the LightningModule, which the rollout engine never gets. Average "
        "exported checkpoints instead, or let a reference follow the actor (reference_every=, reference_share=)."
    ),
    GradientAccumulationScheduler: f"it changes accumulate_grad_batches, but {_MICRO_BATCHES}.",
    BatchSizeFinder: (
        "it runs trial steps, each of which would sample and train. `lightning-rlhf plan` estimates memory, and "
        "max_tokens_per_micro_batch bounds it."
    ),
    LearningRateFinder: (
        "its loss curve needs one objective, and a policy loss is near zero at every learning rate. Try a few values "
        "of the optimizer's lr and compare rewards (`lightning-rlhf plot`)."
    ),
    ModelPruning: (
        "it renames the parameters that are pushed to the rollout engine. Prune the exported Hugging Face directory."
    ),
    BaseFinetuning: (
        "an engine trains every parameter that it has given its optimizer. Leave parameters out in the module's "
        "optimizer= instead."
    ),
}


def check_trainer(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuses what the Trainer was told and cannot be meant for an RL module; ``docs/trainer_flags.md`` lists it.

    Raises:
        ValueError: naming the flag or callback, why, and what to use instead.
    """
    if trainer.state.fn == TrainerFn.PREDICTING:
        raise ValueError(
            f"Trainer.predict does nothing with {type(module).__name__}, whose responses are sampled by a rollout "
            "callback. Use Trainer.validate or Trainer.test, or `lightning-rlhf evaluate` for responses and pass@k."
        )
    if trainer.state.fn != TrainerFn.FITTING:
        return
    _check_callbacks(trainer)
    clip = trainer.gradient_clip_val
    if clip:
        raise ValueError(
            f"Trainer(gradient_clip_val={clip}) clips on one process before the optimizer; an engine clips the norm "
            f"over all ranks itself. Say {type(module).__name__}(max_grad_norm={clip}) instead."
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) has nothing to accumulate: "
            f"{_MICRO_BATCHES}."
        )
    if isinstance(trainer.strategy, ParallelStrategy) and trainer.strategy._layer_sync is not None:
        raise ValueError(
            "Trainer(sync_batchnorm=True) means nothing to a causal language model, which has no batch norm: packed "
            "sequences never share statistics. Leave it out."
        )


def _check_callbacks(trainer: pl.Trainer) -> None:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        for refused, reason in REFUSED_CALLBACKS.items():
            if isinstance(callback, refused):
                raise ValueError(f"{type(callback).__name__} does not work with RL modules: {reason}")
