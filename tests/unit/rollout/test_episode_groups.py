"""Episodes in the background: each at its own pace, the same ids as together; ended and closed without a trace."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from support.rollout import prompt_batch
from support.tiny import EOS_ID, tiny_tokenizer
from support.turns import Counting, Dice, Logged, LoopEngine
from support.waiting import within

from lightning_rlhf.callbacks.rollout_window import Prompt, RolloutWindow, batch_of
from lightning_rlhf.contracts.environment import Action, Environment, EnvironmentBrokenError, StepResult, Task
from lightning_rlhf.contracts.rollout import SamplingConfig, request_seed
from lightning_rlhf.rollout.episode_groups import EpisodeGroups
from lightning_rlhf.rollout.episodes import TurnLimits
from lightning_rlhf.rollout.multi_turn import MultiTurnSampler
from lightning_rlhf.rollout.timed_calls import TimedCalls
from lightning_rlhf.types import PromptBatch, Rollouts, RolloutSequence

TOKENIZER = tiny_tokenizer()
SAMPLING = SamplingConfig(n=2, max_new_tokens=8, seed=3)


def _ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def _prompts(**metadata: dict[str, Any]) -> PromptBatch:
    batch = prompt_batch({uid: _ids(f"<user>{uid}<eos><assistant>") for uid in metadata})
    return replace(batch, metadata=list(metadata.values()))


def _drawn(uid: str, ids: list[int]) -> list[int]:
    """Ids by the request's seed, as a real engine draws them."""
    draw = torch.Generator().manual_seed(request_seed(3, rl_step=5, uid=uid, sample_index=0))
    return [*torch.randint(5, 40, (3,), generator=draw).tolist(), EOS_ID]


@pytest.fixture
def engine() -> Iterator[LoopEngine]:
    made = LoopEngine(_drawn, end=EOS_ID)
    yield made
    made.shutdown()


def _sampler(environment: Any, *, max_model_len: int = 200, **limits: Any) -> MultiTurnSampler:
    return MultiTurnSampler(
        environment=environment, tokenizer=TOKENIZER, max_model_len=max_model_len, limits=TurnLimits(**limits)
    )


def _begin(groups: EpisodeGroups, prompts: PromptBatch) -> list[Future[list[RolloutSequence]]]:
    return [groups.start_group(prompts, i, SAMPLING, rl_step=5, version=7) for i in range(len(prompts))]


def _rows(futures: list[Future[list[RolloutSequence]]]) -> Rollouts:
    return Rollouts.from_sequences([row for future in futures for row in future.result(timeout=30)])


@pytest.mark.parametrize(("environment", "room"), [(Counting, 70), (Dice, 30)])
def test_the_same_rows_as_when_all_take_their_turns_together(environment: Any, room: int, engine: LoopEngine) -> None:
    prompts = _prompts(a={"turns": 1}, bbbbbbbbbbb={"turns": 3}, c={"turns": 2}, d={"turns": 9}, e={"turns": 2})
    sampler = _sampler(environment, max_model_len=room, max_turns=4)
    together = sampler.generate(engine, prompts, SAMPLING, rl_step=5)
    counts = sampler.take_counts()
    futures = _begin(EpisodeGroups(sampler, engine), prompts)
    apart = _rows(futures)
    for name in ("tokens", "response_mask", "rollout_log_probs", "token_versions", "cu_seqlens"):
        assert torch.equal(getattr(apart, name), getattr(together, name)), name
    for name in ("uids", "sample_indices", "finish_reasons", "responses", "prompts", "metadata"):
        assert getattr(apart, name) == getattr(together, name), name
    assert len(set(apart.finish_reasons)) == 2
    assert sampler.take_counts().episodes == 0  # they count when a step takes them
    sampler.count([row for future in futures for row in future.result()])
    assert sampler.take_counts() == counts


def test_a_row_without_room_is_skipped(engine: LoopEngine) -> None:
    (row, _) = _begin(EpisodeGroups(_sampler(Counting, max_model_len=4), engine), _prompts(a={"turns": 2}))[0].result(9)
    assert (row.finish_reason, row.response_token_ids, row.metadata["episode"]["turns"]) == ("skipped", [], 0)


class _Behind(Environment):
    """Sample 0 answers its first turn when sample 1 is over."""

    over: ClassVar[threading.Event]

    def reset(self, task: Task) -> None:
        self._sample = task.sample_index

    def step(self, action: Action) -> StepResult:
        if self._sample == 0:
            assert _Behind.over.wait(20), "episodes wait for each other"
        return StepResult(done=action.turn == 2)

    def close(self) -> None:
        if self._sample == 1:
            _Behind.over.set()


def test_no_episode_waits_for_another(engine: LoopEngine) -> None:
    _Behind.over = threading.Event()
    rollouts = _rows(_begin(EpisodeGroups(_sampler(_Behind), engine), _prompts(a={})))
    assert [facts["episode"]["turns"] for facts in rollouts.metadata] == [3, 3]
    assert rollouts.finish_reasons == ["stop", "stop"]


