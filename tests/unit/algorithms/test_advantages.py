from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.ragged import few_examples
from torch import Tensor

from lightning_rlhf.algorithms import advantages

NAN, INF = math.nan, math.inf
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0])
UIDS = ["a"] * 4 + ["b"] * 4
LENGTHS = torch.tensor([3, 1, 4, 2, 5, 1, 2, 2])

GROUPED: dict[str, Callable[[Tensor, list[str]], Tensor]] = {
    "grpo": advantages.grpo,
    "dr_grpo": partial(advantages.grpo, normalize_std=False),
    "rloo": advantages.rloo,
    "reinforce_plus_plus_baseline": advantages.reinforce_plus_plus_baseline,
    "gpg": advantages.gpg,
    "pass_at_k": advantages.pass_at_k,
    "maxrl": advantages.maxrl,
    "opo": lambda rewards, uids: advantages.opo(rewards, uids, lengths=torch.arange(1, rewards.numel() + 1)),
    "gdpo": lambda rewards, uids: advantages.gdpo(rewards[:, None], uids),
}
ALL = {
    **GROUPED,
    "reinforce_plus_plus": advantages.reinforce_plus_plus,
    "remax": lambda rewards, uids: advantages.remax(rewards, uids, baselines=torch.full_like(rewards, 0.25)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "kwargs", "first", "second"),
    [
        ("grpo", {}, [0.866024, -0.866024, -0.866024, 0.866024], [-0.499999, -0.499999, 1.499997, -0.499999]),
        ("grpo", {"eps": 1e-4}, [0.865875, -0.865875, -0.865875, 0.865875], [-0.4999, -0.4999, 1.4997, -0.4999]),
        ("grpo", {"normalize_std": False}, [0.5, -0.5, -0.5, 0.5], [-0.25, -0.25, 0.75, -0.25]),
        ("rloo", {}, [0.666667, -0.666667, -0.666667, 0.666667], [-0.333333, -0.333333, 1.0, -0.333333]),
        ("reinforce_plus_plus_baseline", {}, [1.0, -1.0, -1.0, 1.0], [-0.5, -0.5, 1.5, -0.5]),
        ("gpg", {}, [1.333333, -1.333333, -1.333333, 1.333333], [-0.666667, -0.666667, 2.0, -0.666667]),
        (
            "reinforce_plus_plus",
            {},
            [1.207615, -0.724569, -0.724569, 1.207615],
            [-0.724569, -0.724569, 1.207615, -0.724569],
        ),
        ("pass_at_k", {}, [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.999996, 0.0]),
    ],
)
def test_agrees_with_independent_libraries(
    name: str, kwargs: dict[str, object], first: list[float], second: list[float], dtype: torch.dtype
) -> None:
    # eps 1e-4 was reported for the first group alone; the second follows from its std of 0.5
    result = getattr(advantages, name)(REWARDS.to(dtype), UIDS, **kwargs)
    assert result.dtype == dtype
    assert result.tolist() == pytest.approx([*first, *second], abs=1e-6)


# --- known mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("eps", "expected"), [(1e-6, 0.7061), (1e-4, 0.6195)])
def test_a08_almost_equal_rewards_are_told_apart(eps: float, expected: float) -> None:
    rewards = torch.tensor([0.50, 0.501], dtype=torch.float64)
    assert advantages.grpo(rewards, ["a", "a"], eps=eps).tolist() == pytest.approx([-expected, expected], abs=1e-4)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize(("reward", "size"), [(0.7, 7), (1000.1, 15), (0.3, 7), (0.1, 3), (1e-30, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a08_a_group_of_equal_rewards_gets_exactly_zero(
    name: str, reward: float, size: int, dtype: torch.dtype
) -> None:
    # a second group keeps the batch's own statistics away from the equal one's
    rewards = torch.tensor([reward] * size + [0.0, 1.0, 1.0], dtype=dtype)
    result = GROUPED[name](rewards, ["a"] * size + ["b"] * 3)
    assert result[:size].tolist() == [0.0] * size
    assert bool(result.isfinite().all())
    if name != "pass_at_k":
        assert result[size].item() < 0


@pytest.mark.parametrize("name", GROUPED)
def test_a08_a_group_of_one_gets_zero(name: str) -> None:
    assert GROUPED[name](torch.tensor([0.7, 0.2]), ["a", "b"]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 4, 2]])
def test_b05_groups_are_joined_by_uid_wherever_they_lie(order: list[int]) -> None:
    rewards, uids = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0]), ["A", "B", "A", "B", "A", "B"]
    result = advantages.grpo(rewards[order], [uids[row] for row in order], normalize_std=False)
    expected = torch.tensor([0.6667, 0.0, -0.3333, 0.0, -0.3333, 0.0])[order]
    assert result.tolist() == pytest.approx(expected.tolist(), abs=1e-4)


