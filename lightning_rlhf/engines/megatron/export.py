"""Full tensors under Hugging Face names from the ranks that hold their parts, one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_rlhf.engines.megatron.families import ModelShape, model_shape
from lightning_rlhf.engines.megatron.layout import collective_device
from lightning_rlhf.engines.megatron.load import local_named
from lightning_rlhf.engines.megatron.names import hf_shapes, look_up, num_elements, pieces, with_expert


@dataclass(frozen=True)
class _Entry:
    """One parameter of the whole model and the ranks that hold it."""

    name: str
    local_shape: tuple[int, ...]
    dtype: torch.dtype
    stage: int
    expert_rank: int | None
    """The place among those that share out the experts; None for what all of them hold."""


def export_parameters(
    chunks: Sequence[nn.Module], *, hf_config: Any, tensor_of: Callable[[Any], Tensor] = lambda parameter: parameter
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the whole model on every rank, as it would stand in a checkpoint.

    A collective: all ranks drain it, also those that need no weights and those whose consumer failed. One parameter
    is held whole at a time, so a tensor is valid until the next one is asked for.

    Args:
        chunks: this rank's model chunks, unwrapped.
        hf_config: of the model.
        tensor_of: what to export of each parameter, of its shape: the parameter itself, or its gradient. Buffers have
            no gradient and come only where this gives parameters themselves.

    Yields:
        Name and tensor. The vocabulary's padding is removed, a tied head left out, and the dtype is that of
        ``tensor_of``.
    """
    shape = model_shape(hf_config)
    local = local_named(chunks, shape)
    if any(tensor_of(tensor) is not tensor for tensor in local.values() if isinstance(tensor, nn.Parameter)):
        local = {name: tensor for name, tensor in local.items() if isinstance(tensor, nn.Parameter)}
    for entry in _catalog(local, shape, tensor_of):
        place = look_up(entry.name, shape)
        tensor = tensor_of(local[entry.name]).detach() if entry.name in local else None
        shapes, flat = _assemble(entry, tensor, shape)
        for hf_name, hf_shape, part in zip(place.hf_names, shapes, flat.split(num_elements(shapes)), strict=True):
            yield hf_name, part.view(hf_shape)


def _catalog(local: dict[str, Any], shape: ModelShape, tensor_of: Callable[[Any], Tensor]) -> list[_Entry]:
    """All parameters of the model, in the same order on every rank."""
    from megatron.core import parallel_state

    mine = [
        (name, tuple(tensor.shape), tensor.dtype)
        for name, tensor in ((name, tensor_of(parameter)) for name, parameter in local.items())
    ]
    stages: list[Any] = [None] * parallel_state.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(stages, mine, group=parallel_state.get_pipeline_model_parallel_group())
    expert_ranks = parallel_state.get_expert_model_parallel_world_size()
    num_local = 0 if shape.moe is None else shape.moe.num_experts // expert_ranks
    entries = []
    for stage, listed in enumerate(stages):
        for name, local_shape, dtype in listed:
            if shape.tied and name == "output_layer.weight":
                continue  # the last stage's copy of the embedding
            if not look_up(name, shape).is_expert:
                entries.append(_Entry(name, local_shape, dtype, stage, None))
                continue
            for rank in range(expert_ranks):
                other = with_expert(name, lambda expert, rank=rank: expert % num_local + rank * num_local)
                entries.append(_Entry(other, local_shape, dtype, stage, rank))
    return entries


def _assemble(entry: _Entry, tensor: Tensor | None, shape: ModelShape) -> tuple[list[tuple[int, ...]], Tensor]:
    """Gather one parameter and hand it to the ranks that hold no part of it.

    Returns:
        The shapes of its Hugging Face tensors, and their elements one after another.
    """
    from megatron.core import parallel_state

    place = look_up(entry.name, shape)
    if place.is_expert:
        cut_over = parallel_state.get_expert_tensor_parallel_group()
    else:
        cut_over = parallel_state.get_tensor_model_parallel_group()
    shapes = hf_shapes(place.kind, entry.local_shape, shape, size=cut_over.size())
    flat = torch.empty(sum(num_elements(shapes)), dtype=entry.dtype, device=collective_device())
    if tensor is not None:
        views = [part.view(one) for part, one in zip(flat.split(num_elements(shapes)), shapes, strict=True)]
        _gather_into(views, tensor, place.kind, shape, cut_over)
    if entry.expert_rank is not None and parallel_state.get_pipeline_model_parallel_rank() == entry.stage:
        _broadcast(flat, parallel_state.get_expert_model_parallel_group(), entry.expert_rank)
    _broadcast(flat, parallel_state.get_pipeline_model_parallel_group(), entry.stage)
    return shapes, flat


def _gather_into(views: list[Tensor], tensor: Tensor, kind: Any, shape: ModelShape, group: Any) -> None:
    """Put every rank's pieces where they stand in the full tensors."""
    shares = [tensor]
    if kind != "plain" and group.size() > 1:
        shares = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(shares, tensor.contiguous(), group=group)
    for rank, share in enumerate(shares):
        filled = 0
        for piece in pieces(kind, share.shape, shape, rank=rank):
            length = piece.stop - piece.start
            part = share.narrow(piece.dim, filled, length)
            views[piece.hf_index].narrow(piece.dim, piece.start, length).copy_(part)
            filled += length


def _broadcast(tensor: Tensor, group: Any, source: int) -> None:
    if group.size() > 1:
        dist.broadcast(tensor, dist.get_global_rank(group, source), group=group)
