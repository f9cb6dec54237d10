"""How strongly the KL to the reference weighs, fixed or steered towards a target."""

from __future__ import annotations

import math
from collections.abc import Mapping


class FixedKLController:
    """A weight that stays.

    Args:
        coef: the weight, 0 or more.

    Raises:
        ValueError: for a negative weight.
    """

    def __init__(self, coef: float) -> None:
        if not (math.isfinite(coef) and coef >= 0):
            raise ValueError(f"kl_coef must be finite and 0 or more, got {coef}.")
        self.coef = coef

    def update(self, kl: float, *, num_rollouts: int) -> None:
        """Told of each RL step's mean KL, in nats per token, over so many rollouts; does nothing here."""

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps: nothing, since the run's own setting holds."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes what a checkpoint kept; a fixed weight takes nothing from it."""


class AdaptiveKLController(FixedKLController):
    r"""A weight that follows the KL (Ziegler et al., arXiv:1909.08593, section 2.2).

    With :math:`e = \mathrm{clip}(KL / KL_{target} - 1, -0.2, 0.2)` the weight is multiplied by :math:`1 + e n / h`
    after each RL step of :math:`n` rollouts: 20 % off the target or more, it changes by a factor of about
    :math:`e^{\pm 0.2}` in :math:`h` rollouts. The paper measures the KL of a whole response; here it is the mean per
    token, so that a target does not depend on the length of responses.

    Args:
        coef: the weight at the start, above 0: a factor never moves a zero.
        target: the KL aimed at, in nats per token, above 0.
        horizon: :math:`h`, in rollouts; at least as many as one RL step has, else a step could turn the weight
            negative.

    Raises:
        ValueError: for numbers outside these bounds.
    """

    def __init__(self, coef: float, *, target: float, horizon: int) -> None:
        super().__init__(coef)
        if coef == 0:
            raise ValueError("An adaptive KL weight is changed by factors and must start above 0; set kl_coef.")
        if not (math.isfinite(target) and target > 0) or horizon < 1:
            raise ValueError(
                f"The KL's target must be above 0 nats per token and its horizon at least 1 rollout, got {target} and "
                f"{horizon}."
            )
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, *, num_rollouts: int) -> None:
        """Moves the weight; see the class.

        Args:
            kl: of the RL step, the mean over its tokens on all ranks, in nats. Every rank must pass the same number.
            num_rollouts: rollouts of the RL step, over all ranks.

        Raises:
            ValueError: for a KL that is not finite, or more rollouts than the horizon.
        """
        if not math.isfinite(kl):
            raise ValueError(f"The mean KL to the reference is {kl}; the policy or the reference has diverged.")
        if num_rollouts > self.horizon:
            raise ValueError(
                f"An RL step of {num_rollouts} rollouts is longer than the horizon of {self.horizon}; set kl_horizon "
                f"to the rollouts of many RL steps."
            )
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * num_rollouts / self.horizon

    def state_dict(self) -> dict[str, float]:
        """The weight as it is now."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes the weight that a checkpoint kept.

        Raises:
            ValueError: if it kept none: it was saved by a run with a fixed weight.
        """
        if "coef" not in state:
            raise ValueError(
                "The checkpoint holds no KL weight to go on from: its run kept the weight fixed. Resume with "
                "kl_target=None, or start anew."
            )
        self.coef = float(state["coef"])


def kl_controller(coef: float, *, target: float | None, horizon: int) -> FixedKLController:
    """The controller that a target asks for.

    Args:
        coef: the weight, or where it starts.
        target: nats per token; None keeps the weight fixed.
        horizon: see ``AdaptiveKLController``.
    """
    return FixedKLController(coef) if target is None else AdaptiveKLController(coef, target=target, horizon=horizon)
