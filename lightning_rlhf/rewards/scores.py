"""What scoring gives, row by row and reward by reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lightning_rlhf.metrics import Metric

FailureCause: TypeAlias = Literal["error", "wall", "cpu", "memory"]


class RewardBrokenError(RuntimeError):
    """Raised by a reward that cannot score anything; it ends the run, where another error fails its rows."""


@dataclass(frozen=True)
class Failure:
    """In place of a row's number: the reward has no verdict on it, and why. The row does not train.

    Attributes:
        reason: for people, for example ``"over its limit of 5 s"``.
        cause: for programs: ``wall``, ``cpu`` or ``memory`` for a limit that was passed, else ``error``.
    """

    reason: str
    cause: FailureCause = "error"


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What ``score`` gives.

    Attributes:
        rewards: ``[B]`` fp32, NaN where the reward failed.
        num_failed: number of NaN rows.
        errors: the first failures, each with its row, the reward's name and the reason.
        components: by name, ``[B]`` fp32, unweighted: one entry for a single reward, one each for weighted ones.
        weights: by the same names.
        failures: by the same names, the rows on which that reward failed.
    """

    rewards: Tensor
    num_failed: int
    errors: list[str]
    components: dict[str, Tensor]
    weights: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)

    @property
    def component_names(self) -> list[str]:
        """``[num_rewards]``, the columns of ``component_matrix``."""
        return list(self.components)

    @property
    def component_matrix(self) -> Tensor:
        """``[B, num_rewards]`` fp32, unweighted, NaN where that reward failed on that row."""
        return torch.stack(list(self.components.values()), dim=1)


def component_metrics(components: Mapping[str, Tensor]) -> dict[str, Metric]:
    """Metrics of several rewards apart, to be joined over ranks.

    Args:
        components: by name, ``[B]`` fp32 of this rank's rows, NaN where that reward failed.

    Returns:
        ``reward/<name>``, the mean over rows that have one, and ``reward/<name>/failed``, the rows that have none.
    """
    metrics: dict[str, Metric] = {}
    for name, values in components.items():
        metrics[f"reward/{name}"] = Metric.mean(values)
        metrics[f"reward/{name}/failed"] = Metric.sum(values.isnan().double())
    return metrics
