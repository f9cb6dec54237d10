"""Micro-batches through megatron's pipeline schedules: none, 1F1B or interleaved, as the layout says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn

from lightning_rlhf.engines.megatron.packed import PackedMicroBatch

LastStage: TypeAlias = Callable[[int, nn.Module, Tensor], tuple[Tensor, Tensor]]
"""On the last stage: number of the micro-batch, model chunk and its output; gives the loss to go backward from, already
multiplied by the mini-batch's number of tokens, and this rank's tokens of the micro-batch."""


def run_schedule(
    chunks: Sequence[Any], packed: Sequence[PackedMicroBatch], last_stage: LastStage, *, forward_only: bool
) -> None:
    """Runs all micro-batches forward, and backward unless ``forward_only``. Collective over all ranks.

    Megatron divides every gradient by the tokens that the micro-batches' losses report, summed over micro-batches and
    data- and context-parallel ranks. With losses multiplied by that very sum, gradients are those of the plain sum of
    losses; and router losses, which are scaled by tokens on the same assumption (``router.py``), keep their weight
    whatever the loss mask is. Padding is in none of these numbers.

    Args:
        chunks: this rank's model chunks; for training wrapped in megatron's DistributedDataParallel.
        packed: the micro-batches, equally many on all ranks.
        last_stage: see ``LastStage``; not called on other stages.
        forward_only: leaves gradients alone.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(micro_batches: Iterator[tuple[int, PackedMicroBatch]], chunk: Any) -> tuple[Tensor, Any]:
        index, micro_batch = next(micro_batches)
        output = chunk(
            input_ids=micro_batch.tokens,
            position_ids=micro_batch.position_ids,
            attention_mask=None,
            packed_seq_params=micro_batch.packed_seq_params(),
            padding_mask=_padding_mask(micro_batch, chunk),
        )
        return output, partial(_three, last_stage, index, chunk)

    iterators = [iter(enumerate(packed)) for _ in chunks]
    several = len(chunks) > 1
    config: Any = chunks[0].config
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if several else iterators[0],
        model=list(chunks) if several else chunks[0],
        num_microbatches=len(packed),
        # read only where stages do not tell each other how long a micro-batch is: then all are equally long
        seq_length=packed[0].num_local * config.context_parallel_size,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _padding_mask(micro_batch: PackedMicroBatch, chunk: Any) -> Tensor | None:
    """Where padding stands, for the routers of a chunk, if it is one of a mixture of experts.

    The first chunk shares the mask out to the ranks of sequence parallelism as it does the tokens (gpt_model.py:314);
    a later one takes it for this rank's share.
    """
    from megatron.core.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
    from megatron.core.utils import get_attr_wrapped_model

    if chunk.config.num_moe_experts is None:
        return None
    mask: Tensor = micro_batch.is_padding
    if not chunk.config.sequence_parallel or get_attr_wrapped_model(chunk, "pre_process"):
        return mask
    shares: tuple[Tensor, ...] = mask.chunk(get_tensor_model_parallel_world_size(), dim=1)
    rank: int = get_tensor_model_parallel_rank()
    return shares[rank]


def _three(
    last_stage: LastStage, index: int, chunk: nn.Module, output: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    loss, num_tokens = last_stage(index, chunk, output)
    return loss, num_tokens, {}
