"""The weight of the entropy bonus, against the rule by hand."""

from __future__ import annotations

import math

import pytest

from lightning_rlhf.algorithms.entropy_controller import AdaptiveEntropyController, entropy_controller


def test_it_follows_the_rule_by_hand() -> None:
    controller = AdaptiveEntropyController(0.01, target=0.5, step=0.005)
    assert controller.coef == 0.01
    seen = []
    for entropy in (0.3, 0.2, 0.9, 0.9, 0.9, 0.9, 0.9, 0.4, 0.5):
        controller.update(entropy)
        seen.append(controller.coef)
    # grows below, does not apply above but falls, not below 0; at the target it applies and stays
    assert seen == pytest.approx([0.015, 0.02, 0, 0, 0, 0, 0, 0.005, 0.005])


def test_its_state_is_the_weight_and_whether_it_applies() -> None:
    controller, other = (AdaptiveEntropyController(0.01, target=0.5, step=0.005) for _ in range(2))
    for entropy in (0.3, 0.9):
        controller.update(entropy)
    other.load_state_dict(controller.state_dict())
    assert other.coef == controller.coef == 0.0
    for each in (controller, other):
        each.update(0.3)
    assert other.coef == controller.coef == pytest.approx(0.015)


def test_a_fixed_weight_stays_and_keeps_nothing() -> None:
    controller = entropy_controller(-0.02, target=None, step=0.005)
    controller.update(9.0)
    assert (controller.coef, controller.state_dict()) == (-0.02, {})
    with pytest.raises(ValueError, match="no entropy weight to go on from"):
        entropy_controller(0.0, target=1.0, step=0.1).load_state_dict({})


def test_an_entropy_that_is_no_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="has diverged"):
        AdaptiveEntropyController(0.0, target=1.0, step=0.1).update(math.nan)
    with pytest.raises(ValueError, match="must be finite"):
        entropy_controller(math.inf, target=None, step=0.1)