def test_versions_by_hand() -> None:
    engine = LoopEngine(lambda uid, ids: [*_ids("x"), EOS_ID], end=EOS_ID, versions=[7, 9])
    groups = EpisodeGroups(_sampler(Counting), engine)
    future = groups.start_group(_prompts(a={"turns": 2}), 0, replace(SAMPLING, n=1), rl_step=0, version=7)
    (row,) = future.result(20)
    engine.shutdown()
    assert row.token_versions == [7] * 2 + [-1] * 9 + [9] * 2
    assert row.response_mask == [True] * 2 + [False] * 9 + [True] * 2
    rollouts = Rollouts.from_sequences([row])
    assert rollouts.token_versions.tolist() == [-1] * 4 + [7] * 2 + [-1] * 9 + [9] * 2


def test_failures_are_those_of_episodes_together(engine: LoopEngine) -> None:
    troubles = ("reset", "raise", "hang", "nan")
    prompts = _prompts(good={"turns": 2}, **{name: {"turns": 2, "trouble": name} for name in troubles})
    sampler = _sampler(Counting, step_seconds=0.2)
    together = sampler.generate(engine, prompts, SAMPLING, rl_step=5)
    apart = _rows(_begin(EpisodeGroups(sampler, engine), prompts))
    assert apart.finish_reasons == together.finish_reasons
    assert apart.finish_reasons == ["stop"] * 2 + ["failed"] * 8
    failures = [[facts["episode"]["failure"] for facts in rows.metadata] for rows in (apart, together)]
    assert failures[0] == failures[1]
    assert failures[0][6] == "step of turn 1 took longer than its limit of 0.2 s"
    assert torch.equal(apart.tokens, together.tokens)


def test_more_hanging_calls_than_allowed_end_the_run(engine: LoopEngine) -> None:
    sampler = _sampler(Counting, step_seconds=0.1)
    sampler.calls.max_abandoned = 1
    (future,) = _begin(EpisodeGroups(sampler, engine), _prompts(a={"turns": 2, "trouble": "hang"}))
    with pytest.raises(EnvironmentBrokenError, match="2 calls of environments hang"):
        future.result(20)


def test_an_ended_group_closes_its_environments_when_they_are_done(engine: LoopEngine) -> None:
    Logged.forget()
    groups = EpisodeGroups(_sampler(Logged, workers=1), engine)
    (future,) = _begin(groups, _prompts(a={"turns": 99, "seconds": 0.2}))
    within(10, lambda: Logged.account.at_work == 1)
    assert future.cancel()
    within(10, lambda: Logged.account.count("close") == Logged.account.made)
    Logged.account.check_closed()  # the step was over first
    before = list(Logged.account.events)
    time.sleep(0.3)
    assert Logged.account.events == before
    with pytest.raises(CancelledError):
        future.result()


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_closing_ends_what_samples_and_what_thinks(seconds: float) -> None:
    Logged.forget()
    engine = LoopEngine(_drawn, end=EOS_ID, seconds=lambda uid: 5.0 if uid[:6] in ("turn 4", "turn 5") else 0.0)
    groups = EpisodeGroups(_sampler(Logged), engine)
    futures = _begin(groups, _prompts(a={"turns": 9, "seconds": seconds}, b={"turns": 9, "seconds": seconds}))
    within(10, lambda: Logged.account.count("step") >= 4)
    start = time.monotonic()
    groups.close()
    assert time.monotonic() - start < 4
    Logged.account.check_closed()
    assert Logged.account.made == 4
    assert all(future.cancelled() for future in futures)
    engine.shutdown()


def test_closing_does_not_wait_for_ever_for_what_hangs(engine: LoopEngine) -> None:
    Logged.forget()
    groups = EpisodeGroups(_sampler(Logged, step_seconds=0.2), engine)
    _begin(groups, _prompts(a={"seconds": 3.0}))
    within(10, lambda: Logged.account.at_work == 2)
    start = time.monotonic()
    groups.close()
    assert time.monotonic() - start < 2
    assert not Logged.account.count("close")  # in use by a thread that cannot be killed


class _Broken(Logged):
    def step(self, action: Action) -> StepResult:
        if self._task.sample_index == 1:
            raise EnvironmentBrokenError("the service is gone")
        return super().step(action)


def test_an_environment_that_is_broken_fails_the_group_and_closes_all(engine: LoopEngine) -> None:
    Logged.forget()
    groups = EpisodeGroups(_sampler(_Broken), engine)
    (future,) = _begin(groups, _prompts(a={"turns": 99, "seconds": 0.05}))
    with pytest.raises(EnvironmentBrokenError, match="service is gone"):
        future.result(20)
    assert Logged.account.made == 2
    Logged.account.check_closed()


