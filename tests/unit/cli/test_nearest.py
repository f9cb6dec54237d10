from __future__ import annotations

import pytest

from lightning_rlhf.cli.nearest import ELSEWHERE, did_you_mean, nearest, nearest_name
from lightning_rlhf.cli.show_config import compose_run
from lightning_rlhf.cli.validate import known_keys

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
        ("algorithm.learning_rate", "algorithm.optimizer.lr"),  # as other libraries call it
        ("num_generations", "rollout.num_rollouts"),
        ("algorithm.beta", "algorithm.kl_coef"),
        ("algorithm.max_steps", None),  # there is no such key among these, under any name
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


def test_names_of_other_libraries_lead_to_keys_that_exist() -> None:
    known = known_keys(compose_run(["model.path=anywhere"]))
    for name in ELSEWHERE:
        best = nearest(f"algorithm.{name}", known)
        assert best is not None
        assert f".{best}".endswith(f".{ELSEWHERE[name]}")
