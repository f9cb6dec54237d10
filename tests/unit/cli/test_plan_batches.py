from __future__ import annotations

from typing import Any

import pytest

from lightning_rlhf.cli.plan_batches import BatchSizes, MicroBatches, bound_micro_batches


def _sizes(**changes: Any) -> BatchSizes:
    return BatchSizes(
        **{
            "prompts_per_step": 2,
            "group_size": 2,
            "mini_batch_size": 4,
            "data_parallel_size": 1,
            "micro_batch_size": None,
            "max_tokens": None,
            "max_new_tokens": 10,
            **changes,
        }
    )


def test_a_whole_share_is_one_micro_batch() -> None:
    # rows of 13, 13, 15, 15
    assert bound_micro_batches([3, 5], _sizes()) == MicroBatches(per_mini_batch=1, inference=1, tokens=56, sequences=4)


def test_by_count() -> None:
    found = bound_micro_batches([3, 5], _sizes(micro_batch_size=3))
    assert (found.per_mini_batch, found.inference, found.sequences) == (2, 2, 2)  # evenly: 2 and 2, not 3 and 1
    assert found.tokens == 28


def test_by_tokens() -> None:
    # first fit finds 15+15 and 13+13; evenly, 15+13 twice
    assert bound_micro_batches([3, 5], _sizes(max_tokens=30)) == MicroBatches(
        per_mini_batch=2, inference=2, tokens=28, sequences=2
    )
    assert bound_micro_batches([3, 5], _sizes(max_tokens=27)).per_mini_batch == 3  # 13+13, 15, 15


def test_shares_of_ranks_and_mini_batches() -> None:
    found = bound_micro_batches(
        [10] * 8, _sizes(prompts_per_step=8, mini_batch_size=8, data_parallel_size=2, max_tokens=40)
    )
    # 8 rows of 20 in a mini-batch, 4 on a rank, 2 in a micro-batch; a rank holds 8 of the step's 16
    assert found == MicroBatches(per_mini_batch=2, inference=4, tokens=40, sequences=2)


def test_the_largest_of_several_steps_counts_and_an_incomplete_one_does_not() -> None:
    found = bound_micro_batches([1, 1, 30, 30, 90], _sizes(max_tokens=100))
    assert (found.per_mini_batch, found.tokens) == (2, 80)


def test_a_longer_bound_than_the_budget_counts_as_the_budget() -> None:
    found = bound_micro_batches([15, 15], _sizes(max_tokens=20))
    assert (found.per_mini_batch, found.tokens) == (4, 20)


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_tokens_per_micro_batch=20 leaves no room .* 20 tokens. Use at least 30"):
        bound_micro_batches([15, 20], _sizes(max_tokens=20))


def test_a_shared_prompt_counts_once_in_a_micro_batch() -> None:
    # rows of 13, 13, 15, 15 share 3 and 5 tokens
    assert bound_micro_batches([3, 5], _sizes(share_prompts=True)) == MicroBatches(
        per_mini_batch=1, inference=1, tokens=3 + 20 + 5 + 20, sequences=4
    )
    by_tokens = bound_micro_batches([3, 5], _sizes(share_prompts=True, max_tokens=30))
    assert (by_tokens.per_mini_batch, by_tokens.tokens, by_tokens.sequences) == (2, 5 + 20, 2)
    # the second group, of 25, is cut, and each half computes its prompt
    cut = bound_micro_batches([3, 5], _sizes(share_prompts=True, max_tokens=24))
    assert (cut.per_mini_batch, cut.tokens) == (3, 3 + 20)


def test_ranks_get_whole_groups_where_prompts_are_shared() -> None:
    found = bound_micro_batches([90] * 2, _sizes(share_prompts=True, data_parallel_size=2))
    assert found == MicroBatches(per_mini_batch=1, inference=1, tokens=90 + 20, sequences=2)
