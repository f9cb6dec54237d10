"""Least in flight, sticky prompts, and what is counted."""

from __future__ import annotations

import pytest

from lightning_rlhf.rollout.routing import Router


def test_the_least_loaded_replica_is_chosen_and_ranks_begin_apart() -> None:
    router = Router(3)
    assert [router.pick([i], size=2, available=[0, 1, 2]) for i in range(4)] == [0, 1, 2, 0]
    assert router.in_flight == [4, 2, 2]
    router.done(0, size=4)
    assert router.pick([9], size=1, available=[0, 1, 2]) == 0
    assert Router(3, offset=2).pick([0], size=1, available=[0, 1, 2]) == 2


def test_a_prompt_stays_with_the_replica_that_knows_it_until_that_one_is_too_busy() -> None:
    router = Router(2, slack=3)
    assert router.pick([1, 2], size=2, available=[0, 1]) == 0
    assert router.pick([1, 2], size=2, available=[0, 1]) == 0  # 2 against 0 is within the slack
    assert router.pick([1, 2], size=2, available=[0, 1]) == 1  # 4 against 0 is not
    assert router.pick([1, 2], size=2, available=[0, 1]) == 1
    assert router.pick([1, 2], size=2, available=[0]) == 0
    router.done(1, size=4)
    router.forget(0)
    assert router.pick([1, 2], size=1, available=[0, 1]) == 1


def test_memory_is_bounded_and_nothing_available_is_an_error() -> None:
    router = Router(1, memory=2)
    for token in range(5):
        router.pick([token], size=1, available=[0])
    assert list(router._seen) == [(3,), (4,)]
    with pytest.raises(ValueError, match="No replica"):
        router.pick([1], size=1, available=[])
    with pytest.raises(ValueError, match="at least one"):
        Router(0)