def test_b05_uids_in_a_tensor_count_by_value() -> None:
    uids = torch.tensor([7, 9, 7, 9])
    assert advantages.rloo(torch.tensor([1.0, 0.0, 0.0, 0.0]), uids).tolist() == [1.0, 0.0, -1.0, 0.0]


@pytest.mark.parametrize("failed", [NAN, INF, -INF])
def test_h01_a_failed_reward_is_left_out_of_the_group(failed: float) -> None:
    result = advantages.grpo(torch.tensor([failed, 1.0, 0.0]), ["a"] * 3)
    assert result.tolist() == pytest.approx([0.0, 0.7071, -0.7071], abs=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_h01_failed_rows_get_zero_and_change_nothing_for_the_others(name: str) -> None:
    rewards = torch.tensor([NAN, 1.0, 0.0, 0.5, NAN, NAN])
    uids = ["a", "a", "a", "b", "b", "c"]
    result = ALL[name](rewards, uids)
    assert result[[0, 4, 5]].tolist() == [0.0, 0.0, 0.0]
    if name != "opo":  # the stand-in for its lengths counts rows
        assert torch.equal(result[1:4], ALL[name](rewards[1:4], uids[1:4]))
    assert ALL[name](torch.tensor([NAN, NAN]), ["a", "a"]).tolist() == [0.0, 0.0]


# --- naive loops ------------------------------------------------------------------------------------------------


def _members(uids: list[str], row: int) -> list[int]:
    return [other for other in range(len(uids)) if uids[other] == uids[row]]


def naive(name: str, rewards: list[float], uids: list[str]) -> list[float]:
    out = []
    for row, reward in enumerate(rewards):
        group = [rewards[other] for other in _members(uids, row)]
        n, mean = len(group), sum(group) / len(group)
        others = [rewards[other] for other in _members(uids, row) if other != row]
        if len(set(group)) == 1:
            out.append(0.0)
        elif name == "grpo":
            out.append((reward - mean) / (statistics.stdev(group) + 1e-6))
        elif name == "dr_grpo":
            out.append(reward - mean)
        elif name == "rloo":
            out.append(reward - sum(others) / (n - 1))
        elif name == "gpg":
            out.append(len(rewards) / sum(r != 0 for r in rewards) * (reward - mean))
        elif name == "maxrl":
            out.append((reward - mean) / (mean + 1e-6))
        elif name == "opo":
            lengths = {other: other + 1 for other in _members(uids, row)}
            out.append(reward - sum(length * rewards[o] for o, length in lengths.items()) / sum(lengths.values()))
        elif name == "pass_at_k":
            lead = reward - max(others)
            out.append(lead / (statistics.stdev(group) + 1e-6) if lead > 0 else 0.0)
        else:
            raise AssertionError(name)
    return out


batches = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from([0.0, 0.25, 0.7, 1.0])), min_size=1, max_size=10
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gpg", "maxrl", "opo", "pass_at_k"])
@given(batch=batches)
@few_examples
def test_matches_a_naive_loop(name: str, dtype: torch.dtype, batch: list[tuple[str, float]]) -> None:
    uids, rewards = [uid for uid, _ in batch], torch.tensor([reward for _, reward in batch], dtype=dtype)
    expected = naive(name, rewards.tolist(), uids)
    assert GROUPED[name](rewards, uids).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in ALL if name != "opo"])
@given(batch=batches, seed=st.integers(0, 99))
@few_examples
def test_the_order_of_the_rows_changes_no_bit(name: str, batch: list[tuple[str, float]], seed: int) -> None:
    uids, rewards = [uid for uid, _ in batch], torch.tensor([reward for _, reward in batch])
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    shuffled = ALL[name](rewards[order], [uids[row] for row in order.tolist()])
    if name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"):
        torch.testing.assert_close(shuffled, ALL[name](rewards, uids)[order])
    else:
        assert torch.equal(shuffled, ALL[name](rewards, uids)[order])


