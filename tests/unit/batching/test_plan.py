"""The global plan: the same for any number of ranks, every row once."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from lightning_rlhf.batching.plan import RowFact, StepPlan, build_step_plan


def _facts(num_ranks: int, *, groups: int = 4, size: int = 3) -> list[RowFact]:
    """The same rows whoever sampled them; prompts are dealt to ranks in contiguous parts."""
    draw = random.Random(0)
    facts = []
    for group, sample in itertools.product(range(groups), range(size)):
        length = draw.randint(4, 40)
        rank = group * num_ranks // groups
        facts.append(
            RowFact(
                uid=f"prompt-{group}",
                sample_index=sample,
                reward=draw.random(),
                length=length,
                num_response_tokens=length - 2,
                num_loss_tokens=0 if (group, sample) == (1, 2) else length - 2,
                truncated=False,
                skipped=False,
                rank=rank,
                row=sum(fact.rank == rank for fact in facts),
            )
        )
    return facts


def _keys(plan: StepPlan, rows: list[int]) -> set[tuple[str, int]]:
    return {(plan.facts[row].uid, plan.facts[row].sample_index) for row in rows}


@pytest.mark.parametrize("mini_batch_size", [None, 6, 3])
def test_mini_batches_hold_the_same_rows_for_any_number_of_ranks(mini_batch_size: int | None) -> None:
    plans = [
        build_step_plan(_facts(ranks), mini_batch_size=mini_batch_size, data_parallel_size=ranks, seed=7)
        for ranks in (1, 2, 4)
    ]
    members = [
        [_keys(plan, [row for rows in mini.rows_of_rank for row in rows]) for mini in plan.mini_batches]
        for plan in plans
    ]
    assert members[0] == members[1] == members[2]
    counts = [[(m.num_global_tokens, m.num_global_sequences) for m in plan.mini_batches] for plan in plans]
    assert counts[0] == counts[1] == counts[2]


def test_every_row_trains_once_and_denominators_count_what_trains() -> None:
    facts = _facts(2)
    plan = build_step_plan(facts, mini_batch_size=6, data_parallel_size=2, seed=0)
    rows = plan.rows_of_rank(0) + plan.rows_of_rank(1)
    assert sorted(rows) == list(range(12))
    assert sum(mini.num_global_tokens for mini in plan.mini_batches) == sum(fact.num_loss_tokens for fact in facts)
    assert sum(mini.num_global_sequences for mini in plan.mini_batches) == 11


def test_the_plan_does_not_depend_on_the_order_of_arrival() -> None:
    facts = _facts(2)
    shuffled = random.Random(1).sample(facts, len(facts))
    plans = [build_step_plan(f, mini_batch_size=4, data_parallel_size=2, seed=3) for f in (facts, shuffled)]
    assert plans[0] == plans[1]
    assert plans[0].checksum() == plans[1].checksum()


def test_the_checksum_sees_one_different_reward() -> None:
    facts = _facts(2)
    other = [dataclasses.replace(facts[0], reward=0.123), *facts[1:]]
    plans = [build_step_plan(f, mini_batch_size=None, data_parallel_size=2, seed=3) for f in (facts, other)]
    assert plans[0].checksum() != plans[1].checksum()


def test_another_seed_draws_other_mini_batches_and_later_epochs_another_order() -> None:
    plans = [build_step_plan(_facts(1), mini_batch_size=3, data_parallel_size=1, seed=seed) for seed in (0, 1)]
    assert plans[0].mini_batches != plans[1].mini_batches
    orders = [plans[0].epoch_order(epoch) for epoch in range(6)]
    assert orders[0] == [0, 1, 2, 3]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def test_shares_are_balanced_by_cost() -> None:
    facts = [dataclasses.replace(fact, length=100 if i < 2 else 10) for i, fact in enumerate(_facts(1))]
    plan = build_step_plan(facts, mini_batch_size=None, data_parallel_size=2, seed=0)
    loads = [sum(plan.facts[row].length for row in rows) for rows in plan.mini_batches[0].rows_of_rank]
    assert loads == [150, 150]


@pytest.mark.parametrize("mini_batch_size", [None, 6])
def test_groups_kept_together_change_who_trains_and_nothing_else(mini_batch_size: int | None) -> None:
    apart, together = (
        build_step_plan(_facts(2), mini_batch_size=mini_batch_size, data_parallel_size=2, seed=3, keep_groups=keep)
        for keep in (False, True)
    )
    for one, other in zip(apart.mini_batches, together.mini_batches, strict=True):
        assert sorted(itertools.chain(*one.rows_of_rank)) == sorted(itertools.chain(*other.rows_of_rank))
        assert one.num_global_tokens == other.num_global_tokens


def test_whole_groups_go_to_one_rank_when_asked() -> None:
    facts = [dataclasses.replace(fact, length=60 + fact.num_response_tokens) for fact in _facts(2)]
    plan = build_step_plan(facts, mini_batch_size=None, data_parallel_size=2, seed=0, keep_groups=True)
    for rows in plan.mini_batches[0].rows_of_rank:
        uids = [plan.facts[row].uid for row in rows]
        assert all(uids.count(uid) == 3 for uid in uids)


def test_rows_that_do_not_divide_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="12 rollouts do not divide into mini-batches of 5"):
        build_step_plan(_facts(1), mini_batch_size=5, data_parallel_size=1, seed=0)


def test_a_row_from_two_places_is_refused() -> None:
    facts = _facts(1)
    with pytest.raises(ValueError, match="came from two places"):
        build_step_plan([*facts, facts[0]], mini_batch_size=None, data_parallel_size=1, seed=0)
