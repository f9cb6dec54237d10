"""GRPO's training_step for a LightningModule that a team has already."""

from __future__ import annotations

import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from lightning_rlhf.modules.grpo import GRPO


class _TheirModule(pl.LightningModule):
    """Stands before the user's class in the method resolution order and ends GRPO's chain of constructors there.

    ``super(_TheirModule, self)`` is the user's own class.
    """

    def __init__(self) -> None:
        """Nothing: the user's constructor has run by then."""


def _ours_then_theirs(name: str) -> Callable[..., Any]:
    """A hook that calls GRPO's and the user's; GRPO's answer counts if it has one."""
    ours = getattr(GRPO, name)

    def hook(self: GRPOMixin, *args: Any, **kwargs: Any) -> Any:
        answer = ours(self, *args, **kwargs)
        theirs = getattr(super(_TheirModule, self), name)(*args, **kwargs)
        return theirs if answer is None else answer

    hook.__doc__ = f"GRPO's ``{name}``, then the user's own."
    return hook


class GRPOMixin(GRPO, _TheirModule):
    """Adds GRPO's ``training_step`` to a LightningModule: ``class RL(rl.GRPOMixin, TheirModule)``.

    Their constructor, hyperparameters, ``forward``, ``configure_model``, ``configure_callbacks`` and hooks stay, and so
    does ``configure_optimizers`` unless ``rl_arguments`` gives an optimizer: it is called once the model is sharded.
    Training, validation and test steps become those of RL. A checkpoint holds the model under their own names, so that
    a file of a plain strategy loads into their class again.

    Works on every strategy that trains the given module in place: ``auto``, ``ddp``, ``fsdp2_rl``, ``ulysses_rl``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Gives the class the signature of their constructor, which LightningCLI reads."""
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            return

        @functools.wraps(super(_TheirModule, cls).__init__)
        def constructor(self: GRPOMixin, *args: Any, **kwargs: Any) -> None:
            super(cls, self).__init__(*args, **kwargs)

        cls.__init__ = constructor  # type: ignore[method-assign]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super(_TheirModule, self).__init__(*args, **kwargs)
        theirs = dict(vars(self))
        arguments = dict(self.rl_arguments())
        arguments.setdefault("tokenizer", theirs.get("_tokenizer"))
        self._model_is_theirs = "model" not in arguments
        if self._model_is_theirs:  # perhaps there only once their configure_model has run
            arguments["model"] = self._modules.get("model") or nn.Identity()
        if "optimizer" not in arguments:
            arguments.update(optimizer=self._their_optimizer, lr_schedule=self._their_schedule)
        super().__init__(**arguments)
        taken = [name for name in theirs if name not in _SHARED and vars(self).get(name) is not theirs[name]]
        if taken:
            raise ValueError(
                f"{type(self).__name__} and GRPO both keep something under self.{', self.'.join(taken)}. Rename it in "
                f"your module: GRPOMixin adds GRPO's attributes to it."
            )

    @abstractmethod
    def rl_arguments(self) -> dict[str, Any]:
        """Arguments of ``GRPO``: at least ``reward``. Called once, after their constructor.

        Without ``model`` it is ``self.model``; without ``tokenizer``, ``self.tokenizer`` if they set one; without
        ``optimizer``, what their ``configure_optimizers`` returns, with its schedule.
        """

    @property
    @override
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return super().tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    # --- their model and optimizer ------------------------------------------------------------------------------

    @override
    def configure_model(self) -> None:
        if not self._engines:
            super(_TheirModule, self).configure_model()
            if self._trainer is None:  # load_from_checkpoint: the weights go into their model
                return
            if self._model_is_theirs:
                self.actor_config = dataclasses.replace(self.actor_config, model=self._their_model())
        super().configure_model()
        mine = {id(parameter) for parameter in self.actor.module.parameters()}
        if self._model_is_theirs and not any(id(parameter) in mine for parameter in self._their_model().parameters()):
            raise ValueError(
                f"{type(self.trainer.strategy).__name__} builds a model of its own, and {type(self).__name__}.model "
                f"would keep its old weights. Use strategy='fsdp2_rl' with GRPOMixin, or rl.GRPO(model=...)."
            )

    def _their_model(self) -> nn.Module:
        model = self._modules.get("model")
        if model is None:
            raise ValueError(
                f"{type(self).__name__} has no self.model after its constructor and configure_model. Say which one is "
                'trained: rl_arguments() may return {"model": ..., ...}.'
            )
        return model

    def _their_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        self._configured = single_optimizer(super(_TheirModule, self).configure_optimizers())
        optimizer = self._configured[0]
        has = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        missing = sum(parameter.requires_grad and id(parameter) not in has for parameter in parameters)
        if missing:
            raise ValueError(
                f"{type(self).__name__}.configure_optimizers leaves out {missing} trained parameter(s) of the model "
                f"as the engine has placed it. Build the optimizer from self.parameters() when it is called, or give "
                f"rl_arguments() an optimizer."
            )
        return optimizer

    def _their_schedule(self, optimizer: Optimizer) -> LRScheduler:
        schedule = self._configured[1]
        return LambdaLR(optimizer, lambda _: 1.0) if schedule is None else schedule

    # --- their names in checkpoints -----------------------------------------------------------------------------

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        for name in self._second_names():
            state.pop(name, None)
        return state

    @override
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        second = self._second_names()
        missing = [name for name in result.missing_keys if name not in second]
        if strict and (missing or result.unexpected_keys):
            raise RuntimeError(
                f"The checkpoint and {type(self).__name__} differ: missing {missing}, unexpected "
                f"{result.unexpected_keys}."
            )
        return result

    def _second_names(self) -> set[str]:
        """Names under ``engine_modules`` of tensors that are theirs and have a name already."""
        named = [*self.named_parameters(remove_duplicate=False), *self.named_buffers(remove_duplicate=False)]
        theirs = {id(tensor) for name, tensor in named if not name.startswith(_ENGINES)}
        return {name for name, tensor in named if name.startswith(_ENGINES) and id(tensor) in theirs}

    # --- their hooks --------------------------------------------------------------------------------------------

    @override
    def configure_callbacks(self) -> Sequence[pl.Callback] | pl.Callback:  # type: ignore[override]
        super().configure_callbacks()
        return super(_TheirModule, self).configure_callbacks()

    on_fit_start = _ours_then_theirs("on_fit_start")
    on_train_start = _ours_then_theirs("on_train_start")
    on_train_batch_start = _ours_then_theirs("on_train_batch_start")
    on_train_batch_end = _ours_then_theirs("on_train_batch_end")
    on_validation_end = _ours_then_theirs("on_validation_end")
    on_save_checkpoint = _ours_then_theirs("on_save_checkpoint")

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._trainer is not None:  # else load_from_checkpoint: the weights alone, perhaps of fine-tuning
            super().on_load_checkpoint(checkpoint)
        super(_TheirModule, self).on_load_checkpoint(checkpoint)


