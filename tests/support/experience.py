"""Experiences with made-up content, and losses to train on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_rlhf.types import Experience, LossOutput, ModelOutputs


def make_experience(
    lengths: Sequence[int], *, prompt_length: int = 2, vocab_size: int = 64, seed: int = 0, temperature: float = 1.0
) -> Experience:
    """Random sequences of the given lengths with random advantages; every sampled token weighs 1 / their number."""
    draw = torch.Generator().manual_seed(seed)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    num_tokens = int(cu_seqlens[-1])
    positions = torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(length) for length in lengths)])
    mask = positions >= prompt_length
    return Experience(
        tokens=torch.randint(0, vocab_size, (num_tokens,), generator=draw),
        cu_seqlens=cu_seqlens,
        response_mask=mask,
        loss_mask=mask,
        rollout_log_probs=torch.zeros(num_tokens),
        advantages=torch.randn(num_tokens, generator=draw) * mask,
        uids=[f"prompt-{row // 2}" for row in range(len(lengths))],
        sample_indices=list(range(len(lengths))),
        temperature=temperature,
        loss_weights=mask.float() / max(int(mask.sum()), 1),
    )


def policy_gradient(outputs: ModelOutputs, micro_batch: Experience) -> LossOutput:
    """Plain policy gradient with an entropy bonus, so that both outputs get a gradient."""
    assert outputs.log_probs is not None
    assert outputs.entropy is not None
    return LossOutput(terms=-outputs.log_probs * micro_batch.advantages - 0.1 * outputs.entropy)
