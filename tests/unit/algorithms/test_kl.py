from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from support.ragged import Ragged, few_examples, ragged

from lightning_rlhf.algorithms.kl import kl_penalty

LOG_PROBS = torch.tensor([-0.8, -0.6, -1.2])
REFERENCE = torch.tensor([-1.0, -0.5, -1.5])
K3 = [0.018731, 0.005171, 0.040818]


@pytest.mark.parametrize(
    ("estimator", "values", "gradient"),
    [
        ("k1", [0.2, -0.1, 0.3], [1.0, 1.0, 1.0]),
        ("k2", [0.02, 0.005, 0.045], [0.2, -0.1, 0.3]),
        ("k3", K3, [0.181269, -0.105171, 0.259182]),
        ("abs", [0.2, 0.1, 0.3], [1.0, -1.0, 1.0]),
        ("k3+", K3, [0.2, -0.1, 0.3]),
    ],
)
def test_agrees_with_independent_libraries(estimator: str, values: list[float], gradient: list[float]) -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    result = kl_penalty(log_probs, REFERENCE, estimator)  # type: ignore[arg-type]
    result.sum().backward()
    assert result.tolist() == pytest.approx(values, abs=1e-6)
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx(gradient, abs=1e-6)


NAIVE = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) + d - 1,
    "abs": abs,
    "k3+": lambda d: math.exp(-d) + d - 1,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", NAIVE)
@given(case=ragged())
@few_examples
def test_matches_a_naive_loop(estimator: str, dtype: torch.dtype, case: Ragged) -> None:
    policy, reference = case.log_probs.to(dtype), case.old_log_probs.to(dtype)
    result = kl_penalty(policy, reference, estimator)  # type: ignore[arg-type]
    assert result.dtype == dtype
    expected = [NAIVE[estimator](p - r) for p, r in zip(policy.tolist(), reference.tolist(), strict=True)]
    assert result.tolist() == pytest.approx(expected, abs=1e-6)


def test_k3_keeps_its_digits_near_zero_and_stays_finite_far_away() -> None:
    assert kl_penalty(torch.tensor([-1e-3]), torch.zeros(1), "k3").item() == pytest.approx(5.0017e-7, rel=1e-3)
    log_probs = torch.tensor([-200.0], requires_grad=True)
    kl_penalty(log_probs, torch.zeros(1), "k3").sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()


def test_refuses() -> None:
    with pytest.raises(ValueError, match="Unknown KL estimator 'k4'; expected one of k1, k2, k3, abs, k3\\+"):
        kl_penalty(LOG_PROBS, REFERENCE, "k4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(3,\) and ref_log_probs \(1,\)"):
        kl_penalty(LOG_PROBS, REFERENCE[:1], "k1")
