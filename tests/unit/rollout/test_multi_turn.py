"""Episodes over a scripted engine: exact ids, masks, log-probs, versions; limits; failures that cost their own row."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from support.rollout import prompt_batch, row_ids
from support.tiny import EOS_ID, tiny_tokenizer
from support.turns import Counting, Dice, ScriptedEngine

from lightning_rlhf.contracts.environment import Action, Environment, EnvironmentBrokenError, StepResult, Task
from lightning_rlhf.contracts.rollout import RolloutEngine, SamplingConfig, request_seed
from lightning_rlhf.rollout.episodes import TurnLimits, turn_uid
from lightning_rlhf.rollout.multi_turn import MultiTurnSampler
from lightning_rlhf.rollout.timed_calls import CallFailure, TimedCalls
from lightning_rlhf.types import PromptBatch, Rollouts

TOKENIZER = tiny_tokenizer()
SAMPLING = SamplingConfig(n=1, max_new_tokens=8)


def _ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def _prompts(**metadata: dict[str, Any]) -> PromptBatch:
    batch = prompt_batch({uid: _ids(f"<user>{uid}<eos><assistant>") for uid in metadata})
    return replace(batch, metadata=list(metadata.values()))


def _sampler(environment: Any = Counting, *, max_model_len: int = 200, **limits: Any) -> MultiTurnSampler:
    return MultiTurnSampler(
        environment=environment, tokenizer=TOKENIZER, max_model_len=max_model_len, limits=TurnLimits(**limits)
    )


def _says(text: str) -> Any:
    return lambda uid, ids: [*_ids(text), EOS_ID]


def _fields(rollouts: Rollouts, row: int) -> tuple[str, list[bool], list[float], list[int]]:
    """Text with special tokens, and what stands at each place, of one row's ids."""
    span = slice(*rollouts.cu_seqlens[row : row + 2].tolist())
    return (
        TOKENIZER.decode(rollouts.tokens[span].tolist()),
        rollouts.response_mask[span].tolist(),
        [round(value, 6) for value in rollouts.rollout_log_probs[span].tolist()],
        rollouts.token_versions[span].tolist(),
    )


def test_two_turns_by_hand() -> None:
    engine = ScriptedEngine(_says("x"), end=EOS_ID, versions=[7, 9])
    rollouts = _sampler().generate(engine, _prompts(a={"turns": 2}), SAMPLING, rl_step=0)
    text, mask, log_probs, versions = _fields(rollouts, 0)
    assert text == "<user>a<eos><assistant>x<eos><user>seen 0<eos><assistant>x<eos>"
    # prompt 4, turn 2, glue: <user> + 6 characters + <eos> + <assistant>, turn 2
    assert mask == [False] * 4 + [True] * 2 + [False] * 9 + [True] * 2
    assert log_probs == [0.0] * 4 + [-0.04, -0.05] + [0.0] * 9 + [-0.15, -0.16]
    assert versions == [-1] * 4 + [7] * 2 + [-1] * 9 + [9] * 2
    assert engine.asked[1] == {"turn 1 of 0/a": row_ids(rollouts, 0)[:15]}
    assert (rollouts.finish_reasons, rollouts.responses) == (["stop"], ["x"])
    assert rollouts.metadata[0] == {
        "turns": 2,
        "episode": {
            "reward": 2.0,
            "turns": 2,
            "failure": None,
            "finish_reason": "stop",
            "transcript": [
                {"role": "assistant", "content": "x"},
                {"role": "user", "content": "seen 0"},
                {"role": "assistant", "content": "x"},
            ],
        },
    }


def test_e05_what_was_sampled_is_never_encoded_again() -> None:
    """A capital is sampled as <unk>, whose text is no text: only ids carry it into the next turn."""
    unknown = TOKENIZER.unk_token_id
    engine = ScriptedEngine(lambda uid, ids: [unknown, 40, EOS_ID], end=EOS_ID)
    rollouts = _sampler().generate(engine, _prompts(a={"turns": 3}), SAMPLING, rl_step=0)
    ids = row_ids(rollouts, 0)
    assert ids.count(unknown) == 3
    for before, after in zip(engine.asked, engine.asked[1:], strict=False):
        (shorter,), (longer,) = before.values(), after.values()
        assert longer[: len(shorter)] == shorter
    assert ids != _ids(TOKENIZER.decode(ids, skip_special_tokens=True))


