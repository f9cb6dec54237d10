"""Functions that treat a batch as a whole, against loops over its rows and tokens, on random inputs."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.ragged import Ragged, few_examples, ragged
from torch import Tensor

from lightning_rlhf.algorithms import advantages, corrections, length_penalties, losses
from lightning_rlhf.algorithms.covariance_losses import clip_cov_selection, kl_cov_selection
from lightning_rlhf.algorithms.log_probs import token_log_probs

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
Rows = list[tuple[str, float, int]]
"""Per row: uid, reward (NaN where it failed), response tokens."""

rows_of_a_batch = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.25, 0.7, 1.0, math.nan]), st.integers(1, 9)),
    min_size=1,
    max_size=10,
)


def whitened(values: list[float], weights: list[int]) -> list[float]:
    """Each value repeated ``weight`` times, less the mean, over the sample deviation; weight 0: left out."""
    spread = [value for value, weight in zip(values, weights, strict=True) for _ in range(weight)]
    if len(set(spread)) < 2:
        return [0.0] * len(values)
    mean, deviation = statistics.fmean(spread), math.sqrt(statistics.variance(spread) + 1e-8)
    return [(v - mean) / deviation if w else 0.0 for v, w in zip(values, weights, strict=True)]


def centred(batch: Rows) -> list[float]:
    """Less the mean of the group's known rewards; 0 for a group of equal ones, and for a failed reward."""
    found = []
    for uid, reward, _ in batch:
        group = [r for u, r, _ in batch if u == uid and not math.isnan(r)]
        alone = math.isnan(reward) or len(set(group)) < 2
        found.append(0.0 if alone else reward - statistics.fmean(group))
    return found


def naive_advantages(name: str, batch: Rows, *, by_token: bool) -> list[float]:
    known = [not math.isnan(reward) for _, reward, _ in batch]
    weights = [(n if by_token else 1) * ok for (_, _, n), ok in zip(batch, known, strict=True)]
    if name == "reinforce_plus_plus":
        return whitened([0.0 if math.isnan(r) else r for _, r, _ in batch], weights)
    relative = centred(batch)
    alike = [len({r for u, r, _ in batch if u == uid and not math.isnan(r)}) < 2 for uid, _, _ in batch]
    return [0.0 if same else value for value, same in zip(whitened(relative, weights), alike, strict=True)]


@DTYPES
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
@given(batch=rows_of_a_batch)
@few_examples
def test_whitened_estimators(name: str, by_token: bool, dtype: torch.dtype, batch: Rows) -> None:
    uids, rewards, lengths = zip(*batch, strict=True)
    found = getattr(advantages, name)(
        torch.tensor(rewards, dtype=dtype), uids, lengths=torch.tensor(lengths) if by_token else None
    )
    tolerance = 2e-5 if dtype == torch.float32 else 1e-9
    assert found.tolist() == pytest.approx(naive_advantages(name, batch, by_token=by_token), abs=tolerance)


@DTYPES
@given(batch=rows_of_a_batch)
@few_examples
def test_remax(dtype: torch.dtype, batch: Rows) -> None:
    uids, rewards, lengths = zip(*batch, strict=True)
    baselines = [math.nan if n == 9 else n / 8 for n in lengths]
    found = advantages.remax(torch.tensor(rewards, dtype=dtype), uids, baselines=torch.tensor(baselines, dtype=dtype))
    differences = [r - b for r, b in zip(rewards, baselines, strict=True)]
    assert found.tolist() == pytest.approx([0.0 if math.isnan(d) else d for d in differences], abs=1e-6)


@DTYPES
@given(batch=rows_of_a_batch, weights=st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.5, 2.0])))
@few_examples
def test_gdpo(dtype: torch.dtype, batch: Rows, weights: tuple[float, float]) -> None:
    uids, first, lengths = zip(*batch, strict=True)
    columns = [list(first), [float(n % 3) for n in lengths]]
    known = [weights[0] == 0 or not math.isnan(r) for r in first]
    total = [0.0] * len(batch)
    for column, weight in zip(columns, weights, strict=True):
        if weight == 0:
            continue
        for row, uid in enumerate(uids):
            group = [column[o] for o in range(len(batch)) if uids[o] == uid and known[o]]
            if known[row] and len(set(group)) > 1:
                total[row] += weight * (column[row] - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6)
    expected = whitened(total, [int(ok) for ok in known])
    expected = [value if t else 0.0 for value, t in zip(expected, total, strict=True)]
    found = advantages.gdpo(torch.tensor(columns, dtype=dtype).T, uids, weights=weights)
    assert found.tolist() == pytest.approx(expected, abs=1e-4 if dtype == torch.float32 else 1e-6)


