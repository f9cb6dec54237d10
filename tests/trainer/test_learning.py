"""Each algorithm learns a toy task from its experiment file: the reward rises beyond noise, through the whole run."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from support.learning import rise, run_experiment

STEPS = 20
ALGORITHMS = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "ppo"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_learns_from_its_experiment_file(algorithm: str, tmp_path: Path, tiny_directory: Path) -> None:
    metrics = run_experiment(f"{algorithm}-tiny-1n1r-auto", tmp_path, tiny_directory, steps=STEPS)
    rewards = [step["reward/mean"] for step in metrics]
    assert len(rewards) == STEPS
    difference, in_errors = rise(rewards)
    assert difference > 0.3
    assert in_errors > 3.0
    # the maximum is 1; DAPO's penalty takes up to 1 off it
    assert statistics.mean(rewards[-5:]) > (0.7 if algorithm == "dapo" else 0.85)
    # the old policy is not the new one, else this would be REINFORCE under eight names
    assert max(abs(step["actor/approx_kl"]) for step in metrics) > 1e-3


def test_without_a_learning_rate_the_criterion_fails(tmp_path: Path, tiny_directory: Path) -> None:
    metrics = run_experiment("grpo-tiny-1n1r-auto", tmp_path, tiny_directory, "algorithm.optimizer.lr=0.0", steps=STEPS)
    difference, in_errors = rise([step["reward/mean"] for step in metrics])
    assert difference < 0.1
    assert in_errors < 3.0
