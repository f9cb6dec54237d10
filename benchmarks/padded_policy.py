"""What one writes without an engine: padded rows through a Hugging Face model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from lightning_rlhf.algorithms.log_probs import token_log_probs
from lightning_rlhf.types import Experience


class PaddedPolicy(nn.Module):
    """Log-probs of padded rows' tokens, and entropies, which an engine gives to its loss and to its metrics."""

    def __init__(self, causal_lm: LlamaForCausalLM) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(self, rows: Tensor, attention_mask: Tensor | None, scored: Tensor | None = None) -> Tensor:
        """
        Args:
            rows: ``[B, T]`` int64.
            attention_mask: ``[B, T]`` bool; None: rows without padding.
            scored: ``[B, T - 1]`` bool, tokens whose log-probs are wanted; None: all. Others give 0.
        """
        states = self.causal_lm.model(input_ids=rows, attention_mask=attention_mask, use_cache=False).last_hidden_state
        hidden, labels = states[:, :-1].flatten(0, 1), rows[:, 1:].flatten()
        weight = self.causal_lm.lm_head.weight
        if scored is None:
            log_probs, _ = token_log_probs(hidden, weight, labels, entropy=True)
            return log_probs.view(len(rows), -1).clone()  # FSDP hangs its hook on a tensor, not on a view of one
        index = scored.flatten().nonzero().squeeze(-1)
        log_probs, _ = token_log_probs(hidden[index], weight, labels[index], entropy=True)
        return log_probs.new_zeros(len(hidden)).index_copy(0, index, log_probs).view(len(rows), -1).clone()


def padded_step(policy: nn.Module, data: Experience, count: int) -> None:
    """Forward and backward of rows in the order they come, ``count`` at a time."""
    assert data.loss_weights is not None
    weights = -data.loss_weights * data.advantages
    sequences, terms, masks = (
        list(values.split(data.lengths.tolist())) for values in (data.tokens, weights, data.response_mask)
    )
    for start in range(0, len(sequences), count):
        part = slice(start, start + count)
        rows, factors, scored = (
            nn.utils.rnn.pad_sequence(values[part], batch_first=True) for values in (sequences, terms, masks)
        )
        real = torch.arange(rows.shape[1]) < torch.tensor([len(one) for one in sequences[part]])[:, None]
        (policy(rows, real, scored[:, 1:]) * factors[:, 1:]).sum().backward()
    policy.zero_grad()