@DTYPES
@given(case=ragged())
@few_examples
def test_whiten_and_rewards_at_their_tokens(dtype: torch.dtype, case: Ragged) -> None:
    case = case.to(dtype)
    width, ends = max(case.lengths) + 2, {"cu_seqlens": case.cu_seqlens}
    mask = case.padded(case.mask, width=width)
    flat = advantages.whiten(case.advantages, case.mask)
    expected = whitened(case.advantages.masked_fill(~case.mask, 0).tolist(), case.mask.int().tolist())
    assert flat.tolist() == pytest.approx(expected, abs=1e-5)
    poisoned = case.padded(case.poisoned().advantages, width=width, fill=math.nan)
    torch.testing.assert_close(advantages.whiten(poisoned, mask), case.padded(flat, width=width))

    rewards = torch.arange(1, len(case.lengths) + 1).to(dtype)
    placed = torch.zeros_like(case.advantages)
    for reward, part in zip(rewards, case.slices(), strict=True):
        on = [t for t in range(part.start, part.stop) if case.mask[t]]
        if on:
            placed[on[-1]] = reward
    assert torch.equal(advantages.token_level_rewards(rewards, case.mask, **ends), placed)
    assert torch.equal(advantages.token_level_rewards(rewards, mask), case.padded(placed, width=width))


def covariances(case: Ragged) -> list[float]:
    on = [t for t in range(case.mask.numel()) if case.mask[t]]
    means = [sum(float(v[t]) for t in on) / max(len(on), 1) for v in (case.log_probs, case.advantages)]
    return [(float(case.log_probs[t]) - means[0]) * (float(case.advantages[t]) - means[1]) for t in on]


@DTYPES
@given(case=ragged(), fraction=st.sampled_from([0.0, 0.01, 0.3, 1.0]))
@few_examples
def test_kl_cov(dtype: torch.dtype, case: Ragged, fraction: float) -> None:
    case = case.to(dtype)
    arguments = (case.log_probs, case.old_log_probs, case.advantages, case.mask)
    on = [t for t in range(case.mask.numel()) if case.mask[t]]
    ranked = sorted(zip(covariances(case), on, strict=True), key=lambda pair: (-pair[0], pair[1]))
    count = max(int(len(on) * fraction), 1) if fraction else 0
    largest = {t for _, t in ranked[:count]}
    expected = [0.0] * case.mask.numel()
    for t in on:
        d = float(case.log_probs[t] - case.old_log_probs[t])
        expected[t] = -math.exp(d) * float(case.advantages[t]) + (0.1 * abs(d) if t in largest else 0.0)
    found = losses.kl_cov(*arguments, cu_seqlens=case.cu_seqlens, fraction=fraction).terms
    assert found.tolist() == pytest.approx(expected, abs=2e-5)
    chosen = kl_cov_selection(*arguments, generator=torch.Generator(), fraction=fraction)
    assert {t for t in range(chosen.numel()) if chosen[t]} == largest


