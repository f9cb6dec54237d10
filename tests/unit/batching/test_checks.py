from __future__ import annotations

from typing import Any

import pytest

from lightning_rlhf.batching.checks import check_batch_sizes


def sizes(**changes: int | None) -> dict[str, Any]:
    """8 prompts x 2 rollouts on 2 ranks, which fits, with changes."""
    return {"prompts_per_step": 8, "rollouts_per_prompt": 2, "data_parallel_size": 2, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mini_batch_size": 16},
        {"mini_batch_size": 8},
        {"mini_batch_size": 2, "micro_batch_size": 1},
        {"mini_batch_size": 8, "micro_batch_size": 4},
        {"mini_batch_size": 8, "micro_batch_size": 3},  # micro-batches of 3 and 1: the same gradient
        {"max_tokens_per_micro_batch": 1},
        {"data_parallel_size": 1, "micro_batch_size": 16},
        {"data_parallel_size": 8, "micro_batch_size": 2},
    ],
)
def test_sizes_that_fit_pass(changes: dict[str, int]) -> None:
    check_batch_sizes(**sizes(**changes))


G02 = {
    "1: 4 prompts x 2 on 3 ranks": (
        {"prompts_per_step": 4, "rollouts_per_prompt": 2, "data_parallel_size": 3},
        (
            "prompts_per_step=4 does not divide over 3 data-parallel ranks: every rank samples for the same number of "
            "prompts. Use 3 or 6."
        ),
    ),
    "2: mini-batch 4, micro-batch 8": (
        sizes(data_parallel_size=1, mini_batch_size=4, micro_batch_size=8),
        (
            "micro_batch_size=8 is larger than a rank's share of the mini-batch, which is mini_batch_size=4 / 1 "
            "data-parallel ranks = 4 rollouts. Use micro_batch_size=4 or less, or mini_batch_size=8 or more."
        ),
    ),
    "2 on 2 ranks: the share counts": (
        sizes(mini_batch_size=8, micro_batch_size=8),
        (
            "micro_batch_size=8 is larger than a rank's share of the mini-batch, which is mini_batch_size=8 / 2 "
            "data-parallel ranks = 4 rollouts. Use micro_batch_size=4 or less, or mini_batch_size=16 or more."
        ),
    ),
    "3: mini-batch 2 on 4 ranks": (
        sizes(data_parallel_size=4, mini_batch_size=2),
        (
            "mini_batch_size=2 leaves some of the 4 data-parallel ranks without a rollout. "
            "mini_batch_size counts rollouts over all ranks; use one of 4, 8, 16."
        ),
    ),
    "4: train batch 8, mini-batch 3": (
        sizes(prompts_per_step=4, data_parallel_size=1, mini_batch_size=3),
        (
            "mini_batch_size=3 does not divide the 8 rollouts of a step (4 prompts x 2 rollouts): 2 would be lost. "
            "mini_batch_size counts rollouts over all ranks; use one of 1, 2, 4, 8."
        ),
    ),
    "5: mini-batch larger than the train batch": (
        sizes(prompts_per_step=4, mini_batch_size=16),
        (
            "mini_batch_size=16 is larger than the 8 rollouts of a step (4 prompts x 2 rollouts). "
            "mini_batch_size counts rollouts over all ranks; use one of 2, 4, 8."
        ),
    ),
    "uneven shares": (
        {"prompts_per_step": 3, "rollouts_per_prompt": 4, "data_parallel_size": 3, "mini_batch_size": 4},
        (
            "mini_batch_size=4 does not divide over 3 data-parallel ranks. "
            "mini_batch_size counts rollouts over all ranks; use one of 3, 6, 12."
        ),
    ),
}


@pytest.mark.parametrize(("numbers", "message"), G02.values(), ids=G02)
def test_g02_sizes_that_do_not_fit(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        check_batch_sizes(**numbers)
    assert str(error.value) == message


def test_g02_with_a_token_budget_only_the_micro_batch_checks_fall_away() -> None:
    check_batch_sizes(**sizes(mini_batch_size=2, max_tokens_per_micro_batch=4096))
    for numbers, message in G02.values():
        if "micro_batch_size" not in numbers:
            with pytest.raises(ValueError) as error:
                check_batch_sizes(**numbers, max_tokens_per_micro_batch=4096)
            assert str(error.value) == message


def test_g02_mini_batch_counts_rollouts_not_prompts() -> None:
    # 4 prompts x 2 rollouts: 8 is the whole step if rollouts are counted, and too large if prompts were.
    check_batch_sizes(**sizes(prompts_per_step=4, mini_batch_size=8))


def test_two_ways_to_cut_micro_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="micro_batch_size=2 and max_tokens_per_micro_batch=512 both cut"):
        check_batch_sizes(**sizes(micro_batch_size=2, max_tokens_per_micro_batch=512))


@pytest.mark.parametrize("name", ["prompts_per_step", "rollouts_per_prompt", "data_parallel_size", "micro_batch_size"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        check_batch_sizes(**{**sizes(), name: 0})
