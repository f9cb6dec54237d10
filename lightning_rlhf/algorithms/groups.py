"""Statistics of the groups of a batch: rows that share a uid, wherever they lie."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

UIDs: TypeAlias = Sequence[Hashable] | Tensor
"""Identities of the prompts of ``B`` rollouts; a tensor counts by value."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Rewards by group; every result is given per row, ``[B]`` float64.

    Rows without a finite reward belong to no statistic. Sums are taken in float64 and in order of value, so that they
    depend neither on where the rows lie nor on how many ranks held them.

    Attributes:
        rewards: ``[B]`` float64, 0 where the reward failed.
        valid: ``[B]`` bool, rows with a finite reward.
        index: ``[B]`` int64, number of the row's group.
        num_groups: number of groups.
    """

    rewards: Tensor
    valid: Tensor
    index: Tensor
    num_groups: int

    @classmethod
    def of(cls, rewards: Tensor, uids: UIDs) -> Groups:
        """Groups rows by equal uid.

        Args:
            rewards: ``[B]``; NaN or infinite where scoring failed.
            uids: ``B`` identities.

        Raises:
            ValueError: if rewards are not ``[B]`` or their number is not that of the uids.
        """
        if rewards.ndim != 1:
            raise ValueError(f"rewards must have shape [B], one per rollout, got {tuple(rewards.shape)}.")
        # tensors hash by object, so each row would be a group of its own
        listed = uids.tolist() if isinstance(uids, Tensor) else uids
        identities: list[Hashable] = [uid.item() if isinstance(uid, Tensor) else uid for uid in listed]
        if len(identities) != rewards.numel():
            raise ValueError(f"{rewards.numel()} rewards but {len(identities)} uids; every rollout needs its own.")
        numbers: dict[Hashable, int] = {}
        index = [numbers.setdefault(uid, len(numbers)) for uid in identities]
        values = rewards.detach().double()
        valid = values.isfinite()
        return cls(
            rewards=values.masked_fill(~valid, 0),
            valid=valid,
            index=torch.tensor(index, dtype=torch.int64, device=rewards.device),
            num_groups=len(numbers),
        )

    def sum(self, values: Tensor) -> Tensor:
        """Sum of ``values`` over the valid rows of each row's group."""
        kept = values.double().masked_fill(~self.valid, 0)
        order = kept.argsort()
        sums = kept.new_zeros(self.num_groups).index_add_(0, self.index[order], kept[order])
        return sums[self.index]

    @property
    def counts(self) -> Tensor:
        """Valid rows of each row's group."""
        return self.sum(torch.ones_like(self.rewards))

    @property
    def means(self) -> Tensor:
        """Mean reward of each row's group; 0 if no row of it is valid."""
        return self.sum(self.rewards) / self.counts.clamp(min=1)

    @property
    def stds(self) -> Tensor:
        """Sample standard deviation (n-1) of each row's group, in two passes; 0 for fewer than two valid rows."""
        squares = (self.rewards - self.means).square()
        return (self.sum(squares) / (self.counts - 1).clamp(min=1)).sqrt()

    def max(self, values: Tensor, where: Tensor | None = None) -> Tensor:
        """Largest of ``values`` over the valid rows (of ``where``) of each row's group; minus infinity for none."""
        allowed = self.valid if where is None else self.valid & where
        largest = self.rewards.new_full((self.num_groups,), -torch.inf)
        largest.scatter_reduce_(0, self.index, values.double().masked_fill(~allowed, -torch.inf), "amax")
        return largest[self.index]

    @property
    def equal(self) -> Tensor:
        """``[B]`` bool: the row's group has no two different rewards, so it says nothing about which one is better."""
        return self.max(self.rewards) <= -self.max(-self.rewards)

    def informative(self, advantages: Tensor, dtype: torch.dtype) -> Tensor:
        """``advantages``, exactly 0 for failed rows and for groups of equal rewards, whatever rounding left there."""
        return as_rewards(advantages.masked_fill(self.equal | ~self.valid, 0), dtype)


def as_rewards(advantages: Tensor, dtype: torch.dtype) -> Tensor:
    """``advantages`` in float64 if the rewards were, else in fp32."""
    return advantages if dtype == torch.float64 else advantages.float()
