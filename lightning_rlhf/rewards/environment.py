"""What an episode's environment gave, as a reward that others can be added to."""

from __future__ import annotations

from typing import Any

from lightning_rlhf.contracts.environment import EPISODE_KEY
from lightning_rlhf.rewards.function import RewardFunction, WeightedRewards
from lightning_rlhf.rewards.scores import Failure


class EnvironmentReward:
    """The sum of the rewards of an episode's steps; for a rollout with ``environment=``.

    Alone or one of ``WeightedRewards``. An episode whose environment failed has no reward.
    """

    __name__ = "environment"

    def __call__(
        self, prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]
    ) -> list[float | Failure]:
        """Reads each row's episode.

        Raises:
            KeyError: if a row has none.
        """
        del prompts, responses
        return [self._of(facts) for facts in metadata]

    def _of(self, facts: dict[str, Any]) -> float | Failure:
        if EPISODE_KEY not in facts:
            raise KeyError(
                f"metadata[{EPISODE_KEY!r}] is missing (it has {sorted(facts)}): EnvironmentReward needs a rollout "
                "with an environment, such as VLLMRollout(environment=...)"
            )
        episode = facts[EPISODE_KEY]
        return Failure(episode["failure"]) if episode["failure"] else float(episode["reward"])


def reads_environment(reward: RewardFunction) -> bool:
    """Whether ``EnvironmentReward`` is this reward or a part of it."""
    if isinstance(reward, WeightedRewards):
        return any(reads_environment(part) for part, _ in reward.rewards)
    return isinstance(reward, EnvironmentReward)
