"""Advantage estimators, policy losses and rollout corrections by name; a project's own join them by a decorator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from lightning_rlhf.algorithms import advantages, corrections, covariance_losses, length_penalties, losses
from lightning_rlhf.types import LossOutput

AdvantageEstimator: TypeAlias = Callable[..., Tensor]
"""``(rewards [B], uids, **arguments) -> [B]``; given what it has a parameter for: ``lengths [B]`` of responses,
``baselines [B]``, rewards of greedy rollouts, sampled for it, and ``components [B, K]`` of several rewards."""
PolicyLoss: TypeAlias = Callable[..., LossOutput]
"""``(log_probs, old_log_probs, advantages, response_mask, *, cu_seqlens, **arguments) -> LossOutput``; one that has a
selection (``token_selection``) is given ``selected`` as well."""
TokenSelection: TypeAlias = Callable[..., Tensor]
"""``(log_probs, old_log_probs, advantages, response_mask, *, generator, **arguments) -> bool`` of a mini-batch."""
Correction: TypeAlias = Callable[..., Tensor]
"""``(log_probs_trainer, rollout_log_probs, mask, **arguments) -> weights``; given ``cu_seqlens`` if it asks for it."""
Corrections: TypeAlias = str | Correction | Sequence[str | Correction]
"""One correction by name or callable, or several, whose weights are multiplied."""

LengthPenalty: TypeAlias = Callable[..., Tensor]
"""``(rewards [B], uids, lengths [B], **arguments) -> [B]``, added to the rewards."""

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
    "remax": advantages.remax,
    "gdpo": advantages.gdpo,
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
    "clip_cov": losses.clip_cov,
    "kl_cov": losses.kl_cov,
}
_SELECTIONS: dict[str, TokenSelection] = {
    "clip_cov": covariance_losses.clip_cov_selection,
    "kl_cov": covariance_losses.kl_cov_selection,
}
_LENGTH_PENALTIES: dict[str, LengthPenalty] = {
    "linear": length_penalties.linear,
    "relative": length_penalties.relative,
}
_CORRECTIONS: dict[str, Correction] = {
    "token_tis": corrections.token_tis,
    "sequence_tis": corrections.sequence_tis,
    "icepop": corrections.icepop,
    "sequence_mask": corrections.sequence_mask,
    "geometric_mask": corrections.geometric_mask,
    "veto": corrections.veto,
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


def token_selection(chosen: str | PolicyLoss) -> TokenSelection | None:
    """What chooses the tokens that a policy loss treats apart, over a mini-batch before it is split; or None."""
    return _SELECTIONS.get(chosen) if isinstance(chosen, str) else None


def rollout_correction(chosen: str | Correction) -> Correction | None:
    """The rollout correction of that name, None for ``"none"``; a callable is returned as it is.

    Raises:
        ValueError: for an unknown name, with all known ones.
    """
    return None if chosen == "none" else _look_up(_CORRECTIONS, "rollout_correction", chosen, extra=("none",))


def length_penalty(chosen: str | LengthPenalty) -> LengthPenalty:
    """The length penalty of that name; a callable is returned as it is.

    Raises:
        ValueError: for an unknown name, with all known ones.
    """
    return _look_up(_LENGTH_PENALTIES, "length_penalty", chosen)


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
        raise ValueError(f"{argument}={chosen!r} is not one of {names}.")
    return known[chosen]
