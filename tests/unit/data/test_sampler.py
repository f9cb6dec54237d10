from __future__ import annotations

from itertools import islice

import pytest

from lightning_rlhf.data import Position, PromptSampler


def steps(
    num_prompts: int, *, prompts_per_step: int, ranks: int, start: Position, count: int, **kwargs: object
) -> list[list[int]]:
    """The prompts of each step, joined over the ranks in rank order, as ``count`` steps of every rank give them."""
    per_rank = []
    for rank in range(ranks):
        sampler = PromptSampler(
            num_prompts,
            prompts_per_step=prompts_per_step,
            num_replicas=ranks,
            rank=rank,
            **kwargs,
        )
        sampler.start = start
        share = prompts_per_step // ranks
        indices = list(islice(sampler, count * share))
        per_rank.append([indices[i * share : (i + 1) * share] for i in range(count)])
    return [[index for rank in per_rank for index in rank[step]] for step in range(count)]


def test_unshuffled_shares_by_hand() -> None:
    shares = [list(PromptSampler(11, prompts_per_step=4, num_replicas=2, rank=rank, shuffle=False)) for rank in (0, 1)]
    assert shares == [[0, 1, 4, 5], [2, 3, 6, 7]]  # 8, 9 and 10 do not fill a step


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_a_step_holds_the_same_prompts_on_any_number_of_ranks(ranks: int) -> None:
    for epoch in (0, 1):
        start = Position(epoch=epoch)
        alone = steps(50, prompts_per_step=6, ranks=1, start=start, count=8, seed=5)
        split = steps(50, prompts_per_step=6, ranks=ranks, start=start, count=8, seed=5)
        assert split == alone
        seen = [index for step in alone for index in step]
        assert len(seen) == len(set(seen)) == 48


def test_epochs_and_seeds_have_their_own_orders() -> None:
    orders = {
        (seed, epoch): tuple(PromptSampler(30, prompts_per_step=5, seed=seed).order(epoch))
        for seed in (0, 1, 2)
        for epoch in (0, 1, 2)
    }
    assert len(set(orders.values())) == 9  # seed + epoch would give 5
    assert all(sorted(order) == list(range(30)) for order in orders.values())


def test_prompts_left_out_differ_between_epochs() -> None:
    sampler = PromptSampler(10, prompts_per_step=4, seed=0)
    seen = {index for epoch in range(8) for index in sampler.order(epoch)[:8]}
    assert seen == set(range(10))


def test_resume_on_other_ranks_neither_repeats_nor_loses() -> None:
    kwargs = {"prompts_per_step": 6, "seed": 1}
    unbroken = steps(20, ranks=1, start=Position(), count=3, **kwargs)
    one = PromptSampler(20, prompts_per_step=6, num_replicas=2, rank=0, seed=1)
    position = one.after_step(Position())
    assert position == Position(epoch=0, prompts_in_epoch=6, prompts_consumed=6)
    resumed = steps(20, ranks=3, start=position, count=2, **kwargs)
    assert resumed == unbroken[1:]


def test_a_pass_goes_on_into_the_next_epoch() -> None:
    sampler = PromptSampler(10, prompts_per_step=4, seed=3)
    sampler.start = Position(epoch=0, prompts_in_epoch=4, prompts_consumed=4)
    assert list(sampler) == sampler.order(0)[4:8] + sampler.order(1)[:4]
    end = sampler.after_step(sampler.after_step(sampler.start))
    assert end == Position(epoch=1, prompts_in_epoch=4, prompts_consumed=12)


def test_another_step_size_continues_at_the_same_prompt() -> None:
    small = PromptSampler(10, prompts_per_step=2, seed=3)
    position = small.after_step(small.after_step(small.after_step(Position())))
    large = PromptSampler(10, prompts_per_step=4, seed=3)
    large.start = position
    assert list(islice(large, 4)) == large.order(0)[6:10]


def test_g02_numbers_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"prompts_per_step=4 cannot be shared equally by 3 .* such as 6"):
        PromptSampler(8, prompts_per_step=4, num_replicas=3, rank=0)
    with pytest.raises(ValueError, match="prompts_per_step=9, but there are only 8 prompts"):
        PromptSampler(8, prompts_per_step=9)
    with pytest.raises(ValueError, match="prompts_per_step must be at least 1, got 0"):
        PromptSampler(8, prompts_per_step=0)


def test_set_epoch_changes_nothing() -> None:
    sampler = PromptSampler(10, prompts_per_step=5)
    before = list(sampler)
    sampler.set_epoch(3)
    assert list(sampler) == before
    assert len(sampler) == 10


def test_a_step_that_lacks_prompts_takes_those_that_come_next() -> None:
    sampler = PromptSampler(10, prompts_per_step=4, shuffle=False)
    start = Position(prompts_in_epoch=4, prompts_consumed=4)
    drawn, after = sampler.draw(start, 3, without={0, 1, 2, 3})
    assert drawn == [4, 5, 6]
    assert after == Position(prompts_in_epoch=7, prompts_consumed=7)
    # what is left of the epoch, then the next, where a prompt that the step has tried is passed over and consumed
    drawn, after = sampler.draw(after, 5, without={0, 1, 2, 3, 4, 5, 6})
    assert drawn == [7, 8, 9]
    assert after == Position(epoch=1, prompts_in_epoch=7, prompts_consumed=17)
    assert sampler.draw(after, 2, without=set())[0] == [7, 8]


def test_drawn_prompts_are_shared_in_order_also_if_they_do_not_divide() -> None:
    shares = [
        PromptSampler(12, prompts_per_step=3, num_replicas=3, rank=rank).share([7, 8, 9, 10]) for rank in range(3)
    ]
    assert shares == [[7], [8], [9, 10]]
