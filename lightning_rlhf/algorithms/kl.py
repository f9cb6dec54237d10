"""Per-token estimates of the KL divergence between the policy and a reference (Schulman, "Approximating KL")."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

KLEstimator: TypeAlias = Literal["k1", "k2", "k3", "abs", "k3+"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within this bound before they are exponentiated: e^20 is far outside any trust region, and
beyond e^88 fp32 overflows and turns a gradient of 0 into NaN."""


def as_float(values: Tensor) -> Tensor:
    """The same values in fp32, or untouched if they are float64."""
    return values if values.dtype == torch.float64 else values.float()


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, estimator: KLEstimator) -> Tensor:
    r"""Estimates :math:`KL(\pi \| \pi_{ref})` at each token drawn from :math:`\pi`.

    With :math:`d = \log\pi - \log\pi_{ref}`:

    * ``k1``: :math:`d`, unbiased, may be negative;
    * ``k2``: :math:`d^2 / 2`, whose gradient is that of the KL divergence;
    * ``k3``: :math:`e^{-d} + d - 1`, unbiased, never negative;
    * ``abs``: :math:`|d|`;
    * ``k3+``: the value of k3 with the gradient of k2 (straight through).

    Args:
        log_probs: any shape, nats, by the policy; gradients flow through it.
        ref_log_probs: same shape, by the reference.
        estimator: which of the above.

    Returns:
        Same shape, unweighted, fp32 (float64 for float64 log-probs). Where the policy gives a token less than
        :math:`e^{-20}` of the reference's probability, k3 stays at its value there.

    Raises:
        ValueError: for different shapes or an unknown estimator.
    """
    if log_probs.shape != ref_log_probs.shape:
        raise ValueError(
            f"log_probs {tuple(log_probs.shape)} and ref_log_probs {tuple(ref_log_probs.shape)} must have one shape."
        )
    difference = as_float(log_probs) - as_float(ref_log_probs)
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return _k3(difference)
    if estimator == "k3+":
        k2 = difference.square() / 2
        return k2 + (_k3(difference) - k2).detach()
    raise ValueError(f"Unknown KL estimator {estimator!r}; expected one of {', '.join(get_args(KLEstimator))}.")


def _k3(difference: Tensor) -> Tensor:
    bounded = difference.clamp(min=-MAX_LOG_RATIO)  # e^-d overflows on this side alone
    # expm1 keeps the digits of a small difference, where exp(x) - 1 - x cancels
    return (-bounded).expm1() + bounded
