"""The fixed mini-batch of GRPO that both sides train on, and its loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_rlhf.algorithms.advantages import grpo
from lightning_rlhf.algorithms.aggregation import loss_weights
from lightning_rlhf.contracts.engine import LossFunction
from lightning_rlhf.modules.grpo import GRPO
from lightning_rlhf.types import Experience

LENGTHS = (5, 30, 8, 17, 3, 40, 12, 9, 21, 6, 33, 14)
"""Tokens of each sequence, four groups of three: uneven, and odd ones among them."""
REWARDS = (1.0, 0.0, 0.5, 0.0, 1.0, 0.25, 1.0, math.nan, 0.0, 0.75, 0.0, 1.0)
"""One has failed: its row is in the batch and trains nothing."""
_GROUP = 3
_PROMPT_LENGTH = 2
_TEMPERATURE = 0.8


def make_batch(vocab_size: int) -> Experience:
    """All rows, with loss weights, and without the log-probs of other policies.

    Args:
        vocab_size: ids are drawn below it.
    """
    draw = torch.Generator().manual_seed(0)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    uids = [f"prompt-{row // _GROUP}" for row in range(len(LENGTHS))]
    rewards = torch.tensor(REWARDS)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    rows = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    response_mask = positions >= _PROMPT_LENGTH
    loss_mask = response_mask & ~rewards.isnan()[rows]
    return Experience(
        tokens=torch.randint(0, vocab_size, (len(rows),), generator=draw),
        cu_seqlens=cu_seqlens,
        response_mask=response_mask,
        loss_mask=loss_mask,
        rollout_log_probs=torch.zeros(len(rows)),
        advantages=grpo(rewards, uids)[rows].nan_to_num(0.0) * loss_mask,
        uids=uids,
        sample_indices=[row % _GROUP for row in range(len(LENGTHS))],
        temperature=_TEMPERATURE,
        loss_weights=loss_weights(loss_mask, "token-mean"),
    )


def with_other_policies(batch: Experience, log_probs: Tensor) -> Experience:
    """The batch with log-probs of the old policy, the reference and the rollout engine, near the given ones.

    Near, so that some ratios are clipped and others are not.

    Args:
        batch: all rows.
        log_probs: ``[num_tokens]``, by one process.
    """
    draw = torch.Generator().manual_seed(1)
    old, ref, rollout = (
        (log_probs.cpu() + 0.2 * torch.randn(batch.num_tokens, generator=draw)) * batch.response_mask for _ in range(3)
    )
    return dataclasses.replace(batch, old_log_probs=old, ref_log_probs=ref, rollout_log_probs=rollout)


def rows_of_rank(rank: int, size: int) -> list[int]:
    """The longest sequences go to the first rank, so that ranks differ in their number of micro-batches."""
    by_length = sorted(range(len(LENGTHS)), key=lambda row: (-LENGTHS[row], row))
    share, more = divmod(len(by_length), size)
    start = rank * share + min(rank, more)
    return by_length[start : start + share + (rank < more)]


def loss_function() -> LossFunction:
    """The loss of ``GRPO`` with a KL term: clipped surrogate, entropy and mismatch metrics."""
    return GRPO(model="none", reward=_no_reward, optimizer=partial(torch.optim.AdamW, lr=0.0), kl_coef=0.1).policy_loss


def _no_reward(prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[object]) -> list[float]:
    raise NotImplementedError("The batch is scored already.")
