"""Groups ahead of training: none lost, none twice, none too old, in the order in which they finish."""

from __future__ import annotations

import json
import math
import random
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlhf.callbacks.async_rollout import AsyncSettings, check_same_kind, steps_ahead, versions_per_step
from lightning_rlhf.callbacks.group_buffer import FinishedGroup, GroupBuffer
from lightning_rlhf.callbacks.rollout_window import Prompt, RolloutWindow, batch_of, prompts_of
from lightning_rlhf.types import RolloutSequence


def sequence(uid: str, version: int) -> RolloutSequence:
    return RolloutSequence(
        uid=uid,
        sample_index=0,
        prompt_token_ids=[1],
        response_token_ids=[2, 3],
        log_probs=[-0.1, -1 / 3],
        policy_version=version,
        finish_reason="stop",
    )


class Replicas:
    """Finishes groups when it is told to."""

    def __init__(self) -> None:
        self.futures: dict[str, list[Future[list[RolloutSequence]]]] = {}

    def begin(self, prompt: Prompt, version: int) -> Future[list[RolloutSequence]]:
        future: Future[list[RolloutSequence]] = Future()
        future.version = version  # type: ignore[attr-defined]
        self.futures.setdefault(prompt["uid"], []).append(future)
        return future

    def finish(self, *uids: str) -> None:
        for uid in uids:
            future = self.futures[uid][-1]
            future.set_result([sequence(uid, future.version)])  # type: ignore[attr-defined]

    def unfinished(self) -> list[str]:
        return [uid for uid, futures in self.futures.items() if not futures[-1].done()]


def prompts(*uids: str) -> list[Prompt]:
    return [{"uid": uid, "prompt_token_ids": [1], "prompt": uid, "metadata": {}} for uid in uids]


def uids(groups: list[FinishedGroup]) -> list[str]:
    return [group.prompt["uid"] for group in groups]


def test_a_step_takes_what_finishes_first_but_never_leaves_a_group_to_age_out() -> None:
    replicas = Replicas()
    window = RolloutWindow(replicas.begin, capacity=4, max_staleness=1)
    window.add(prompts("a", "b", "c", "d"))
    window.begin_all(version=0)
    replicas.finish("d", "b")
    assert uids(window.take(2, version=0, versions_per_step=1)) == ["d", "b"]
    window.add(prompts("e", "f"))
    window.begin_all(version=1)
    replicas.finish("e", "f", "c", "a")  # e and f are done first, but a and c could not wait for another step
    assert sorted(uids(window.take(2, version=1, versions_per_step=1))) == ["a", "c"]
    assert len(window) == 2
    assert window.restarted == 0


def test_what_is_too_old_is_ended_and_begun_again() -> None:
    replicas = Replicas()
    window = RolloutWindow(replicas.begin, capacity=4, max_staleness=0)
    window.add(prompts("a", "b", "c", "d"))
    window.begin_all(version=5)
    replicas.finish("c", "a", "d")
    assert uids(window.take(2, version=5, versions_per_step=1)) == ["c", "a"]
    assert window.restarted == 2
    window.begin_all(version=6)
    assert replicas.futures["b"][0].cancelled()
    again = [uid for uid, futures in replicas.futures.items() if len(futures) == 2]
    assert len(again) == 2
    replicas.finish(*again)
    taken = window.take(2, version=6, versions_per_step=1)
    assert {group.version for group in taken} == {6}
    assert sorted(uids(taken)) == sorted(again)


@pytest.mark.parametrize(("staleness", "extra"), [(0, 0), (0, 3), (1, 0), (2, 2), (5, 1)])
def test_many_steps_in_random_order_lose_nothing_and_bound_the_age(staleness: int, extra: int) -> None:
    draw, replicas, count = random.Random(staleness), Replicas(), 3
    window = RolloutWindow(replicas.begin, capacity=(staleness + 1) * count + extra, max_staleness=staleness)
    given = (f"p{i}" for i in range(10_000))
    handed_out, trained, ages = [], [], []

    def add(number: int) -> None:
        new = [next(given) for _ in range(number)]
        handed_out.extend(new)
        window.add(prompts(*new))

    add(staleness * count + extra)
    for version in range(40):
        add(count)
        if version == 20:  # as after a resume from a checkpoint
            saved = json.loads(json.dumps(window.to_json()))
            window.close()
            replicas = Replicas()
            window = RolloutWindow(replicas.begin, capacity=window.capacity, max_staleness=staleness)
            window.load([saved], rank=0, num_ranks=1)
        window.begin_all(version=version)
        waiting = replicas.unfinished()
        draw.shuffle(waiting)
        # at least what the step waits for
        replicas.finish(
            *(waiting if version % 3 else sorted(waiting, key=lambda uid: replicas.futures[uid][-1].version))
        )  # type: ignore[attr-defined]
        taken = window.take(count, version=version, versions_per_step=1)
        assert len(taken) == count
        trained += uids(taken)
        ages += [version - group.version for group in taken]
    assert len(set(trained)) == len(trained) == 120
    left = [p["uid"] for p in window.to_json()["prompts"]] + [g["prompt"]["uid"] for g in window.to_json()["finished"]]
    assert sorted(trained + left) == sorted(handed_out)
    assert max(ages) <= staleness
    assert staleness == 0 or max(ages) > 0


