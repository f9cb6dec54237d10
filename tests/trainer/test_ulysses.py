"""GRPO with sequence parallelism through the real Trainer: the numbers of one process, and one truth within a group."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.fork import DistributedError, run_distributed
from support.toy import Recorder, parameters_of, toy_data, toy_module, toy_ppo, toy_trainer

from lightning_rlhf.contracts.callback import RLCallback
from lightning_rlhf.modules import GRPO
from lightning_rlhf.strategies import UlyssesRLStrategy
from lightning_rlhf.types import PromptBatch

COMPARED = ("actor/loss", "actor/grad_norm", "actor/entropy", "reward/mean", "reward/std", "rollout/trained_tokens")


class Witness(RLCallback):
    """Keeps what a rank holds when it trains: rewards, and rows that it scored itself."""

    def __init__(self) -> None:
        self.rewards: list[list[float]] = []
        self.responses: list[list[str]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        assert batch.rollouts is not None
        assert batch.rollouts.rewards is not None
        self.rewards.append(batch.rollouts.rewards.tolist())
        self.responses.append(list(batch.rollouts.responses))


def _fit(
    root: Path, model: Path, strategy: Any, devices: int, *, prompts_per_step: int = 4, **module: Any
) -> dict[str, Any]:
    recorder, witness = Recorder(), Witness()
    trainer = toy_trainer(root, callbacks=[recorder, witness], strategy=strategy, devices=devices)
    grpo = toy_module(model, **module)
    trainer.fit(grpo, toy_data(prompts_per_step=prompts_per_step))
    return {
        "steps": recorder.steps,
        "rewards": witness.rewards,
        "responses": witness.responses,
        "parameters": {name: tensor.numpy() for name, tensor in parameters_of(grpo).items()},
    }


def _fit_ranks(root: Path, model: Path, ranks: int, sp_size: int, **settings: Any) -> list[dict[str, Any]]:
    def fit() -> dict[str, Any]:
        return _fit(root, model, UlyssesRLStrategy(sp_size=sp_size), ranks, **settings)

    return run_distributed(fit, ranks, init_process_group=False, timeout=120.0)


def _assert_same(one: dict[str, Any], other: dict[str, Any], *, tolerance: float = 1e-5) -> None:
    assert len(one["steps"]) == len(other["steps"])
    for a, b in zip(one["steps"], other["steps"], strict=True):
        for name in COMPARED:
            assert a["metrics"][name] == pytest.approx(b["metrics"][name], abs=tolerance), (a["rl_step"], name)
    for name, value in one["parameters"].items():
        assert torch.allclose(torch.tensor(value), torch.tensor(other["parameters"][name]), atol=tolerance), name


def test_two_slices_give_the_numbers_of_one_plain_process(tmp_path: Path, tiny_directory: Path) -> None:
    settings: dict[str, Any] = {"mini_batch_size": 8, "max_rl_steps": 3, "kl_coef": 0.1}
    plain = _fit(tmp_path, tiny_directory, "auto", 1, **settings)
    first, second = _fit_ranks(tmp_path, tiny_directory, 2, 2, **settings)
    _assert_same(plain, first)
    _assert_same(plain, second)
    for result in (first, second):
        # both hold all rollouts of the group, those that the other has sampled included
        assert [step["tokens"] for step in result["steps"]] == [step["tokens"] for step in plain["steps"]]
        assert result["rewards"] == plain["rewards"]
        assert result["responses"] == plain["responses"]


@pytest.mark.parametrize(("ranks", "prompts_per_step"), [(2, 1), (4, 2)], ids=["one-rank-idle", "two-groups"])
def test_fewer_prompts_than_ranks(tmp_path: Path, tiny_directory: Path, ranks: int, prompts_per_step: int) -> None:
    settings: dict[str, Any] = {"prompts_per_step": prompts_per_step, "max_rl_steps": 2}
    plain = _fit(tmp_path, tiny_directory, "auto", 1, **settings)
    for result in _fit_ranks(tmp_path, tiny_directory, ranks, 2, **settings):
        _assert_same(plain, result)


def test_ppo_has_its_critic_in_slices_too(tmp_path: Path, tiny_directory: Path) -> None:
    def fit(strategy: Any, devices: int) -> dict[str, Any]:
        recorder = Recorder()
        ppo = toy_ppo(tiny_directory, max_rl_steps=2)
        toy_trainer(tmp_path, callbacks=[recorder], strategy=strategy, devices=devices).fit(ppo, toy_data())
        critic = {name: tensor.numpy() for name, tensor in parameters_of(ppo, role="critic").items()}
        return {"steps": recorder.steps, "parameters": critic}

    plain = fit("auto", 1)
    assert plain["steps"][1]["metrics"]["critic/loss"] > 0
    for result in run_distributed(
        lambda: fit(UlyssesRLStrategy(sp_size=2), 2), 2, init_process_group=False, timeout=120.0
    ):
        _assert_same(plain, result)
        for a, b in zip(plain["steps"], result["steps"], strict=True):
            assert a["metrics"]["critic/loss"] == pytest.approx(b["metrics"]["critic/loss"], abs=1e-5)


def test_a_reward_that_draws_is_drawn_once_for_a_group(tmp_path: Path, tiny_directory: Path) -> None:
    def drawn(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        return [random.SystemRandom().random() for _ in responses]

    first, second = _fit_ranks(tmp_path, tiny_directory, 2, 2, reward=drawn, max_rl_steps=2)
    assert first["rewards"] == second["rewards"]
    assert len({reward for step in first["rewards"] for reward in step}) == 32
    _assert_same(first, second, tolerance=1e-9)


def test_a_failed_reward_stays_failed_on_every_rank(tmp_path: Path, tiny_directory: Path) -> None:
    def sometimes(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float | None]:
        return [None if index % 4 == 0 else float(len(r)) for index, r in enumerate(responses)]

    for result in _fit_ranks(tmp_path, tiny_directory, 2, 2, reward=sometimes, max_rl_steps=1):
        assert result["steps"][0]["metrics"]["reward/failed"] == 4


def test_g03_heads_that_do_not_divide_are_refused_with_the_numbers(tmp_path: Path, tiny_directory: Path) -> None:
    with pytest.raises(DistributedError, match="sp_size=3 does not fit a model with 2 attention heads"):
        _fit_ranks(tmp_path, tiny_directory, 3, 3)


def test_g03_sizes_that_do_not_multiply_to_the_processes_are_refused(tmp_path: Path, tiny_directory: Path) -> None:
    with pytest.raises(DistributedError, match=r"sp_size=2 does not fit 3 process\(es\)"):
        _fit_ranks(tmp_path, tiny_directory, 3, 2)


def test_by_name_alone_it_has_no_sequence_parallel_ranks(tmp_path: Path, tiny_directory: Path) -> None:
    trainer = toy_trainer(tmp_path, strategy="ulysses_rl")
    assert isinstance(trainer.strategy, UlyssesRLStrategy)
    assert trainer.strategy.sizes == {"dp_replicate": 1, "dp_shard": "auto", "sp": 1}
    assert isinstance(toy_module(tiny_directory), GRPO)
