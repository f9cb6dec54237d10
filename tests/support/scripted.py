"""A GRPO module on a tiny model whose RL steps are written down: what its callbacks must show is known by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_rlhf.data import ListPrompts, PromptDataModule
from lightning_rlhf.modules import GRPO
from lightning_rlhf.types import PromptBatch, Rollouts, RolloutSequence
from support.tiny import tiny_model, tiny_tokenizer

TOKENS_PER_STEP = 16.0


class ScriptedGRPO(GRPO):
    """One prompt and one response per row and step; the reward of step ``i`` (from 0) is ``rewards[i]``, None fails."""

    def __init__(
        self,
        rewards: Sequence[float | None],
        *,
        responses: Sequence[str] = ("4",),
        max_rl_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            **{
                "model": tiny_model(),
                "tokenizer": tiny_tokenizer(),
                "reward": lambda prompts, responses, metadata: [0.0] * len(prompts),
                "optimizer": partial(torch.optim.SGD, lr=0.1),
                "max_rl_steps": len(rewards) if max_rl_steps is None else max_rl_steps,
                **kwargs,
            }
        )
        self.script = list(rewards)
        self.scripted_responses = list(responses)

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        reward = self.script[self.rl_step]
        rows = [
            RolloutSequence(
                uid=uid,
                sample_index=sample,
                prompt_token_ids=[5, 6],
                response_token_ids=[7, 8],
                log_probs=[-1.0, -1.0],
                policy_version=self.policy_version,
                finish_reason="stop",
                prompt=prompt,
                response=response,
            )
            for uid, prompt in zip(batch.uids, batch.prompts, strict=True)
            for sample, response in enumerate(self.scripted_responses)
        ]
        batch.rollouts = Rollouts.from_sequences(rows)
        batch.rollouts.rewards = torch.full((len(rows),), float("nan") if reward is None else reward)
        metrics = {"rollout/num_tokens": TOKENS_PER_STEP}
        if reward is not None:
            metrics |= {"reward/mean": reward, "reward/std": 0.5}
        self.policy_version += 1
        self.finish_step(metrics)


def scripted_data(prompts: Sequence[str] = ("1 + 3 =", "2 + 2 ="), *, prompts_per_step: int = 2) -> PromptDataModule:
    """The prompts in their order, two a step."""
    return PromptDataModule(ListPrompts(list(prompts)), prompts_per_step=prompts_per_step, shuffle=False)


def scripted_fit(
    module: ScriptedGRPO,
    root: Path,
    callbacks: Sequence[pl.Callback],
    *,
    data: PromptDataModule | None = None,
    ckpt_path: str | None = None,
    **changes: Any,
) -> pl.Trainer:
    """Runs the script through the real Trainer in one process."""
    arguments: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": -1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": root,
        "callbacks": list(callbacks),
    }
    trainer = pl.Trainer(**{**arguments, **changes})
    trainer.fit(module, datamodule=data or scripted_data(), ckpt_path=ckpt_path)
    return trainer
