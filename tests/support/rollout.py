"""Prompts by hand, and log-probs by the plainest means, for tests of rollout engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_rlhf.types import PromptBatch, Rollouts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prompt_batch(prompts: dict[str, list[int]]) -> PromptBatch:
    """Prompts by uid; the text is the uid, too."""
    uids = list(prompts)
    metadata: list[dict[str, Any]] = [{"answer": uid.upper()} for uid in uids]
    return PromptBatch(uids=uids, prompt_token_ids=list(prompts.values()), prompts=uids, metadata=metadata)


def row_ids(rollouts: Rollouts, row: int) -> list[int]:
    """Prompt and response ids of one row."""
    start, end = rollouts.cu_seqlens[row : row + 2].tolist()
    ids: list[int] = rollouts.tokens[start:end].tolist()
    return ids


def response_ids(rollouts: Rollouts, row: int) -> list[int]:
    """Response ids of one row."""
    start, end = rollouts.cu_seqlens[row : row + 2].tolist()
    ids: list[int] = rollouts.tokens[start:end][rollouts.response_mask[start:end]].tolist()
    return ids


def response_log_probs(rollouts: Rollouts, row: int) -> list[float]:
    """The engine's log-probs of one row's response."""
    start, end = rollouts.cu_seqlens[row : row + 2].tolist()
    values: list[float] = rollouts.rollout_log_probs[start:end][rollouts.response_mask[start:end]].tolist()
    return values


@torch.no_grad()
def naive_log_probs(model: PreTrainedModel, ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
    """Log-prob of each id given those before it, by one whole forward in fp32; 0 for the first."""
    logits = model(torch.tensor([list(ids)])).logits[0].float() / temperature
    log_probs = torch.log_softmax(logits, -1)
    return [0.0, *(float(log_probs[place, token]) for place, token in enumerate(ids[1:]))]


def largest_difference(model: PreTrainedModel, rollouts: Rollouts, *, temperature: float = 1.0) -> float:
    """Largest difference of the engine's response log-probs from the model's; there must be some."""
    differences = []
    for row in range(len(rollouts)):
        own = response_log_probs(rollouts, row)
        ids = row_ids(rollouts, row)
        expected = naive_log_probs(model, ids, temperature=temperature)[len(ids) - len(own) :] if own else []
        differences += [abs(a - b) for a, b in zip(own, expected, strict=True)]
    assert differences
    return max(differences)


def perturb(model: PreTrainedModel, *, seed: int, scale: float = 0.5) -> None:
    """Moves every parameter by noise of ``scale`` times its own spread (norms by a tenth), in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = float(parameter.std()) if parameter.ndim > 1 else 0.1
            parameter.add_(scale * spread * torch.randn(parameter.shape, generator=generator))
