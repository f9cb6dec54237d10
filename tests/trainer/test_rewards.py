"""Rewards that hang and fail within a run: the step goes on, their rows do not train, and metrics name them."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from support.rewards import hangs_on_prompt
from support.toy import Recorder, digit_reward, parameters_of, toy_data, toy_module, toy_trainer

from lightning_rlhf.rewards import Failure, TimeLimited, WeightedRewards

FAILING = "3 + 4 ="


def failed_by_hand(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float | Failure]:
    given = digit_reward(prompts, responses, metadata)
    return [Failure("by hand") if FAILING in prompt else value for prompt, value in zip(prompts, given, strict=True)]


def fit(root: Path, model: Path, reward: Any) -> tuple[list[dict[str, float]], dict[str, Any]]:
    recorder, module = Recorder(), toy_module(model, reward=reward, max_rl_steps=3)
    toy_trainer(root, callbacks=[recorder]).fit(module, toy_data(shuffle=False))
    return [step["metrics"] for step in recorder.steps], parameters_of(module)


def test_h04_a_hanging_reward_does_not_stall_the_step_and_h01_its_rows_do_not_train(
    tmp_path: Path, tiny_directory: Path
) -> None:
    """Four rows of one prompt hang in the first step; the run equals one in which a reward has no verdict on them."""
    hanging = TimeLimited(hangs_on_prompt, seconds=3.0, workers=16)
    hanging.start()
    begun = time.monotonic()
    metrics, parameters = fit(tmp_path, tiny_directory, hanging)
    assert time.monotonic() - begun < 60.0
    hanging.close()
    assert [step["reward/failed"] for step in metrics] == [4.0, 0.0, 0.0]
    by_hand, expected = fit(tmp_path, tiny_directory, failed_by_hand)
    for step, other in zip(metrics, by_hand, strict=True):
        for name in ("reward/mean", "actor/loss", "actor/grad_norm", "rollout/trained_tokens"):
            assert step[name] == pytest.approx(other[name], abs=1e-6)
    for name, value in parameters.items():
        assert value.equal(expected[name]), name


def test_a_failing_component_fails_its_rows_alone(tmp_path: Path, tiny_directory: Path) -> None:
    reward = WeightedRewards([(digit_reward, 1.0), (failed_by_hand, 0.0)])
    metrics, _ = fit(tmp_path, tiny_directory, reward)
    assert [step["reward/failed"] for step in metrics] == [0.0, 0.0, 0.0]  # of weight 0: reported, and no more
    reward = WeightedRewards([(digit_reward, 1.0), (failed_by_hand, 1.0)])
    metrics, parameters = fit(tmp_path, tiny_directory, reward)
    assert [step["reward/failed"] for step in metrics] == [4.0, 0.0, 0.0]
    assert all(math.isfinite(step["actor/loss"]) for step in metrics)
    assert all(value.isfinite().all() for value in parameters.values())
