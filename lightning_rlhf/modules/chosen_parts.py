"""A module's estimator, loss and correction, by name or callable; their arguments are checked before a model loads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.algorithms.advantages import gdpo
from lightning_rlhf.algorithms.registry import (
    AdvantageEstimator,
    Correction,
    Corrections,
    LengthPenalty,
    PolicyLoss,
    TokenSelection,
    advantage_estimator,
    length_penalty,
    policy_loss,
    rollout_correction,
    token_selection,
)


def chosen_policy_loss(
    chosen: str | PolicyLoss,
    *,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None,
    arguments: Mapping[str, Any] | None,
) -> PolicyLoss:
    """The loss with its arguments bound.

    Args:
        chosen: a known name or a callable.
        clip_low: given to the loss unless None.
        clip_high: likewise.
        dual_clip: likewise.
        arguments: what else the loss takes.

    Raises:
        ValueError: for an unknown name, an argument that the loss does not take, or a value that it refuses.
    """
    loss = policy_loss(chosen)
    bounds = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    given = {name: value for name, value in bounds.items() if value is not None}
    twice = sorted(given.keys() & (arguments or {}).keys())
    if twice:
        raise ValueError(f"policy_loss_args holds {', '.join(twice)}, which is an argument of its own. Give it once.")
    bound: PolicyLoss = _bind("policy_loss", chosen, loss, {**given, **(arguments or {})})
    if isinstance(chosen, str):
        zero, ends = torch.zeros(1), torch.tensor([0, 1])
        bound(zero, zero, zero, torch.ones(1, dtype=torch.bool), cu_seqlens=ends)  # each loss checks its own arguments
    return bound


def chosen_selection(chosen: str | PolicyLoss, loss: PolicyLoss) -> TokenSelection | None:
    """What chooses the tokens that the loss treats apart, with those of the loss's arguments that it takes; or None.

    Args:
        chosen: the loss's name, or a callable, which has no selection.
        loss: as ``chosen_policy_loss`` has bound it.
    """
    selection = token_selection(chosen)
    if selection is None:
        return None
    takes = inspect.signature(selection).parameters
    given: Mapping[str, Any] = getattr(loss, "keywords", {})
    return partial(selection, **{name: value for name, value in given.items() if name in takes})


class ChosenAdvantage:
    """An estimator with its arguments bound, called with what a step knows; see ``chosen_advantage``.

    Attributes:
        needs_baselines: whether it reads rewards of greedy rollouts.
        needs_components: whether it reads several rewards apart.
    """

    def __init__(self, estimator: AdvantageEstimator, bound: Callable[..., Any]) -> None:
        takes = inspect.signature(estimator).parameters
        self._bound = bound
        self._by_column = estimator is gdpo
        self._needs = frozenset(takes) & {"lengths", "baselines", "components"}
        self.needs_baselines = "baselines" in self._needs
        self.needs_components = self._by_column or "components" in self._needs

    def __call__(
        self,
        rewards: Tensor,
        uids: list[str],
        lengths: Tensor,
        *,
        baselines: Tensor | None = None,
        components: Tensor | None = None,
    ) -> Tensor:
        """Advantages ``[B]``.

        Args:
            rewards: ``[B]``, NaN where a row does not train.
            uids: ``B`` identities of the prompts.
            lengths: ``[B]`` response tokens.
            baselines: ``[B]`` rewards of greedy rollouts.
            components: ``[B, K]``, a column for each reward.
        """
        known = {"lengths": lengths, "baselines": baselines, "components": components}
        first = components if self._by_column else rewards
        advantages: Tensor = self._bound(first, uids, **{name: known[name] for name in self._needs})
        return advantages


def chosen_advantage(
    chosen: str | AdvantageEstimator, *, normalize_std: bool, arguments: Mapping[str, Any] | None
) -> ChosenAdvantage:
    """The estimator with its arguments bound.

    Args:
        chosen: a known name or a callable; one with a parameter ``lengths``, ``baselines`` or ``components`` is given
            them.
        normalize_std: given to an estimator that takes it; False is refused for any other.
        arguments: what else the estimator takes.

    Raises:
        ValueError: for an unknown name or an argument that the estimator does not take.
    """
    estimator = advantage_estimator(chosen)
    given: dict[str, Any] = dict(arguments or {})
    if "normalize_std" in inspect.signature(estimator).parameters:
        given.setdefault("normalize_std", normalize_std)
    elif not normalize_std:
        raise ValueError(f"normalize_std=False means nothing to advantage={_named(chosen)}: it has no such division.")
    return ChosenAdvantage(estimator, _bind("advantage", chosen, estimator, given))


def chosen_length_penalty(
    chosen: str | LengthPenalty | None, arguments: Mapping[str, Any] | None
) -> LengthPenalty | None:
    """The length penalty as ``(rewards, uids, lengths) -> [B]``; None for none.

    Raises:
        ValueError: for an unknown name, an argument that it does not take, or a value that it refuses.
    """
    if chosen is None:
        if arguments:
            raise ValueError(f"length_penalty_args={dict(arguments)} without a length_penalty to take them.")
        return None
    bound: LengthPenalty = _bind("length_penalty", chosen, length_penalty(chosen), dict(arguments or {}))
    if isinstance(chosen, str):
        bound(torch.zeros(1), ["a"], torch.ones(1))
    return bound


def chosen_correction(chosen: Corrections, arguments: Mapping[str, Any] | None) -> Correction | None:
    """The correction as ``(old_log_probs, rollout_log_probs, mask, cu_seqlens=...) -> weights``; None for none.

    Args:
        chosen: a known name, a callable, or several of them, whose weights are multiplied: a token keeps what all of
            them leave it.
        arguments: of the correction; of several, each one's by its name.

    Raises:
        ValueError: for an unknown name, an argument that it does not take, or a value that it refuses.
    """
    if isinstance(chosen, Sequence) and not isinstance(chosen, str):
        return _product_of_corrections(chosen, arguments or {})
    correction = rollout_correction(chosen)
    if correction is None:
        if arguments:
            raise ValueError(f"correction_args={dict(arguments)} without a rollout_correction to take them.")
        return None
    bound = _bind("rollout_correction", chosen, correction, dict(arguments or {}))
    by_sequence = "cu_seqlens" in inspect.signature(correction).parameters

    def weigh(old: Tensor, rollout: Tensor, mask: Tensor, *, cu_seqlens: Tensor) -> Tensor:
        weights: Tensor = bound(old, rollout, mask, **({"cu_seqlens": cu_seqlens} if by_sequence else {}))
        return weights.detach()

    if isinstance(chosen, str):
        weigh(torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool), cu_seqlens=torch.tensor([0, 1]))
    return weigh


def _product_of_corrections(chosen: Sequence[str | Correction], arguments: Mapping[str, Any]) -> Correction:
    names = [one if isinstance(one, str) else _named(one) for one in chosen]
    if not names or "none" in names or len(set(names)) != len(names):
        raise ValueError(f"rollout_correction={names} must name one or more, each once; 'none' stands alone.")
    stray = sorted(arguments.keys() - set(names))
    if stray or not all(isinstance(given, Mapping) for given in arguments.values()):
        raise ValueError(
            f"correction_args={dict(arguments)} of several corrections holds each one's arguments by its name, "
            f"{{'{names[0]}': {{...}}}}; the names are {', '.join(names)}."
        )
    parts = [chosen_correction(one, arguments.get(name)) for one, name in zip(chosen, names, strict=True)]

    def weigh(old: Tensor, rollout: Tensor, mask: Tensor, *, cu_seqlens: Tensor) -> Tensor:
        weights = mask.to(old.dtype)
        for part in parts:
            if part is not None:
                weights = weights * part(old, rollout, mask, cu_seqlens=cu_seqlens)
        return weights

    return weigh


def _bind(argument: str, chosen: str | Callable[..., Any], function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """``partial(function, **given)``, refusing what the function does not take."""
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        own = [name for name, p in parameters.items() if p.kind == p.KEYWORD_ONLY and name not in _FROM_THE_STEP]
        unknown = sorted(given.keys() - set(own))
        if unknown:
            raise ValueError(
                f"{argument}={_named(chosen)} takes no {', '.join(unknown)}; it takes {', '.join(own) or 'nothing'}."
            )
    return partial(function, **given)


_FROM_THE_STEP = ("cu_seqlens", "lengths", "baselines", "components", "selected", "generator")
"""Arguments that a step's data gives, not the user."""


def _named(chosen: str | Callable[..., Any]) -> str:
    return repr(chosen) if isinstance(chosen, str) else str(getattr(chosen, "__name__", chosen))
