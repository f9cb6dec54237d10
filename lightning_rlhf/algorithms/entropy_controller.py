"""How strongly the entropy bonus weighs, fixed or steered towards a target."""

from __future__ import annotations

import math
from collections.abc import Mapping


class FixedEntropyController:
    """A weight that stays.

    Args:
        coef: the weight; below 0 it is a penalty.

    Raises:
        ValueError: for a weight that is not finite.
    """

    def __init__(self, coef: float) -> None:
        if not math.isfinite(coef):
            raise ValueError(f"entropy_coef must be finite, got {coef}.")
        self._coef = coef

    @property
    def coef(self) -> float:
        """The weight as it is now."""
        return self._coef

    def update(self, entropy: float) -> None:
        """Told of each RL step's mean entropy, in nats per token; does nothing here."""

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps: nothing, since the run's own setting holds."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes what a checkpoint kept; a fixed weight takes nothing from it."""


class AdaptiveEntropyController(FixedEntropyController):
    r"""A bonus that holds the entropy up at a target (Skywork-OR1, arXiv:2505.22312, section 4.2).

    After each RL step of mean entropy :math:`e_k` the weight :math:`c_k` grows by :math:`\Delta` if
    :math:`e_k < e_{target}` and falls by :math:`\Delta` if it is above, not below 0. It applies only while
    the entropy is at the target or below: :math:`\alpha_k = c_k`, and 0 above. The entropy that decides is that of the
    RL step before.

    Args:
        coef: the weight at the start, 0 or more.
        target: nats per token, above 0.
        step: :math:`\Delta`, above 0; the paper has 0.005.

    Raises:
        ValueError: for numbers outside these bounds.
    """

    def __init__(self, coef: float, *, target: float, step: float) -> None:
        super().__init__(coef)
        if coef < 0 or not (0 < target < math.inf and 0 < step < math.inf):
            raise ValueError(
                f"An adaptive entropy bonus needs entropy_coef of 0 or more, and entropy_target and entropy_step above "
                f"0, got {coef}, {target} and {step}."
            )
        self.target, self.step = target, step
        self._applies = True

    @property
    def coef(self) -> float:
        """The weight that applies now, 0 while the entropy is above the target."""
        return self._coef if self._applies else 0.0

    def update(self, entropy: float) -> None:
        """Moves the weight; see the class. Every rank must pass the same number.

        Raises:
            ValueError: for an entropy that is not finite.
        """
        if not math.isfinite(entropy):
            raise ValueError(f"The mean entropy is {entropy}; the policy has diverged.")
        self._applies = entropy <= self.target
        change = self.step if entropy < self.target else -self.step if entropy > self.target else 0.0
        self._coef = max(self._coef + change, 0.0)

    def state_dict(self) -> dict[str, float]:
        """The weight, and whether it applies."""
        return {"coef": self._coef, "applies": float(self._applies)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes what a checkpoint kept.

        Raises:
            ValueError: if it kept none: it was saved by a run with a fixed weight.
        """
        if "coef" not in state:
            raise ValueError(
                "The checkpoint holds no entropy weight to go on from: its run kept the weight fixed. Resume with "
                "entropy_target=None, or start anew."
            )
        self._coef, self._applies = float(state["coef"]), bool(state["applies"])


def entropy_controller(coef: float, *, target: float | None, step: float) -> FixedEntropyController:
    """The controller that a target asks for.

    Args:
        coef: the weight, or where it starts.
        target: nats per token; None keeps the weight fixed.
        step: see ``AdaptiveEntropyController``.
    """
    return FixedEntropyController(coef) if target is None else AdaptiveEntropyController(coef, target=target, step=step)
