"""Which groups have a signal: the rows that train decide, no others."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_rlhf.callbacks.dynamic_sampling import DynamicSampling, FilledStep, fill_step
from lightning_rlhf.types import PromptBatch, Rollouts, RolloutSequence

Row = tuple[float, str, int]
"""Reward, finish reason, response tokens."""

DIFFERENT: list[Row] = [(1.0, "stop", 2), (0.0, "stop", 2)]


def _prompts(uids: list[str]) -> PromptBatch:
    return PromptBatch(
        uids=uids, prompt_token_ids=[[1]] * len(uids), prompts=["p"] * len(uids), metadata=[{}] * len(uids)
    )


def _fill(group: list[Row], *, mask_truncated: bool) -> FilledStep:
    """A step of one group; the prompt that is drawn in its place has two different rewards."""

    def sample(prompts: PromptBatch) -> Rollouts:
        rows = group if prompts.uids == ["first"] else DIFFERENT
        sequences = [
            RolloutSequence(
                uid=prompts.uids[0], sample_index=index, prompt_token_ids=[1], response_token_ids=[2] * length,
                log_probs=[-1.0] * length, finish_reason=reason, policy_version=0,
            )
            for index, (_, reason, length) in enumerate(rows)
        ]  # fmt: skip
        rollouts = Rollouts.from_sequences(sequences)
        rollouts.rewards = torch.tensor([reward for reward, _, _ in rows])
        return rollouts

    return fill_step(
        _prompts(["first"]),
        settings=DynamicSampling(max_rounds=1),
        mask_truncated=mask_truncated,
        sample=sample,
        draw=lambda count: _prompts(["second"] * count),
        group=None,
        num_replicas=1,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize(
    ("group", "mask_truncated", "has_signal"),
    [
        (DIFFERENT, True, True),
        ([(1.0, "stop", 2), (1.0, "stop", 2)], False, False),
        ([(1.0, "length", 2), (0.0, "stop", 2)], False, True),
        ([(1.0, "length", 2), (0.0, "stop", 2), (0.0, "stop", 2)], True, False),
        ([(1.0, "length", 2), (0.0, "stop", 2), (0.5, "stop", 2)], True, True),
        ([(1.0, "stop", 0), (0.0, "stop", 2)], False, False),
        ([(1.0, "abort", 2), (0.0, "stop", 2)], False, False),
        ([(1.0, "stop", 2), (math.nan, "stop", 2)], False, False),
        ([(math.inf, "stop", 2), (0.0, "stop", 2)], False, False),
    ],
)
def test_rows_that_do_not_train_give_no_signal(group: list[Row], mask_truncated: bool, has_signal: bool) -> None:
    step = _fill(group, mask_truncated=mask_truncated)
    assert step.prompts.uids == (["first"] if has_signal else ["second"])
    assert set(step.rollouts.uids) == set(step.prompts.uids)
    assert step.metrics["rollout/dropped_groups"] == float(not has_signal)
