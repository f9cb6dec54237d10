"""Episodes through the real Trainer: one process and two ranks play and learn the same; failures do not train."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fork import run_distributed
from support.toy import Recorder, digit_reward, parameters_of, toy_data, toy_module, toy_ppo, toy_trainer
from support.turns import Counting, Dice

from lightning_rlhf.callbacks import DynamicSampling, HFRollout, VLLMRollout
from lightning_rlhf.contracts.callback import RLCallback
from lightning_rlhf.contracts.environment import Action, StepResult, Task
from lightning_rlhf.data import ListPrompts, Prompt, PromptDataModule
from lightning_rlhf.modules import OnPolicyModule
from lightning_rlhf.rewards import EnvironmentReward
from lightning_rlhf.rollout.episodes import TurnLimits
from lightning_rlhf.strategies import FSDP2RLStrategy, UlyssesRLStrategy

GROUP = 4


class _Episodes(RLCallback):
    """Keeps what each row of this rank was, and what of it trained."""

    def __init__(self) -> None:
        self.rows: list[list[dict[str, Any]]] = []
        self.trained: list[dict[tuple[str, int], int]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, OnPolicyModule)
        rollouts = batch.rollouts
        self.rows.append(
            [
                {
                    "mask": rollouts.select([row]).response_mask.tolist(),
                    "reward": float(rollouts.rewards[row]),
                    "facts": rollouts.metadata[row].get("episode"),
                    "reason": rollouts.finish_reasons[row],
                }
                for row in range(len(rollouts))
            ]
        )
        data = pl_module.step_data.experience
        keys = zip(data.uids, data.sample_indices, strict=True)
        self.trained.append({key: int(data.select([row]).loss_mask.sum()) for row, key in enumerate(keys)})


def _fit(
    root: Path, model: Path, *, strategy: Any = "auto", devices: int = 1, make: Any = toy_module,
    environment: Any = Dice, data: Any = None, dynamic_sampling: DynamicSampling | None = None,
    turn_limits: TurnLimits | None = None,
    **module: Any,
) -> dict[str, Any]:  # fmt: skip
    recorder, episodes = Recorder(), _Episodes()
    rollout = HFRollout(
        num_rollouts=GROUP, max_new_tokens=6, max_model_len=96, environment=environment, turn_limits=turn_limits,
        stop=("=",), dynamic_sampling=dynamic_sampling,
    )  # fmt: skip
    named = {"ulysses": lambda: UlyssesRLStrategy(sp_size=2), "shared": lambda: FSDP2RLStrategy(share_prompts=True)}
    chosen = named[strategy]() if strategy in named else strategy
    trainer = toy_trainer(root, callbacks=[recorder, episodes], rollout=rollout, strategy=chosen, devices=devices)
    learner = make(model, **{"reward": EnvironmentReward(), "max_rl_steps": 3, **module})
    trainer.fit(learner, data or toy_data())
    return {
        "steps": recorder.steps,
        "rows": episodes.rows,
        "trained": episodes.trained,
        "parameters": {name: tensor.tolist() for name, tensor in parameters_of(learner).items()},
    }


def _same(alone: dict[str, Any], ranks: list[dict[str, Any]], *, shared: bool) -> None:
    for index, step in enumerate(alone["steps"]):
        parts = [rank["steps"][index] for rank in ranks]
        if shared:
            assert all(part["tokens"] == step["tokens"] for part in parts)
        else:
            assert [token for part in parts for token in part["tokens"]] == step["tokens"]
        for part in parts:
            for name in ("actor/loss", "actor/grad_norm", "reward/mean"):
                assert part["metrics"][name] == pytest.approx(step["metrics"][name], abs=1e-5), name
            for name in ("turns_mean", "turns_max", "observation_tokens", "failed_episodes"):
                assert part["metrics"][f"rollout/{name}"] == pytest.approx(step["metrics"][f"rollout/{name}"]), name
    for rank in ranks:
        for name, value in alone["parameters"].items():
            assert torch.allclose(torch.tensor(rank["parameters"][name]), torch.tensor(value), atol=1e-5), name


@pytest.mark.parametrize("make", [toy_module, toy_ppo])
def test_one_process_and_two_ranks_play_the_same_episodes(tmp_path: Path, tiny_directory: Path, make: Any) -> None:
    alone = _fit(tmp_path, tiny_directory, make=make)
    metrics = alone["steps"][0]["metrics"]
    rows = alone["rows"][0]
    turns = [row["facts"]["turns"] for row in rows]
    assert max(turns) > 1  # else nothing here is about turns
    assert metrics["rollout/turns_mean"] == pytest.approx(sum(turns) / len(turns))
    assert metrics["rollout/turns_max"] == max(turns)
    assert [row["reward"] for row in rows] == pytest.approx([row["facts"]["reward"] for row in rows])
    assert metrics["rollout/observation_tokens"] > 0
    # the trainer's log-probs behind observations are the engine's: the ids are the same and so are the places
    assert metrics["actor/mismatch_abs_max"] < 1e-4
    ranks = run_distributed(
        _fit, 2, tmp_path, tiny_directory, strategy="fsdp2_rl", devices=2, make=make, init_process_group=False,
        timeout=120.0,
    )  # fmt: skip
    _same(alone, ranks, shared=False)


def test_ranks_that_share_a_model_share_out_the_episodes(tmp_path: Path, tiny_directory: Path) -> None:
    alone = _fit(tmp_path, tiny_directory, max_rl_steps=2)
    ranks = run_distributed(
        _fit, 2, tmp_path, tiny_directory, strategy="ulysses", devices=2, max_rl_steps=2, init_process_group=False,
        timeout=120.0,
    )  # fmt: skip
    _same(alone, ranks, shared=True)


class Troubled(Dice):
    """Fails the episodes of the prompts that its metadata names."""

    def reset(self, task: Task) -> None:
        super().reset(task)
        if task.metadata["bad"] and task.sample_index == 0:
            raise OSError("no board")

    def step(self, action: Action) -> StepResult:
        return super().step(action)


def _data() -> PromptDataModule:
    prompts = [Prompt(uid=str(i), prompt=f"{i} + {i} =", metadata={"bad": i % 2 == 0}) for i in range(4)]
    return PromptDataModule(ListPrompts(prompts), prompts_per_step=4, shuffle=False)


def test_failed_episodes_do_not_train_whatever_their_reward(tmp_path: Path, tiny_directory: Path) -> None:
    for reward in (EnvironmentReward(), digit_reward):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = _fit(tmp_path, tiny_directory, environment=Troubled, data=_data(), reward=reward, max_rl_steps=1)
        metrics = run["steps"][0]["metrics"]
        assert (metrics["rollout/failed_episodes"], metrics["rollout/skipped"]) == (2.0, 2.0)
        trained = run["trained"][0]
        assert {key for key, count in trained.items() if count == 0} == {("0", 0), ("2", 0)}
        rows = {(row // GROUP, row % GROUP): one for row, one in enumerate(run["rows"][0])}
        for (prompt, sample), row in rows.items():
            if trained[str(prompt), sample]:  # every id that the policy sampled trains, and no other
                assert trained[str(prompt), sample] == sum(row["mask"])


def test_rewards_that_nobody_reads_are_warned_of(tmp_path: Path, tiny_directory: Path) -> None:
    with pytest.warns(UserWarning, match="The environment gives rewards, but the module's reward"):
        _fit(tmp_path, tiny_directory, reward=digit_reward, max_rl_steps=1)


def test_dynamic_sampling_and_a_greedy_baseline_work_over_episodes(tmp_path: Path, tiny_directory: Path) -> None:
    run = _fit(
        tmp_path, tiny_directory, dynamic_sampling=DynamicSampling(max_rounds=1), advantage="remax", max_rl_steps=2,
        turn_limits=TurnLimits(max_turns=2),
    )  # fmt: skip
    for step in run["steps"]:
        assert step["metrics"]["rollout/turns_max"] <= 2
        assert step["metrics"]["actor/grad_norm"] > 0


class _Critic(RLCallback):
    """Keeps the experience that the critic has seen, and the rollouts."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.experience, self.rollouts = pl_module.step_data.experience, batch.rollouts


