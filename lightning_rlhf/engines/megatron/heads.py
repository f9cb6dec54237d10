"""What the last stage's chunk gives, and how tokens are scored by it: log-probs and entropies, or values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_rlhf.engines.megatron.log_probs import vocab_parallel_log_probs
from lightning_rlhf.engines.megatron.packed import PackedMicroBatch
from lightning_rlhf.types import ModelOutputs


def give_hidden_states(chunk: Any) -> None:
    """Makes a language model's last chunk give hidden states in place of logits, which would be of all tokens at once.

    The mappings are those of megatron's own output layer: each rank's rows of the head give a part of the states'
    gradient, which is summed over tensor-parallel ranks, under sequence parallelism into each one's share of tokens.
    """
    from megatron.core.tensor_parallel.mappings import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
    )

    layer = chunk.output_layer

    def forward(states: Tensor, **_: Any) -> tuple[Tensor, None]:
        if layer.sequence_parallel:
            return gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=True), None
        return copy_to_tensor_model_parallel_region(states), None

    layer.forward = forward


def head_weight(chunk: Any) -> Tensor:
    """``[padded vocabulary / tp, hidden]``: this rank's rows of the head, tied to the embedding or not."""
    weight: Tensor = (
        chunk.shared_embedding_or_output_weight()
        if chunk.share_embeddings_and_output_weights
        else chunk.output_layer.weight
    )
    return weight


def log_probs_of(
    states: Tensor,
    packed: PackedMicroBatch,
    *,
    weight: Tensor,
    vocab_size: int,
    temperature: float,
    chunk_size: int,
    entropy: bool,
    tensor_group: dist.ProcessGroup,
    context_group: dist.ProcessGroup | None,
) -> ModelOutputs:
    """Log-probs, and entropies if asked for, at the tokens. Collective over both groups.

    Args:
        states: ``[1, num_local, hidden]``, what the last chunk gives.
        packed: the micro-batch.
        weight: this rank's rows of the head.
        vocab_size: of the model, without padding.
        temperature: logits are divided by it.
        chunk_size: tokens whose logits are held at a time.
        entropy: also entropies.
        tensor_group: the ranks that share the head.
        context_group: the ranks that share each sequence; None for one.
    """
    log_probs, entropies = vocab_parallel_log_probs(
        states[0][packed.scored],
        weight,
        packed.labels,
        vocab_size=vocab_size,
        group=tensor_group,
        temperature=temperature,
        chunk_size=chunk_size,
        entropy=entropy,
    )
    columns = [log_probs] if entropies is None else [log_probs, entropies]
    at_tokens = packed.at_tokens(torch.stack(columns, dim=-1), group=context_group)
    # each a tensor of its own: a loss function may change one in place
    return ModelOutputs(log_probs=at_tokens[:, 0].clone(), entropy=at_tokens[:, 1].clone() if entropy else None)


def values_of(values: Tensor, packed: PackedMicroBatch, *, context_group: dist.ProcessGroup | None) -> ModelOutputs:
    """Values at the tokens, each read at the state before it. Collective over the group.

    Args:
        values: ``[1, num_local, 1]`` fp32, what the last chunk gives.
        packed: the micro-batch.
        context_group: the ranks that share each sequence; None for one.
    """
    return ModelOutputs(values=packed.at_tokens(values[0][packed.scored], group=context_group)[:, 0].clone())
