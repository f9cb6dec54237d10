"""DPPO: a trust region on the probability of the token itself, in place of a clip of its ratio (arXiv:2602.04879)."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_rlhf.algorithms.policy_inputs import PolicyInputs, check_bounds, check_cap
from lightning_rlhf.types import LossOutput


def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_cap: float = 3.0,
) -> LossOutput:
    r"""DPPO with the binary total variation (arXiv:2602.04879): the trust region bounds :math:`\pi - \pi_{old}`.

    Terms are :math:`-\mathrm{sg}(\min(r, C))\,A \log\pi`, and 0 where the probability of the token has left the region
    in the direction of its advantage: risen by more than ``clip_high``, or fallen by more than ``clip_low``.

    Args:
        log_probs: as for ``ppo_clip``, like the next four.
        old_log_probs: see there.
        advantages: see there.
        response_mask: see there.
        cu_seqlens: see there.
        clip_low: largest fall in probability, at most 1.
        clip_high: largest rise in probability, at most 1.
        ratio_cap: :math:`C`, largest weight of a token.

    Returns:
        Terms and metrics as for ``ppo_clip``.

    Raises:
        ValueError: for different shapes or a bound that is negative.
    """
    check_bounds(clip_low, clip_high)
    inputs = PolicyInputs.check(log_probs, old_log_probs, advantages, response_mask, cu_seqlens)
    new, old = _probabilities(inputs)
    change = new - old
    return _trust_region_terms(inputs, fallen=change < -clip_low, risen=change > clip_high, ratio_cap=ratio_cap)


def dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_cap: float = 3.0,
) -> LossOutput:
    r"""DPPO with the binary KL divergence (arXiv:2602.04879) between "this token" and "any other token".

    As ``dppo_tv``, with :math:`p\log\frac{p}{q} + (1-p)\log\frac{1-p}{1-q}` in nats (:math:`p` old, :math:`q` new) in
    place of the change in probability. Arguments, result and errors as there.
    """
    check_bounds(clip_low, clip_high)
    inputs = PolicyInputs.check(log_probs, old_log_probs, advantages, response_mask, cu_seqlens)
    log_new, log_old = inputs.log_probs.detach(), inputs.old_log_probs
    new, old = _probabilities(inputs)
    tiny = 1e-8  # keeps log(1 - p) finite for a token of probability 1
    kl = old * (log_old - log_new) + (1 - old) * ((1 - old + tiny) / (1 - new + tiny)).log()
    return _trust_region_terms(
        inputs, fallen=(kl > clip_low) & (new < old), risen=(kl > clip_high) & (new > old), ratio_cap=ratio_cap
    )


def _probabilities(inputs: PolicyInputs) -> tuple[Tensor, Tensor]:
    """New and old, without gradient; a log-prob that rounding left a little above 0 is a probability of 1."""
    return inputs.log_probs.detach().exp().clamp(max=1), inputs.old_log_probs.exp().clamp(max=1)


def _trust_region_terms(inputs: PolicyInputs, *, fallen: Tensor, risen: Tensor, ratio_cap: float) -> LossOutput:
    """REINFORCE with a capped weight, without the tokens that left the region the way their advantage pushes."""
    check_cap(ratio_cap)
    too_high, too_low = risen & (inputs.advantages > 0), fallen & (inputs.advantages <= 0)
    weight = inputs.ratio.detach().clamp(max=ratio_cap)
    terms = -weight * inputs.advantages * inputs.log_probs
    return inputs.output(
        torch.where(too_high | too_low, torch.zeros_like(terms), terms), clipped_low=too_low, clipped_high=too_high
    )