def test_episodes_go_on_together_and_drop_out_when_they_are_over() -> None:
    engine = ScriptedEngine(_says("x"), end=EOS_ID)
    prompts = _prompts(a={"turns": 1}, b={"turns": 3}, c={"turns": 2})
    rollouts = _sampler().generate(engine, prompts, replace(SAMPLING, n=2), rl_step=0)
    assert [list(call) for call in engine.asked] == [
        [turn_uid(uid, sample_index=sample, turn=0) for uid in "abc" for sample in range(2)],
        [turn_uid(uid, sample_index=sample, turn=1) for uid in "bc" for sample in range(2)],
        [turn_uid("b", sample_index=sample, turn=2) for sample in range(2)],
    ]
    assert list(zip(rollouts.uids, rollouts.sample_indices, strict=True)) == [(u, s) for u in "abc" for s in range(2)]
    assert [facts["episode"]["turns"] for facts in rollouts.metadata] == [1, 1, 3, 3, 2, 2]
    assert rollouts.response_lengths.tolist() == [2, 2, 6, 6, 4, 4]


def test_requests_have_seeds_of_their_own() -> None:
    seeds = {
        request_seed(0, rl_step=0, uid=turn_uid(uid, sample_index=sample, turn=turn), sample_index=0)
        for uid in ("a", "b", "1/a", "0/1/a")
        for sample in range(12)
        for turn in range(12)
    }
    assert len(seeds) == 4 * 12 * 12


class _Drawing(ScriptedEngine):
    """Draws ids from the request's seed, as a real engine does."""

    def __init__(self) -> None:
        def say(uid: str, ids: list[int]) -> list[int]:
            draw = torch.Generator().manual_seed(request_seed(3, rl_step=5, uid=uid, sample_index=0))
            return [*torch.randint(5, 40, (3,), generator=draw).tolist(), EOS_ID]

        super().__init__(say, end=EOS_ID)


def test_an_episode_depends_on_nothing_beside_it() -> None:
    """Alone, among others, in another order: the same ids, and the same dice of the environment for a whole group."""
    sampling = replace(SAMPLING, n=2, seed=3)
    every = _sampler(Dice).generate(_Drawing(), _prompts(a={}, b={}, c={}), sampling, rl_step=5)
    turned = _sampler(Dice, workers=1).generate(_Drawing(), _prompts(c={}, b={}), sampling, rl_step=5)
    assert [row_ids(every, row) for row in (4, 5, 2, 3)] == [row_ids(turned, row) for row in range(4)]
    said = [[m["content"] for m in f["episode"]["transcript"] if m["role"] == "user"] for f in every.metadata]
    assert said[0] == said[1]
    assert said[0] != said[2]
    assert row_ids(every, 0) != row_ids(every, 1)
    other = _sampler(Dice).generate(_Drawing(), _prompts(a={}), sampling, rl_step=6)
    assert other.metadata[0]["episode"]["transcript"][1] != every.metadata[0]["episode"]["transcript"][1]


def test_a_turn_at_its_limit_ends_the_episode_and_is_judged() -> None:
    engine = ScriptedEngine(lambda uid, ids: _ids("x" * 50), end=EOS_ID)
    rollouts = _sampler().generate(engine, _prompts(a={"turns": 3}), SAMPLING, rl_step=0)
    assert (engine.budgets, rollouts.finish_reasons) == ([8], ["length"])
    assert rollouts.metadata[0]["episode"]["reward"] == 8.0


def test_the_number_of_turns_ends_an_episode() -> None:
    rollouts = _sampler(max_turns=2).generate(
        ScriptedEngine(_says("x"), end=EOS_ID), _prompts(a={"turns": 3}, b={"turns": 2}), SAMPLING, rl_step=0
    )
    assert rollouts.finish_reasons == ["length", "stop"]
    assert [facts["episode"]["turns"] for facts in rollouts.metadata] == [2, 2]
    assert [_fields(rollouts, row)[1][-1] for row in range(2)] == [True, True]  # no observation at the end


