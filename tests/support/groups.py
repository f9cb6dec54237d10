"""Rollouts of prompts that are longer than a token, for what prompts have in common."""

from __future__ import annotations

import torch

from lightning_rlhf.types import Experience


def make_prompt(length: int, seed: int) -> list[int]:
    """Random token ids below 64."""
    return torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_groups(groups: list[tuple[list[int], list[int]]], *, seed: int = 0) -> Experience:
    """Rollouts of prompts, all of whose response tokens train with random weights.

    Args:
        groups: per prompt its tokens, and the lengths of its rollouts' responses.
        seed: of responses, advantages and weights.
    """
    draw = torch.Generator().manual_seed(seed)
    tokens, masks, lengths, uids, indices = [], [], [], [], []
    for number, (prompt, responses) in enumerate(groups):
        for index, length in enumerate(responses):
            tokens += [torch.tensor(prompt), torch.randint(0, 64, (length,), generator=draw)]
            masks += [torch.zeros(len(prompt), dtype=torch.bool), torch.ones(length, dtype=torch.bool)]
            lengths.append(len(prompt) + length)
            uids.append(f"prompt-{number}")
            indices.append(index)
    mask = torch.cat(masks)
    return Experience(
        tokens=torch.cat(tokens),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        response_mask=mask,
        loss_mask=mask,
        rollout_log_probs=torch.zeros(len(mask)),
        advantages=torch.randn(len(mask), generator=draw) * mask,
        uids=uids,
        sample_indices=indices,
        temperature=0.7,
        loss_weights=torch.rand(len(mask), generator=draw) * mask / mask.sum(),
    )
