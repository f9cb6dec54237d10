"""A toy RL run on a tiny model: real Trainer, real engines, seconds on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_rlhf.callbacks import HFRollout, RLCheckpoint, WeightSync
from lightning_rlhf.contracts.callback import RLCallback
from lightning_rlhf.data import ListPrompts, PromptDataModule
from lightning_rlhf.modules import GRPO, PPO, OnPolicyModule
from lightning_rlhf.types import PromptBatch

NUM_PROMPTS = 12


def digit_reward(prompts: list[str], responses: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """The share of a response's characters that are digits: dense, so that a tiny model learns it in a few steps."""
    return [sum(c.isdigit() for c in response) / max(len(response), 1) for response in responses]


class Recorder(RLCallback):
    """Keeps what each RL step saw and gave: uids, tokens, metrics, versions."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, OnPolicyModule)
        assert batch.rollouts is not None
        self.steps.append(
            {
                "rl_step": pl_module.rl_step,
                "uids": list(batch.uids),
                "tokens": batch.rollouts.tokens.tolist(),
                "versions": sorted(set(batch.rollouts.token_versions.tolist()) - {-1}),
                "metrics": {k: v for k, v in pl_module.last_metrics.items() if not k.startswith("time/")},
            }
        )


def toy_module(model: Any, **changes: Any) -> GRPO:
    """GRPO on ``digit_reward`` with a learning rate high enough to learn in ten steps."""
    arguments: dict[str, Any] = {
        "model": model,
        "reward": digit_reward,
        "optimizer": partial(torch.optim.AdamW, lr=3e-3, eps=1e-4, weight_decay=0.0),
        "max_rl_steps": 4,
    }
    return GRPO(**{**arguments, **changes})


def toy_ppo(model: Any, **changes: Any) -> PPO:
    """PPO on ``digit_reward``, actor and critic with the learning rate of ``toy_module``."""
    arguments: dict[str, Any] = {
        "model": model,
        "reward": digit_reward,
        "optimizer": partial(torch.optim.AdamW, lr=3e-3, eps=1e-4, weight_decay=0.0),
        "max_rl_steps": 4,
    }
    return PPO(**{**arguments, **changes})


def toy_data(**changes: Any) -> PromptDataModule:
    """Twelve short prompts, four per step: three steps an epoch."""
    return PromptDataModule(
        ListPrompts([f"{i} + {i + 1} =" for i in range(NUM_PROMPTS)]), **{"prompts_per_step": 4, **changes}
    )


def toy_trainer(
    root: Path,
    *,
    callbacks: Sequence[pl.Callback] = (),
    rollout: pl.Callback | None = None,
    weight_sync: bool = True,
    **changes: Any,
) -> pl.Trainer:
    """A quiet Trainer on the CPU with rollout and weight sync."""
    arguments: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": -1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, RLCheckpoint) for c in callbacks),
        "default_root_dir": root,
    }
    sampler = rollout or HFRollout(num_rollouts=4, max_new_tokens=8, max_model_len=64)
    every = [sampler, *([WeightSync()] if weight_sync else []), *callbacks]
    return pl.Trainer(callbacks=every, **{**arguments, **changes})


def parameters_of(module: OnPolicyModule, *, role: str = "actor") -> dict[str, torch.Tensor]:
    """The actor's (or the critic's) full parameters, by name. Collective."""
    engine = module.critic if isinstance(module, PPO) and role == "critic" else module.actor
    return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}
