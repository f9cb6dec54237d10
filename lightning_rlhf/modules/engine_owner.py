"""A LightningModule that trains through engines: who builds them, how Lightning counts their steps."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_rlhf.contracts.callback import OptimizerStep, RLCallback
from lightning_rlhf.contracts.engine import (
    BaseEngine,
    EngineConfig,
    EngineHost,
    LossFunction,
    OptimizerStepResult,
)
from lightning_rlhf.engines.optimizer import EngineOptimizer
from lightning_rlhf.metrics import Metric, compute_metrics, merge_metrics, reduce_metrics
from lightning_rlhf.modules.plain_strategies import check_plain_engine, check_strategy, create_plain_engine
from lightning_rlhf.modules.step_data import StepData
from lightning_rlhf.modules.step_record import StepRecord
from lightning_rlhf.modules.trainer_flags import check_trainer
from lightning_rlhf.types import Experience, Role


class EngineOwner(StepRecord):
    """Holds one trained engine per role, each with an optimizer that Lightning steps and counts.

    Attributes:
        rl_step: training_steps done.
        policy_version: the actor's optimizer steps that moved its parameters.
        engine_modules: the engines' modules by role, so that Lightning sees their parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.rl_step = 0
        self.policy_version = 0
        self.engine_modules = nn.ModuleDict()
        self._engines: dict[Role, BaseEngine] = {}
        self._step_index, self._step_is_last = 0, False

    def has_engines(self) -> bool:
        """Whether an earlier Trainer has had the engines built; then they are handed to this one's strategy.

        Raises:
            ValueError: if they do not fit it.
        """
        for role, engine in self._engines.items():
            self._check_engine(role, engine)
        return bool(self._engines)

    def add_trained_engine(self, model_type: str, config: EngineConfig) -> None:
        """Builds an engine that has an optimizer, under its role; its parameters become the module's. Collective."""
        engine = self._engines[config.role] = self.create_engine(model_type, config)
        self.engine_modules[config.role] = engine.module

    def create_engine(self, model_type: str, config: EngineConfig) -> BaseEngine:
        """Builds an engine on the strategy's back end; on a plain strategy the ``torch`` one. Collective."""
        strategy = self.trainer.strategy
        if isinstance(strategy, EngineHost):
            return strategy.create_engine(model_type, config)
        return create_plain_engine(self.trainer, model_type, config)

    def _check_engine(self, role: str, engine: BaseEngine) -> None:
        """A module that another Trainer has used before brings its engines; they must fit this one's strategy."""
        strategy = self.trainer.strategy
        if isinstance(strategy, EngineHost):
            strategy.adopt_engine(role, engine)
        else:
            check_plain_engine(self.trainer, role, engine)

    @override
    def configure_callbacks(self) -> list[pl.Callback]:
        """None; but this is the first hook that Lightning calls, before processes, data and models."""
        check_strategy(self.trainer)
        check_trainer(self.trainer, self)
        return []

    @override
    def configure_optimizers(self) -> list[Optimizer]:
        return [EngineOptimizer(engine, after_step=self._announcer(role)) for role, engine in self._engines.items()]

    def _announcer(self, role: Role) -> Callable[[OptimizerStepResult], None]:
        def announce(result: OptimizerStepResult) -> None:
            if role == "actor" and result.stepped:
                self.policy_version += 1
            step = OptimizerStep(
                role=role,
                stepped=result.stepped,
                index=self._step_index,
                is_last=self._step_is_last,
                rl_step=self.rl_step,
            )
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, RLCallback):
                    callback.on_after_optimizer_step(self.trainer, self, step)

        return announce

    def train_engine(self, role: Role, data: StepData, loss_function: LossFunction, *, epochs: int) -> dict[str, float]:
        """One optimizer step per mini-batch and epoch; returns their metrics, joined as each declares. Collective."""
        num_steps = epochs * data.num_trained
        untrained = epochs * len(data.plan.mini_batches) - num_steps
        engine, history, counts = self._engines[role], [], []
        for index, mini_batch in enumerate(data.mini_batches(epochs=epochs)):
            self._step_index, self._step_is_last = index, index == num_steps - 1
            engine.train_batch(self.before_train_batch(role, index, mini_batch), loss_function)
            history.append(engine.last_metrics)
            if engine.last_counts is not None:
                counts.append(engine.last_counts.metrics(engine.device))
        if untrained:
            rank_zero_warn(
                f"RL step {self.rl_step}: {untrained} mini-batch(es) had no row with a reward to train on, and no step."
            )
            history.append({"skipped_steps": Metric.sum(torch.tensor(float(untrained)))})
        if not num_steps:  # a mean over no step; among steps that were taken these zeros would count as losses
            history.append({name: Metric.of(torch.tensor(0.0)) for name in ("loss", "grad_norm")})
        # a loss names its own metrics bare; one with a slash says itself what it is about
        metrics = compute_metrics(merge_metrics(history))
        metrics |= reduce_metrics(
            merge_metrics(counts), engine.data_parallel_group, distributed=engine.data_parallel_size > 1
        )
        return {name if "/" in name else f"{role}/{name}": value for name, value in metrics.items()}

    def before_train_batch(self, role: Role, index: int, mini_batch: Experience) -> Experience:
        """Adds what a loss needs of a whole mini-batch, before the engine cuts it. Collective.

        Args:
            role: whose mini-batch it is.
            index: which optimizer step of this role in the RL step, from 0.
            mini_batch: this rank's rows.
        """
        return mini_batch

    @override
    def on_train_start(self) -> None:
        optimizers = self.optimizers(use_pl_optimizer=True)
        bound = optimizers if isinstance(optimizers, list) else [optimizers]
        for engine, optimizer in zip(self._engines.values(), bound, strict=True):
            engine.bind_optimizer(optimizer)
