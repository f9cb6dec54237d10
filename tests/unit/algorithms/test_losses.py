from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from support.ragged import Ragged, few_examples, ragged
from torch import Tensor

from lightning_rlhf.algorithms import losses
from lightning_rlhf.algorithms.aggregation import loss_weights
from lightning_rlhf.metrics import merge_metrics
from lightning_rlhf.types import LossOutput

OLD = torch.tensor([[-1.0, -0.5, -2.0, -0.1], [-0.7, -1.2, -0.3, -3.0]])
NEW = torch.tensor([[-0.8, -0.6, -1.2, -0.1], [-0.9, -0.4, -0.3, -1.0]])
ADVANTAGES = torch.tensor([[1.0] * 4, [-0.5] * 4])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])

TOKEN_LOSSES = ["ppo_clip", "dapo", "cispo", "sapo", "dppo_tv", "dppo_kl", "gpg", "reinforce"]
SEQUENCE_LOSSES = ["gspo", "gmpo"]
LOSSES = [*TOKEN_LOSSES, *SEQUENCE_LOSSES]
# exp of a lone element and of one within a vector differ by their last bit
LAST_DIGIT = {"rtol": 1e-13, "atol": 1e-14}
METRICS = {"ratio_mean", "ratio_min", "ratio_max", "clip_fraction_low", "clip_fraction_high", "approx_kl"}


def on_golden(name: str, mode: str = "token-mean", norm_length: int | None = None, **kwargs: object) -> float:
    output = getattr(losses, name)(NEW, OLD, ADVANTAGES, MASK, **kwargs)
    return float((output.terms * loss_weights(MASK, mode, norm_length=norm_length)).sum())


@pytest.mark.parametrize(
    ("name", "kwargs", "mode", "expected"),
    [
        ("ppo_clip", {}, "token-mean", 0.344547),
        ("ppo_clip", {}, "seq-mean-token-mean", 0.163777),
        ("ppo_clip", {}, "seq-mean-token-sum-norm", 0.301478),
        ("ppo_clip", {"dual_clip": 3.0}, "token-mean", 0.031043),
        ("ppo_clip", {"dual_clip": 3.0}, "seq-mean-token-mean", -0.110539),
        ("ppo_clip", {"dual_clip": 3.0}, "seq-mean-token-sum", 0.108649),
        ("ppo_clip", {"dual_clip": 3.0}, "seq-mean-token-sum-norm", 0.027162),
        ("ppo_clip", {"clip_high": 0.28, "dual_clip": 3.0}, "token-mean", 0.016557),
        ("ppo_clip", {"clip_high": 0.28}, "token-mean", 0.330061),
        ("dapo", {}, "token-mean", 0.330061),
        ("gspo", {}, "seq-mean-token-mean", -0.121115),
        ("gspo", {"level": "token"}, "seq-mean-token-mean", -0.121115),
        ("gmpo", {}, "seq-mean-token-mean", -0.073700),
        ("cispo", {}, "token-mean", 0.226353),
        ("sapo", {}, "seq-mean-token-mean", -0.551748),
        ("dppo_tv", {}, "token-mean", 0.246734),
        ("dppo_tv", {"ratio_cap": 20.0}, "token-mean", -0.066770),
        ("dppo_kl", {}, "token-mean", 0.246734),
        ("gpg", {}, "token-mean", 0.185714),
        ("reinforce", {}, "token-mean", 0.185714),
        ("kl_cov", {}, "token-mean", 0.223555),
        ("kl_cov", {"coefficient": 1.0}, "token-mean", 0.480698),
    ],
)
def test_agrees_with_independent_libraries(name: str, kwargs: dict[str, object], mode: str, expected: float) -> None:
    norm_length = 4 if mode == "seq-mean-token-sum-norm" else None
    assert on_golden(name, mode, norm_length, **kwargs) == pytest.approx(expected, abs=1e-6)


