"""Checks of a module's arguments, made in its constructor: before a model is loaded."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from torch import nn

from lightning_rlhf.algorithms.aggregation import AggregationMode
from lightning_rlhf.algorithms.kl import KLEstimator


def check_arguments(
    *,
    aggregation: str,
    norm_length: int | None,
    num_epochs: int,
    mini_batch_size: int | None,
    max_rl_steps: int | None,
    seed: int,
) -> None:
    """What every on-policy module asks of its arguments.

    Raises:
        ValueError: naming the argument, what it is, and what it may be.
    """
    check_choice("aggregation", aggregation, get_args(AggregationMode))
    if aggregation == "seq-mean-token-sum-norm" and norm_length is None:
        raise ValueError(
            "aggregation='seq-mean-token-sum-norm' divides by a constant: give norm_length, usually max_new_tokens."
        )
    counts = {"norm_length": norm_length, "mini_batch_size": mini_batch_size, "max_rl_steps": max_rl_steps}
    for name, value in {**counts, "num_epochs": num_epochs}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}.")


def check_model(model: object) -> None:
    """A model to load must be there: a directory with a configuration, an id of a hub, or a module.

    Raises:
        TypeError: for anything else.
        FileNotFoundError: for a path to no directory, or to one that holds no model.
    """
    if isinstance(model, nn.Module):
        return
    expected = "model must be a Hugging Face directory or id, or a causal language model"
    if not isinstance(model, (str, Path)):
        raise TypeError(f"{expected}, got {type(model).__name__}. Pass for example 'models/SmolLM2-135M-Instruct'.")
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"{expected}; the directory {path} has no config.json. Pass the folder that save_pretrained or "
                "`lightning-rlhf export` wrote."
            )
    elif isinstance(model, Path) or model.startswith(("/", "./", "../", "~", "models/")):
        raise FileNotFoundError(
            f"{expected}; there is no directory {path}. `lightning-rlhf prepare-model` writes SmolLM2-135M-Instruct."
        )


def check_reward(reward: Callable[..., Any]) -> None:
    """What every on-policy module asks of its reward: a plain function of three lists.

    Raises:
        TypeError: saying what it is, and what it must take.
    """
    name = getattr(reward, "__name__", type(reward).__name__)
    expected = "reward must be a function (prompts, responses, metadata) -> one number per response"
    if not callable(reward):
        raise TypeError(f"{expected}, got {reward!r}, which cannot be called. Pass a function.")
    if inspect.iscoroutinefunction(reward):
        raise TypeError(f"{expected}, got {name}, which is async. Pass a function that waits for it: asyncio.run(...).")
    try:
        signature = inspect.signature(reward)
    except ValueError:  # some builtins have none
        return
    try:
        signature.bind([], [], [])
    except TypeError as error:
        raise TypeError(f"{expected}, got {name}{signature}: {error}. Take all three by position.") from error


def check_policy_loss(
    *, clip_low: float | None, clip_high: float | None, dual_clip: float | None, kl_coef: float, kl_estimator: str
) -> None:
    """What a clipped policy loss with a KL term asks of its arguments.

    Raises:
        ValueError: naming the argument, what it is, and what it may be.
    """
    if not 0 <= (clip_low or 0.0) <= 1 or not 0 <= (clip_high or 0.0) < math.inf:
        raise ValueError(f"clip_low={clip_low} must lie in [0, 1] and clip_high={clip_high} must not be negative.")
    if dual_clip is not None and not 1 < dual_clip < math.inf:
        raise ValueError(f"dual_clip must be above 1 (or None for off), got {dual_clip}.")
    if not 0 <= kl_coef < math.inf:
        raise ValueError(f"kl_coef must be a number of at least 0, got {kl_coef}.")
    check_choice("kl_estimator", kl_estimator, get_args(KLEstimator))


def check_reference(*, kl_coef: float, every: int | None, share: float, has_adapter: bool = False) -> None:
    """What a reference that follows the actor asks of its arguments.

    Raises:
        ValueError: naming the argument, what it is, and what it may be.
    """
    if not 0 < share <= 1:
        raise ValueError(f"reference_share must lie above 0 and at most at 1, which copies the actor; got {share}.")
    if every is None:
        if share != 1:
            raise ValueError(f"reference_share={share} without reference_every: say after how many RL steps it moves.")
        return
    if has_adapter:
        raise ValueError(
            f"reference_every={every} moves a reference, but with lora the reference is the actor's frozen base. Leave "
            f"one of the two out."
        )
    if every < 1:
        raise ValueError(f"reference_every must be at least 1 RL step, got {every}; None keeps the reference.")
    if kl_coef == 0:
        raise ValueError(f"reference_every={every} moves a reference that kl_coef=0 does not keep. Set kl_coef.")


def check_overlong(max_tokens: int | None, cache_tokens: int | None) -> None:
    """What DAPO's soft overlong penalty asks of its two lengths: both, or neither.

    Raises:
        ValueError: naming both.
    """
    if max_tokens is None and cache_tokens is None:
        return
    if max_tokens is None or cache_tokens is None or not 1 <= cache_tokens <= max_tokens:
        raise ValueError(
            "The overlong penalty needs 1 <= overlong_cache_tokens <= overlong_max_tokens, or neither of them; "
            f"got {cache_tokens} and {max_tokens}."
        )


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuses a value that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}.")
