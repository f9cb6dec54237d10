"""Policy losses whose ratio belongs to the whole sequence: the geometric mean of its tokens' ratios."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_rlhf.algorithms.kl import MAX_LOG_RATIO
from lightning_rlhf.algorithms.policy_inputs import PolicyInputs, check_bounds
from lightning_rlhf.algorithms.sequences import sequence_means, spread
from lightning_rlhf.types import LossOutput


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    level: Literal["sequence", "token"] = "sequence",
) -> LossOutput:
    r"""GSPO (arXiv:2507.18071): PPO's clip of :math:`s = \exp(\mathrm{mean}_t \log r_t)`, one ratio per sequence.

    Every token of a sequence holds the same term up to its advantage, so ``seq-mean-token-mean`` gives the paper's
    mean over sequences. The ``token`` form replaces :math:`s` by :math:`\mathrm{sg}(s)\,\pi_t/\mathrm{sg}(\pi_t)`:
    the same values, and a gradient per token, so that advantages may differ within a sequence.

    Args:
        log_probs: nats, by the policy being trained, padded ``[B, T]`` or flat; gradients flow through it.
        old_log_probs: same shape, by the trainer before the update.
        advantages: same shape.
        response_mask: same shape, tokens that train; whole sequences.
        cu_seqlens: ``[B+1]``, needed by the flat layout.
        clip_low: how far below 1 the sequence's ratio may fall; the paper uses 3e-4.
        clip_high: how far above 1 it may rise; the paper uses 4e-4.
        level: ``sequence`` or ``token`` form.

    Returns:
        Terms, and the metrics of ``ppo_clip``, of the sequence's ratio at each of its tokens.

    Raises:
        ValueError: for different shapes, a negative bound, an unknown level, or a flat layout without ``cu_seqlens``.
    """
    check_bounds(clip_low, clip_high)
    inputs = PolicyInputs.check(log_probs, old_log_probs, advantages, response_mask, cu_seqlens)
    log_s = _sequence_log_ratio(inputs.difference, inputs, cu_seqlens)
    if level == "token":
        log_s = inputs.log_probs - inputs.log_probs.detach() + log_s.detach()
    elif level != "sequence":
        raise ValueError(f"level must be 'sequence' or 'token', got {level!r}.")
    ratio, advantages = log_s.exp(), inputs.advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return inputs.output(
        torch.maximum(-ratio * advantages, -clipped * advantages),
        ratio=ratio,
        clipped_low=(advantages < 0) & (ratio < 1 - clip_low),
        clipped_high=(advantages > 0) & (ratio > 1 + clip_high),
    )


def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> LossOutput:
    r"""GMPO (arXiv:2507.20673): the geometric mean of token ratios that are clipped one by one.

    :math:`-A \exp(\mathrm{mean}_t\,c_t)` with :math:`c_t = \min(\log r_t, \epsilon_{high})` where :math:`A > 0` and
    :math:`\max(\log r_t, -\epsilon_{low})` where :math:`A < 0`; :math:`A` is the sequence's mean advantage. Every
    token holds its sequence's term; ``seq-mean-token-mean`` gives the mean over sequences.

    Args:
        log_probs: as for ``gspo``, like the next four.
        old_log_probs: see there.
        advantages: see there.
        response_mask: see there.
        cu_seqlens: see there.
        clip_low: how far a token's log-ratio may fall below 0, in nats; the paper uses 0.4.
        clip_high: how far it may rise above 0.

    Returns:
        Terms, and the metrics of ``ppo_clip``; clip fractions count tokens, the ratio is the sequence's.

    Raises:
        ValueError: as for ``gspo``.
    """
    check_bounds(clip_low, clip_high)
    inputs = PolicyInputs.check(log_probs, old_log_probs, advantages, response_mask, cu_seqlens)
    log_ratio, positive = inputs.difference, inputs.advantages > 0
    clipped = torch.where(positive, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    ratio = _sequence_log_ratio(clipped, inputs, cu_seqlens).exp()
    mean_advantage = sequence_means(inputs.advantages, inputs.mask, cu_seqlens)
    terms = -ratio * spread(mean_advantage, ratio, cu_seqlens).to(ratio.dtype)
    return inputs.output(
        terms,
        ratio=ratio,
        clipped_low=(inputs.advantages < 0) & (log_ratio < -clip_low),
        clipped_high=positive & (log_ratio > clip_high),
    )


def _sequence_log_ratio(log_ratio: Tensor, inputs: PolicyInputs, cu_seqlens: Tensor | None) -> Tensor:
    """Each sequence's mean log-ratio, within ±20, at each of its tokens, differentiable."""
    # the mean is bounded, not its parts: one token far off in a long sequence moves it as far as it should
    means = sequence_means(log_ratio, inputs.mask, cu_seqlens).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return spread(means, log_ratio, cu_seqlens).to(log_ratio.dtype)
