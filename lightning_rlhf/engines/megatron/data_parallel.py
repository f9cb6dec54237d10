"""Model chunks wrapped in megatron's DistributedDataParallel, which sums gradients over ranks that hold other rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions:
    """How gradients and optimizer state lie on data-parallel ranks; nothing here changes a number.

    Attributes:
        distributed_optimizer: each rank holds, and steps, a share of the optimizer's state.
        overlap_grad_reduce: sum a bucket of gradients while the backward goes on.
        overlap_param_gather: gather updated parameters during the next forward; needs the two others.
        bucket_size: parameters of one such sum; None: megatron's choice.

    Raises:
        ValueError: if ``overlap_param_gather`` stands without what it needs.
    """

    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = None

    def __post_init__(self) -> None:
        """Refuses what megatron would assert on later."""
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError(
                "overlap_param_gather=True gathers what a distributed optimizer has updated: it needs "
                "distributed_optimizer=True and overlap_grad_reduce=True."
            )


def wrap(chunks: Sequence[nn.Module], options: DataParallelOptions) -> list[Any]:
    """Gives each chunk buffers in which its gradients are summed in fp32, and tells megatron's schedule of them.

    Gradients are summed over data- and context-parallel ranks, never averaged: the chunks' config has
    ``calculate_per_token_loss``, and the schedule divides by the number of tokens that losses were multiplied by.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    config: Any = chunks[0].config
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=options.distributed_optimizer,
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        bucket_size=options.bucket_size,
        average_in_collective=False,
    )
    wrapped: list[Any] = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if options.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in wrapped])
        config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in wrapped])
    if options.overlap_param_gather:
        config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in wrapped])
    return wrapped


def _one_or_all(functions: list[Any]) -> Any:
    return functions if len(functions) > 1 else functions[0]


@contextmanager
def whole_parameters(chunks: Sequence[Any], options: DataParallelOptions) -> Iterator[None]:
    """Within it every parameter is up to date, also where its gathering waits for the next forward. Collective."""
    if options.overlap_param_gather:
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)
    yield


def show_gradients(chunks: Sequence[Any]) -> None:
    """Puts each parameter's summed gradient where torch has it, without a copy."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            if parameter.requires_grad and parameter.main_grad.dtype == parameter.dtype:
                parameter.grad = parameter.main_grad


def gather_gradients(chunks: Sequence[Any], options: DataParallelOptions) -> None:
    """Makes gradients whole where a distributed optimizer has left each rank the sum of its own share. Collective."""
    if not options.distributed_optimizer:
        return
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            if group.size() == 1:
                continue
            for bucket in buffer.buckets:
                whole = bucket.grad_data
                own = whole.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(whole, own, group=group)


def main_gradient(parameter: Tensor) -> Tensor:
    """The summed gradient of a parameter."""
    gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return gradient
