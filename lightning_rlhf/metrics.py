"""Metrics that survive any split: each value declares how it is joined over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

Reduction = Literal["sum", "mean", "min", "max"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A partial metric: a value over some of the tokens, sequences or micro-batches.

    Attributes:
        value: scalar float64; for ``mean`` the weighted sum so far.
        weight: scalar float64; for ``mean`` the sum of weights, else the number of values seen.
        reduction: how parts are joined.
    """

    value: Tensor
    weight: Tensor
    reduction: Reduction

    @classmethod
    def sum(cls, values: Tensor) -> Metric:
        """The plain sum; a NaN in it stays visible."""
        values = values.detach().double()
        return cls(value=values.sum(), weight=_count(values), reduction="sum")

    @classmethod
    def mean(cls, values: Tensor, mask: Tensor | None = None) -> Metric:
        """Mean of the finite-or-infinite values where ``mask``; NaN entries are left out of both sums."""
        values = _observed(values, mask)
        return cls(value=values.sum(), weight=_count(values), reduction="mean")

    @classmethod
    def min(cls, values: Tensor, mask: Tensor | None = None) -> Metric:
        """Smallest value where ``mask``, NaN left out; infinity if there is none."""
        values = _observed(values, mask)
        neutral = values.new_full((1,), math.inf)
        return cls(value=torch.cat([values, neutral]).min(), weight=_count(values), reduction="min")

    @classmethod
    def max(cls, values: Tensor, mask: Tensor | None = None) -> Metric:
        """Largest value where ``mask``, NaN left out; minus infinity if there is none."""
        values = _observed(values, mask)
        neutral = values.new_full((1,), -math.inf)
        return cls(value=torch.cat([values, neutral]).max(), weight=_count(values), reduction="max")

    @classmethod
    def of(cls, value: Tensor) -> Metric:
        """One value, to be averaged with others of its kind; unlike in ``mean`` a NaN stays visible."""
        value = value.detach().double()
        return cls(value=value, weight=torch.ones_like(value), reduction="mean")

    def merge(self, other: Metric) -> Metric:
        """Joins two parts of the same metric.

        Raises:
            ValueError: if the two declare different reductions.
        """
        if self.reduction != other.reduction:
            raise ValueError(f"Cannot join a metric reduced by {self.reduction!r} with one by {other.reduction!r}.")
        if self.reduction in ("sum", "mean"):
            value = self.value + other.value
        else:
            value = (torch.minimum if self.reduction == "min" else torch.maximum)(self.value, other.value)
        return Metric(value=value, weight=self.weight + other.weight, reduction=self.reduction)

    def compute(self) -> float | None:
        """The joined value, or None if nothing was observed (a mean, min or max over no value)."""
        if self.reduction == "sum":
            return float(self.value)
        if float(self.weight) == 0.0:
            return None
        return float(self.value / self.weight) if self.reduction == "mean" else float(self.value)


def _observed(values: Tensor, mask: Tensor | None) -> Tensor:
    values = values.detach().double().reshape(-1)
    keep = ~values.isnan() if mask is None else ~values.isnan() & mask.reshape(-1).bool()
    return values[keep]


def _count(values: Tensor) -> Tensor:
    return torch.tensor(float(values.numel()), dtype=torch.float64, device=values.device)


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Joins the metrics of several micro-batches, by name."""
    joined: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            joined[name] = joined[name].merge(metric) if name in joined else metric
    return joined


def join_ranks(
    metrics: Mapping[str, Metric], group: dist.ProcessGroup | None = None, *, distributed: bool = False
) -> dict[str, Metric]:
    """Joins metrics over the ranks of ``group`` with two collectives, whatever their number.

    Every rank must hold the same names; a loss function gives them all, also for an empty micro-batch.

    Args:
        metrics: this rank's parts.
        group: data-parallel group; None means the default group.
        distributed: False keeps the parts local (one process).
    """
    names = sorted(metrics)
    if not distributed or not names:
        return dict(metrics)
    summed = torch.stack(
        [
            torch.stack([m.value if m.reduction in ("sum", "mean") else torch.zeros_like(m.value), m.weight])
            for m in (metrics[name] for name in names)
        ]
    )
    # minimum of -x is the maximum: one collective serves min and max
    extremes = torch.stack([-metrics[n].value if metrics[n].reduction == "max" else metrics[n].value for n in names])
    dist.all_reduce(summed, group=group)
    dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=group)
    joined = {}
    for row, name in enumerate(names):
        reduction = metrics[name].reduction
        extreme = -extremes[row] if reduction == "max" else extremes[row]
        value = summed[row, 0] if reduction in ("sum", "mean") else extreme
        joined[name] = Metric(value=value, weight=summed[row, 1], reduction=reduction)
    return joined


def compute_metrics(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Name to value, without those that observed nothing."""
    computed = {name: metric.compute() for name, metric in metrics.items()}
    return {name: value for name, value in computed.items() if value is not None}


def reduce_metrics(
    metrics: Mapping[str, Metric], group: dist.ProcessGroup | None = None, *, distributed: bool = False
) -> dict[str, float]:
    """``join_ranks`` and ``compute_metrics`` in one."""
    return compute_metrics(join_ranks(metrics, group, distributed=distributed))
