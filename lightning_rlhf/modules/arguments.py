"""Checks of a module's arguments, made in its constructor: before a model is loaded."""

from __future__ import annotations

import math
from typing import get_args

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
