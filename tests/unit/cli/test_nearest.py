from __future__ import annotations

import pytest

from lightning_rlhf.cli.nearest import did_you_mean, nearest, nearest_name

KEYS = [
    "seed",
    "name",
    "algorithm.kl_coef",
    "algorithm.kl_estimator",
    "algorithm.lr_schedule",
    "algorithm.optimizer.lr",
    "algorithm.seed",
    "rollout.temperature",
    "rollout.num_rollouts",
    "data.seed",
    "data.prompts_per_step",
    "trainer.devices",
]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("algorithm.kl_coeff", "algorithm.kl_coef"),
        ("algo.kl_coeff", "algorithm.kl_coef"),
        ("kl_coef", "algorithm.kl_coef"),
        ("algorithm.lr", "algorithm.optimizer.lr"),
        ("optimizer.lr", "algorithm.optimizer.lr"),
        ("trainer.temperature", "rollout.temperature"),
        ("algorithm.num_rollout", "rollout.num_rollouts"),
        ("data.sed", "data.seed"),
        ("trainer.device", "trainer.devices"),
        ("zzz.qqq", None),
    ],
)
def test_nearest(typed: str, meant: str | None) -> None:
    assert nearest(typed, KEYS) == meant


def test_where_nothing_is_near_the_level_is_listed() -> None:
    assert did_you_mean("rollout.xyz", KEYS) == "known there: rollout.num_rollouts, rollout.temperature."
    assert did_you_mean("zzz.qqq", KEYS) == "known there: algorithm, data, name, rollout, seed, trainer."


def test_nearest_name_can_be_strict() -> None:
    assert nearest_name("projct", ["project", "offline"], at_least=0.8) == "project"
    assert nearest_name("entity", ["project", "offline"], at_least=0.8) is None
