"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_rlhf.algorithms.kl import as_float
from lightning_rlhf.algorithms.policy_inputs import check_shapes
from lightning_rlhf.metrics import Metric
from lightning_rlhf.types import LossOutput


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    clip: float | None = None,
) -> LossOutput:
    r"""Half the squared error of the critic; with ``clip`` the larger of plain and clipped (PPO2).

    :math:`\frac12\max((V-R)^2, (\mathrm{clip}(V, V_{old}-c, V_{old}+c)-R)^2)`.

    Args:
        values: padded ``[B, T]`` or flat ``[num_tokens]``, by the critic being trained; gradients flow through it.
        old_values: same shape, by the critic before the update.
        returns: same shape, targets.
        response_mask: same shape, tokens that train.
        cu_seqlens: ``[B+1]`` for the flat layout; not needed here.
        clip: :math:`c`; None: plain squared error.

    Returns:
        Terms, and the metrics ``value_mean``, ``value_error_mean`` (absolute) and ``value_clip_fraction``.

    Raises:
        ValueError: for different shapes or a clip that is not positive.
    """
    check_shapes(cu_seqlens, values=values, old_values=old_values, returns=returns, response_mask=response_mask)
    if clip is not None and clip <= 0:
        raise ValueError(f"clip must be positive, got {clip}; None switches it off.")
    mask = response_mask.bool()
    values, old_values, returns = (
        as_float(tensor).masked_fill(~mask, 0) for tensor in (values, old_values.detach(), returns.detach())
    )
    squared = (values - returns).square()
    clipped_away = torch.zeros_like(mask)
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        clipped_squared = (clipped - returns).square()
        clipped_away = ((values - old_values).abs() > clip) & (clipped_squared > squared)
        squared = torch.maximum(squared, clipped_squared)
    metrics = {
        "value_mean": Metric.mean(values, mask),
        "value_error_mean": Metric.mean((values - returns).abs(), mask),
        "value_clip_fraction": Metric.mean(clipped_away.float(), mask),
    }
    return LossOutput(terms=(squared / 2).masked_fill(~mask, 0), metrics=metrics)
