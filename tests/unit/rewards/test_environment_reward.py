"""What an episode's environment gave, alone and beside other rewards."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_rlhf.rewards import EnvironmentReward, WeightedRewards, reads_environment, score


def _length(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    return [float(len(response)) for response in responses]


def _rows(*episodes: dict[str, Any]) -> tuple[list[str], list[str], list[dict[str, Any]]]:
    return ["p"] * len(episodes), ["abc"] * len(episodes), [{"episode": episode} for episode in episodes]


GOOD, FAILED = {"reward": 2.5, "failure": None}, {"reward": 1.0, "failure": "reset raised OSError: no board"}


def test_it_gives_the_sum_and_fails_the_rows_whose_environment_failed() -> None:
    scores = score(EnvironmentReward(), *_rows(GOOD, FAILED))
    assert scores.rewards[0] == 2.5
    assert scores.rewards[1].isnan()
    assert scores.errors == ["row 1, environment: reset raised OSError: no board"]


def test_it_is_one_of_several() -> None:
    scores = score(WeightedRewards([(EnvironmentReward(), 2.0), (_length, -1.0)]), *_rows(GOOD, GOOD))
    assert scores.rewards.tolist() == [2.0, 2.0]
    assert scores.component_names == ["environment", "_length"]


def test_without_an_episode_it_says_what_is_missing() -> None:
    scores = score(EnvironmentReward(), ["p"], ["r"], [{"answer": 1}])
    assert "VLLMRollout(environment=...)" in scores.errors[0]


@pytest.mark.parametrize(
    ("reward", "reads"),
    [
        (EnvironmentReward(), True),
        (_length, False),
        (WeightedRewards([(_length, 1.0)]), False),
        (WeightedRewards([(_length, 1.0), (EnvironmentReward(), 1.0)]), True),
    ],
)
def test_whether_a_reward_reads_it(reward: Any, reads: bool) -> None:
    assert reads_environment(reward) == reads
