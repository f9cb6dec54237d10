"""The weight of the KL, against the paper's rule by hand."""

from __future__ import annotations

import math

import pytest

from lightning_rlhf.algorithms.kl_controller import AdaptiveKLController, FixedKLController, kl_controller


def test_a_fixed_weight_stays() -> None:
    controller = kl_controller(0.3, target=None, horizon=100)
    controller.update(50.0, num_rollouts=1000)
    assert controller.coef == 0.3
    assert controller.state_dict() == {}
    assert type(controller) is FixedKLController


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.1, 0.5),  # on target
        (0.11, 0.5 * (1 + 0.1 * 64 / 1000)),  # 10 % above
        (0.095, 0.5 * (1 - 0.05 * 64 / 1000)),
        (5.0, 0.5 * (1 + 0.2 * 64 / 1000)),  # held at 20 %
        (0.0, 0.5 * (1 - 0.2 * 64 / 1000)),
        (-3.0, 0.5 * (1 - 0.2 * 64 / 1000)),  # k1 may be negative
    ],
)
def test_an_adaptive_weight_moves_by_the_papers_rule(kl: float, expected: float) -> None:
    controller = kl_controller(0.5, target=0.1, horizon=1000)
    controller.update(kl, num_rollouts=64)
    assert controller.coef == pytest.approx(expected, rel=1e-12)


def test_over_one_horizon_it_changes_by_e_to_the_fifth() -> None:
    controller = AdaptiveKLController(1.0, target=0.1, horizon=100_000)
    for _ in range(1000):
        controller.update(1.0, num_rollouts=100)
    assert controller.coef == pytest.approx(math.exp(0.2), rel=1e-3)


def test_its_state_goes_on_elsewhere() -> None:
    first, second = (AdaptiveKLController(0.5, target=0.1, horizon=1000) for _ in range(2))
    first.update(1.0, num_rollouts=64)
    second.load_state_dict(first.state_dict())
    assert second.coef == first.coef != 0.5
    with pytest.raises(ValueError, match="no KL weight to go on from"):
        second.load_state_dict({})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coef": -0.1, "target": None, "horizon": 1}, "0 or more"),
        ({"coef": math.nan, "target": None, "horizon": 1}, "0 or more"),
        ({"coef": 0.0, "target": 0.1, "horizon": 1}, "above 0"),
        ({"coef": 0.1, "target": 0.0, "horizon": 1}, "above 0 nats"),
        ({"coef": 0.1, "target": 0.1, "horizon": 0}, "at least 1 rollout"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kl_controller(arguments["coef"], target=arguments["target"], horizon=int(arguments["horizon"]))


def test_a_step_longer_than_the_horizon_and_a_diverged_kl_are_refused() -> None:
    controller = AdaptiveKLController(0.5, target=0.1, horizon=10)
    with pytest.raises(ValueError, match="longer than the horizon"):
        controller.update(0.1, num_rollouts=11)
    with pytest.raises(ValueError, match="diverged"):
        controller.update(math.nan, num_rollouts=10)
