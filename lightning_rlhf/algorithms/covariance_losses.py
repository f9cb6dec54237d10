"""Losses that treat the tokens of largest covariance apart, to keep the entropy from collapsing (arXiv:2505.22617).

Which tokens those are depends on the whole mini-batch. Within a micro-batch or on one rank the choice would be
another, so it is made once per mini-batch, before the split, and handed to the loss as ``selected``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_rlhf.algorithms.policy_inputs import PolicyInputs, check_bounds, check_shapes
from lightning_rlhf.metrics import Metric
from lightning_rlhf.types import LossOutput


def kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    fraction: float = 0.0002,
    coefficient: float = 0.1,
    selected: Tensor | None = None,
) -> LossOutput:
    r"""KL-Cov: :math:`-rA`, unclipped, plus :math:`k\,|\log r|` on the tokens of largest covariance.

    Args:
        log_probs: nats, by the policy being trained, padded ``[B, T]`` or flat; gradients flow through it.
        old_log_probs: same shape, by the trainer before the update.
        advantages: same shape.
        response_mask: same shape, tokens that train.
        cu_seqlens: ``[B+1]`` for the flat layout; not needed here.
        fraction: share of the tokens that get the penalty, rounded down, at least one unless 0.
        coefficient: :math:`k`.
        selected: same shape, bool, as ``select_largest_covariance`` made it for the mini-batch. None: the tensors
            given are the whole mini-batch, and the choice is made here.

    Returns:
        Terms, the metrics of ``ppo_clip``, and ``selected_fraction``.

    Raises:
        ValueError: for different shapes or a fraction outside 0 to 1.
    """
    inputs = PolicyInputs.check(log_probs, old_log_probs, advantages, response_mask, cu_seqlens)
    if selected is None:
        selected = select_largest_covariance(log_probs, advantages, response_mask, fraction=fraction)
    check_shapes(None, log_probs=log_probs, selected=selected)
    terms = -inputs.ratio * inputs.advantages
    output = inputs.output(terms + coefficient * inputs.log_ratio.abs() * selected)
    output.metrics["selected_fraction"] = Metric.mean(selected.float(), inputs.mask)
    return output


def clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    fraction: float = 0.0002,
    covariance_range: tuple[float, float] = (1.0, 5.0),
    selected: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> LossOutput:
    """Clip-Cov: PPO's clip, with the terms of a few tokens of high covariance dropped altogether.

    Args:
        log_probs: as for ``kl_cov``, like the next four.
        old_log_probs: see there.
        advantages: see there.
        response_mask: see there.
        cu_seqlens: see there.
        clip_low: how far below 1 the ratio may fall.
        clip_high: how far above 1 it may rise.
        fraction: share of the tokens that are dropped at most, rounded down, at least one unless 0.
        covariance_range: open interval of covariances to choose from.
        selected: same shape, bool, as ``sample_covariance_range`` made it for the mini-batch. None: the tensors given
            are the whole mini-batch, and the choice is made here, among tokens that the clip leaves alone.
        generator: source of the choice.

    Returns:
        Terms, the metrics of ``ppo_clip``, and ``selected_fraction``.

    Raises:
        ValueError: for different shapes, a negative bound, or a fraction outside 0 to 1.
    """
    check_bounds(clip_low, clip_high)
    inputs = PolicyInputs.check(log_probs, old_log_probs, advantages, response_mask, cu_seqlens)
    ratio, advantages = inputs.ratio, inputs.advantages
    too_low = (advantages < 0) & (ratio < 1 - clip_low)
    too_high = (advantages > 0) & (ratio > 1 + clip_high)
    if selected is None:
        selected = sample_covariance_range(
            log_probs,
            advantages,
            response_mask,
            fraction=fraction,
            covariance_range=covariance_range,
            excluded=too_low | too_high,
            generator=generator,
        )
    check_shapes(None, log_probs=log_probs, selected=selected)
    terms = torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    output = inputs.output(terms.masked_fill(selected, 0), clipped_low=too_low, clipped_high=too_high)
    output.metrics["selected_fraction"] = Metric.mean(selected.float(), inputs.mask)
    return output


def token_covariance(log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Each token's share of the covariance of log-prob and advantage over the mask: product of the two deviations.

    Returns:
        float64 in the shape of ``log_probs``, without gradient, 0 off the mask.
    """
    check_shapes(None, log_probs=log_probs, advantages=advantages, response_mask=response_mask)
    mask = response_mask.bool()
    # float64: which token is the largest must not depend on the order in which a mean was summed
    product = torch.ones_like(log_probs, dtype=torch.float64, requires_grad=False)
    for values in (log_probs, advantages):
        kept = values.detach().double().masked_fill(~mask, 0)
        product = product * (kept - kept.sum() / mask.sum().clamp(min=1))
    return product.masked_fill(~mask, 0)


