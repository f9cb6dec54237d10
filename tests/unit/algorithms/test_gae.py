from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.ragged import Ragged, few_examples, ragged
from torch import Tensor

from lightning_rlhf.algorithms.advantages import gae

REWARDS = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
VALUES = torch.tensor([[0.1, 0.2, 0.3, 0.4]])


def test_agrees_with_independent_libraries() -> None:
    advantages, returns = gae(REWARDS, VALUES, torch.ones(1, 4), gamma=0.99, lam=0.95)
    assert advantages[0].tolist() == pytest.approx([0.773290, 0.718012, 0.660300, 0.6], abs=1e-6)
    assert returns[0].tolist() == pytest.approx([0.873290, 0.918012, 0.960300, 1.0], abs=1e-6)


def test_an_observation_is_skipped_rather_than_zeroed() -> None:
    mask = torch.tensor([[1, 1, 0, 1]])
    advantages, returns = gae(REWARDS, VALUES, mask, gamma=0.99, lam=0.95)
    assert advantages[0].tolist() == pytest.approx([0.813062, 0.7603, 0.0, 0.6], abs=1e-6)
    assert returns[0, 2].item() == 0.0


@pytest.mark.parametrize("masked_value", [100.0, 0.0, math.nan, math.inf])
def test_a05_a_masked_value_is_never_bootstrapped_from(masked_value: float) -> None:
    rewards, values = torch.tensor([[0.0, 1.0, math.nan]]), torch.tensor([[0.2, 0.4, masked_value]])
    advantages, returns = gae(rewards, values, torch.tensor([[1, 1, 0]]), gamma=1.0, lam=0.95)
    assert advantages[0].tolist() == pytest.approx([0.77, 0.6, 0.0])
    assert returns[0].tolist() == pytest.approx([0.97, 1.0, 0.0])


def naive_row(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """By the definition: each advantage is the discounted sum of all later errors."""
    n = len(rewards)
    errors = [rewards[t] + (gamma * values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, n)) for t in range(n)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(case=ragged(), gamma=st.sampled_from([1.0, 0.99, 0.5, 0.0]), lam=st.sampled_from([1.0, 0.95, 0.0]))
@few_examples
def test_matches_the_definition_on_the_masked_tokens_alone(
    dtype: torch.dtype, case: Ragged, gamma: float, lam: float
) -> None:
    width = max(case.lengths) + 2
    rewards, values = (case.padded(t, width=width, fill=9.0).to(dtype) for t in (case.advantages, case.log_probs))
    mask = case.padded(case.mask, width=width)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    assert advantages.dtype == dtype
    for row in range(len(case.lengths)):
        on = mask[row]
        expected = naive_row(rewards[row][on].tolist(), values[row][on].tolist(), gamma, lam)
        assert advantages[row][on].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert not advantages[row][~on].any()
        torch.testing.assert_close(returns[row][on], advantages[row][on] + values[row][on])


def test_no_gradient_flows_into_the_critic() -> None:
    values = VALUES.clone().requires_grad_()
    advantages, returns = gae(REWARDS, values, torch.ones(1, 4), gamma=1.0, lam=1.0)
    assert not advantages.requires_grad
    assert not returns.requires_grad


@pytest.mark.parametrize(
    ("values", "gamma", "message"),
    [
        (VALUES[0], 1.0, r"share one padded shape"),
        (VALUES[:, :3], 1.0, r"values \(1, 3\)"),
        (VALUES, 1.5, "between 0 and 1, got 1.5"),
    ],
)
def test_refuses(values: Tensor, gamma: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gae(REWARDS, values, torch.ones(1, 4), gamma=gamma, lam=0.95)
