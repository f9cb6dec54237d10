"""Episodes in the background with the real vLLM: weights that change across turns, a replica that dies, real runs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
from support.fork import run_distributed
from support.replicas import fresh, push, tokens_generated, two_replicas
from support.rollout import naive_log_probs, perturb, prompt_batch
from support.tiny import tiny_model, write_tiny_model
from support.toy import Recorder, toy_module, toy_trainer
from support.turns import Logged
from support.versions import VersionCheck
from support.waiting import within

from lightning_rlhf.callbacks import DynamicSampling, RLCheckpoint, VLLMRollout, WeightSync
from lightning_rlhf.contracts.environment import Action, StepResult
from lightning_rlhf.contracts.rollout import SamplingConfig
from lightning_rlhf.data import ListPrompts, Prompt, PromptDataModule
from lightning_rlhf.rewards import EnvironmentReward
from lightning_rlhf.rollout.episode_groups import EpisodeGroups
from lightning_rlhf.rollout.episodes import TurnLimits
from lightning_rlhf.rollout.multi_turn import MultiTurnSampler
from lightning_rlhf.rollout.served import ServedRolloutEngine
from lightning_rlhf.types import Rollouts

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")

PROMPTS = prompt_batch({f"p{i}": [5 + (i + j) % 50 for j in range(3 + i % 4)] for i in range(6)})
SAMPLING = SamplingConfig(n=4, max_new_tokens=48, stop_token_ids=(20, 21))
LONG = SamplingConfig(n=4, max_new_tokens=80, stop_token_ids=(20,))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), tied=True, seed=7)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[ServedRolloutEngine]:
    served = two_replicas(directory)
    yield served
    served.shutdown()


def _sampler(engine: ServedRolloutEngine, environment: Any, **limits: Any) -> MultiTurnSampler:
    return MultiTurnSampler(
        environment=environment, tokenizer=engine.directory.tokenizer, max_model_len=256, limits=TurnLimits(**limits)
    )


def _play(groups: EpisodeGroups, sampling: SamplingConfig, *, version: int) -> list[Any]:
    return [groups.start_group(PROMPTS, i, sampling, rl_step=1, version=version) for i in range(len(PROMPTS))]


def _rollouts(futures: list[Any]) -> Rollouts:
    return Rollouts.from_sequences([row for future in futures for row in future.result(timeout=90)])


class _Waits(Logged):
    """Samples 0 and 1 think about their first turn until they are told to go on."""

    go_on: ClassVar[threading.Event]
    thinking: ClassVar[int] = 0

    def step(self, action: Action) -> StepResult:
        if action.turn == 0 and self._task.sample_index < 2:
            with Logged.lock:
                _Waits.thinking += 1
            assert _Waits.go_on.wait(60)
        return super().step(action)


def _spans_of_turns(versions: list[int]) -> list[list[int]]:
    """The versions of each turn; observations (-1) stand between two."""
    turns: list[list[int]] = [[]]
    for before, now in zip([-1, *versions], versions, strict=False):
        if now != -1 and before == -1:
            turns.append([])
        if now != -1:
            turns[-1].append(now)
    return turns[1:]


@pytest.mark.parametrize("in_flight", ["keep", "resubmit"])
def test_weights_that_change_within_and_between_turns(engine: ServedRolloutEngine, in_flight: str) -> None:
    """Each token has the log-prob of the weights that its version names, over all turns of its episode."""
    Logged.forget()
    _Waits.go_on, _Waits.thinking = threading.Event(), 0
    engine.in_flight = in_flight
    old = fresh(engine, seed=11, version=11)
    new = tiny_model(tied=True).eval()
    perturb(new, seed=12, scale=0.3)
    groups = EpisodeGroups(_sampler(engine, _Waits, max_turns=3), engine)
    start = tokens_generated(engine)
    futures = _play(groups, LONG, version=11)
    within(30, lambda: _Waits.thinking > 0 and tokens_generated(engine) > start + 250)
    push(engine, new, version=12)
    _Waits.go_on.set()
    rollouts = _rollouts(futures)
    engine.in_flight = "keep"

    worst = wrong_side = 0.0
    within_a_turn = between_turns = 0
    for row in range(len(rollouts)):
        span = slice(*rollouts.cu_seqlens[row : row + 2].tolist())
        ids, versions = rollouts.tokens[span].tolist(), rollouts.token_versions[span].tolist()
        sampled, own = rollouts.response_mask[span].tolist(), rollouts.rollout_log_probs[span].tolist()
        assert [version != -1 for version in versions] == sampled  # prompt and observations have no version
        by = {11: naive_log_probs(old, ids), 12: naive_log_probs(new, ids)}
        turns = _spans_of_turns(versions)
        assert len(turns) == rollouts.metadata[row]["episode"]["turns"]
        in_order = [version for version in versions if version != -1]
        assert in_order == sorted(in_order)
        within_a_turn += any(set(turn) == {11, 12} for turn in turns)
        between_turns += any({*a} == {11} and {*b} == {12} for a, b in pairwise(turns))
        for place in [place for place, on in enumerate(sampled) if on]:
            worst = max(worst, abs(own[place] - by[versions[place]][place]))
            wrong_side = max(wrong_side, abs(own[place] - by[23 - versions[place]][place]))
    assert worst < 1e-5
    assert wrong_side > 0.1
    assert within_a_turn > 0, "no turn crossed the switch: this test shows nothing"
    assert between_turns > 0, "no episode crossed the switch between two turns: this test shows nothing"
    Logged.account.check_closed()
    assert engine.pool.ledger.accepted == engine.pool.ledger.answered


def test_a_replica_killed_in_a_later_turn_costs_no_turn_and_none_is_played_twice(engine: ServedRolloutEngine) -> None:
    """The request of the turn goes to the other replica; turns before it stay, and no environment is asked again."""
    assert engine._fleet is not None
    fresh(engine, seed=4, version=4)
    sampler = _sampler(engine, Logged, max_turns=3)
    together = sampler.generate(engine, PROMPTS, SAMPLING, rl_step=1)
    Logged.forget()
    ledger = engine.pool.ledger
    before, resent = ledger.accepted, ledger.resent
    futures = _play(EpisodeGroups(sampler, engine), SAMPLING, version=4)
    within(30, lambda: Logged.account.count("step") >= 6)
    os.kill(engine._fleet.pids[0], signal.SIGKILL)
    apart = _rollouts(futures)
    assert ledger.resent > resent, "nothing was in flight: this test shows nothing"
    assert apart.tokens.tolist() == together.tokens.tolist()
    assert apart.response_mask.tolist() == together.response_mask.tolist()
    assert apart.rollout_log_probs.tolist() == pytest.approx(together.rollout_log_probs.tolist(), abs=1e-5)
    turns = sum(facts["episode"]["turns"] for facts in apart.metadata)
    assert ledger.accepted - before == turns  # a request for each turn
    assert ledger.accepted == ledger.answered
    assert ledger.duplicates == 0
    assert Logged.account.count("step") == turns
    assert Logged.account.made == len(apart) == 24
    Logged.account.check_closed()
    within(60, lambda: engine.pool.replicas[0].state == "up")


def _data() -> PromptDataModule:
    prompts = [Prompt(uid=str(i), prompt=f"{i} + {i + 1} =", metadata={"turns": 1 + i % 3}) for i in range(48)]
    return PromptDataModule(ListPrompts(prompts), prompts_per_step=4)


def _flat_for_even(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """Every second prompt's rewards are all equal; the others' depend on what was said alone."""
    even = [int("".join(c for c in prompt.split("+")[0] if c.isdigit())) % 2 == 0 for prompt in prompts]
    said = ["".join(m["content"] for m in facts["episode"]["transcript"]) for facts in metadata]
    return [0.0 if flat else sum(map(ord, text)) / 1e3 for text, flat in zip(said, even, strict=True)]


class _Rows(pl.Callback):
    """Keeps of every row that a step took: prompt, sample, turns, reason, reward."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, int, str]] = []
        self.unmasked_versions = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rollouts = batch.rollouts
        self.unmasked_versions += int(((rollouts.token_versions != -1) != rollouts.response_mask).sum())
        turns = [facts["episode"]["turns"] for facts in rollouts.metadata]
        self.rows += zip(rollouts.uids, rollouts.sample_indices, turns, rollouts.finish_reasons, strict=True)


