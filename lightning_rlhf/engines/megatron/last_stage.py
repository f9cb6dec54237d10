"""What the last pipeline stage computes, told to all stages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_rlhf.metrics import Metric


def share_metrics(
    metrics: Mapping[str, Metric], *, group: dist.ProcessGroup, device: torch.device
) -> dict[str, Metric]:
    """The last stage's metrics, on every stage. Collective; numbers survive exactly.

    Args:
        metrics: this stage's; only the last one's are read.
        group: the stages, in order.
        device: where collectives take their tensors, and metrics lie.
    """
    if dist.get_world_size(group) == 1:
        return dict(metrics)
    facts = {name: [m.reduction, float(m.value), float(m.weight)] for name, m in metrics.items()}
    payload = json.dumps(facts).encode()
    size = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    dist.broadcast(size, group=group, group_src=dist.get_world_size(group) - 1)
    buffer = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if _is_last(group):
        buffer.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(buffer, group=group, group_src=dist.get_world_size(group) - 1)
    shared = json.loads(buffer.cpu().numpy().tobytes())
    return {
        name: Metric(
            value=torch.tensor(value, dtype=torch.float64, device=device),
            weight=torch.tensor(weight, dtype=torch.float64, device=device),
            reduction=reduction,
        )
        for name, (reduction, value, weight) in shared.items()
    }


def share_columns(columns: Sequence[Tensor], *, group: dist.ProcessGroup) -> None:
    """Fills tensors of equal shapes on every stage with the last one's. Collective."""
    if dist.get_world_size(group) > 1:
        for column in columns:
            dist.broadcast(column, group=group, group_src=dist.get_world_size(group) - 1)


def _is_last(group: dist.ProcessGroup) -> bool:
    return dist.get_rank(group) == dist.get_world_size(group) - 1