def test_reinforce_plus_plus_whitens_over_tokens_if_lengths_are_given() -> None:
    tokens = [float(r) for r, length in zip(REWARDS, LENGTHS, strict=True) for _ in range(int(length))]
    mean, std = statistics.mean(tokens), statistics.stdev(tokens)
    expected = [(float(r) - mean) / std for r in REWARDS]
    assert advantages.reinforce_plus_plus(REWARDS, UIDS, lengths=LENGTHS).tolist() == pytest.approx(expected, abs=1e-6)


def test_reinforce_plus_plus_baseline_whitens_over_tokens_if_lengths_are_given() -> None:
    centred = [0.5, -0.5, -0.5, 0.5, -0.25, -0.25, 0.75, -0.25]
    tokens = [c for c, length in zip(centred, LENGTHS.tolist(), strict=True) for _ in range(length)]
    expected = [(c - statistics.mean(tokens)) / statistics.stdev(tokens) for c in centred]
    result = advantages.reinforce_plus_plus_baseline(REWARDS, UIDS, lengths=LENGTHS)
    assert result.tolist() == pytest.approx(expected, abs=1e-6)


def test_opo_by_hand() -> None:
    rewards, lengths = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([1, 3, 0])
    assert advantages.opo(rewards, ["a"] * 3, lengths=lengths).tolist() == [0.75, -0.25, 0.25]
    assert advantages.opo(rewards, ["a"] * 3, lengths=torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]


def test_remax_by_hand() -> None:
    rewards, baselines = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.25, 0.5, NAN])
    assert advantages.remax(rewards, ["a", "b", "c"], baselines=baselines).tolist() == [0.75, -0.5, 0.0]


def test_pass_at_k_with_two_best_gets_zero() -> None:
    assert advantages.pass_at_k(torch.tensor([1.0, 1.0, 0.0]), ["a"] * 3).tolist() == [0.0, 0.0, 0.0]
    assert advantages.pass_at_k(torch.tensor([1.0, 0.25, 0.0]), ["a"] * 3, normalize_std=False).tolist() == [0.75, 0, 0]


def test_gdpo_normalises_each_reward_apart() -> None:
    # the second reward is 100 times the first: normalised apart both count alike, added up first only it would
    rewards = torch.tensor([[1.0, 0.0], [0.0, 100.0], [0.0, 0.0], [1.0, 100.0]])
    each = 0.5 / (statistics.stdev([1, 0, 0, 1]) + 1e-6)
    total = [each - each, each - each, -2 * each, 2 * each]
    expected = [t / statistics.stdev(total) for t in total]
    assert advantages.gdpo(rewards, ["a"] * 4).tolist() == pytest.approx(expected, abs=1e-5)
    weighted = advantages.gdpo(rewards, ["a"] * 4, weights=[1.0, 0.0])
    assert weighted.tolist() == pytest.approx(
        [r / statistics.stdev([0.5, -0.5, -0.5, 0.5]) for r in (0.5, -0.5, -0.5, 0.5)]
    )
    one_failed = torch.tensor([[NAN, 1.0], [0.0, 1.0], [1.0, 0.0]])
    assert advantages.gdpo(one_failed, ["a"] * 3)[0].item() == 0.0


def test_integer_rewards_give_fp32() -> None:
    assert advantages.grpo(torch.tensor([1, 0]), ["a", "a"]).dtype == torch.float32


# --- whitening, and where things sit among the tokens -----------------------------------------------------------