def _fit(
    root: Path, model: Path, arguments: dict[str, Any], steps: int, ckpt_path: str | None = None, devices: int = 1,
    module: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    Logged.forget()
    recorder, rows, check = Recorder(), _Rows(), VersionCheck(model)
    rollout = VLLMRollout(
        mode="server",
        num_rollouts=4,
        max_new_tokens=16,
        max_model_len=256,
        stop=("=", "3"),
        **{"environment": Logged, **arguments},
    )
    checked = [check] if ckpt_path is None else []
    callbacks: list[pl.Callback] = [recorder, rows, RLCheckpoint(every_n_rl_steps=2), *checked]
    callbacks.append(WeightSync(engine="naive" if devices == 1 else "shm"))
    trainer = toy_trainer(
        root, callbacks=callbacks, rollout=rollout, weight_sync=False, strategy="fsdp2_rl", devices=devices
    )
    learner = toy_module(model, **{"max_rl_steps": steps, "reward": EnvironmentReward(), **(module or {})})
    try:
        trainer.fit(learner, _data(), ckpt_path=ckpt_path)
        window = rollout._async.window.to_json() if rollout._async is not None else {"prompts": [], "finished": []}
    finally:
        rollout.shutdown()
    Logged.account.check_closed()
    return {
        "steps": recorder.steps,
        "rows": rows.rows,
        "unmasked_versions": rows.unmasked_versions,
        "worst": check.worst,
        "ages": check.ages,
        "trained": [uid for step in recorder.steps for uid in step["uids"]],
        "left": [p["uid"] for p in window["prompts"]] + [g["prompt"]["uid"] for g in window["finished"]],
        "events": Logged.account.events,
    }


def _run(
    engine: ServedRolloutEngine, root: Path, model: Path, rollout: dict[str, Any], *arguments: Any, devices: int = 1,
    **named: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """In processes of their own, with the replicas of the other tests."""
    engine.weight_version = None  # the runs bring weights
    arguments = (root, model, {"urls": engine.urls, "token": engine.token, **rollout}, *arguments)
    return run_distributed(_fit, devices, *arguments, devices=devices, init_process_group=False, timeout=240, **named)


def _check_rows(run: dict[str, Any]) -> None:
    """A trained row is one whole episode: an environment, asked once for each turn, from the first on."""
    assert run["unmasked_versions"] == 0
    by_number: dict[int, list[str]] = {}
    for what, uid, sample, number in run["events"]:
        by_number.setdefault(number, []).append(f"{what} {uid} {sample}")
    played = {
        (*events[0].split()[1:], sum(event.startswith("step") for event in events)) for events in by_number.values()
    }
    assert len(run["rows"]) == len({row[:2] for row in run["rows"]})
    for uid, sample, turns, _ in run["rows"]:
        assert (uid, str(sample), turns) in played


def test_episodes_one_step_ahead_have_the_metrics_of_those_in_step_and_survive_a_checkpoint(
    engine: ServedRolloutEngine, tmp_path: Path, directory: Path
) -> None:
    (synchronous,) = _run(engine, tmp_path / "a", directory, {}, 2)
    (ahead,) = _run(engine, tmp_path / "b", directory, {"max_staleness": 1}, 4)
    keys = [set().union(*(step["metrics"] for step in run["steps"])) for run in (synchronous, ahead)]
    assert keys[1] - keys[0] == {"rollout/staleness_0", "rollout/staleness_1", "rollout/restarted_groups"}
    assert keys[0] <= keys[1]
    assert ahead["worst"] < 1e-5  # each token of each turn against the weights of its version
    assert ahead["ages"] == {0, 1}
    assert len(ahead["trained"]) == len(set(ahead["trained"])) == 16
    assert len(ahead["left"]) == 4
    _check_rows(ahead)
    for index, step in enumerate(ahead["steps"]):
        metrics = step["metrics"]
        assert set(step["versions"]) <= {index, index - 1}
        assert metrics["rollout/staleness_max"] <= 1
        own = [row for row in ahead["rows"] if row[0] in step["uids"]]
        assert metrics["rollout/turns_mean"] == pytest.approx(sum(row[2] for row in own) / len(own))
        assert metrics["rollout/turns_max"] > 1
        assert metrics["rollout/failed_episodes"] == 0
        assert metrics["actor/grad_norm"] > 0
    (resumed,) = _run(engine, tmp_path / "b", directory, {"max_staleness": 1}, 6, "last")
    assert set(ahead["left"]) <= set(resumed["trained"]), "what was under way when the run stopped was lost"
    every = ahead["trained"] + resumed["trained"] + resumed["left"]
    assert len(every) == len(set(every)) == 28
    _check_rows(resumed)


@pytest.mark.slow
def test_two_ranks_with_more_under_way_and_groups_without_signal(
    engine: ServedRolloutEngine, tmp_path: Path, directory: Path
) -> None:
    arguments = {"max_staleness": 2, "over_sampling": 1.5, "in_flight": "resubmit"}
    arguments["dynamic_sampling"] = DynamicSampling()
    ranks = _run(engine, tmp_path, directory, arguments, 4, devices=2, module={"reward": _flat_for_even})
    assert max(rank["worst"] for rank in ranks) < 1e-5
    trained, left = [[uid for rank in ranks for uid in rank[key]] for key in ("trained", "left")]
    assert len(trained) == len(set(trained)) == 16
    assert all(int(uid.partition("@")[0]) % 2 for uid in trained), "a group of equal rewards was trained on"
    assert not set(trained) & set(left)
    assert max(age for rank in ranks for age in rank["ages"]) <= 2
    for rank in ranks:
        _check_rows(rank)
    for first, second in zip(*(rank["steps"] for rank in ranks), strict=True):
        for name in ("turns_mean", "turns_max", "observation_tokens", "failed_episodes", "staleness_mean"):
            assert first["metrics"][f"rollout/{name}"] == second["metrics"][f"rollout/{name}"], name


class _Troubled(Logged):
    """Fails in the second turn of every first sample."""

    def step(self, action: Action) -> StepResult:
        if action.turn == 1 and self._task.sample_index == 0:
            self._note("step")
            raise OSError("no board")
        return super().step(action)


@pytest.mark.slow
def test_greedy_baselines_and_failures_beside_episodes_under_way(
    engine: ServedRolloutEngine, tmp_path: Path, directory: Path
) -> None:
    arguments = {"max_staleness": 1, "over_sampling": 1.5, "environment": _Troubled}
    (run,) = _run(engine, tmp_path, directory, arguments, 3, module={"advantage": "remax"})
    assert run["worst"] < 1e-5
    _check_rows(run)
    assert len(run["trained"]) == len(set(run["trained"])) == 12
    for step in run["steps"]:
        own = [row for row in run["rows"] if row[0] in step["uids"]]
        assert step["metrics"]["rollout/turns_mean"] == pytest.approx(sum(row[2] for row in own) / len(own))
        failed = [row for row in own if row[3] == "failed"]
        assert step["metrics"]["rollout/failed_episodes"] == step["metrics"]["rollout/skipped"] == len(failed)
    assert any(row[3] == "failed" for row in run["rows"])