def test_gae_steps_from_one_turn_over_the_observation_to_the_next(tmp_path: Path, tiny_directory: Path) -> None:
    """Against a naive loop over the ids that the policy sampled, with the episode's reward at the last of them."""
    critic = _Critic()
    rollout = HFRollout(num_rollouts=GROUP, max_new_tokens=6, max_model_len=96, environment=Dice, stop=("=",))
    trainer = toy_trainer(tmp_path, callbacks=[critic], rollout=rollout)
    gamma, lam = 0.9, 0.8
    trainer.fit(toy_ppo(tiny_directory, reward=EnvironmentReward(), max_rl_steps=1, gamma=gamma, lam=lam), toy_data())
    data, rollouts = critic.experience, critic.rollouts
    rewards = dict(
        zip(zip(rollouts.uids, rollouts.sample_indices, strict=True), rollouts.rewards.tolist(), strict=True)
    )
    gaps = 0
    for row in range(len(data)):
        one = data.select([row])
        places = one.loss_mask.nonzero().flatten().tolist()
        gaps += places != list(range(places[0], places[-1] + 1))
        values, returns = one.values.tolist(), one.returns.tolist()
        after_value = after_advantage = 0.0
        reward = rewards[data.uids[row], data.sample_indices[row]]
        for place in reversed(places):
            delta = (reward if place == places[-1] else 0.0) + gamma * after_value - values[place]
            after_advantage = delta + gamma * lam * after_advantage
            after_value = values[place]
            assert returns[place] == pytest.approx(after_advantage + values[place], abs=1e-5)
        assert not any(advantage for place, advantage in enumerate(one.advantages.tolist()) if place not in places)
    assert gaps > 0  # rows with observations between their turns


def test_greedy_baselines_are_not_counted_as_episodes(tmp_path: Path, tiny_directory: Path) -> None:
    run = _fit(tmp_path, tiny_directory, advantage="remax", max_rl_steps=2)
    for step, rows in zip(run["steps"], run["rows"], strict=True):
        turns = [row["facts"]["turns"] for row in rows]
        assert step["metrics"]["rollout/turns_mean"] == pytest.approx(sum(turns) / len(turns))


def test_rows_that_share_their_prompt_in_a_micro_batch_learn_the_same(tmp_path: Path, tiny_directory: Path) -> None:
    alone = _fit(tmp_path, tiny_directory, max_rl_steps=2)
    shared = run_distributed(
        _fit, 1, tmp_path, tiny_directory, strategy="shared", devices=1, max_rl_steps=2, init_process_group=False,
        timeout=120.0,
    )  # fmt: skip
    _same(alone, shared, shared=False)


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no environment="):
        HFRollout(turn_limits=TurnLimits())
    with pytest.raises(ValueError, match="neither samples beside training"):
        VLLMRollout(max_staleness=1, environment=partial(Counting))