def test_sum_of_terms_with_dual_clip() -> None:
    assert float(losses.ppo_clip(NEW, OLD, ADVANTAGES, MASK, dual_clip=3.0).terms.sum()) == pytest.approx(
        0.217299, abs=1e-6
    )


def test_value_loss_agrees_with_independent_libraries() -> None:
    values, old, returns = torch.tensor([0.5, 1.5, -0.2]), torch.tensor([0.4, 0.6, 0.1]), torch.tensor([1.0, 1.0, 0.0])
    output = losses.value_loss(values, old, returns, torch.ones(3), clip=0.5)
    assert float(output.terms.mean()) == pytest.approx(0.09, abs=1e-6)
    assert losses.value_loss(values, old, returns, torch.ones(3)).terms.tolist() == pytest.approx([0.125, 0.125, 0.02])
    assert output.metrics["value_clip_fraction"].compute() == 0.0


def test_value_clip_holds_a_value_that_ran_away() -> None:
    values = torch.tensor([1.5], requires_grad=True)
    output = losses.value_loss(values, torch.tensor([0.0]), torch.tensor([1.4]), torch.ones(1), clip=0.5)
    output.terms.sum().backward()
    assert output.terms.item() == pytest.approx(0.405)  # (0.5 - 1.4)^2 / 2, of the clipped value
    assert values.grad is not None
    assert values.grad.item() == 0.0
    assert output.metrics["value_clip_fraction"].compute() == 1.0


# --- naive loops: one token at a time, Python branches ----------------------------------------------------------


def _ppo(lp: Tensor, old: Tensor, a: float, low: float, high: float) -> Tensor:
    r = (lp - old).exp()
    if (a > 0 and float(r.detach()) > 1 + high) or (a < 0 and float(r.detach()) < 1 - low):
        return 0 * lp - (1 + high if a > 0 else 1 - low) * a
    return -r * a


def _cispo(lp: Tensor, old: Tensor, a: float) -> Tensor:
    return -min(max(math.exp(float(lp.detach() - old)), 0.8), 1.2) * a * lp


def _sapo(lp: Tensor, old: Tensor, a: float) -> Tensor:
    tau = 1.0 if a > 0 else 1.05
    return -a * 4 / tau / (1 + (-tau * ((lp - old).exp() - 1)).exp())


def _dppo(lp: Tensor, old: Tensor, a: float, *, binary_kl: bool) -> Tensor:
    p, q = math.exp(float(old)), math.exp(float(lp.detach()))
    distance = abs(p - q)
    if binary_kl:
        distance = p * math.log(p / q) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))
    if distance > 0.2 and (q > p) == (a > 0):
        return 0 * lp
    return -min(q / p, 3.0) * a * lp


NAIVE: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "ppo_clip": partial(_ppo, low=0.2, high=0.2),
    "dapo": partial(_ppo, low=0.2, high=0.28),
    "cispo": _cispo,
    "sapo": _sapo,
    "dppo_tv": partial(_dppo, binary_kl=False),
    "dppo_kl": partial(_dppo, binary_kl=True),
    "gpg": lambda lp, old, a: -a * lp,
    "reinforce": lambda lp, old, a: -a * lp,
}


def _naive_gspo(lp: Tensor, old: Tensor, a: Tensor, mask: Tensor) -> list[Tensor]:
    on = [t for t in range(len(mask)) if mask[t]]
    s = (sum((lp[t] - old[t] for t in on), torch.zeros((), dtype=lp.dtype)) / len(on)).exp()
    return [-torch.minimum(s * a[t], s.clamp(0.8, 1.2) * a[t]) if mask[t] else 0 * lp[t] for t in range(len(mask))]


def _naive_gmpo(lp: Tensor, old: Tensor, a: Tensor, mask: Tensor) -> list[Tensor]:
    on = [t for t in range(len(mask)) if mask[t]]
    product = torch.ones((), dtype=lp.dtype)
    for t in on:
        r = (lp[t] - old[t]).exp()
        product = product * (r.clamp(max=math.exp(0.2)) if a[t] > 0 else r.clamp(min=math.exp(-0.2)))
    loss = -(product ** (1 / len(on))) * sum(float(a[t]) for t in on) / len(on)
    return [loss if mask[t] else 0 * lp[t] for t in range(len(mask))]