@DTYPES
@given(case=ragged(), seed=st.integers(0, 9))
@few_examples
def test_clip_cov(dtype: torch.dtype, case: Ragged, seed: int) -> None:
    case = case.to(dtype)
    arguments = (case.log_probs, case.old_log_probs, case.advantages, case.mask)
    settings: dict[str, Any] = {"fraction": 0.4, "covariance_range": (0.01, 0.5)}
    chosen = clip_cov_selection(*arguments, generator=torch.Generator().manual_seed(seed), **settings)
    on = [t for t in range(case.mask.numel()) if case.mask[t]]
    plain = losses.ppo_clip(*arguments, cu_seqlens=case.cu_seqlens).terms
    ratios = (case.log_probs - case.old_log_probs).exp()
    allowed = {
        t
        for covariance, t in zip(covariances(case), on, strict=True)
        if 0.01 < covariance < 0.5
        and not (case.advantages[t] > 0 and ratios[t] > 1.2)
        and not (case.advantages[t] < 0 and ratios[t] < 0.8)
    }
    dropped = {t for t in range(chosen.numel()) if chosen[t]}
    assert dropped <= allowed
    assert len(dropped) == min(len(allowed), max(int(len(on) * 0.4), 1))
    found = losses.clip_cov(*arguments, cu_seqlens=case.cu_seqlens, selected=chosen).terms
    assert found.tolist() == [0.0 if t in dropped else float(plain[t]) for t in range(len(plain))]


def naive_weights(name: str, differences: list[float]) -> list[float]:
    ratios, total = [math.exp(d) for d in differences], sum(differences)
    if name == "token_tis":
        return [min(ratio, 2.0) for ratio in ratios]
    if name == "icepop":
        return [ratio if 0.5 <= ratio <= 2.0 else 0.0 for ratio in ratios]
    one = {
        "sequence_tis": lambda: min(math.exp(total), 2.0),
        "sequence_mask": lambda: float(0.5 <= math.exp(total) <= 2.0),
        "geometric_mask": lambda: float(0.99 <= math.exp(total / len(ratios)) <= 1.01),
        "veto": lambda: float(min(ratios) >= 1e-4),
    }[name]()
    return [one] * len(ratios)


@DTYPES
@pytest.mark.parametrize("name", ["token_tis", "sequence_tis", "icepop", "sequence_mask", "geometric_mask", "veto"])
@given(case=ragged(), scale=st.sampled_from([0.01, 1.0, 10.0]))
@few_examples
def test_corrections(name: str, dtype: torch.dtype, case: Ragged, scale: float) -> None:
    # the rollout's log-probs lie around the trainer's, near or far
    rollout = case.old_log_probs - scale * (case.log_probs - case.old_log_probs)
    trainer, rollout = case.old_log_probs.to(dtype), rollout.to(dtype)
    expected = torch.zeros(case.mask.numel(), dtype=dtype)
    for part in case.slices():
        on = [t for t in range(part.start, part.stop) if case.mask[t]]
        if on:
            expected[on] = torch.tensor(
                naive_weights(name, [float(trainer[t].double() - rollout[t].double()) for t in on]), dtype=dtype
            )
    hole = torch.full_like(rollout, math.nan)
    ends = {} if name in ("token_tis", "icepop") else {"cu_seqlens": case.cu_seqlens}
    flat = getattr(corrections, name)(trainer, rollout.where(case.mask, hole), case.mask, **ends)
    torch.testing.assert_close(flat, expected)
    width = 3 * max(case.lengths) + 1
    parts = (case.padded(trainer, width=width), case.padded(rollout, width=width, fill=math.nan))
    padded = getattr(corrections, name)(*parts, case.padded(case.mask, width=width))
    torch.testing.assert_close(padded, case.padded(expected, width=width))


@given(batch=rows_of_a_batch)
@few_examples
def test_length_penalties(batch: Rows) -> None:
    uids, rewards, lengths = zip(*batch, strict=True)
    given_rewards, given_lengths = torch.tensor(rewards, dtype=torch.float64), torch.tensor(lengths)
    expected = []
    for uid, reward, length in batch:
        group = [n for u, r, n in batch if u == uid and not math.isnan(r)]
        if math.isnan(reward) or min(group) == max(group):
            expected.append(0.0)
            continue
        score = 0.5 - (length - min(group)) / (max(group) - min(group))
        expected.append(score if reward > 0 else min(score, 0.0))
    assert length_penalties.relative(given_rewards, uids, given_lengths).tolist() == pytest.approx(expected)
    linear = [0.0 if math.isnan(r) else -0.25 * n for _, r, n in batch]
    assert length_penalties.linear(given_rewards, uids, given_lengths, per_token=0.25).tolist() == linear


