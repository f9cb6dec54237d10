"""How many micro-batches, and which rows in each: agreed by all ranks that step through collectives together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from lightning_rlhf.batching.micro_batch import plan_micro_batches
from lightning_rlhf.contracts.engine import EngineConfig
from lightning_rlhf.contracts.micro_batch_counts import MicroBatchCounts

_CANNOT_PLAN = 2**40
"""Sent in place of a number of micro-batches by a rank that must raise, so that no other waits for it."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlan:
    """One rank's micro-batches.

    Attributes:
        rows: of each micro-batch, perhaps none; equally many micro-batches on all data-parallel ranks.
        padded_sizes: of each micro-batch, the tokens that it is padded to over context-parallel ranks.
        num_tokens: the mini-batch's tokens over data-parallel ranks, without padding.
    """

    rows: list[list[int]]
    padded_sizes: list[int]
    num_tokens: int

    def counts(self, *, num_tokens: int) -> MicroBatchCounts:
        """What this rank's model-parallel group runs, given the tokens of its rows."""
        padded = sum(self.padded_sizes)
        return MicroBatchCounts(num_micro_batches=len(self.rows), num_tokens=padded, num_padding=padded - num_tokens)


def agree_micro_batches(
    lengths: Sequence[int],
    config: EngineConfig,
    *,
    hidden_size: int,
    multiple: int,
    number_divisible_by: int,
    equal_sizes: bool,
    group: dist.ProcessGroup,
    device: torch.device,
    refused: str | None = None,
) -> MicroBatchPlan:
    """Cuts this rank's rows as the engine's limits say, with empty micro-batches up to the others' number. Collective.

    Args:
        lengths: tokens of each row.
        config: holds the limits.
        hidden_size: of the model.
        multiple: what each sequence is padded to a multiple of.
        number_divisible_by: what the number of micro-batches must be a multiple of (an interleaved pipeline's stages).
        equal_sizes: pad all micro-batches of all ranks to the largest one's tokens.
        group: data-parallel ranks.
        device: where collectives take their tensors.
        refused: why this rank cannot go on, None if it can.

    Raises:
        ValueError: with ``refused``, or if a sequence is longer than a micro-batch may be.
        RuntimeError: if another rank cannot cut its share.
    """
    cut = partial(
        plan_micro_batches,
        lengths,
        micro_batch_size=config.micro_batch_size,
        max_tokens=config.max_tokens_per_micro_batch,
        hidden_size=hidden_size,
    )
    own: ValueError | None = None if refused is None else ValueError(refused)
    number = _CANNOT_PLAN
    if own is None:
        try:
            number = max(len(cut()), 1)
        except ValueError as error:
            own = error
    number = _over_ranks(number, dist.ReduceOp.MAX, group, device)
    if own is not None:
        raise own
    if number == _CANNOT_PLAN:
        raise RuntimeError("Another data-parallel rank cannot cut its share into micro-batches; see its error.")
    number += -number % number_divisible_by
    rows = cut(num_micro_batches=number)
    sizes = [sum(_padded(lengths[row], multiple) for row in part) or multiple for part in rows]
    if equal_sizes:
        sizes = [_over_ranks(max(sizes), dist.ReduceOp.MAX, group, device)] * number
    return MicroBatchPlan(
        rows=rows, padded_sizes=sizes, num_tokens=_over_ranks(sum(lengths), dist.ReduceOp.SUM, group, device)
    )


def _padded(length: int, multiple: int) -> int:
    return max(length + -length % multiple, multiple)


def _over_ranks(number: int, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, device: torch.device) -> int:
    if dist.get_world_size(group) == 1:
        return number
    agreed = torch.tensor(number, device=device)
    dist.all_reduce(agreed, op=operation, group=group)
    return int(agreed)