def select_largest_covariance(
    log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *, fraction: float
) -> Tensor:
    """The ``fraction`` of tokens on the mask (rounded down, at least one if above 0) with the largest covariance.

    Args:
        log_probs: of a whole mini-batch, padded or flat.
        advantages: same shape.
        response_mask: same shape.
        fraction: of the tokens on the mask.

    Returns:
        bool, in the shape of ``log_probs``.

    Raises:
        ValueError: for different shapes or a fraction outside 0 to 1.
    """
    covariance = token_covariance(log_probs, advantages, response_mask)
    candidates = response_mask.bool().flatten().nonzero().squeeze(-1)
    order = covariance.flatten()[candidates].argsort(descending=True, stable=True)
    chosen = candidates[order[: _count(fraction, candidates.numel())]]
    return _as_mask(chosen, log_probs)


def sample_covariance_range(
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    fraction: float,
    covariance_range: tuple[float, float],
    excluded: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Random tokens among those whose covariance lies strictly within a range.

    Args:
        log_probs: of a whole mini-batch, padded or flat.
        advantages: same shape.
        response_mask: same shape.
        fraction: how many, as a share of the tokens on the mask (rounded down, at least one if above 0); fewer if
            the range holds fewer.
        covariance_range: lower and upper bound.
        excluded: same shape, bool, tokens not to choose.
        generator: source of the choice.

    Returns:
        bool, in the shape of ``log_probs``.

    Raises:
        ValueError: for different shapes or a fraction outside 0 to 1.
    """
    low, high = covariance_range
    covariance = token_covariance(log_probs, advantages, response_mask)
    mask = response_mask.bool()
    allowed = mask & (covariance > low) & (covariance < high)
    if excluded is not None:
        allowed = allowed & ~excluded
    candidates = allowed.flatten().nonzero().squeeze(-1)
    order = torch.randperm(candidates.numel(), generator=generator).to(candidates.device)
    return _as_mask(candidates[order[: _count(fraction, int(mask.sum()))]], log_probs)


def kl_cov_selection(
    log_probs: Tensor,
    old_log_probs: Tensor,  # noqa: ARG001 - selections share one signature
    advantages: Tensor,
    response_mask: Tensor,
    *,
    generator: torch.Generator,  # noqa: ARG001
    fraction: float = 0.0002,
) -> Tensor:
    """The tokens that ``kl_cov`` penalises in a mini-batch; arguments and result as for ``clip_cov_selection``."""
    return select_largest_covariance(log_probs, advantages, response_mask, fraction=fraction)


def clip_cov_selection(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    generator: torch.Generator,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    fraction: float = 0.0002,
    covariance_range: tuple[float, float] = (1.0, 5.0),
) -> Tensor:
    """The tokens that ``clip_cov`` drops from a mini-batch, among those that the clip leaves alone.

    Args:
        log_probs: of the whole mini-batch, by the policy as it is before its optimizer step.
        old_log_probs: same shape.
        advantages: same shape.
        response_mask: same shape.
        generator: source of the choice.
        clip_low: as for ``clip_cov``, like the next three.
        clip_high: see there.
        fraction: see there.
        covariance_range: see there.

    Returns:
        bool, in the shape of ``log_probs``.
    """
    ratio = PolicyInputs.check(log_probs, old_log_probs, advantages, response_mask, None).ratio
    clipped = ((advantages < 0) & (ratio < 1 - clip_low)) | ((advantages > 0) & (ratio > 1 + clip_high))
    return sample_covariance_range(
        log_probs,
        advantages,
        response_mask,
        fraction=fraction,
        covariance_range=covariance_range,
        excluded=clipped,
        generator=generator,
    )


def _count(fraction: float, num_tokens: int) -> int:
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction must lie between 0 and 1, got {fraction}.")
    return max(int(num_tokens * fraction), 1) if fraction > 0 else 0


def _as_mask(chosen: Tensor, like: Tensor) -> Tensor:
    flat = torch.zeros(like.numel(), dtype=torch.bool, device=like.device)
    flat[chosen] = True
    return flat.reshape(like.shape)
