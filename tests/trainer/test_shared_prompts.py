"""GRPO with shared prompts through the real Trainer: the numbers of one plain process, with fewer tokens computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.fork import run_distributed
from support.toy import Recorder, parameters_of, toy_data, toy_module, toy_trainer

from lightning_rlhf.contracts.callback import RLCallback
from lightning_rlhf.engines.hf_model import PackedModel
from lightning_rlhf.modules import GRPO
from lightning_rlhf.strategies import FSDP2RLStrategy
from lightning_rlhf.types import PromptBatch

COMPARED = ("actor/loss", "actor/grad_norm", "actor/entropy", "actor/ref_kl", "reward/mean", "rollout/trained_tokens")


class _Tokens(RLCallback):
    """How many tokens the actor's decoder has computed, and which prompts' rows each rank has trained on."""

    def __init__(self) -> None:
        self.computed = 0
        self.groups: list[dict[str, int]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, GRPO)
        data = pl_module.step_data
        assert data is not None
        uids = data.experience.uids
        self.groups.append({uid: uids.count(uid) for uid in uids})
        if not self.computed:
            packed: Any = pl_module.actor.module
            assert isinstance(packed, PackedModel)
            packed.hf_model.base_model.register_forward_pre_hook(self._count, with_kwargs=True)  # type: ignore[operator]

    def _count(self, _: torch.nn.Module, args: Any, kwargs: dict[str, torch.Tensor]) -> None:
        self.computed += kwargs["input_ids"].numel()


def _fit(root: Path, model: Path, strategy: Any, devices: int, **module: Any) -> dict[str, Any]:
    recorder, tokens = Recorder(), _Tokens()
    trainer = toy_trainer(root, callbacks=[recorder, tokens], strategy=strategy, devices=devices)
    grpo = toy_module(model, **module)
    trainer.fit(grpo, toy_data())
    return {
        "steps": recorder.steps,
        "computed": tokens.computed,
        "groups": tokens.groups,
        "parameters": {name: tensor.numpy() for name, tensor in parameters_of(grpo).items()},
    }


@pytest.mark.parametrize("cut", [{"micro_batch_size": 4}, {"max_tokens_per_micro_batch": 64}], ids=str)
def test_two_ranks_that_share_prompts_give_the_numbers_of_one_plain_process(
    cut: dict[str, int], tmp_path: Path, tiny_directory: Path
) -> None:
    settings: dict[str, Any] = {"max_rl_steps": 3, "kl_coef": 0.1, **cut}
    plain = _fit(tmp_path, tiny_directory, "auto", 1, **settings)
    ranks = run_distributed(
        lambda: _fit(tmp_path, tiny_directory, FSDP2RLStrategy(share_prompts=True), 2, **settings),
        2,
        init_process_group=False,
        timeout=120.0,
    )
    for found in ranks:
        for one, other in zip(plain["steps"], found["steps"], strict=True):
            for name in COMPARED:
                assert other["metrics"][name] == pytest.approx(one["metrics"][name], abs=1e-5), name
        for name, value in plain["parameters"].items():
            assert torch.allclose(torch.tensor(value), torch.tensor(found["parameters"][name]), atol=1e-5), name
        # four groups of four rollouts on two ranks: none has to be cut
        assert all(set(groups.values()) == {4} for groups in found["groups"])
    assert sum(found["computed"] for found in ranks) < 0.7 * plain["computed"]


def test_the_module_says_it_where_no_strategy_can(tmp_path: Path, tiny_directory: Path) -> None:
    plain = _fit(tmp_path, tiny_directory, "auto", 1, max_rl_steps=2, kl_coef=0.1)
    found = _fit(tmp_path, tiny_directory, "auto", 1, max_rl_steps=2, kl_coef=0.1, share_prompts=True)
    for one, other in zip(plain["steps"], found["steps"], strict=True):
        for name in COMPARED:
            assert other["metrics"][name] == pytest.approx(one["metrics"][name], abs=1e-5), name
    assert found["computed"] < 0.7 * plain["computed"]