@pytest.mark.parametrize(
    ("limit", "turns", "length"),
    [(11, 1, 2), (12, 2, 12), (13, 2, 13), (22, 2, 13), (23, 3, 23), (24, 3, 24), (99, 3, 24)],
)
def test_the_limit_on_all_tokens_is_exact(limit: int, turns: int, length: int) -> None:
    """A turn has 2 ids, what follows it 9: an observation behind which no turn of 1 id fits is not appended."""
    engine = ScriptedEngine(_says("x"), end=EOS_ID)
    prompts = _prompts(a={"turns": 3})
    by_response = _sampler(max_response_tokens=limit).generate(engine, prompts, SAMPLING, rl_step=0)
    by_model = _sampler(max_model_len=limit + 4).generate(engine, prompts, SAMPLING, rl_step=0)
    for rollouts in (by_response, by_model):
        assert rollouts.metadata[0]["episode"]["turns"] == turns
        assert len(row_ids(rollouts, 0)) == 4 + length
        assert rollouts.finish_reasons == ["stop" if length == 24 else "length"]


def test_a_budget_of_one_id_cuts_the_turn_of_that_row_alone() -> None:
    engine = ScriptedEngine(_says("x"), end=EOS_ID)
    prompts = _prompts(a={"turns": 2}, bbb={"turns": 2})
    rollouts = _sampler(max_model_len=4 + 2 + 9 + 2 + 1).generate(engine, prompts, SAMPLING, rl_step=0)
    assert engine.budgets == [8, 3]  # a has 3 ids of room, bbb 1
    assert rollouts.finish_reasons == ["stop", "length"]
    assert [len(row_ids(rollouts, row)) for row in range(2)] == [17, 18]
    assert rollouts.metadata[1]["episode"]["reward"] == 2.0


def test_a_prompt_without_room_is_skipped_and_one_with_an_unreadable_id_too() -> None:
    engine = ScriptedEngine(lambda uid, ids: [] if "/b" in uid and len(ids) > 4 else [5, EOS_ID], end=EOS_ID)
    prompts = _prompts(a={"turns": 2}, b={"turns": 2}, ccccccccccccccccc={"turns": 1})
    rollouts = _sampler(max_model_len=20).generate(engine, prompts, SAMPLING, rl_step=0)
    assert rollouts.finish_reasons == ["stop", "skipped", "skipped"]
    assert rollouts.response_lengths.tolist() == [4, 0, 0]
    assert row_ids(rollouts, 1) == _ids("<user>b<eos><assistant>")


def test_a_failure_masks_its_own_row_is_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    troubles = ("reset", "raise", "hang", "nan")
    prompts = _prompts(good={"turns": 2}, **{name: {"turns": 2, "trouble": name} for name in troubles})
    sampler = _sampler(step_seconds=0.2)
    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        rollouts = sampler.generate(ScriptedEngine(_says("x"), end=EOS_ID), prompts, SAMPLING, rl_step=0)
    assert time.monotonic() - start < 20
    assert rollouts.finish_reasons == ["stop", "failed", "failed", "failed", "failed"]
    failures = [facts["episode"]["failure"] for facts in rollouts.metadata]
    assert failures == [
        None,
        "reset raised OSError: no board",
        "step of turn 1 raised KeyError: 'piece'",
        "step of turn 1 took longer than its limit of 0.2 s",
        "step of turn 1 raised ValueError: step gave the reward nan, not a finite fp32 number.",
    ]
    assert "4 of 5 episodes failed" in caplog.text
    assert all(str(failure) in caplog.text for failure in failures[1:])
    counts = sampler.take_counts()
    assert (counts.episodes, counts.failed, counts.turns, counts.most_turns) == (5, 4, 8, 2)
    assert counts.observation_tokens == 4 * 9
    assert sampler.take_counts().episodes == 0


class _Says(Environment):
    def reset(self, task: Task) -> None:
        self._observation = task.metadata["says"]

    def step(self, action: Action) -> StepResult:
        return StepResult(observation=self._observation, done=action.turn == 1)


