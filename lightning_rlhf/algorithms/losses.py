"""Policy and value losses as per-token terms; the weights that average them are made in ``aggregation``.

Every function takes padded ``[B, T]`` or flat ``[num_tokens]`` tensors (with ``cu_seqlens``) and returns unweighted
terms, exactly 0 off the mask, whose weighted sum is minimised. A ratio is ``exp(log_probs - old_log_probs)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_rlhf.algorithms.covariance_losses import clip_cov, kl_cov
from lightning_rlhf.algorithms.policy_inputs import PolicyInputs, check_bounds, check_cap
from lightning_rlhf.algorithms.sequence_losses import gmpo, gspo
from lightning_rlhf.algorithms.trust_region_losses import dppo_kl, dppo_tv
from lightning_rlhf.algorithms.value_losses import value_loss
from lightning_rlhf.metrics import Metric
from lightning_rlhf.types import LossOutput

__all__ = [
    "ppo_clip",
    "dapo",
    "gspo",
    "gmpo",
    "cispo",
    "sapo",
    "dppo_tv",
    "dppo_kl",
    "gpg",
    "reinforce",
    "clip_cov",
    "kl_cov",
    "value_loss",
]


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossOutput:
    r"""PPO's clipped surrogate (arXiv:1707.06347), with separate bounds (DAPO) and an optional dual clip.

    :math:`-\min(rA, \mathrm{clip}(r, 1-\epsilon_{low}, 1+\epsilon_{high})A)`; with ``dual_clip`` :math:`c`, and only
    where :math:`A < 0`, at most :math:`-cA` (arXiv:1912.09729).

    Args:
        log_probs: nats, by the policy being trained; gradients flow through it.
        old_log_probs: same shape, by the trainer before the update.
        advantages: same shape.
        response_mask: same shape, tokens that train.
        cu_seqlens: ``[B+1]`` for the flat layout; not needed here.
        clip_low: how far below 1 the ratio may fall.
        clip_high: how far above 1 it may rise.
        dual_clip: largest ratio that a negative advantage may push back from; above 1; None: no such bound.

    Returns:
        Terms, and the metrics ``ratio_mean|min|max``, ``approx_kl``, ``clip_fraction_low`` and ``_high`` (share of
        tokens that the clip leaves without gradient), with a dual clip also ``dual_clip_fraction``.

    Raises:
        ValueError: for different shapes, a negative bound, or ``dual_clip`` of 1 or less.
    """
    check_bounds(clip_low, clip_high)
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(
            f"dual_clip bounds ratios from above and must exceed 1, got {dual_clip}; None switches it off."
        )
    inputs = PolicyInputs.check(log_probs, old_log_probs, advantages, response_mask, cu_seqlens)
    ratio, advantages = inputs.ratio, inputs.advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    terms = torch.maximum(-ratio * advantages, -clipped * advantages)
    bounded = torch.zeros_like(inputs.mask)
    if dual_clip is not None:
        bounded = (advantages < 0) & (ratio > dual_clip)
        terms = torch.where(bounded, -dual_clip * advantages, terms)
    output = inputs.output(
        terms,
        clipped_low=(advantages < 0) & (ratio < 1 - clip_low),
        clipped_high=(advantages > 0) & (ratio > 1 + clip_high),
    )
    if dual_clip is not None:
        output.metrics["dual_clip_fraction"] = Metric.mean(bounded.float(), inputs.mask)
    return output


def dapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> LossOutput:
    """``ppo_clip`` with DAPO's bounds (arXiv:2503.14476): rare tokens may rise further than common ones may fall.

    DAPO averages by ``token-mean``. Arguments, result and errors as for ``ppo_clip``.
    """
    return ppo_clip(
        log_probs,
        old_log_probs,
        advantages,
        response_mask,
        cu_seqlens=cu_seqlens,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> LossOutput:
    r"""CISPO (arXiv:2506.13585): :math:`-\mathrm{sg}(\mathrm{clip}(r))\,A \log\pi`; every token keeps a gradient.

    The clipped ratio is a constant weight, as in the paper; some libraries send the gradient through it instead.
    ``clip_fraction_low`` and ``_high`` count tokens whose weight is at a bound. Arguments and errors as for
    ``ppo_clip``.
    """
    check_bounds(clip_low, clip_high)
    inputs = PolicyInputs.check(log_probs, old_log_probs, advantages, response_mask, cu_seqlens)
    ratio = inputs.ratio.detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    terms = -weight * inputs.advantages * inputs.log_probs
    return inputs.output(terms, clipped_low=ratio < 1 - clip_low, clipped_high=ratio > 1 + clip_high)


def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> LossOutput:
    r"""SAPO (arXiv:2511.20347): a smooth gate in place of the clip, :math:`-\frac{4}{\tau}\sigma(\tau(r-1))A`.

    Args:
        log_probs: as for ``ppo_clip``, like the next four.
        old_log_probs: see there.
        advantages: see there.
        response_mask: see there.
        cu_seqlens: see there.
        tau_positive: steepness of the gate where the advantage is above 0.
        tau_negative: steepness elsewhere; larger, since negative updates spread over the whole vocabulary.

    Returns:
        Terms and metrics as for ``ppo_clip``; nothing is clipped.

    Raises:
        ValueError: for different shapes, or a steepness that is not positive.
    """
    if tau_positive <= 0 or tau_negative <= 0:
        raise ValueError(f"tau_positive and tau_negative must be positive, got {tau_positive} and {tau_negative}.")
    inputs = PolicyInputs.check(log_probs, old_log_probs, advantages, response_mask, cu_seqlens)
    positive = torch.full_like(inputs.ratio, tau_positive)
    tau = torch.where(inputs.advantages > 0, positive, tau_negative)
    gate = torch.sigmoid(tau * (inputs.ratio - 1)) * (4 / tau)
    return inputs.output(-gate * inputs.advantages)


def gpg(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
) -> LossOutput:
    r"""GPG (arXiv:2504.02546): the plain policy gradient, :math:`-A\log\pi`; ``old_log_probs`` serve the metrics alone.

    Arguments, result and errors as for ``ppo_clip``; nothing is clipped.
    """
    inputs = PolicyInputs.check(log_probs, old_log_probs, advantages, response_mask, cu_seqlens)
    return inputs.output(-inputs.advantages * inputs.log_probs)


def reinforce(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    ratio_cap: float | None = None,
) -> LossOutput:
    r"""REINFORCE, :math:`-\mathrm{sg}(w)\,A\log\pi` with :math:`w = \min(r, C)`, or 1 without ``ratio_cap``.

    Args:
        log_probs: as for ``ppo_clip``, like the next four.
        old_log_probs: see there.
        advantages: see there.
        response_mask: see there.
        cu_seqlens: see there.
        ratio_cap: :math:`C`, largest importance weight for samples that an older policy drew; None: no weight, which
            is right for one update per rollout.

    Returns:
        Terms and metrics as for ``ppo_clip``; ``clip_fraction_high`` counts weights at the cap.

    Raises:
        ValueError: for different shapes or a cap that is not positive.
    """
    inputs = PolicyInputs.check(log_probs, old_log_probs, advantages, response_mask, cu_seqlens)
    if ratio_cap is None:
        return inputs.output(-inputs.advantages * inputs.log_probs)
    check_cap(ratio_cap)
    ratio = inputs.ratio.detach()
    terms = -ratio.clamp(max=ratio_cap) * inputs.advantages * inputs.log_probs
    return inputs.output(terms, clipped_high=ratio > ratio_cap)
