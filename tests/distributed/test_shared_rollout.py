"""Rollouts shared out within a group of ranks: everything arrives everywhere, exactly, and differences are told."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fork import DistributedError, run_distributed
from support.rollout import prompt_batch
from torch import Tensor

from lightning_rlhf.callbacks import shared_rollout
from lightning_rlhf.callbacks.shared_rollout import generate_in_shares, pack, unpack
from lightning_rlhf.types import PromptBatch, Rollouts, RolloutSequence

CPU = torch.device("cpu")
PROMPTS = {f'prompt-{index}\n"é': [5 + index] * (index + 1) for index in range(5)}


def _sampled(prompts: PromptBatch) -> Rollouts:
    """Two responses for each prompt; lengths, log-probs and versions say which."""
    rows = []
    for uid, ids, text, metadata in zip(
        prompts.uids, prompts.prompt_token_ids, prompts.prompts, prompts.metadata, strict=True
    ):
        for sample in range(2):
            length = len(ids) + sample - 1
            rows.append(
                RolloutSequence(
                    uid=uid,
                    sample_index=sample,
                    prompt_token_ids=ids,
                    response_token_ids=list(range(length)),
                    log_probs=[-math.pi / (1 + place) for place in range(length)],
                    policy_version=7,
                    finish_reason="stop" if length else "skipped",
                    prompt=text,
                    response=f"{text} → {sample}\n",
                    metadata=metadata,
                )
            )
    return Rollouts.from_sequences(rows, temperature=0.7)


def _scored(rollouts: Rollouts) -> Tensor:
    rollouts.rewards = rollouts.lengths.float() / 3
    rollouts.rewards[rollouts.lengths == 3] = math.nan
    return rollouts.rewards


def _fields(rollouts: Rollouts) -> dict[str, Any]:
    return {
        name: value.numpy().tobytes() if isinstance(value, Tensor) else value for name, value in vars(rollouts).items()
    }


def _whole(prompts: dict[str, list[int]]) -> Rollouts:
    rollouts = _sampled(prompt_batch(prompts))
    _scored(rollouts)
    return rollouts


def test_bytes_and_back_are_exact() -> None:
    whole = _whole(PROMPTS)
    assert _fields(unpack(pack(whole), prompt_batch(PROMPTS))) == _fields(whole)


def test_rollouts_without_rewards_are_not_shared() -> None:
    with pytest.raises(ValueError, match="score them first"):
        pack(_sampled(prompt_batch(PROMPTS)))


@pytest.mark.parametrize("num_prompts", [5, 3, 1])
def test_every_rank_gets_what_one_would_have_made(num_prompts: int) -> None:
    prompts = dict(list(PROMPTS.items())[:num_prompts])

    def run() -> tuple[dict[str, Any], int]:
        made = []

        def generate(share: PromptBatch) -> Rollouts:
            made.append(len(share))
            return _sampled(share)

        rollouts = generate_in_shares(prompt_batch(prompts), generate, _scored, group=dist.group.WORLD, device=CPU)
        return _fields(rollouts), sum(made)

    results = run_distributed(run, 3)
    assert [fields for fields, _ in results] == [_fields(_whole(prompts))] * 3
    assert sum(made for _, made in results) == num_prompts
    assert max(made for _, made in results) == math.ceil(num_prompts / 3)


def test_alone_a_rank_generates_everything_and_scores_later() -> None:
    rollouts = generate_in_shares(prompt_batch(PROMPTS), _sampled, _scored, group=None, device=CPU)
    assert rollouts.rewards is None
    assert rollouts.uids == [uid for uid in PROMPTS for _ in range(2)]


def test_different_prompts_within_a_group_stop_all_ranks() -> None:
    def run() -> None:
        prompts = prompt_batch({f"{dist.get_rank()}-{uid}": ids for uid, ids in PROMPTS.items()})
        with pytest.raises(RuntimeError, match="hold different prompts"):
            generate_in_shares(prompts, _sampled, _scored, group=dist.group.WORLD, device=CPU)

    run_distributed(run, 2)


def test_a_reward_that_arrives_changed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = shared_rollout.unpack

    def changed(payload: bytes, batch: PromptBatch) -> Rollouts:
        rollouts = right(payload, batch)
        assert rollouts.rewards is not None
        rollouts.rewards[0] += dist.get_rank()
        return rollouts

    monkeypatch.setattr(shared_rollout, "unpack", changed)

    def run() -> None:
        generate_in_shares(prompt_batch(PROMPTS), _sampled, _scored, group=dist.group.WORLD, device=CPU)

    with pytest.raises(DistributedError, match="2 of 2 ranks failed") as caught:
        run_distributed(run, 2)
    assert str(caught.value).count("different rollouts or rewards after sharing them") >= 2
