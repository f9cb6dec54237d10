"""The gap between the engine that sampled the tokens and the trainer that scores them: how wide, and what to do."""

from __future__ import annotations

from torch import Tensor

from lightning_rlhf.algorithms.kl import MAX_LOG_RATIO, kl_penalty
from lightning_rlhf.metrics import Metric


def mismatch_metrics(log_probs_trainer: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Metric]:
    r"""How far the trainer's log-probs are from those that the tokens were sampled with, at the same weights.

    Args:
        log_probs_trainer: any shape, nats, by the trainer before the update.
        rollout_log_probs: same shape, as the rollout engine reported them.
        mask: same shape, the sampled tokens.

    Returns:
        ``mismatch_abs_mean`` and ``mismatch_abs_max`` of the absolute difference in nats, and ``mismatch_kl``, the k3
        estimate of :math:`KL(\pi_{rollout} \| \pi_{trainer})` per token. The same names for an empty mask.

    Raises:
        ValueError: for different shapes.
    """
    _check_shapes(log_probs_trainer, rollout_log_probs, mask)
    mask = mask.bool()
    trainer, rollout = log_probs_trainer.detach().double(), rollout_log_probs.detach().double()
    difference = (trainer - rollout).abs()
    return {
        "mismatch_abs_mean": Metric.mean(difference, mask),
        "mismatch_abs_max": Metric.max(difference, mask),
        # the tokens were drawn from the rollout engine, so it is the first argument
        "mismatch_kl": Metric.mean(kl_penalty(rollout, trainer, "k3"), mask),
    }


def token_tis(log_probs_trainer: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, cap: float = 2.0) -> Tensor:
    r"""Truncated importance weights per token, :math:`\min(\pi_{trainer} / \pi_{rollout}, C)` (Ionides 2008).

    Multiplying a loss's terms by them corrects for tokens that were sampled by an engine whose log-probs differ.

    Args:
        log_probs_trainer: any shape, nats, by the trainer before the update.
        rollout_log_probs: same shape, as the rollout engine reported them.
        mask: same shape, the sampled tokens.
        cap: :math:`C`, the largest weight.

    Returns:
        Same shape, the trainer's dtype, without gradient, 0 off the mask.

    Raises:
        ValueError: for different shapes or a cap that is not positive.
    """
    _check_shapes(log_probs_trainer, rollout_log_probs, mask)
    if cap <= 0:
        raise ValueError(f"cap must be positive, got {cap}.")
    off = ~mask.bool()
    log_ratio = (log_probs_trainer.detach() - rollout_log_probs.detach()).masked_fill(off, 0)
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp().clamp(max=cap).masked_fill(off, 0)


def _check_shapes(log_probs_trainer: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> None:
    shapes = [tuple(tensor.shape) for tensor in (log_probs_trainer, rollout_log_probs, mask)]
    if len(set(shapes)) != 1:
        raise ValueError(
            f"log_probs_trainer {shapes[0]}, rollout_log_probs {shapes[1]} and mask {shapes[2]} must have one shape."
        )
