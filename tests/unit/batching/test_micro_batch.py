"""Micro-batches: the limit holds, every row once, compute even."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lightning_rlhf.batching import plan_micro_batches, sequence_costs


def _tokens(lengths: list[int], plan: list[list[int]]) -> list[int]:
    return [sum(lengths[row] for row in rows) for rows in plan]


@pytest.mark.parametrize(
    ("lengths", "expected"), [([6] * 5, 5), ([7, 3, 7, 3], 2), ([5, 5, 5, 5], 2)], ids=["five-6", "7373", "5555"]
)
def test_b03_budget_is_a_limit_and_not_an_average(lengths: list[int], expected: int) -> None:
    plan = plan_micro_batches(lengths, max_tokens=10)
    assert len(plan) == expected
    assert max(_tokens(lengths, plan)) <= 10


def test_b03_a_sample_above_the_budget_is_an_error_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="Sequence 1 has 12 tokens, more than the 10"):
        plan_micro_batches([3, 12], max_tokens=10)


@pytest.mark.parametrize("seed", range(30))
def test_random_budgets_hold_and_use_every_row_once(seed: int) -> None:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 50, int(draw.integers(1, 60))).tolist()
    budget = int(draw.integers(max(lengths), 200))
    least = plan_micro_batches(lengths, max_tokens=budget)
    assert len(least) <= 11 / 9 * np.ceil(sum(lengths) / budget) + 2
    for extra in (0, 1, 3, len(lengths)):
        plan = plan_micro_batches(lengths, max_tokens=budget, num_micro_batches=len(least) + extra)
        assert len(plan) == len(least) + extra
        assert sorted(itertools.chain(*plan)) == list(range(len(lengths)))
        assert max(_tokens(lengths, plan)) <= budget
        # rows are spread before anything stays empty
        assert sum(bool(rows) for rows in plan) == min(len(plan), len(lengths))


@pytest.mark.parametrize(("count", "size", "expected"), [(8, 3, [3, 3, 2]), (7, 7, [7]), (5, 1, [1] * 5), (3, 8, [3])])
def test_micro_batches_by_count(count: int, size: int, expected: list[int]) -> None:
    plan = plan_micro_batches(list(range(1, count + 1)), micro_batch_size=size)
    assert sorted(map(len, plan), reverse=True) == expected
    assert sorted(itertools.chain(*plan)) == list(range(count))


def test_more_micro_batches_than_needed_are_filled_first_and_then_empty() -> None:
    assert sorted(map(len, plan_micro_batches([4, 4, 4, 4], micro_batch_size=2, num_micro_batches=3))) == [1, 1, 2]
    assert plan_micro_batches([5, 3], num_micro_batches=4) == [[0], [1], [], []]
    assert plan_micro_batches([], max_tokens=8, num_micro_batches=2) == [[], []]
    assert plan_micro_batches([]) == []


def test_without_a_limit_all_rows_are_one_micro_batch() -> None:
    assert plan_micro_batches([5, 9, 2]) == [[0, 1, 2]]


def test_compute_is_balanced_and_not_tokens() -> None:
    # one long sequence costs as much as many short ones of the same number of tokens and more
    lengths = [4000] + [100] * 40
    plan = plan_micro_batches(lengths, max_tokens=5000, num_micro_batches=2, hidden_size=64)
    costs = sequence_costs(lengths, hidden_size=64)
    assert plan[0] == [0]
    assert costs[plan[0]].sum() > costs[plan[1]].sum()
    even = plan_micro_batches([10, 20, 30, 40] * 8, micro_batch_size=8, hidden_size=64)
    assert _tokens([10, 20, 30, 40] * 8, even) == [200] * 4


def test_compute_is_balanced_as_far_as_the_budget_has_room() -> None:
    # attention makes the long row cost more than all the others, of which its micro-batch must still take one
    lengths = [100] + [10] * 20
    plan = plan_micro_batches(lengths, max_tokens=190, hidden_size=1)
    assert [len(rows) for rows in plan] == [2, 19]


def test_costliest_first_so_that_ranks_meet_their_large_ones_together() -> None:
    lengths = np.random.default_rng(0).integers(1, 90, 40).tolist()
    costs = sequence_costs(lengths)
    found = [float(costs[rows].sum()) for rows in plan_micro_batches(lengths, max_tokens=100)]
    assert found == sorted(found, reverse=True)


def test_balancing_that_finds_no_room_falls_back_to_the_packing_that_fits() -> None:
    # exactly full bins: largest-first by cost would strand a piece
    lengths = [6, 5, 5, 4, 4, 3, 3]
    plan = plan_micro_batches(lengths, max_tokens=10)
    assert len(plan) == 3
    assert max(_tokens(lengths, plan)) <= 10


def test_refuses_contradictions() -> None:
    with pytest.raises(ValueError, match="not both"):
        plan_micro_batches([1], micro_batch_size=1, max_tokens=1)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        plan_micro_batches([1], max_tokens=0)
    with pytest.raises(ValueError, match=r"5 sequences of 30 tokens need 5 micro-batches.*num_micro_batches=4"):
        plan_micro_batches([6] * 5, max_tokens=10, num_micro_batches=4)
