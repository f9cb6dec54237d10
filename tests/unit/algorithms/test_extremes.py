"""Inputs far from the usual: huge differences, half precision, masks of integers, NaN where nothing is read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_rlhf.algorithms import advantages, corrections, losses
from lightning_rlhf.algorithms.covariance_losses import token_covariance
from lightning_rlhf.algorithms.kl import kl_penalty
from lightning_rlhf.algorithms.log_probs import token_log_probs

NAN, INF = math.nan, math.inf
LOSSES = (
    "ppo_clip", "dapo", "gspo", "gmpo", "cispo", "sapo", "dppo_tv", "dppo_kl", "gpg", "reinforce", "clip_cov", "kl_cov",
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_stays_finite_whatever_the_log_probs(name: str, dtype: torch.dtype) -> None:
    new = torch.tensor(
        [[-1.0, -500.0, -1e-3, NAN, INF], [-1e4, -2.0, -3.0, -INF, 0.0]], dtype=dtype, requires_grad=True
    )
    old = torch.tensor([[-500.0, -1.0, -1.0, NAN, 1.0], [-2.0, -1e4, -3.0, -INF, 0.0]], dtype=dtype)
    scores = torch.tensor([[1.0, -1.0, 2.0, NAN, INF], [-1.0, 1.0, 0.0, NAN, 0.0]])
    output = getattr(losses, name)(new, old, scores, torch.tensor([[1, 1, 1, 0, 0]] * 2))
    output.terms.sum().backward()
    assert output.terms.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert output.terms.isfinite().all()
    assert (output.terms[:, 3:] == 0).all()
    assert new.grad is not None
    assert new.grad.isfinite().all()
    assert (new.grad[:, 3:] == 0).all()
    for metric, value in output.metrics.items():
        assert math.isfinite(value.compute()), metric


def test_one_token_far_off_moves_a_sequences_ratio_as_far_as_it_should() -> None:
    difference = torch.zeros(1, 1000, dtype=torch.float64)
    difference[0, 7] = 100.0
    new, ones = (difference - 200).requires_grad_(), torch.ones(1, 1000, dtype=torch.float64)
    arguments: Any = (new, torch.full_like(new, -200.0), -ones, ones)
    for output in (losses.gspo(*arguments), losses.gmpo(*arguments)):
        assert output.terms[0, 0].item() == pytest.approx(math.exp(0.1))  # 100 nats over 1000 tokens
    losses.gspo(*arguments).terms.mean().backward()
    assert new.grad is not None
    assert new.grad[0, 7].item() == pytest.approx(math.exp(0.1) / 1000)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_a_log_prob_that_rounding_left_above_zero_is_a_probability_of_one(name: str) -> None:
    risen = getattr(losses, name)(torch.tensor([1e-6]), torch.tensor([-2.0]), torch.ones(1), torch.ones(1))
    assert risen.terms.item() == 0.0
    assert risen.metrics["clip_fraction_high"].compute() == 1.0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "k3+"])
def test_kl_in_half_precision_is_that_of_fp32(estimator: Any) -> None:
    new, reference = torch.tensor([-1.0, -100.0, -0.5]).half(), torch.tensor([-100.0, -1.0, -0.625]).half()
    found = kl_penalty(new, reference, estimator)
    assert found.dtype == torch.float32
    assert torch.equal(found, kl_penalty(new.float(), reference.float(), estimator))
    assert found.isfinite().all()


def test_k3_of_a_token_that_the_reference_all_but_excludes_is_exact() -> None:
    new = torch.tensor([-0.5], dtype=torch.float64, requires_grad=True)
    found = kl_penalty(new, torch.tensor([-100.0], dtype=torch.float64), "k3")
    found.sum().backward()
    assert found.item() == pytest.approx(98.5)
    assert new.grad is not None
    assert new.grad.item() == pytest.approx(1.0)


def test_bounds_of_corrections_hold_however_far_apart_the_two_are() -> None:
    trainer, rollout, mask = torch.tensor([[-30.0, 0.0]]), torch.tensor([[-0.1, 0.0]]), torch.ones(1, 2)
    assert corrections.veto(trainer, rollout, mask, threshold=1e-10).tolist() == [[0.0, 0.0]]
    assert corrections.veto(trainer, rollout, mask, threshold=1e-14).tolist() == [[1.0, 1.0]]
    assert corrections.sequence_mask(trainer, rollout, mask, low=1e-10, high=2.0).tolist() == [[0.0, 0.0]]
    assert corrections.sequence_mask(rollout, trainer, mask, low=0.0, high=1e12).tolist() == [[0.0, 0.0]]
    assert corrections.icepop(rollout, trainer, mask, high=1e12).tolist() == [[0.0, 1.0]]
    assert corrections.token_tis(rollout - 1e4, trainer - 2e4, mask, cap=INF).isfinite().all()


@pytest.mark.parametrize("name", ["token_tis", "sequence_tis", "icepop", "sequence_mask", "geometric_mask", "veto"])
def test_corrections_of_bf16_log_probs_are_computed_in_more(name: str) -> None:
    trainer, rollout = torch.tensor([[-1.0, -2.0]]).bfloat16(), torch.tensor([[-1.1, -2.1]]).bfloat16()
    found = getattr(corrections, name)(trainer, rollout, torch.ones(1, 2))
    assert torch.equal(found, getattr(corrections, name)(trainer.float(), rollout.float(), torch.ones(1, 2)))


def test_uids_may_be_any_kind_of_identity() -> None:
    rewards, expected = torch.tensor([1.0, 1.0, 0.0, 0.5]), [0.5, 0.25, -0.5, -0.25]
    numbers = torch.tensor([7, 8, 7, 8])
    kinds: list[Any] = [
        numbers, list(numbers), numbers.tolist(), numbers.numpy(), list(numbers.numpy()), np.array(list("abab")),
        ["a", np.str_("b"), np.str_("a"), "b"], [("p", 1), ("p", 2), ("p", 1), ("p", 2)],
    ]  # fmt: skip
    for uids in kinds:
        assert advantages.rloo(rewards, uids).tolist() == [2 * value for value in expected], uids


def test_gae_of_integers_and_half_precision_is_that_of_fp32() -> None:
    rewards, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.ones(1, 3)
    values = torch.tensor([[0.25, 0.5, 0.75]])
    expected = advantages.gae(rewards, values, mask, gamma=0.9, lam=0.9)
    for found, right in zip(advantages.gae(rewards, values.half(), mask, gamma=0.9, lam=0.9), expected, strict=True):
        assert torch.equal(found, right)
    whole = advantages.gae(rewards.long(), torch.zeros(1, 3, dtype=torch.int64), mask.bool(), gamma=0.9, lam=1.0)
    assert whole[0].tolist()[0] == pytest.approx([0.81, 0.9, 1.0])


def test_covariance_does_not_depend_on_the_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    flat: list[Tensor] = [torch.randn(900, generator=generator) for _ in range(2)]
    padded = [torch.cat([values.reshape(9, 100), torch.full((9, 211), NAN)], dim=1) for values in flat]
    mask = torch.zeros(9, 311, dtype=torch.bool)
    mask[:, :100] = True
    whole = token_covariance(padded[0], padded[1], mask)
    torch.testing.assert_close(whole[mask], token_covariance(flat[0], flat[1], torch.ones(900)), rtol=1e-12, atol=1e-13)


def test_log_probs_refuse_two_dtypes_by_name() -> None:
    with pytest.raises(ValueError, match=r"hidden is torch.bfloat16 and head_weight torch.float32"):
        token_log_probs(torch.zeros(3, 2).bfloat16(), torch.zeros(4, 2), torch.tensor([0, 1, 2]))