def naive_terms(name: str, case: Ragged, log_probs: Tensor) -> Tensor:
    terms: list[Tensor] = []
    for part in case.slices():
        lp, old, a, mask = log_probs[part], case.old_log_probs[part], case.advantages[part], case.mask[part]
        if name in SEQUENCE_LOSSES and bool(mask.any()):
            terms += (_naive_gspo if name == "gspo" else _naive_gmpo)(lp, old, a, mask)
        elif name in SEQUENCE_LOSSES:
            terms += [0 * x for x in lp]
        else:
            terms += [NAIVE[name](lp[t], old[t], float(a[t])) if mask[t] else 0 * lp[t] for t in range(len(mask))]
    return torch.stack(terms) if terms else 0 * log_probs


def run(name: str, case: Ragged, log_probs: Tensor) -> LossOutput:
    output: LossOutput = getattr(losses, name)(
        log_probs, case.old_log_probs, case.advantages, case.mask, cu_seqlens=case.cu_seqlens
    )
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LOSSES)
@given(case=ragged())
@few_examples
def test_matches_a_naive_loop(name: str, dtype: torch.dtype, case: Ragged) -> None:
    tolerance = {"atol": 1e-9, "rtol": 1e-9} if dtype == torch.float64 else {"atol": 2e-5, "rtol": 2e-5}
    case = case.to(dtype)
    weights = torch.linspace(0.5, 1.5, case.mask.numel(), dtype=dtype)
    ours, naive = case.log_probs.clone().requires_grad_(), case.log_probs.clone().requires_grad_()
    terms, expected = run(name, case, ours).terms, naive_terms(name, case, naive)
    assert terms.dtype == dtype
    torch.testing.assert_close(terms, expected, **tolerance)
    (terms * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, naive.grad, **tolerance)


@pytest.mark.parametrize("name", LOSSES)
@given(case=ragged())
@few_examples
def test_padded_equals_flat_whatever_stands_in_the_padding(name: str, case: Ragged) -> None:
    poisoned, width = case.poisoned(), 3 * max(case.lengths) + 1
    flat, rows = (
        poisoned.log_probs.clone().requires_grad_(),
        case.padded(poisoned.log_probs, width=width, fill=math.nan),
    )
    rows.requires_grad_()
    flat_output = run(name, poisoned, flat)
    padded_output: LossOutput = getattr(losses, name)(
        rows,
        case.padded(poisoned.old_log_probs, width=width, fill=math.inf),
        case.padded(poisoned.advantages, width=width, fill=math.nan),
        case.padded(case.mask, width=width),
    )
    flat_output.terms.sum().backward()
    padded_output.terms.sum().backward()
    torch.testing.assert_close(padded_output.terms, case.padded(flat_output.terms, width=width), **LAST_DIGIT)
    assert flat.grad is not None
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad, case.padded(flat.grad, width=width), **LAST_DIGIT)
    assert not flat.grad[~case.mask].any()
    assert not rows.grad[~case.padded(case.mask, width=width)].any()
    assert not padded_output.terms[~case.padded(case.mask, width=width)].any()
    assert not flat_output.terms[~case.mask].any()
    for metric, value in flat_output.metrics.items():
        assert padded_output.metrics[metric].compute() == pytest.approx(value.compute(), nan_ok=True), metric


@pytest.mark.parametrize("name", LOSSES)
@given(case=ragged(min_sequences=2))
@few_examples
def test_split_into_micro_batches_gives_the_same_terms_and_metrics(name: str, case: Ragged) -> None:
    whole = run(name, case, case.log_probs)
    parts = []
    for part, length in zip(case.slices(), case.lengths, strict=True):
        one = Ragged([length], case.log_probs[part], case.old_log_probs[part], case.advantages[part], case.mask[part])
        parts.append(run(name, one, one.log_probs))
    torch.testing.assert_close(torch.cat([part.terms for part in parts]), whole.terms, **LAST_DIGIT)
    merged = merge_metrics(part.metrics for part in parts)
    assert {name: m.compute() for name, m in merged.items()} == pytest.approx(
        {name: m.compute() for name, m in whole.metrics.items()}
    )


