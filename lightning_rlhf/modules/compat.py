"""Another library's choice where libraries disagree, in place of what a user has not said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from lightning_rlhf.modules.arguments import check_choice

Compat: TypeAlias = Literal["verl", "trl"]

VERL_DUAL_CLIP = 3.0
TRL_STD_EPS = 1e-4
TRL_CISPO_BOUNDS = (1.0, 4.0)
"""``clip_low`` and ``clip_high`` that give TRL's weight, the ratio up to an absolute 5 without a lower bound."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The arguments on which libraries disagree.

    Attributes:
        advantage_args: of the estimator.
        clip_low: of the policy loss; None takes the loss's own.
        clip_high: likewise.
        dual_clip: likewise.
    """

    advantage_args: Mapping[str, Any]
    clip_low: float | None
    clip_high: float | None
    dual_clip: float | None


def as_in(compat: Compat | None, chosen: Choices, *, advantage: object, policy_loss: object) -> Choices:
    """``chosen`` with the library's values where it says nothing; what is said stays.

    Args:
        compat: ``"verl"``, ``"trl"`` or None for this library's own choices.
        chosen: the user's arguments.
        advantage: name of the estimator, or a callable, of which nothing is known.
        policy_loss: name of the loss, or a callable.

    Raises:
        ValueError: for another library.
    """
    if compat is None:
        return chosen
    check_choice("compat", compat, get_args(Compat))
    args, low, high, dual = dict(chosen.advantage_args), chosen.clip_low, chosen.clip_high, chosen.dual_clip
    if compat == "verl" and policy_loss in ("ppo_clip", "dapo") and dual is None:
        dual = VERL_DUAL_CLIP
    if compat == "trl" and advantage == "grpo":
        args.setdefault("eps", TRL_STD_EPS)
    if compat == "trl" and policy_loss == "cispo":
        low, high = (
            mine if given is None else given for given, mine in zip((low, high), TRL_CISPO_BOUNDS, strict=True)
        )
    return Choices(advantage_args=args, clip_low=low, clip_high=high, dual_clip=dual)
