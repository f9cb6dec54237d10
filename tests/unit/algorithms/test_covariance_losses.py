from __future__ import annotations

import math

import pytest
import torch

from lightning_rlhf.algorithms import losses
from lightning_rlhf.algorithms.covariance_losses import (
    sample_covariance_range,
    select_largest_covariance,
    token_covariance,
)

# means over the mask: log-prob -2, advantage 0.5; deviations (1, -1, 0) and (1.5, -0.5, -1)
LOG_PROBS = torch.tensor([-1.0, -3.0, -2.0, math.nan])
OLD = torch.tensor([-1.5, -3.0, -2.2, math.nan])
ADVANTAGES = torch.tensor([2.0, 0.0, -0.5, math.nan])
MASK = torch.tensor([True, True, True, False])


def test_covariance_by_hand_leaves_out_what_is_off_the_mask() -> None:
    assert token_covariance(LOG_PROBS, ADVANTAGES, MASK).tolist() == pytest.approx([1.5, 0.5, 0.0, 0.0])


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [
        (0.0, [False, False, False, False]),
        (0.01, [True, False, False, False]),
        (0.67, [True, True, False, False]),
        (1.0, [True, True, True, False]),
    ],
)
def test_largest_covariance(fraction: float, expected: list[bool]) -> None:
    assert select_largest_covariance(LOG_PROBS, ADVANTAGES, MASK, fraction=fraction).tolist() == expected


def test_sampling_stays_in_the_range_and_off_excluded_tokens() -> None:
    def sample(low: float, high: float, excluded: list[bool] | None = None) -> list[bool]:
        where = None if excluded is None else torch.tensor(excluded)
        return sample_covariance_range(
            LOG_PROBS, ADVANTAGES, MASK, fraction=1.0, covariance_range=(low, high), excluded=where
        ).tolist()

    assert sample(0.2, 1.0) == [False, True, False, False]
    assert sample(0.2, 9.0) == [True, True, False, False]
    assert sample(0.2, 9.0, [True, False, False, False]) == [False, True, False, False]
    assert sample(5.0, 9.0) == [False] * 4


def test_sampling_is_reproducible_and_takes_the_asked_share() -> None:
    log_probs, advantages = torch.linspace(-3, -1, 100), torch.linspace(-1, 1, 100)
    mask = torch.ones(100, dtype=torch.bool)

    def sample(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return sample_covariance_range(
            log_probs, advantages, mask, fraction=0.1, covariance_range=(0.1, 9.0), generator=generator
        )

    assert torch.equal(sample(0), sample(0))
    assert not torch.equal(sample(0), sample(1))
    assert int(sample(0).sum()) == 10


def test_kl_cov_adds_the_penalty_on_selected_tokens_alone() -> None:
    terms = losses.kl_cov(LOG_PROBS, OLD, ADVANTAGES, MASK, coefficient=0.1).terms.tolist()
    expected = [-2 * math.exp(0.5) + 0.05, 0.0, 0.5 * math.exp(0.2), 0.0]
    assert terms == pytest.approx(expected, rel=1e-5)


def test_clip_cov_drops_selected_tokens_and_clips_the_rest() -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    output = losses.clip_cov(
        log_probs, OLD, ADVANTAGES, MASK, clip_high=0.1, fraction=1.0, covariance_range=(-0.1, 9.0)
    )
    output.terms.sum().backward()
    # token 0 is clipped (1.65 > 1.1), so it is left to the clip; tokens 1 and 2 are chosen
    assert output.terms.tolist() == pytest.approx([-2.2, 0.0, 0.0, 0.0])
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert output.metrics["selected_fraction"].compute() == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", ["kl_cov", "clip_cov"])
def test_a_choice_made_before_the_split_gives_the_terms_of_the_whole(name: str) -> None:
    log_probs, old, advantages, mask = LOG_PROBS[:3], OLD[:3], ADVANTAGES[:3], MASK[:3]
    selected = select_largest_covariance(log_probs, advantages, mask, fraction=0.4)
    loss = getattr(losses, name)
    whole = loss(log_probs, old, advantages, mask, selected=selected).terms
    parts = [
        loss(log_probs[i : i + 1], old[i : i + 1], advantages[i : i + 1], mask[i : i + 1], selected=selected[i : i + 1])
        for i in range(3)
    ]
    assert torch.equal(torch.cat([part.terms for part in parts]), whole)
