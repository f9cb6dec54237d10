"""An engine's rows: which they are, where they stand, and the loss that they sum to."""

from __future__ import annotations

import dataclasses
import hashlib

import torch
from torch import Tensor

from lightning_rlhf.contracts.engine import LossFunction
from lightning_rlhf.metrics import Metric
from lightning_rlhf.types import Experience, ModelOutputs

NO_LOSS_WEIGHTS = (
    "The experience has no loss_weights, so the loss has no denominator. Set one weight per token, from the "
    "mini-batch's global counts, before forward_backward_batch."
)


def weighted_loss(
    outputs: ModelOutputs, micro_batch: Experience, loss_function: LossFunction
) -> tuple[Tensor, dict[str, Metric]]:
    """``(terms * loss_weights).sum()`` of a micro-batch, and the loss function's metrics.

    Raises:
        ValueError: if there is not one term per token, or the rows have no weights.
    """
    result = loss_function(outputs, micro_batch)
    if result.terms.shape != micro_batch.tokens.shape:
        raise ValueError(
            f"The loss function must give one term per token, [{micro_batch.num_tokens}], got "
            f"{tuple(result.terms.shape)}. Leave masking and averaging to loss_weights."
        )
    anchor = outputs.values if outputs.log_probs is None else outputs.log_probs
    if micro_batch.loss_weights is None or anchor is None:
        raise ValueError(NO_LOSS_WEIGHTS)
    # The sum over no element is 0 and still leads back through every layer: also a micro-batch without rows, or a
    # loss that reads no output, takes part in the collectives of the backward.
    return (result.terms * micro_batch.loss_weights).sum() + anchor[:0].sum(), result.metrics


def digest(data: Experience) -> int:
    """A 62-bit digest of all that a loss can read of the rows."""
    state = hashlib.blake2b(digest_size=8)
    for spec in dataclasses.fields(data):
        value = getattr(data, spec.name)
        if isinstance(value, Tensor):
            state.update(spec.name.encode() + value.detach().cpu().numpy().tobytes())
    return int.from_bytes(state.digest(), "big") >> 2


def token_places(cu_seqlens: Tensor, rows: list[int]) -> Tensor:
    """``[tokens of rows]``: where the tokens of ``batch.select(rows)`` stand in ``batch``."""
    index = torch.as_tensor(rows, dtype=torch.int64, device=cu_seqlens.device)
    lengths = cu_seqlens.diff()[index]
    starts = lengths.cumsum(0) - lengths
    shift = torch.repeat_interleave(cu_seqlens[:-1][index] - starts, lengths)
    return torch.arange(len(shift), device=shift.device) + shift
