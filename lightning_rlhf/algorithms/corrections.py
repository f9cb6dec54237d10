r"""The gap between the engine that sampled the tokens and the trainer that scores them: how wide, and what to do.

A correction is a weight per token, without gradient, by which a policy loss's terms are multiplied. The denominators
of the loss stay what they are, so a token or sequence with weight 0 pulls the loss towards 0; it does not hand its
share to the others. With :math:`\rho_t = \pi_{trainer} / \pi_{rollout}` of a token, a sequence's ratio is the product
of its tokens', its geometric ratio the geometric mean.
"""

from __future__ import annotations

import math

from torch import Tensor

from lightning_rlhf.algorithms.kl import MAX_LOG_RATIO, as_float, kl_penalty
from lightning_rlhf.algorithms.sequences import sequence_means, sequence_sums, spread
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


def correction_metrics(
    weights: Tensor, log_probs_trainer: Tensor, rollout_log_probs: Tensor, mask: Tensor
) -> dict[str, Metric]:
    r"""What a correction does to the tokens, and how badly it is needed.

    Args:
        weights: any shape, of the correction.
        log_probs_trainer: same shape, nats, by the trainer before the update.
        rollout_log_probs: same shape, as the rollout engine reported them.
        mask: same shape, the tokens that train.

    Returns:
        ``correction_weight_mean`` and ``correction_weight_square_mean``, from which ``effective_sample_size`` follows
        once all parts are joined; ``correction_kept_fraction``, the share of tokens whose weight is not 0; and
        ``mismatch_chi_square``, :math:`E[\rho^2] - 1` over the tokens, before any correction.

    Raises:
        ValueError: for different shapes.
    """
    _check_shapes(log_probs_trainer, rollout_log_probs, mask)
    mask, weights = mask.bool(), weights.detach().double()
    ratio = _token_ratio(log_probs_trainer, rollout_log_probs, mask).clamp(max=_LARGEST_WEIGHT)
    return {
        "correction_weight_mean": Metric.mean(weights, mask),
        "correction_weight_square_mean": Metric.mean(weights.square(), mask),
        "correction_kept_fraction": Metric.mean((weights != 0).float(), mask),
        "mismatch_chi_square": Metric.mean(ratio.square() - 1, mask),
    }


def effective_sample_size(weight_mean: float, weight_square_mean: float) -> float:
    r"""Kish's effective sample size as a share of the tokens, :math:`E[w]^2 / E[w^2]`: 1 for equal weights, 0 for none.

    Args:
        weight_mean: over all tokens.
        weight_square_mean: mean of the squares over all tokens.
    """
    return weight_mean**2 / weight_square_mean if weight_square_mean > 0 else 0.0


def token_tis(log_probs_trainer: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, cap: float = 2.0) -> Tensor:
    r"""Truncated importance weights per token, :math:`\min(\pi_{trainer} / \pi_{rollout}, C)` (Ionides 2008).

    Multiplying a loss's terms by them corrects for tokens that were sampled by an engine whose log-probs differ.

    Args:
        log_probs_trainer: any shape, nats, by the trainer before the update.
        rollout_log_probs: same shape, as the rollout engine reported them.
        mask: same shape, the sampled tokens.
        cap: :math:`C`, the largest weight.

    Returns:
        Same shape, fp32 (float64 for float64 log-probs), without gradient, 0 off the mask; never above
        :math:`e^{20}`.

    Raises:
        ValueError: for different shapes or a cap that is not positive.
    """
    _check_shapes(log_probs_trainer, rollout_log_probs, mask)
    _check_cap(cap)
    ratio = _token_ratio(log_probs_trainer, rollout_log_probs, mask)
    return _as_weights(ratio.clamp(max=cap), log_probs_trainer, mask)


def sequence_tis(
    log_probs_trainer: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    cap: float = 2.0,
) -> Tensor:
    r"""Truncated importance weight per sequence, :math:`\min(\prod_t \rho_t, C)`, at each of its tokens.

    Unbiased but for the truncation, where ``token_tis`` is biased; its variance grows with the length.

    Args:
        log_probs_trainer: padded ``[B, T]`` or flat, nats, by the trainer before the update.
        rollout_log_probs: same shape, as the rollout engine reported them.
        mask: same shape, the sampled tokens.
        cu_seqlens: ``[B+1]``, needed by the flat layout.
        cap: :math:`C`, the largest weight.

    Returns:
        As for ``token_tis``.

    Raises:
        ValueError: as for ``token_tis``, or for a flat layout without ``cu_seqlens``.
    """
    _check_cap(cap)
    ratio = _sequence_ratio(log_probs_trainer, rollout_log_probs, mask, cu_seqlens)
    return _at_tokens(ratio.clamp(max=cap), log_probs_trainer, mask, cu_seqlens)


def icepop(
    log_probs_trainer: Tensor, rollout_log_probs: Tensor, mask: Tensor, *, low: float = 0.5, high: float = 2.0
) -> Tensor:
    r"""IcePop (Ring-1T, arXiv:2510.18855): :math:`\rho_t` within ``[low, high]``, else 0: an outlier does not train.

    Args:
        log_probs_trainer: as for ``token_tis``, like the next two.
        rollout_log_probs: see there.
        mask: see there.
        low: smallest ratio that trains.
        high: largest; the paper has 5.

    Returns:
        As for ``token_tis``.

    Raises:
        ValueError: for different shapes, or bounds that are not ``0 <= low <= high``.
    """
    _check_shapes(log_probs_trainer, rollout_log_probs, mask)
    _check_range(low, high)
    ratio = _token_ratio(log_probs_trainer, rollout_log_probs, mask)
    return _as_weights(ratio.masked_fill((ratio < low) | (ratio > high), 0), log_probs_trainer, mask)