def test_whiten_is_over_the_mask() -> None:
    values = torch.tensor([[1.0, NAN], [2.0, 6.0]])
    result = advantages.whiten(values, torch.tensor([[True, False], [True, True]]))
    std = statistics.stdev([1.0, 2.0, 6.0])
    assert result.flatten().tolist() == pytest.approx([-2 / std, 0.0, -1 / std, 3 / std], abs=1e-6)
    assert advantages.whiten(torch.full((3,), 0.7), torch.ones(3)).tolist() == [0.0, 0.0, 0.0]
    assert advantages.whiten(torch.full((3,), 0.7), torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    assert advantages.whiten(torch.tensor([5.0]), torch.ones(1)).tolist() == [0.0]


def test_response_advantages_flat_and_padded() -> None:
    flat = advantages.response_advantages(
        torch.tensor([2.0, -1.0, 3.0]),
        torch.tensor([0, 1, 1, 0, 1], dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 3, 3, 5]),
    )
    assert flat.tolist() == [0.0, 2.0, 2.0, 0.0, 3.0]
    padded = advantages.response_advantages(torch.tensor([2.0, -1.0]), torch.tensor([[0, 1], [1, 0]]))
    assert padded.tolist() == [[0.0, 2.0], [-1.0, 0.0]]


@pytest.mark.parametrize(
    ("ids", "length", "expected"),
    [
        ([11, 12, 2, 0, 0], 3, [0.0, 0.0, 1.0, 0.0, 0.0]),
        ([11, 12, 13, 14, 15], 5, [0.0, 0.0, 0.0, 0.0, 1.0]),
        ([11, 7, 0, 0, 0], 2, [0.0, 1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_a11_reward_sits_on_the_last_real_token_whatever_its_id(
    ids: list[int], length: int, expected: list[float]
) -> None:
    mask = torch.arange(len(ids)) < length
    assert advantages.token_level_rewards(torch.ones(1), mask[None]).tolist() == [expected]
    cu_seqlens = torch.tensor([0, length])
    flat = advantages.token_level_rewards(torch.ones(1), mask[:length], cu_seqlens=cu_seqlens)
    assert flat.tolist() == expected[:length]


def test_a11_token_level_rewards_of_several_sequences() -> None:
    # prompt token first; the second has an observation at the end, the third no response at all
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 0], dtype=torch.bool)
    flat = advantages.token_level_rewards(torch.tensor([0.5, 2.0, 9.0]), mask, cu_seqlens=torch.tensor([0, 3, 6, 7]))
    assert flat.tolist() == [0.0, 0.0, 0.5, 0.0, 2.0, 0.0, 0.0]


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ALL if name != "gdpo"])
def test_refuses_a_missing_uid_and_a_matrix_of_rewards(name: str) -> None:
    with pytest.raises(ValueError, match="2 rewards but 1 uids"):
        ALL[name](torch.ones(2), ["a"])
    with pytest.raises(ValueError, match=r"shape \[B\]"):
        ALL[name](torch.ones(2, 2), ["a", "b"])


def test_refuses_extras_of_another_length() -> None:
    with pytest.raises(ValueError, match=r"lengths must have shape \(8,\)"):
        advantages.opo(REWARDS, UIDS, lengths=torch.ones(3))
    with pytest.raises(ValueError, match=r"baselines must have shape \(8,\)"):
        advantages.remax(REWARDS, UIDS, baselines=torch.ones(1))
    with pytest.raises(ValueError, match="1 rewards per rollout but 2 weights"):
        advantages.gdpo(REWARDS[:, None], UIDS, weights=[1.0, 2.0])
    with pytest.raises(ValueError, match=r"shape \[B, K\]"):
        advantages.gdpo(REWARDS, UIDS)
    with pytest.raises(ValueError, match="one shape"):
        advantages.whiten(torch.ones(2, 2), torch.ones(2))
    with pytest.raises(ValueError, match=r"shape \[2\]"):
        advantages.token_level_rewards(torch.ones(1), torch.ones(2, 3))


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(ValueError, match=r"got -1\.0"):
        advantages.maxrl(torch.tensor([-1.0, 1.0]), ["a", "a"])


def test_gdpo_leaves_a_reward_of_weight_0_out_also_where_it_failed() -> None:
    rewards = torch.tensor([[1.0, math.nan], [0.0, 5.0], [0.0, 7.0], [1.0, 9.0]], dtype=torch.float64)
    found = advantages.gdpo(rewards, ["a", "a", "b", "b"], weights=[2.0, 0.0])
    assert torch.equal(found, advantages.gdpo(rewards[:, :1], ["a", "a", "b", "b"], weights=[2.0]))
    assert (found != 0).all()
    assert advantages.gdpo(rewards, ["a"] * 4, weights=[0.0, 0.0]).tolist() == [0.0] * 4