@DTYPES
@given(
    sizes=st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(1, 7)),
    chunk_size=st.integers(1, 11),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    seed=st.integers(0, 99),
)
@few_examples
def test_token_log_probs(
    dtype: torch.dtype, sizes: tuple[int, int, int], chunk_size: int, temperature: float, seed: int
) -> None:
    (rows, width, vocabulary), generator = sizes, torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=dtype).requires_grad_()
    head = torch.randn(vocabulary, width, generator=generator, dtype=dtype).requires_grad_()
    labels = torch.randint(vocabulary, (rows,), generator=generator)
    weights = torch.randn(2, rows, generator=generator, dtype=dtype)

    def gradients(found: list[Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad((found[0] * weights[0] + found[1] * weights[1]).sum(), [hidden, head]))

    rows_of_two: list[list[Tensor]] = [[], []]
    for row in range(rows):
        logits = [(hidden[row] * head[v]).sum() / temperature for v in range(vocabulary)]
        log_total = torch.stack([logit.exp() for logit in logits]).sum().log()
        logs = [logit - log_total for logit in logits]
        rows_of_two[0].append(logs[int(labels[row])])
        rows_of_two[1].append(-torch.stack([log.exp() * log for log in logs]).sum())
    expected = [torch.stack(parts) if parts else 0 * (hidden.sum(1) + head.sum()) for parts in rows_of_two]
    found = list(token_log_probs(hidden, head, labels, temperature=temperature, chunk_size=chunk_size, entropy=True))
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    pairs = [*zip(found, expected, strict=True), *zip(gradients(found), gradients(expected), strict=True)]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, **tolerance)


def naive_variant(name: str, lp: Tensor, old: Tensor, a: Tensor) -> tuple[list[float], list[float]]:
    """Terms and their derivatives by the log-prob of one sequence's sampled tokens."""
    terms, slopes = [], []
    mean = sum(float(x - y) for x, y in zip(lp, old, strict=True)) / max(len(lp), 1)
    for x, y, advantage in zip(lp.tolist(), old.tolist(), a.tolist(), strict=True):
        ratio = math.exp(mean if name == "gspo" else x - y)
        if name == "reinforce":
            terms.append(-min(ratio, 1.1) * advantage * x)
            slopes.append(-min(ratio, 1.1) * advantage)
        elif (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8):
            terms.append(-(1.2 if advantage > 0 else 0.8) * advantage)
            slopes.append(0.0)
        elif name == "ppo_clip" and advantage < 0 and ratio > 1.3:
            terms.append(-1.3 * advantage)
            slopes.append(0.0)
        else:
            terms.append(-ratio * advantage)
            slopes.append(-ratio * advantage)
    return terms, slopes


@DTYPES
@pytest.mark.parametrize(
    ("name", "settings"),
    [("ppo_clip", {"dual_clip": 1.3}), ("gspo", {"level": "token"}), ("reinforce", {"ratio_cap": 1.1})],
)
@given(case=ragged())
@few_examples
def test_variants_of_losses(name: str, settings: dict[str, Any], dtype: torch.dtype, case: Ragged) -> None:
    case = case.to(dtype)
    terms, slopes = torch.zeros(2, case.mask.numel(), dtype=dtype)
    for part in case.slices():
        on = [t for t in range(part.start, part.stop) if case.mask[t]]
        found = naive_variant(name, case.log_probs[on], case.old_log_probs[on], case.advantages[on])
        terms[on], slopes[on] = (torch.tensor(values, dtype=dtype) for values in found)
    new = case.log_probs.clone().requires_grad_()
    arguments = (new, case.old_log_probs, case.advantages, case.mask)
    flat = getattr(losses, name)(*arguments, cu_seqlens=case.cu_seqlens, **settings).terms
    flat.sum().backward()
    tolerance: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-5}
    torch.testing.assert_close(flat, terms, **tolerance)
    torch.testing.assert_close(new.grad, slopes, **tolerance)
    width = max(case.lengths) + 3
    padded = getattr(losses, name)(*(case.padded(values.detach(), width=width) for values in arguments), **settings)
    torch.testing.assert_close(padded.terms, case.padded(flat.detach(), width=width), rtol=1e-6, atol=1e-7)
