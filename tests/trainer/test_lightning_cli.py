"""GRPO and PPO from LightningCLI's YAML: rewards by import path and by class, through the real parser and a step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml

from lightning_rlhf.modules import GRPO, PPO, OnPolicyModule

pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse[signatures]")

ADAMW = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1.0e-3}}


class ShareOf:
    """A reward with an argument of its own."""

    def __init__(self, characters: str = "0123456789") -> None:
        self.characters = characters

    def __call__(self, prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        return [sum(c in self.characters for c in response) / max(len(response), 1) for response in responses]


@pytest.fixture
def as_module(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name by which a YAML finds this file."""
    monkeypatch.setitem(sys.modules, "my_rewards", sys.modules[ShareOf.__module__])
    monkeypatch.setattr(ShareOf, "__module__", "my_rewards")
    return "my_rewards"


def _cli(folder: Path, model: dict[str, Any]) -> OnPolicyModule:
    from lightning.pytorch.cli import LightningCLI

    prompts = {"class_path": "lightning_rlhf.data.ListPrompts", "init_args": {"prompts": ["1 + 1 =", "2 + 2 ="]}}
    rollout = {"num_rollouts": 2, "max_new_tokens": 4, "max_model_len": 32}
    config = {
        "seed_everything": 0,
        "model": model,
        "data": {
            "class_path": "lightning_rlhf.PromptDataModule",
            "init_args": {"source": prompts, "prompts_per_step": 2},
        },
        "trainer": {
            "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "max_epochs": 1,
            "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": str(folder),
            "callbacks": [
                {"class_path": "lightning_rlhf.HFRollout", "init_args": rollout},
                {"class_path": "lightning_rlhf.WeightSync"},
            ],
        },
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    cli = LightningCLI(
        pl.LightningModule,
        pl.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        save_config_callback=None,
        args=["fit", "--config", str(folder / "config.yaml")],
    )
    assert isinstance(cli.model, OnPolicyModule)
    assert cli.model.rl_step == 1
    assert 0.0 <= cli.model.last_metrics["reward/mean"] <= 1.0
    return cli.model


def test_a_reward_by_its_import_path(tmp_path: Path, tiny_directory: Path) -> None:
    arguments = {"model": str(tiny_directory), "reward": "support.toy.digit_reward", "optimizer": ADAMW}
    module = _cli(tmp_path, {"class_path": "lightning_rlhf.GRPO", "init_args": arguments})
    assert isinstance(module, GRPO)
    assert getattr(module.reward, "__name__", None) == "digit_reward"


def test_a_reward_by_its_class(tmp_path: Path, tiny_directory: Path, as_module: str) -> None:
    reward = {"class_path": f"{as_module}.ShareOf", "init_args": {"characters": "0"}}
    arguments = {"model": str(tiny_directory), "reward": reward, "optimizer": ADAMW}
    module = _cli(tmp_path, {"class_path": "lightning_rlhf.GRPO", "init_args": arguments})
    assert isinstance(module.reward, ShareOf)
    assert module.reward.characters == "0"


def test_ppo_with_its_own_critic_optimizer_and_schedule(tmp_path: Path, tiny_directory: Path) -> None:
    schedule = {"class_path": "torch.optim.lr_scheduler.ConstantLR", "init_args": {"factor": 0.5}}
    arguments = {
        "model": str(tiny_directory), "reward": "support.toy.digit_reward", "optimizer": ADAMW,
        "critic_optimizer": {**ADAMW, "init_args": {"lr": 3.0e-3}}, "lr_schedule": schedule,
    }  # fmt: skip
    module = _cli(tmp_path, {"class_path": "lightning_rlhf.PPO", "init_args": arguments})
    assert isinstance(module, PPO)
    assert module.last_metrics["actor/lr"] == pytest.approx(0.5e-3)
    assert module.last_metrics["critic/lr"] == pytest.approx(3e-3)


def test_what_is_no_reward_is_refused_by_the_parser(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for reward in ("support.toy.NUM_PROMPTS", "support.toy.no_such_reward"):
        arguments = {"model": "m", "reward": reward, "optimizer": ADAMW}
        with pytest.raises(SystemExit):
            _cli(tmp_path, {"class_path": "lightning_rlhf.GRPO", "init_args": arguments})
        assert "reward" in capsys.readouterr().err