def test_a_failed_group_stops_the_step_and_too_few_groups_are_told() -> None:
    replicas = Replicas()
    window = RolloutWindow(replicas.begin, capacity=2, max_staleness=0)
    window.add(prompts("a"))
    window.begin_all(version=0)
    with pytest.raises(RuntimeError, match="only 1 are under way"):
        window.take(2, version=0, versions_per_step=1)
    replicas.futures["a"][0].set_exception(RuntimeError("no replica is left"))
    with pytest.raises(RuntimeError, match="no replica is left"):
        window.take(1, version=0, versions_per_step=1)


def test_another_number_of_ranks_deals_groups_out_anew() -> None:
    parts = []
    for rank in range(2):
        replicas = Replicas()
        window = RolloutWindow(replicas.begin, capacity=4, max_staleness=1)
        window.add(prompts(*(f"r{rank}-{i}" for i in range(4))))
        window.begin_all(version=3)
        replicas.finish(f"r{rank}-1", f"r{rank}-0")
        window._collect(0.0)
        parts.append(json.loads(json.dumps(window.to_json())))
    for num_ranks in (1, 2, 4):
        found: list[Any] = []
        for rank in range(num_ranks):
            window = RolloutWindow(Replicas().begin, capacity=8 // num_ranks, max_staleness=1)
            window.load(parts, rank=rank, num_ranks=num_ranks)
            assert len(window) == 8 // num_ranks
            saved = window.to_json()
            assert all(group["version"] == 3 for group in saved["finished"])
            found += [p["uid"] for p in saved["prompts"]] + [g["prompt"]["uid"] for g in saved["finished"]]
        assert sorted(found) == sorted(f"r{rank}-{i}" for rank in range(2) for i in range(4))


def test_the_buffer_gives_each_group_once_and_keeps_numbers_exactly() -> None:
    buffer = GroupBuffer(3)
    for uid, version in (("a", 5), ("b", 3), ("c", 4)):
        buffer.put(FinishedGroup(prompt=prompts(uid)[0], version=version, sequences=[sequence(uid, version)]))
    with pytest.raises(RuntimeError, match="full"):
        buffer.put(FinishedGroup(prompt=prompts("d")[0], version=5, sequences=[]))
    assert uids(buffer.in_order()) == ["a", "b", "c"]
    assert buffer.count_older(5) == 2
    (first,) = buffer.take(1, older_first=4)
    assert first.prompt["uid"] == "b"
    again = FinishedGroup.from_json(json.loads(json.dumps(first.to_json())))
    assert again == first
    assert uids(buffer.take(5, older_first=0)) == ["a", "c"]
    assert len(buffer) == 0


def test_uids_of_two_epochs_differ() -> None:
    batch = batch_of(prompts("a", "b"))
    assert [p["uid"] for p in prompts_of(batch, rl_step=7)] == ["a@7", "b@7"]


def test_a_run_with_an_environment_does_not_go_on_from_one_without() -> None:
    group = FinishedGroup(prompt=prompts("a")[0], version=1, sequences=[sequence("a", 1)])
    without = [{"prompts": [], "finished": [group.to_json()]}]
    check_same_kind(without, episodes=False)
    check_same_kind([{"prompts": prompts("a"), "finished": []}], episodes=True)
    with pytest.raises(ValueError, match="without an environment="):
        check_same_kind(without, episodes=True)
    without[0]["finished"][0]["sequences"][0]["metadata"]["episode"] = {"turns": 1}
    check_same_kind(without, episodes=True)
    with pytest.raises(ValueError, match="with an environment="):
        check_same_kind(without, episodes=False)


def test_how_far_ahead() -> None:
    module: Any = SimpleNamespace(mini_batch_size=16, num_epochs=2)
    assert versions_per_step(module, rollouts_per_step=40) == 6
    assert steps_ahead(AsyncSettings(), per_step=6, lag=0) == 0
    assert steps_ahead(AsyncSettings(max_staleness=6), per_step=6, lag=0) == 1
    assert steps_ahead(AsyncSettings(max_staleness=13), per_step=6, lag=1) == 2
    with pytest.raises(ValueError, match="max_staleness=7 or more"):
        steps_ahead(AsyncSettings(max_staleness=6), per_step=6, lag=1)
    with pytest.raises(ValueError, match="max_staleness=3 or more"):
        steps_ahead(AsyncSettings(), per_step=1, lag=2)
    assert steps_ahead(AsyncSettings(max_staleness=3), per_step=1, lag=2) == 1  # the advice is taken
    for wrong in (0.5, math.nan, math.inf):
        with pytest.raises(ValueError, match="at least 1"):
            AsyncSettings(over_sampling=wrong)
    with pytest.raises(TypeError, match=r"max_staleness=1\.5 counts policy versions"):
        AsyncSettings(max_staleness=1.5)  # type: ignore[arg-type]
