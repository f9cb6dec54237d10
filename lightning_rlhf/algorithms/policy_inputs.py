"""What every policy loss starts from: its inputs checked, cleaned off the mask, and their probability ratio."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rlhf.algorithms.kl import MAX_LOG_RATIO, as_float
from lightning_rlhf.algorithms.sequences import num_sequences
from lightning_rlhf.metrics import Metric
from lightning_rlhf.types import LossOutput


@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
    """Inputs of a policy loss in one shape, padded ``[B, T]`` or flat ``[num_tokens]``; all 0 off the mask.

    Whatever stood off the mask (padding, prompt, NaN) is gone, so it reaches neither a term nor a gradient.

    Attributes:
        log_probs: fp32 or float64, nats, differentiable.
        old_log_probs: by the trainer before the update, without gradient.
        advantages: without gradient.
        mask: bool.
        difference: ``log_probs - old_log_probs``, differentiable.
        log_ratio: ``difference`` within ±20.
        ratio: ``exp(log_ratio)``, differentiable.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    difference: Tensor
    log_ratio: Tensor
    ratio: Tensor

    @classmethod
    def check(
        cls,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        cu_seqlens: Tensor | None,
    ) -> PolicyInputs:
        """Checks shapes, cleans what is off the mask, and forms the ratio.

        Raises:
            ValueError: if the four differ in shape: broadcasting one of them would hide a mistake.
        """
        check_shapes(
            cu_seqlens,
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            advantages=advantages,
            response_mask=response_mask,
        )
        mask = response_mask.bool()
        log_probs, old_log_probs, advantages = (
            as_float(tensor).masked_fill(~mask, 0)
            for tensor in (log_probs, old_log_probs.detach(), advantages.detach())
        )
        difference = log_probs - old_log_probs
        log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return cls(
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            advantages=advantages,
            mask=mask,
            difference=difference,
            log_ratio=log_ratio,
            ratio=log_ratio.exp(),
        )

    def output(
        self,
        terms: Tensor,
        *,
        ratio: Tensor | None = None,
        clipped_low: Tensor | None = None,
        clipped_high: Tensor | None = None,
    ) -> LossOutput:
        """Terms with the metrics that every policy loss reports, under the same names for any batch.

        Args:
            terms: per token, unweighted.
            ratio: the ratio that the loss clips, if it is not the token's.
            clipped_low: tokens without gradient since their ratio fell too far; None: the loss has no such bound.
            clipped_high: tokens without gradient since their ratio rose too far.
        """
        ratio = self.ratio if ratio is None else ratio
        never = torch.zeros_like(self.mask)
        metrics = {
            "ratio_mean": Metric.mean(ratio, self.mask),
            "ratio_min": Metric.min(ratio, self.mask),
            "ratio_max": Metric.max(ratio, self.mask),
            "clip_fraction_low": Metric.mean((never if clipped_low is None else clipped_low).float(), self.mask),
            "clip_fraction_high": Metric.mean((never if clipped_high is None else clipped_high).float(), self.mask),
            # the tokens were drawn from the old policy: k3 of KL(old || new), never negative
            "approx_kl": Metric.mean(self.log_ratio.detach().expm1() - self.log_ratio.detach(), self.mask),
        }
        return LossOutput(terms=terms.masked_fill(~self.mask, 0), metrics=metrics)


def check_shapes(cu_seqlens: Tensor | None, **tensors: Tensor) -> None:
    """Refuses tensors of different shapes, and ``cu_seqlens`` that does not belong to them.

    Raises:
        ValueError: naming every shape.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"Per-token tensors must have one shape, padded [B, T] or flat [num_tokens]; got {listed}.")
    if cu_seqlens is not None:
        num_sequences(next(iter(tensors.values())), cu_seqlens)


def check_bounds(clip_low: float, clip_high: float) -> None:
    """Refuses negative clip bounds; both are distances.

    Raises:
        ValueError: naming both.
    """
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"clip_low and clip_high are distances and must not be negative, got {clip_low}, {clip_high}.")


def check_cap(ratio_cap: float) -> None:
    """Refuses a cap of importance weights that is not positive.

    Raises:
        ValueError: naming it.
    """
    if ratio_cap <= 0:
        raise ValueError(f"ratio_cap must be positive, got {ratio_cap}.")