@pytest.mark.parametrize("name", [*LOSSES, "kl_cov", "clip_cov"])
def test_an_empty_micro_batch_has_every_metric_and_a_gradient(name: str) -> None:
    empty = torch.zeros(0, requires_grad=True)
    cu_seqlens = torch.zeros(1, dtype=torch.int64)
    output = getattr(losses, name)(
        empty, empty.detach(), empty.detach(), torch.zeros(0, dtype=torch.bool), cu_seqlens=cu_seqlens
    )
    output.terms.sum().backward()
    full = getattr(losses, name)(NEW, OLD, ADVANTAGES, MASK)
    assert set(output.metrics) == set(full.metrics) >= METRICS
    assert output.metrics["ratio_mean"].compute() is None
    assert empty.grad is not None


# --- what the metrics say ---------------------------------------------------------------------------------------


def test_ppo_metrics_by_hand() -> None:
    metrics = losses.ppo_clip(NEW, OLD, ADVANTAGES, MASK).metrics
    ratios = [math.exp(d) for d in (0.2, -0.1, 0.8, -0.2, 0.8, 0.0, 2.0)]
    assert metrics["ratio_mean"].compute() == pytest.approx(sum(ratios) / 7)
    assert metrics["ratio_min"].compute() == pytest.approx(math.exp(-0.2))
    assert metrics["ratio_max"].compute() == pytest.approx(math.exp(2.0), rel=1e-6)
    # above 1.2 with a positive advantage: 0.2 and 0.8 of row 1; below 0.8 with a negative one: none (exp(-0.2) = 0.819)
    assert metrics["clip_fraction_high"].compute() == pytest.approx(2 / 7)
    assert metrics["clip_fraction_low"].compute() == 0.0
    assert losses.ppo_clip(NEW, OLD, ADVANTAGES, MASK, clip_low=0.1).metrics[
        "clip_fraction_low"
    ].compute() == pytest.approx(1 / 7)
    assert metrics["approx_kl"].compute() == pytest.approx(
        sum(math.exp(d) - d - 1 for d in (0.2, -0.1, 0.8, -0.2, 0.8, 0.0, 2.0)) / 7, rel=1e-5
    )


def test_dual_clip_stops_the_gradient_of_a_negative_advantage() -> None:
    log_probs = NEW.clone().requires_grad_()
    output = losses.ppo_clip(log_probs, OLD, ADVANTAGES, MASK, dual_clip=3.0)
    output.terms.sum().backward()
    assert output.terms[1, 3].item() == pytest.approx(1.5)  # 3 * 0.5 in place of exp(2) * 0.5
    assert log_probs.grad is not None
    assert log_probs.grad[1, 3].item() == 0.0
    assert output.metrics["dual_clip_fraction"].compute() == pytest.approx(1 / 7)


def test_dual_clip_leaves_a_positive_advantage_alone() -> None:
    args = (torch.tensor([-0.5]), torch.tensor([-3.0]), torch.tensor([1.0]), torch.ones(1))
    output = losses.ppo_clip(*args, dual_clip=3.0)  # ratio 12.2
    assert output.terms.item() == pytest.approx(-1.2)
    assert output.metrics["dual_clip_fraction"].compute() == 0.0


