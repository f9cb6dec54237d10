from __future__ import annotations

import math

import pytest
import torch

from lightning_rlhf.algorithms.corrections import mismatch_metrics, token_tis

TRAINER = torch.tensor([[-1.0, -0.5, -2.0, -0.1], [-0.7, -1.2, -0.3, -3.0]])
ROLLOUT = torch.tensor([[-1.3, -0.5, -2.0, -0.1], [-0.7, -2.4, -0.3, -3.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])


def test_token_tis_agrees_with_independent_libraries() -> None:
    weights = token_tis(TRAINER, ROLLOUT, MASK, cap=2.0)
    assert weights.flatten().tolist() == pytest.approx([1.349859, 1, 1, 0, 1, 2, 1, 1], abs=1e-6)


def test_token_tis_has_no_gradient_and_reads_nothing_off_the_mask() -> None:
    trainer = TRAINER.clone().masked_fill(MASK == 0, math.nan).requires_grad_()
    weights = token_tis(trainer, ROLLOUT, MASK)
    assert not weights.requires_grad
    assert weights[0, 3].item() == 0.0
    assert token_tis(torch.tensor([-1.0]), torch.tensor([-500.0]), torch.ones(1)).item() == 2.0


def test_mismatch_metrics_by_hand() -> None:
    values = {name: m.compute() for name, m in mismatch_metrics(TRAINER, ROLLOUT, MASK).items()}
    # seven tokens; trainer minus rollout is 0.3 at one and 1.2 at another
    assert values == pytest.approx(
        {
            "mismatch_abs_mean": 1.5 / 7,
            "mismatch_abs_max": 1.2,
            "mismatch_kl": (math.exp(0.3) - 0.3 - 1 + math.exp(1.2) - 1.2 - 1) / 7,
        },
        rel=1e-6,
    )


def test_mismatch_metrics_keep_their_names_for_an_empty_mask() -> None:
    empty = mismatch_metrics(TRAINER, ROLLOUT.masked_fill(MASK == 0, math.nan), torch.zeros_like(MASK))
    assert set(empty) == set(mismatch_metrics(TRAINER, ROLLOUT, MASK))
    assert [metric.compute() for metric in empty.values()] == [None, None, None]


def test_refuses() -> None:
    with pytest.raises(ValueError, match=r"mask \(2, 3\)"):
        mismatch_metrics(TRAINER, ROLLOUT, MASK[:, :3])
    with pytest.raises(ValueError, match="cap must be positive, got 0"):
        token_tis(TRAINER, ROLLOUT, MASK, cap=0.0)
