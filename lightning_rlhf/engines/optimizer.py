"""An engine's optimizer as Lightning sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_rlhf.contracts.engine import BaseEngine, OptimizerStepResult


class EngineOptimizer(Optimizer):
    """Steps an engine: what ``configure_optimizers`` returns, so that Lightning counts the step and calls its hooks.

    ``param_groups`` and ``state`` are those of the engine's own optimizer, also after it has loaded others.

    Args:
        engine: initialized, with an optimizer.
        after_step: called with what the step did, once it is done.

    Raises:
        RuntimeError: if the engine has no optimizer.
    """

    def __init__(self, engine: BaseEngine, *, after_step: Callable[[OptimizerStepResult], None] | None = None) -> None:
        if engine.optimizer is None:
            raise RuntimeError(f"The {engine.config.role} engine has no optimizer to wrap; initialize() it first.")
        self.engine = engine
        self.after_step = after_step
        self.last_result: OptimizerStepResult | None = None
        self.defaults = dict(engine.optimizer.defaults)
        # Optimizer.__init__ would make parameter groups of its own. This is how torch completes an optimizer that has
        # come out of a pickle: hooks and the patched step(), no groups.
        super().__setstate__({})

    @property
    def _inner(self) -> Optimizer:
        inner = self.engine.optimizer
        if inner is None:
            raise RuntimeError(f"The {self.engine.config.role} engine has lost its optimizer.")
        return inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The engine's parameter groups, with learning rates."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The engine's optimizer state, by parameter."""
        return self._inner.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs ``closure``, then one ``engine.optimizer_step()``, then ``after_step``. Collective.

        Returns:
            What the closure returned.
        """
        returned = None
        if closure is not None:
            with torch.enable_grad():
                returned = closure()
        self.last_result = self.engine.optimizer_step()
        if self.after_step is not None:
            self.after_step(self.last_result)
        return returned

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the engine's gradients."""
        self._inner.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The engine's optimizer state, with its schedule's under ``lr_scheduler``."""
        scheduler = self.engine.lr_scheduler
        return {**self._inner.state_dict(), "lr_scheduler": None if scheduler is None else scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the engine's optimizer and schedule.

        Raises:
            ValueError: if the engine has a schedule and the state has none.
        """
        scheduler = self.engine.lr_scheduler
        saved = state_dict.get("lr_scheduler")
        if scheduler is not None and saved is None:
            raise ValueError("The optimizer's state has no lr_scheduler, but the engine has a schedule to restore.")
        self._inner.load_state_dict({key: value for key, value in state_dict.items() if key != "lr_scheduler"})
        if scheduler is not None and saved is not None:
            scheduler.load_state_dict(saved)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the engine's optimizer."""
        self._inner.add_param_group(param_group)
