from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from lightning_rlhf.algorithms import corrections
from lightning_rlhf.algorithms.corrections import (
    correction_metrics,
    effective_sample_size,
    geometric_mask,
    icepop,
    mismatch_metrics,
    sequence_mask,
    sequence_tis,
    token_tis,
    veto,
)
from lightning_rlhf.metrics import merge_metrics

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


# --- golden: row 1's ratios are 1.349859, 1, 1; row 2's 1, 3.320117, 1, 1 --------------------------------------------


@pytest.mark.parametrize(
    ("correct", "expected"),
    [
        (sequence_tis, [1.349859, 1.349859, 1.349859, 0, 2, 2, 2, 2]),
        (icepop, [1.349859, 1, 1, 0, 1, 0, 1, 1]),
        (sequence_mask, [1, 1, 1, 0, 0, 0, 0, 0]),
        # the geometric means are exp(0.3 / 3) = 1.105 and exp(1.2 / 4) = 1.350
        (partial(geometric_mask, low=0.9, high=1.2), [1, 1, 1, 0, 0, 0, 0, 0]),
        (partial(geometric_mask, low=0.9, high=1.4), [1, 1, 1, 0, 1, 1, 1, 1]),
        (geometric_mask, [0] * 8),
        (veto, [1, 1, 1, 0, 1, 1, 1, 1]),
        (partial(veto, threshold=1.01), [0] * 8),
    ],
)
def test_corrections_agree_with_independent_libraries_and_by_hand(
    correct: Callable[..., Tensor], expected: list[float]
) -> None:
    assert correct(TRAINER, ROLLOUT, MASK).flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_veto_drops_the_sequence_of_one_impossible_token() -> None:
    trainer = TRAINER.clone()
    trainer[0, 1] = -12.0
    assert veto(trainer, ROLLOUT, MASK).tolist() == [[0, 0, 0, 0], [1, 1, 1, 1]]
    trainer[0, 1], trainer[0, 3] = -0.5, -12.0  # off the mask
    assert veto(trainer, ROLLOUT, MASK).sum() == 7


def naive(name: str, trainer: list[float], rollout: list[float]) -> list[float]:
    """One sequence, its sampled tokens alone."""
    ratios = [math.exp(t - r) for t, r in zip(trainer, rollout, strict=True)]
    product = math.prod(ratios)
    n = len(ratios)
    if name == "token_tis":
        return [min(ratio, 2.0) for ratio in ratios]
    if name == "icepop":
        return [ratio if 0.5 <= ratio <= 2.0 else 0.0 for ratio in ratios]
    one = {
        "sequence_tis": lambda: min(product, 2.0),
        "sequence_mask": lambda: float(0.5 <= product <= 2.0),
        "geometric_mask": lambda: float(0.99 <= product ** (1 / n) <= 1.01),
        "veto": lambda: float(all(ratio >= 1e-4 for ratio in ratios)),
    }[name]()
    return [one] * n


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["token_tis", "sequence_tis", "icepop", "sequence_mask", "geometric_mask", "veto"])
def test_corrections_are_a_naive_loop_padded_and_flat(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = [3, 7, 1, 12, 5, 9]
    trainer = torch.randn(6, 12, generator=generator, dtype=dtype)
    scale = torch.tensor([0.001, 0.3, 0.2, 0.002, 4.0, 0.1], dtype=dtype)[:, None]
    rollout = trainer - scale * torch.randn(6, 12, generator=generator, dtype=dtype)
    rollout[4, 2] = trainer[4, 2] + 11.0
    mask = torch.arange(12) < torch.tensor(lengths)[:, None]
    padded = getattr(corrections, name)(trainer.masked_fill(~mask, math.nan), rollout, mask)
    expected = [
        w for t, r, m in zip(trainer, rollout, mask, strict=True) for w in naive(name, t[m].tolist(), r[m].tolist())
    ]
    assert padded.dtype == dtype
    assert padded[mask].tolist() == pytest.approx(expected, rel=1e-5)
    assert (padded[~mask] == 0).all()
    ends = {} if name in ("token_tis", "icepop") else {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}
    flat = getattr(corrections, name)(trainer[mask], rollout[mask], mask[mask], **ends)
    assert torch.equal(flat, padded[mask])


def test_correction_metrics_by_hand_and_over_any_split() -> None:
    weights = token_tis(TRAINER, ROLLOUT, MASK)
    whole = correction_metrics(weights, TRAINER, ROLLOUT, MASK)
    values = {name: metric.compute() for name, metric in whole.items()}
    first, second = math.exp(0.3), math.exp(1.2)
    assert values == pytest.approx(
        {
            "correction_weight_mean": (first + 2 + 5) / 7,
            "correction_weight_square_mean": (first**2 + 4 + 5) / 7,
            "correction_kept_fraction": 1.0,
            "mismatch_chi_square": (first**2 + second**2 + 5) / 7 - 1,
        },
        rel=1e-6,
    )
    rows = [
        correction_metrics(weights[i : i + 1], TRAINER[i : i + 1], ROLLOUT[i : i + 1], MASK[i : i + 1]) for i in (0, 1)
    ]
    assert {name: m.compute() for name, m in merge_metrics(rows).items()} == pytest.approx(values, rel=1e-12)
    dropped = correction_metrics(icepop(TRAINER, ROLLOUT, MASK), TRAINER, ROLLOUT, MASK)
    assert dropped["correction_kept_fraction"].compute() == pytest.approx(6 / 7)


def test_effective_sample_size() -> None:
    assert effective_sample_size(1.0, 1.0) == 1.0
    assert effective_sample_size(0.5, 0.5) == 0.5  # half the tokens at weight 1, half dropped
    assert effective_sample_size(0.0, 0.0) == 0.0


@pytest.mark.parametrize(
    ("correct", "message"),
    [
        (partial(sequence_tis, cap=-1.0), "cap must be positive, got -1"),
        (partial(icepop, low=2.0, high=1.0), "got 2.0 and 1.0"),
        (partial(sequence_mask, low=-1.0), "got -1.0 and 2.0"),
        (partial(geometric_mask, low=3.0), "got 3.0 and 1.01"),
        (partial(veto, threshold=0.0), "threshold must be positive, got 0"),
    ],
)
def test_corrections_refuse(correct: Callable[..., Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        correct(TRAINER, ROLLOUT, MASK)
    with pytest.raises(ValueError, match="must have one shape"):
        correct.func(TRAINER, ROLLOUT[:, :2], MASK)  # type: ignore[attr-defined]