def test_an_engine_that_fails_closes_all_environments() -> None:
    def fails(uid: str, ids: list[int]) -> list[int]:
        if "turn 1" in uid:
            raise RuntimeError("no replica is left")
        return _drawn(uid, ids)

    Logged.forget()
    engine = LoopEngine(fails, end=EOS_ID)
    (future,) = _begin(EpisodeGroups(_sampler(Logged), engine), _prompts(a={}))
    with pytest.raises(RuntimeError, match="no replica is left"):
        future.result(20)
    Logged.account.check_closed()
    engine.shutdown()


def test_the_limit_on_workers_holds_over_groups_and_validation_together(engine: LoopEngine) -> None:
    Logged.forget()
    sampler = _sampler(Logged, workers=3)
    facts = {"turns": 3, "seconds": 0.02}
    futures = _begin(EpisodeGroups(sampler, engine), _prompts(a=facts, b=facts, c=facts))
    sampler.generate(engine, _prompts(d=facts, e=facts), SAMPLING, rl_step=5)
    assert len(_rows(futures)) == 6
    assert Logged.account.most_at_work == 3
    Logged.account.check_closed()


def test_a_taken_name_is_refused(engine: LoopEngine) -> None:
    with pytest.raises(ValueError, match="rename it"):
        _begin(EpisodeGroups(_sampler(Counting), engine), _prompts(a={"episode": 1}))


def test_calls_that_wait_can_be_taken_back() -> None:
    calls: TimedCalls[int] = TimedCalls(seconds=5.0, workers=1)
    gate, begun = threading.Event(), []
    first = calls.submit(lambda: (gate.wait(5), 1)[1])
    second, third = (calls.submit(lambda number=number: (begun.append(number), number)[1]) for number in (2, 3))
    assert second.cancel()
    assert not first.cancel()
    gate.set()
    assert (first.result(5), third.result(5), begun) == (1, 3, [3])


@pytest.mark.parametrize(("staleness", "extra"), [(0, 2), (1, 0), (2, 1)])
def test_many_steps_over_a_window_and_a_checkpoint_keep_the_account(staleness: int, extra: int) -> None:
    """Prompts are trained once or left; environments are closed once; rows of a checkpoint come back as they were."""
    Logged.forget()
    draw, count = random.Random(staleness), 2
    version = 0
    pace = random.Random(1)
    engine = LoopEngine(_drawn, end=EOS_ID, seconds=lambda uid: pace.random() * 0.03)
    sampler = _sampler(Logged, workers=4)
    groups = EpisodeGroups(sampler, engine)

    def begin(prompt: Prompt, tagged: int) -> Future[list[RolloutSequence]]:
        return groups.start_group(batch_of([prompt]), 0, SAMPLING, rl_step=version, version=tagged)

    def new_window() -> RolloutWindow:
        return RolloutWindow(begin, capacity=(staleness + 1) * count + extra, max_staleness=staleness)

    names = (f"p{i}" for i in range(1000))
    window, handed_out, taken, restarted = new_window(), [], [], 0

    def add(number: int) -> None:
        for uid in [next(names) for _ in range(number)]:
            handed_out.append(uid)
            facts = {"turns": draw.randint(1, 4), "seconds": draw.choice([0.0, 0.02])}
            window.add([{"uid": uid, "prompt_token_ids": _ids("<user>"), "prompt": uid, "metadata": facts}])

    add(staleness * count + extra)
    for version in range(12):
        add(count)
        if version == 6:
            saved = json.loads(json.dumps(window.to_json()))
            window.close()
            groups.close()
            restarted += window.restarted
            window = new_window()
            window.load([saved], rank=0, num_ranks=1)
        window.begin_all(version=version)
        step = window.take(count, version=version, versions_per_step=1)
        assert all(version - group.version <= staleness for group in step)
        taken += step
    restarted += window.restarted
    left = window.to_json()
    window.close()
    groups.close()
    trained = [group.prompt["uid"] for group in taken]
    assert len(trained) == len(set(trained)) == 24
    waiting = [p["uid"] for p in left["prompts"]] + [g["prompt"]["uid"] for g in left["finished"]]
    assert sorted(trained + waiting) == sorted(handed_out)
    for group in taken:
        for sample, row in enumerate(group.sequences):
            facts = row.metadata["episode"]
            assert (row.sample_index, facts["finish_reason"]) == (sample, "stop")
            assert facts["turns"] == group.prompt["metadata"]["turns"]
            assert row.response_mask is not None
            assert [mark for mark in row.token_versions or [] if mark != -1] == [7] * sum(row.response_mask)
    Logged.account.check_closed()
    steps = Logged.account.count("step")
    assert steps >= sum(row.metadata["episode"]["turns"] for group in taken for row in group.sequences)
    assert restarted > 0 or extra == 0
    engine.shutdown()