def test_a_ratio_beyond_fp32_keeps_terms_and_gradients_finite() -> None:
    log_probs = torch.tensor([-0.1, -0.1], requires_grad=True)
    for name in LOSSES:
        log_probs.grad = None
        terms = getattr(losses, name)(
            log_probs,
            torch.tensor([-200.0, -200.0]),
            torch.tensor([1.0, -1.0]),
            torch.ones(2),
            cu_seqlens=torch.tensor([0, 1, 2]),
        ).terms
        terms.sum().backward()
        assert terms.isfinite().all(), name
        assert log_probs.grad is not None
        assert log_probs.grad.isfinite().all(), name


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    log_probs = NEW.clone().requires_grad_()
    losses.cispo(log_probs, OLD, ADVANTAGES, MASK).terms.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad[0, 2].item() == pytest.approx(-1.2)
    assert log_probs.grad[0, 3].item() == 0.0


def test_gspo_sequence_and_token_form_have_one_gradient_for_one_advantage() -> None:
    grads = []
    for level in ("sequence", "token"):
        log_probs = NEW.clone().requires_grad_()
        terms = losses.gspo(log_probs, OLD, ADVANTAGES, MASK, clip_low=1.0, clip_high=9.0, level=level).terms
        (terms * loss_weights(MASK, "seq-mean-token-mean")).sum().backward()
        grads.append(log_probs.grad)
    torch.testing.assert_close(grads[0], grads[1])
    assert grads[0].abs().sum() > 0


def test_reinforce_caps_the_importance_weight() -> None:
    log_probs = torch.tensor([-1.0, -1.0], requires_grad=True)
    output = losses.reinforce(log_probs, torch.tensor([-3.0, -0.5]), torch.ones(2), torch.ones(2), ratio_cap=2.0)
    output.terms.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-2.0, -math.exp(-0.5)])
    assert output.metrics["clip_fraction_high"].compute() == 0.5


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*LOSSES, "kl_cov", "clip_cov"])
def test_refuses_shapes_that_would_broadcast(name: str) -> None:
    with pytest.raises(ValueError, match=r"advantages \(2, 1\)"):
        getattr(losses, name)(NEW, OLD, ADVANTAGES[:, :1], MASK)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("ppo_clip", {"clip_low": -0.1}, "clip_low"),
        ("ppo_clip", {"dual_clip": 1.0}, "must exceed 1, got 1.0"),
        ("ppo_clip", {"cu_seqlens": torch.tensor([0, 4, 8])}, "flat"),
        ("gspo", {"level": "word"}, "'word'"),
        ("sapo", {"tau_positive": 0.0}, "tau_positive"),
        ("dppo_tv", {"ratio_cap": 0.0}, "ratio_cap"),
        ("reinforce", {"ratio_cap": -1.0}, "ratio_cap"),
        ("kl_cov", {"fraction": 2.0}, "between 0 and 1, got 2.0"),
    ],
)
def test_refuses_settings_that_mean_nothing(name: str, kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(losses, name)(NEW, OLD, ADVANTAGES, MASK, **kwargs)


@pytest.mark.parametrize("name", SEQUENCE_LOSSES)
def test_a_sequence_loss_on_flat_tensors_needs_cu_seqlens(name: str) -> None:
    with pytest.raises(ValueError, match="cu_seqlens"):
        getattr(losses, name)(NEW[0], OLD[0], ADVANTAGES[0], MASK[0])


def test_value_loss_refuses_a_clip_of_zero() -> None:
    with pytest.raises(ValueError, match="clip must be positive"):
        losses.value_loss(NEW, OLD, OLD, MASK, clip=0.0)


@given(case=ragged())
@few_examples
def test_value_loss_matches_a_naive_loop(case: Ragged) -> None:
    values, old, returns = case.log_probs, case.old_log_probs, case.advantages
    terms = losses.value_loss(values, old, returns, case.mask, cu_seqlens=case.cu_seqlens, clip=0.2).terms
    for t in range(case.mask.numel()):
        v, o, r = float(values[t]), float(old[t]), float(returns[t])
        clipped = min(max(v, o - 0.2), o + 0.2)
        expected = max((v - r) ** 2, (clipped - r) ** 2) / 2 if case.mask[t] else 0.0
        assert float(terms[t]) == pytest.approx(expected)
