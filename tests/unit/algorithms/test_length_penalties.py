"""What a length adds to a reward, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_rlhf.algorithms import length_penalties

REWARDS = torch.tensor([1.0, 1.0, 0.0, 0.0, math.nan, 1.0, 0.0], dtype=torch.float64)
UIDS = ["a", "a", "a", "a", "a", "b", "b"]
LENGTHS = torch.tensor([10, 30, 20, 50, 90, 7, 7])


def test_linear_by_hand() -> None:
    found = length_penalties.linear(REWARDS, UIDS, LENGTHS, per_token=0.01)
    assert found.tolist() == pytest.approx([-0.1, -0.3, -0.2, -0.5, 0.0, -0.07, -0.07])


def test_relative_by_hand() -> None:
    """Lengths 10 to 50 without the failed row: 0.5, 0, 0.25, -0.5; a wrong one earns nothing by being short."""
    found = length_penalties.relative(REWARDS, UIDS, LENGTHS, weight=2.0)
    assert found.tolist() == pytest.approx([1.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0])
    stricter = length_penalties.relative(REWARDS, UIDS, LENGTHS, correct_above=1.0)
    assert stricter.tolist() == pytest.approx([0.0, 0.0, 0.0, -0.5, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("name", ["linear", "relative"])
def test_the_order_of_rows_changes_nothing_and_rewards_in_fp32_give_fp32(name: str) -> None:
    penalty = getattr(length_penalties, name)
    order = torch.tensor([6, 3, 0, 5, 1, 4, 2])
    shuffled = penalty(REWARDS[order], [UIDS[row] for row in order.tolist()], LENGTHS[order])
    assert torch.equal(shuffled, penalty(REWARDS, UIDS, LENGTHS)[order])
    assert penalty(REWARDS.float(), UIDS, LENGTHS).dtype == torch.float32


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValueError, match="per_token is a price"):
        length_penalties.linear(REWARDS, UIDS, LENGTHS, per_token=-1.0)
    with pytest.raises(ValueError, match="weight must not be negative"):
        length_penalties.relative(REWARDS, UIDS, LENGTHS, weight=-1.0)
    with pytest.raises(ValueError, match=r"lengths must have shape \(7,\), got \(2,\)"):
        length_penalties.linear(REWARDS, UIDS, LENGTHS[:2])
