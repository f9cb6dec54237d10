"""Every sampled token against the weights of the version that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from transformers import AutoModelForCausalLM

from lightning_rlhf.contracts.callback import OptimizerStep, RLCallback
from lightning_rlhf.modules import OnPolicyModule
from lightning_rlhf.types import PromptBatch
from support.rollout import naive_log_probs


class VersionCheck(RLCallback):
    """Keeps each version's weights, and holds every sampled token against the version that it names.

    Attributes:
        worst: largest difference of log-probs so far.
        ages: of trained tokens, in versions.
        trained: uids of the prompts.
    """

    def __init__(self, model: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.weights = {0: {name: tensor.clone() for name, tensor in self.model.state_dict().items()}}
        self.worst = 0.0
        self.ages: set[int] = set()
        self.trained: list[str] = []

    def on_after_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: OptimizerStep) -> None:
        assert isinstance(pl_module, OnPolicyModule)
        state = {name: tensor.clone() for name, tensor in pl_module.actor.get_per_tensor_param()}
        self.weights[pl_module.policy_version] = state

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, OnPolicyModule)
        assert batch.rollouts is not None
        rollouts, now = batch.rollouts, pl_module.policy_version - 1
        self.trained += batch.uids
        for version in set(rollouts.token_versions[rollouts.response_mask].tolist()):
            self.ages.add(now - version)
            self.model.load_state_dict(self.weights[version], strict=False)
            self.model.tie_weights()
            for row in range(len(rollouts)):
                part = slice(*rollouts.cu_seqlens[row : row + 2].tolist())
                expected = torch.tensor(naive_log_probs(self.model, rollouts.tokens[part].tolist()))
                mine = rollouts.token_versions[part] == version
                if mine.any():
                    off = (rollouts.rollout_log_probs[part] - expected)[mine].abs().max().item()
                    self.worst = max(self.worst, off)