def single_optimizer(configured: Any) -> tuple[Optimizer, LRScheduler | None]:
    """The one optimizer, and its schedule, of what a ``configure_optimizers`` has returned.

    Raises:
        ValueError: for several optimizers, or a schedule that is not stepped with the optimizer.
    """
    schedule: Any = None
    if isinstance(configured, dict):
        configured, schedule = configured["optimizer"], configured.get("lr_scheduler")
    elif isinstance(configured, (tuple, list)):
        nested = len(configured) == 2 and isinstance(configured[0], (tuple, list))
        optimizers, schedules = configured if nested else (configured, [])
        if len(optimizers) != 1 or len(schedules) > 1:
            raise ValueError(
                f"configure_optimizers returned {len(optimizers)} optimizers and {len(schedules)} schedules; an actor "
                f"has one of each. Give rl_arguments() an optimizer."
            )
        configured, schedule = optimizers[0], schedules[0] if schedules else None
        if isinstance(configured, dict):
            return single_optimizer(configured)
    if schedule is not None:
        interval = schedule.get("interval", "epoch") if isinstance(schedule, dict) else "epoch"
        if interval != "step":
            raise ValueError(
                f"configure_optimizers returned a schedule with interval={interval!r}; an engine steps it with each "
                f'optimizer step. Return {{"scheduler": ..., "interval": "step"}}, or give rl_arguments() an optimizer '
                f"and lr_schedule."
            )
        schedule = schedule["scheduler"]
    if not isinstance(configured, Optimizer) or not isinstance(schedule, (LRScheduler, type(None))):
        raise ValueError(
            f"configure_optimizers returned {type(configured).__name__} with {type(schedule).__name__}, expected a "
            "torch optimizer and at most one LRScheduler. Give rl_arguments() an optimizer."
        )
    return configured, schedule


_ENGINES = "engine_modules."
_SHARED = ("_tokenizer", "_automatic_optimization", "_model_is_theirs")
"""Attributes that GRPO may set again."""
