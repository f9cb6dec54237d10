"""The algorithms as LightningModules: what one RL step does with the responses of a rollout."""

from __future__ import annotations

from lightning_rlhf.modules.grpo import GRPO
from lightning_rlhf.modules.mixin import GRPOMixin
from lightning_rlhf.modules.on_policy import OnPolicyModule
from lightning_rlhf.modules.ppo import PPO

__all__ = ["GRPO", "PPO", "GRPOMixin", "OnPolicyModule"]