def sequence_mask(
    log_probs_trainer: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    low: float = 0.5,
    high: float = 2.0,
) -> Tensor:
    r"""1 for sequences whose ratio :math:`\prod_t \rho_t` lies within ``[low, high]``, else 0; nothing is reweighted.

    Args:
        log_probs_trainer: as for ``sequence_tis``, like the next three.
        rollout_log_probs: see there.
        mask: see there.
        cu_seqlens: see there.
        low: smallest ratio that trains.
        high: largest.

    Returns:
        As for ``token_tis``.

    Raises:
        ValueError: as for ``sequence_tis``, or for bounds that are not ``0 <= low <= high``.
    """
    _check_range(low, high)
    ratio = _sequence_ratio(log_probs_trainer, rollout_log_probs, mask, cu_seqlens)
    return _at_tokens((ratio >= low) & (ratio <= high), log_probs_trainer, mask, cu_seqlens)


def geometric_mask(
    log_probs_trainer: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    low: float = 0.99,
    high: float = 1.01,
) -> Tensor:
    r"""1 for sequences whose :math:`\exp(\mathrm{mean}_t \log\rho_t)` lies within ``[low, high]``, else 0.

    Does not tighten with the length, as ``sequence_mask`` does. Arguments, result and errors as there.
    """
    _check_range(low, high)
    ratio = _sequence_ratio(log_probs_trainer, rollout_log_probs, mask, cu_seqlens, geometric=True)
    return _at_tokens((ratio >= low) & (ratio <= high), log_probs_trainer, mask, cu_seqlens)


def veto(
    log_probs_trainer: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    threshold: float = 1e-4,
) -> Tensor:
    r"""0 for a sequence in which any token's :math:`\rho_t` is below ``threshold``, else 1.

    The trainer all but excludes such a token: what follows it is no sample of the trainer's policy.

    Args:
        log_probs_trainer: as for ``sequence_tis``, like the next three.
        rollout_log_probs: see there.
        mask: see there.
        cu_seqlens: see there.
        threshold: the ratio, above 0.

    Returns:
        As for ``token_tis``.

    Raises:
        ValueError: as for ``sequence_tis``, or for a threshold that is not positive.
    """
    if threshold <= 0:
        raise ValueError(f"threshold must be positive, got {threshold}.")
    _check_shapes(log_probs_trainer, rollout_log_probs, mask)
    ratio = _token_ratio(log_probs_trainer, rollout_log_probs, mask)
    offences = sequence_sums((ratio < threshold).to(ratio.dtype), mask.bool(), cu_seqlens)
    return _at_tokens(offences == 0, log_probs_trainer, mask, cu_seqlens)


_LARGEST_WEIGHT = math.exp(MAX_LOG_RATIO)
_LARGEST_EXPONENT = 700.0
"""float64 holds e^700: bounds are compared with the ratio as it is, however far it has gone."""


def _token_ratio(log_probs_trainer: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """``rho`` per token, float64, 1 off the mask."""
    difference = log_probs_trainer.detach().double() - rollout_log_probs.detach().double()
    return difference.masked_fill(~mask.bool(), 0).clamp(max=_LARGEST_EXPONENT).exp()


def _sequence_ratio(
    log_probs_trainer: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    *,
    geometric: bool = False,
) -> Tensor:
    """``[B]`` float64: product, or geometric mean, of the tokens' ratios."""
    _check_shapes(log_probs_trainer, rollout_log_probs, mask)
    difference = log_probs_trainer.detach().double() - rollout_log_probs.detach().double()
    join = sequence_means if geometric else sequence_sums
    return join(difference, mask.bool(), cu_seqlens).clamp(max=_LARGEST_EXPONENT).exp()


def _at_tokens(per_sequence: Tensor, like: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    return _as_weights(spread(per_sequence, like, cu_seqlens).double(), like, mask)


def _as_weights(weights: Tensor, like: Tensor, mask: Tensor) -> Tensor:
    """In fp32, or float64 if the log-probs are; 0 off the mask."""
    return weights.clamp(max=_LARGEST_WEIGHT).to(as_float(like).dtype).masked_fill(~mask.bool(), 0)


def _check_cap(cap: float) -> None:
    if cap <= 0:
        raise ValueError(f"cap must be positive, got {cap}.")


def _check_range(low: float, high: float) -> None:
    if not 0 <= low <= high:
        raise ValueError(f"low and high bound a ratio: 0 <= low <= high; got {low} and {high}.")


def _check_shapes(log_probs_trainer: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> None:
    shapes = [tuple(tensor.shape) for tensor in (log_probs_trainer, rollout_log_probs, mask)]
    if len(set(shapes)) != 1:
        raise ValueError(
            f"log_probs_trainer {shapes[0]}, rollout_log_probs {shapes[1]} and mask {shapes[2]} must have one shape."
        )