def test_an_observation_that_is_no_text_fails_its_episode_and_not_the_run() -> None:
    prompts = _prompts(a={"says": "so"}, b={"says": "half of a pair: \ud800"}, c={"says": 5})
    rollouts = _sampler(_Says).generate(ScriptedEngine(_says("x"), end=EOS_ID), prompts, SAMPLING, rl_step=0)
    assert rollouts.finish_reasons == ["stop", "failed", "failed"]
    failures = [facts["episode"]["failure"] for facts in rollouts.metadata]
    assert "surrogates not allowed" in failures[1]
    assert "step gave an observation of int, expected text" in failures[2]


class _Closing(Environment):
    log: ClassVar[list[str]] = []

    def reset(self, task: Task) -> None:
        self._uid = task.uid
        if task.uid == "b":
            raise OSError("no")

    def step(self, action: Action) -> StepResult:
        if self._uid == "c":
            raise EnvironmentBrokenError("the service is gone")
        return StepResult(done=True)

    def close(self) -> None:
        self.log.append(self._uid)


def test_every_environment_is_closed_once_also_when_the_run_ends() -> None:
    _Closing.log.clear()
    engine = ScriptedEngine(_says("x"), end=EOS_ID)
    _sampler(_Closing).generate(engine, _prompts(a={}, b={}), SAMPLING, rl_step=0)
    assert sorted(_Closing.log) == ["a", "b"]
    with pytest.raises(EnvironmentBrokenError, match="service is gone"):
        _sampler(_Closing).generate(engine, _prompts(a={}, c={}), SAMPLING, rl_step=0)
    assert sorted(_Closing.log) == ["a", "a", "b", "c"]


def test_what_is_no_environment_fails_by_name() -> None:
    rollouts = _sampler(dict).generate(ScriptedEngine(_says("x"), end=EOS_ID), _prompts(a={}), SAMPLING, rl_step=0)
    assert rollouts.metadata[0]["episode"]["failure"].endswith("made a dict, expected an Environment.")


class _Rewriting(ScriptedEngine):
    """Encodes the chat again, as an engine that takes text would."""

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig, *, rl_step: int) -> Rollouts:
        again = [_ids(TOKENIZER.decode(ids, skip_special_tokens=True)) for ids in prompts.prompt_token_ids]
        return super().generate(replace(prompts, prompt_token_ids=again), sampling, rl_step=rl_step)


def test_an_engine_that_does_not_append_is_found_out() -> None:
    with pytest.raises(RuntimeError, match="differs from them at place 0"):
        _sampler().generate(_Rewriting(_says("x"), end=EOS_ID), _prompts(a={"turns": 2}), SAMPLING, rl_step=0)


def test_what_cannot_be_meant_is_refused() -> None:
    engine: RolloutEngine = ScriptedEngine(_says("x"), end=EOS_ID)
    with pytest.raises(ValueError, match="rename it"):
        _sampler().generate(engine, _prompts(a={"episode": 1}), SAMPLING, rl_step=0)
    for wrong in ({"max_turns": 0}, {"max_response_tokens": 0}, {"step_seconds": 0}, {"workers": 0}):
        with pytest.raises(ValueError, match="must be positive"):
            TurnLimits(**wrong)
    engine.weight_version = None
    with pytest.raises(RuntimeError, match="no valid weights"):
        _sampler().generate(engine, _prompts(a={"turns": 1}), SAMPLING, rl_step=0)


def test_calls_run_side_by_side_in_order_and_hanging_ones_are_bounded() -> None:
    calls: TimedCalls[int] = TimedCalls(seconds=5.0, workers=4)
    start = time.monotonic()
    assert calls.run([lambda number=number: (time.sleep(0.2), number)[1] for number in range(8)]) == list(range(8))
    assert time.monotonic() - start < 1.5  # one by one they take 1.6
    hasty: TimedCalls[int] = TimedCalls(seconds=0.05, workers=4, max_abandoned=1)
    (late,) = hasty.run([lambda: (time.sleep(0.4), 1)[1]])
    assert isinstance(late, CallFailure)
    assert late.hangs
    with pytest.raises(EnvironmentBrokenError, match="2 calls of environments hang"):
        hasty.run([lambda: (time.sleep(0.4), 1)[1]])
