"""Advantage estimators, policy losses and rollout corrections by name; a project's own join them by a decorator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from lightning_rlhf.algorithms import advantages, corrections, losses
from lightning_rlhf.types import LossOutput

AdvantageEstimator: TypeAlias = Callable[..., Tensor]
"""``(rewards [B], uids, **arguments) -> [B]``; one with a parameter ``lengths`` is given ``[B]`` response lengths."""
PolicyLoss: TypeAlias = Callable[..., LossOutput]
"""``(log_probs, old_log_probs, advantages, response_mask, *, cu_seqlens, **arguments) -> LossOutput``."""
Correction: TypeAlias = Callable[..., Tensor]
"""``(log_probs_trainer, rollout_log_probs, mask, **arguments) -> weights``; given ``cu_seqlens`` if it asks for it."""

T = TypeVar("T", bound=Callable[..., Any])

_ADVANTAGES: dict[str, AdvantageEstimator] = {
    "grpo": advantages.grpo,
    "rloo": advantages.rloo,
    "reinforce_plus_plus": advantages.reinforce_plus_plus,
    "reinforce_plus_plus_baseline": advantages.reinforce_plus_plus_baseline,
    "opo": advantages.opo,
    "gpg": advantages.gpg,
    "pass_at_k": advantages.pass_at_k,
    "maxrl": advantages.maxrl,
}
_POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo_clip": losses.ppo_clip,
    "dapo": losses.dapo,
    "gspo": losses.gspo,
    "gmpo": losses.gmpo,
    "cispo": losses.cispo,
    "sapo": losses.sapo,
    "dppo_tv": losses.dppo_tv,
    "dppo_kl": losses.dppo_kl,
    "gpg": losses.gpg,
    "reinforce": losses.reinforce,
}
_CORRECTIONS: dict[str, Correction] = {
    "token_tis": corrections.token_tis,
    "sequence_tis": corrections.sequence_tis,
    "icepop": corrections.icepop,
    "sequence_mask": corrections.sequence_mask,
    "geometric_mask": corrections.geometric_mask,
    "veto": corrections.veto,
}
_BY_HAND = {
    "remax": "it needs the reward of a greedy rollout of each prompt, which is not sampled",
    "gdpo": "it needs every reward of a rollout apart, and a module knows their sum alone",
    "clip_cov": "it chooses tokens over the whole mini-batch, and a module's loss sees one micro-batch at a time",
    "kl_cov": "it chooses tokens over the whole mini-batch, and a module's loss sees one micro-batch at a time",
}


def register_advantage(name: str) -> Callable[[T], T]:
    """Decorator: makes an advantage estimator known under ``name``, see ``AdvantageEstimator``.

    Args:
        name: what ``GRPO(advantage=...)`` and the configuration call it.

    Raises:
        ValueError: if the name is taken by another function.
    """
    return _register(_ADVANTAGES, "advantage estimator", name)


def register_policy_loss(name: str) -> Callable[[T], T]:
    """Decorator: makes a policy loss known under ``name``, see ``PolicyLoss``.

    It must give one unweighted term per token, 0 off the mask, and the same metric names for any batch.

    Args:
        name: what ``GRPO(policy_loss=...)`` and the configuration call it.

    Raises:
        ValueError: if the name is taken by another function.
    """
    return _register(_POLICY_LOSSES, "policy loss", name)


def advantage_estimator(chosen: str | AdvantageEstimator) -> AdvantageEstimator:
    """The estimator of that name; a callable is returned as it is.

    Raises:
        ValueError: for an unknown name, with all known ones.
    """
    return _look_up(_ADVANTAGES, "advantage", chosen)


def policy_loss(chosen: str | PolicyLoss) -> PolicyLoss:
    """The policy loss of that name; a callable is returned as it is.

    Raises:
        ValueError: for an unknown name, with all known ones.
    """
    return _look_up(_POLICY_LOSSES, "policy_loss", chosen)


def rollout_correction(chosen: str | Correction) -> Correction | None:
    """The rollout correction of that name, None for ``"none"``; a callable is returned as it is.

    Raises:
        ValueError: for an unknown name, with all known ones.
    """
    return None if chosen == "none" else _look_up(_CORRECTIONS, "rollout_correction", chosen, extra=("none",))


def _register(known: dict[str, Callable[..., Any]], kind: str, name: str) -> Callable[[T], T]:
    def add(function: T) -> T:
        # a module that is loaded twice registers the same function again
        if name in known and _identity(known[name]) != _identity(function):
            raise ValueError(f"There is a {kind} {name!r} already: {'.'.join(_identity(known[name]))}. Choose another.")
        known[name] = function
        return function

    return add


def _identity(function: Callable[..., Any]) -> tuple[str, str]:
    return str(function.__module__), str(getattr(function, "__qualname__", function))


def _look_up(known: Mapping[str, T], argument: str, chosen: str | T, *, extra: tuple[str, ...] = ()) -> T:
    if not isinstance(chosen, str):
        if not callable(chosen):
            raise ValueError(f"{argument} must be a name or a callable, got {chosen!r}.")
        return chosen
    if chosen not in known:
        names = ", ".join(sorted({*known, *extra}))
        reason = f": {_BY_HAND[chosen]}" if chosen in _BY_HAND else ""
        raise ValueError(f"{argument}={chosen!r} is not one of {names}{reason}.")
    return known[chosen]
