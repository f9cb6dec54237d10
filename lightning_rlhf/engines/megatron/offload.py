"""Parameters, gradients and optimizer state between a GPU and host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.engines.megatron.optimizer import MegatronOptimizer


def move_model(chunks: Sequence[Any], device: torch.device, *, parameters: bool, gradients: bool) -> None:
    """Moves the parts of wrapped or bare chunks that are named.

    Gradients are dropped rather than copied: their buffers give up their memory and come back as zeros. Parameters of a
    distributed optimizer lie in buffers that do the same with a copy on the host.

    Args:
        chunks: model chunks.
        device: the GPU, or the host.
        parameters: move parameters.
        gradients: move buffers of gradients.
    """
    for chunk in chunks:
        buffers = list(_buffers(chunk))
        for buffer in buffers:
            if device.type == "cpu":
                buffer.offload_to_cpu(move_params=parameters, move_grads=gradients)
            else:
                buffer.reload_from_cpu(move_params=parameters, move_grads=gradients)
        if parameters and all(buffer.param_data is None for buffer in buffers):
            for parameter in chunk.parameters():
                parameter.data = parameter.data.to(device)


def _buffers(chunk: Any) -> Iterator[Any]:
    from megatron.core.distributed import DistributedDataParallel

    if isinstance(chunk, DistributedDataParallel):
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def move_optimizer(optimizer: MegatronOptimizer, device: torch.device) -> None:
    """Moves moments, and the fp32 parameters that belong to a bf16 model's optimizer."""
    for part in optimizer.inner.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        for state in part.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim:  # torch keeps a step counter on the host
                    state[name] = value.to(device)
        for main in _main_parameters(part):
            main.data = main.data.to(device)


def _main_parameters(part: Any) -> Iterator[Tensor]:
    from megatron.core.optimizer import DistributedOptimizer, Float16OptimizerWithFloat16Params

    groups: list[list[Tensor | None]] = []
    if isinstance(part, DistributedOptimizer):
        groups = part.shard_fp32_from_float16_groups
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        groups = part.fp32_from_float16_groups
    for group in groups:
        yield from (main for main in group if main is not None)
