"""Age and advantages of a step's tokens, by hand, in one process and over two ranks with unequal shares."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.experience import make_experience
from support.fork import run_distributed
from support.tiny import tiny_model

from lightning_rlhf.contracts.engine import EngineConfig
from lightning_rlhf.engines.torch import TorchEngine
from lightning_rlhf.modules.step_metrics import experience_metrics
from lightning_rlhf.types import Experience, Rollouts, RolloutSequence

VERSIONS = [[3, 3, 4], [5]]
ADVANTAGES = [[1.0, -1.0, 3.0], [-2.0]]
"""Of two rows' response tokens."""


def _rollouts(rows: list[int]) -> Rollouts:
    return Rollouts.from_sequences(
        [
            RolloutSequence(
                uid=str(row), sample_index=0, prompt="p", prompt_token_ids=[1, 2], policy_version=VERSIONS[row][0],
                response_token_ids=[7] * len(VERSIONS[row]), log_probs=[-1.0] * len(VERSIONS[row]),
                token_versions=VERSIONS[row], finish_reason="stop",
            )
            for row in rows
        ]
    )  # fmt: skip


def _experience(rows: list[int]) -> Experience:
    data = make_experience([2 + len(ADVANTAGES[row]) for row in rows])
    data.advantages[data.loss_mask] = torch.tensor([value for row in rows for value in ADVANTAGES[row]])
    return data


def _metrics(sampled: list[int], trained: list[int]) -> dict[str, float]:
    group = dist.group.WORLD if dist.is_initialized() else None
    engine = TorchEngine(EngineConfig(model=tiny_model()), device=torch.device("cpu"), process_group=group)
    return experience_metrics(_rollouts(sampled), _experience(trained), engine, policy_version=5)


EXPECTED: dict[str, Any] = {
    "rollout/staleness_mean": (2 + 2 + 1 + 0) / 4,
    "rollout/staleness_max": 2.0,
    "actor/advantage_mean": 0.25,
    "actor/advantage_std": pytest.approx(math.sqrt((1 + 1 + 9 + 4) / 4 - 0.25**2)),
    "actor/advantage_min": -2.0,
    "actor/advantage_max": 3.0,
}


def test_one_process_by_hand() -> None:
    assert _metrics([0, 1], [0, 1]) == EXPECTED


def test_ranks_with_other_rows_than_they_sampled_say_the_same() -> None:
    """A mean of the ranks' means would be (5/3 + 0) / 2 versions, and 0 for a rank without rows would add to it."""

    def run() -> list[dict[str, float]]:
        rank = dist.get_rank()
        return [_metrics([rank], [1 - rank]), _metrics([rank], [] if rank else [0, 1])]

    for rank in run_distributed(run, 2):
        for found in rank:
            assert found == EXPECTED


def test_nothing_that_trains_leaves_the_advantages_out() -> None:
    data = make_experience([2])
    engine = TorchEngine(EngineConfig(model=tiny_model()), device=torch.device("cpu"))
    found = experience_metrics(_rollouts([1]), data, engine, policy_version=5)
    assert found == {"rollout/staleness_mean": 0.0, "rollout/staleness_max": 0.0}
