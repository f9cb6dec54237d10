"""What rows have in common is found in their tokens, and counted once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lightning_rlhf.batching import plan_micro_batches, sequence_costs
from lightning_rlhf.batching.shared_prompts import (
    SharedPrefix,
    among,
    find_shared_prefixes,
    num_computed_tokens,
    share_out_groups,
    shared_cost,
)


def _find(rows: list[list[int]], uids: list[str]) -> list[tuple[tuple[int, ...], int]]:
    tokens = np.array(list(itertools.chain(*rows)), dtype=np.int64)
    starts = np.cumsum([0, *map(len, rows)])
    return [(shared.rows, shared.length) for shared in find_shared_prefixes(tokens, starts, uids)]


def test_rows_of_a_uid_share_the_tokens_that_they_begin_with() -> None:
    rows = [[1, 2, 3, 7], [4, 4, 9], [1, 2, 3, 8, 8], [4, 4, 5, 5]]
    assert _find(rows, ["a", "b", "a", "b"]) == [((0, 2), 3), ((1, 3), 2)]


def test_one_uid_with_two_prompts_shares_within_each() -> None:
    rows = [[1, 2, 3, 7], [5, 6, 6, 1], [1, 2, 3, 8], [5, 6, 6, 2]]
    assert _find(rows, ["a"] * 4) == [((0, 2), 3), ((1, 3), 3)]


def test_a_uid_whose_rows_have_nothing_in_common_shares_nothing() -> None:
    assert _find([[1, 2, 3], [2, 2, 3], [3, 2, 3]], ["a"] * 3) == []


def test_other_uids_are_not_looked_at() -> None:
    assert _find([[1, 2, 3], [1, 2, 3]], ["a", "b"]) == []


def test_a_row_that_branches_early_is_left_out_if_the_others_save_more_without_it() -> None:
    rows = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [1, 2, 3, 4, 5, 8], [1, 9, 9]]
    assert _find(rows, ["a"] * 4) == [((0, 1, 2), 5)]


def test_the_same_response_twice_is_shared_to_its_end() -> None:
    assert _find([[1, 2, 3], [1, 2, 3], [1, 2, 3, 4]], ["a"] * 3) == [((0, 1, 2), 3)]


def test_a_common_first_token_of_long_rows_is_not_worth_sharing() -> None:
    rows = [[0, *[row] * 99] for row in range(1, 5)]
    assert _find(rows, ["a"] * 4) == []


def test_in_a_micro_batch_only_what_two_of_its_rows_share_is_left() -> None:
    shared = [SharedPrefix(rows=(0, 2, 3), length=4), SharedPrefix(rows=(1, 4), length=2)]
    assert among(shared, [1, 2, 3]) == [SharedPrefix(rows=(1, 2), length=4)]
    assert num_computed_tokens([5, 6, 7], among(shared, [1, 2, 3])) == 14


def test_cost_is_that_of_the_tokens_that_are_computed() -> None:
    """With hidden size 1 a sequence of L costs 12 L + L^2; of 3 shared and 1 own token, 16 - 9 of the squares."""
    costs = sequence_costs([4, 5], hidden_size=1).tolist()
    assert shared_cost(costs, float(sequence_costs([3], hidden_size=1)[0])) == 12 * (3 + 1 + 2) + 9 + 7 + 16
    assert shared_cost(costs, 0.0) == sum(costs)


# --- micro-batches ---------------------------------------------------------------------------------------------------


def _computed(lengths: list[int], shared: list[SharedPrefix], plan: list[list[int]]) -> list[int]:
    return [num_computed_tokens([lengths[row] for row in rows], among(shared, rows)) for rows in plan]


def test_a_budget_counts_a_prompt_once_in_a_micro_batch() -> None:
    lengths, shared = [8] * 4, [SharedPrefix(rows=(0, 1, 2, 3), length=6)]
    assert plan_micro_batches(lengths, max_tokens=14, shared=shared) == [[0, 1, 2, 3]]
    assert len(plan_micro_batches(lengths, max_tokens=13, shared=shared)) == 2
    assert len(plan_micro_batches(lengths, max_tokens=14)) == 4


def test_groups_stay_together_under_either_limit() -> None:
    lengths = [8, 8, 8, 8, 9, 9, 9, 9]
    shared = [SharedPrefix(rows=(0, 2, 4, 6), length=6), SharedPrefix(rows=(1, 3, 5, 7), length=6)]
    for limit in ({"micro_batch_size": 4}, {"max_tokens": 20}):
        plan = plan_micro_batches(lengths, shared=shared, **limit)
        assert sorted(plan) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert plan_micro_batches(lengths, shared=shared) == [list(range(8))]


def test_a_group_larger_than_a_micro_batch_is_cut_into_as_few_as_possible() -> None:
    shared = [SharedPrefix(rows=tuple(range(8)), length=6)]
    assert sorted(map(len, plan_micro_batches([8] * 8, micro_batch_size=3, shared=shared))) == [2, 3, 3]
    assert sorted(map(len, plan_micro_batches([8] * 8, max_tokens=14, shared=shared))) == [4, 4]


def test_more_micro_batches_than_groups_stay_empty_instead_of_cutting_one() -> None:
    shared = [SharedPrefix(rows=(0, 1), length=6)]
    assert plan_micro_batches([8, 8, 3], micro_batch_size=4, num_micro_batches=3, shared=shared) == [[0, 1], [2], []]


def test_a_sequence_longer_than_the_budget_is_refused_although_its_prompt_is_shared() -> None:
    with pytest.raises(ValueError, match="Sequence 1 has 12 tokens, more than the 10"):
        plan_micro_batches([9, 12], max_tokens=10, shared=[SharedPrefix(rows=(0, 1), length=8)])


@pytest.mark.parametrize("seed", range(20))
def test_random_groups_keep_every_limit_and_every_row(seed: int) -> None:
    draw = np.random.default_rng(seed)
    lengths: list[int] = []
    shared = []
    for _ in range(int(draw.integers(1, 9))):
        count, prompt = int(draw.integers(1, 9)), int(draw.integers(1, 40))
        first = len(lengths)
        lengths += (prompt + draw.integers(0, 30, count)).tolist()
        if count > 1:
            shared.append(SharedPrefix(rows=tuple(range(first, first + count)), length=prompt))
    budget, count = int(draw.integers(max(lengths), 200)), int(draw.integers(1, 12))
    for extra in (0, 1, 5):
        for limit in ({"max_tokens": budget}, {"micro_batch_size": count}):
            least = plan_micro_batches(lengths, shared=shared, **limit)
            plan = plan_micro_batches(lengths, shared=shared, num_micro_batches=len(least) + extra, **limit)
            assert len(plan) == len(least) + extra
            assert sorted(itertools.chain(*plan)) == list(range(len(lengths)))
            assert max(_computed(lengths, shared, plan)) <= limit.get("max_tokens", sum(lengths))
            assert max(map(len, plan)) <= limit.get("micro_batch_size", len(lengths))


# --- ranks -----------------------------------------------------------------------------------------------------------


def test_groups_stay_whole_where_there_are_enough_of_them() -> None:
    uids = [uid for uid in "abcd" for _ in range(4)]
    parts = share_out_groups([100] * 16, [80] * 16, uids, 2)
    assert sorted(map(len, parts)) == [8, 8]
    for part in parts:
        assert len({uids[row] for row in part}) == 2


def test_a_single_group_is_cut_so_that_no_rank_is_idle() -> None:
    assert sorted(map(len, share_out_groups([100] * 8, [80] * 8, ["a"] * 8, 2))) == [4, 4]
    assert sorted(map(len, share_out_groups([100] * 8, [80] * 8, ["a"] * 8, 4))) == [2, 2, 2, 2]


def test_groups_are_cut_only_where_that_makes_the_costliest_part_cheaper() -> None:
    """Three of a kind on two ranks: whole, one rank has two; cut, each computes a prompt and a half, and one more."""
    uids = [uid for uid in "abc" for _ in range(8)]
    short, long = (share_out_groups([length + 20] * 24, [length] * 24, uids, 2) for length in (20, 2000))
    assert sorted(map(len, short)) == [12, 12]
    assert sorted(map(len, long)) == [8, 16]


def test_no_row_is_lost_with_more_ranks_than_rows() -> None:
    parts = share_out_groups([5, 9], [3, 3], ["a", "a"], 4)
    assert sorted(itertools.chain(*parts)) == [0, 1]
    assert len(parts) == 4
