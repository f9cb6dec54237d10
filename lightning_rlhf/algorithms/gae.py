"""Generalised advantage estimation."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_rlhf.algorithms.kl import as_float


def gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    r"""GAE (arXiv:1506.02438) over the tokens that the policy sampled.

    :math:`\delta_t = r_t + \gamma V_{t'} - V_t` and :math:`A_t = \delta_t + \gamma\lambda A_{t'}`, where :math:`t'` is
    the next token on the mask; after the last one both are 0. An observation (tool output between two actions) is no
    step of the policy, so it is skipped: it is neither discounted nor valued. Whitening is a step of its own
    (``whiten``), over the global batch.

    Args:
        token_level_rewards: padded ``[B, T]``, each reward on a token of the mask; off the mask nothing is read.
        values: same shape, by the critic; off the mask nothing is read.
        response_mask: same shape, tokens sampled by the policy.
        gamma: discount per sampled token, 0 to 1.
        lam: :math:`\lambda`, 0 to 1.

    Returns:
        Advantages and returns (advantages + values), in the shape of ``values``, fp32 (float64 for float64 values),
        without gradient, 0 off the mask.

    Raises:
        ValueError: for different shapes, a layout that is not padded, or factors outside 0 to 1.
    """
    shapes = [tuple(tensor.shape) for tensor in (token_level_rewards, values, response_mask)]
    if len(set(shapes)) != 1 or values.ndim != 2:
        raise ValueError(
            f"token_level_rewards {shapes[0]}, values {shapes[1]} and response_mask {shapes[2]} must share one padded "
            "shape [B, T]."
        )
    if not (0.0 <= gamma <= 1.0 and 0.0 <= lam <= 1.0):
        raise ValueError(f"gamma and lam must lie between 0 and 1, got {gamma} and {lam}.")
    mask = response_mask.bool()
    rewards = token_level_rewards.detach().double()
    values = as_float(values.detach())
    kept_values = values.double().masked_fill(~mask, 0)
    advantages = torch.zeros_like(kept_values)
    next_value = next_advantage = kept_values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        on = mask[:, t]
        # where, not a product with the mask: 0 * NaN would carry what stands off the mask to the tokens before it
        delta = rewards[:, t] + gamma * next_value - kept_values[:, t]
        next_advantage = torch.where(on, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(on, kept_values[:, t], next_value)
        advantages[:, t] = next_advantage.masked_fill(~on, 0)
    return advantages.to(values.dtype), (advantages + kept_values).to(values.dtype)
