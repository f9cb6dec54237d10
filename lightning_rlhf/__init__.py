"""Reinforcement learning for language models as PyTorch Lightning plugins.

Importing the package imports neither vLLM nor Megatron; public names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_rlhf.strategies.register import register_strategies

if TYPE_CHECKING:
    from lightning_rlhf.callbacks import (
        DynamicSampling,
        HFExport,
        HFRollout,
        RLCheckpoint,
        RLProgressBar,
        RolloutDump,
        RunReport,
        SampleTable,
        Throughput,
        VLLMRollout,
        WeightSync,
    )
    from lightning_rlhf.contracts.environment import Action, Environment, StepResult, Task
    from lightning_rlhf.contracts.lora import LoRAConfig
    from lightning_rlhf.contracts.rollout import Guide
    from lightning_rlhf.data import JSONLPrompts, PromptDataModule, ReasoningGymPrompts
    from lightning_rlhf.environments import ToolEnvironment
    from lightning_rlhf.modules import GRPO, PPO, GRPOMixin
    from lightning_rlhf.rollout.episodes import TurnLimits
    from lightning_rlhf.strategies import FSDP2RLStrategy, MegatronRLStrategy, RLStrategy, UlyssesRLStrategy

_PUBLIC = {
    "Action": "lightning_rlhf.contracts.environment",
    "DynamicSampling": "lightning_rlhf.callbacks",
    "Environment": "lightning_rlhf.contracts.environment",
    "FSDP2RLStrategy": "lightning_rlhf.strategies",
    "GRPO": "lightning_rlhf.modules",
    "GRPOMixin": "lightning_rlhf.modules",
    "Guide": "lightning_rlhf.contracts.rollout",
    "HFExport": "lightning_rlhf.callbacks",
    "HFRollout": "lightning_rlhf.callbacks",
    "JSONLPrompts": "lightning_rlhf.data",
    "LoRAConfig": "lightning_rlhf.contracts.lora",
    "MegatronRLStrategy": "lightning_rlhf.strategies",
    "PPO": "lightning_rlhf.modules",
    "PromptDataModule": "lightning_rlhf.data",
    "RLCheckpoint": "lightning_rlhf.callbacks",
    "RLProgressBar": "lightning_rlhf.callbacks",
    "RLStrategy": "lightning_rlhf.strategies",
    "ReasoningGymPrompts": "lightning_rlhf.data",
    "RolloutDump": "lightning_rlhf.callbacks",
    "RunReport": "lightning_rlhf.callbacks",
    "SampleTable": "lightning_rlhf.callbacks",
    "StepResult": "lightning_rlhf.contracts.environment",
    "Task": "lightning_rlhf.contracts.environment",
    "Throughput": "lightning_rlhf.callbacks",
    "ToolEnvironment": "lightning_rlhf.environments",
    "TurnLimits": "lightning_rlhf.rollout.episodes",
    "UlyssesRLStrategy": "lightning_rlhf.strategies",
    "VLLMRollout": "lightning_rlhf.callbacks",
    "WeightSync": "lightning_rlhf.callbacks",
}

__all__ = [
    "GRPO",
    "PPO",
    "Action",
    "DynamicSampling",
    "Environment",
    "FSDP2RLStrategy",
    "GRPOMixin",
    "Guide",
    "HFExport",
    "HFRollout",
    "JSONLPrompts",
    "LoRAConfig",
    "MegatronRLStrategy",
    "PromptDataModule",
    "RLCheckpoint",
    "RLProgressBar",
    "RLStrategy",
    "ReasoningGymPrompts",
    "RolloutDump",
    "RunReport",
    "SampleTable",
    "StepResult",
    "Task",
    "Throughput",
    "ToolEnvironment",
    "TurnLimits",
    "UlyssesRLStrategy",
    "VLLMRollout",
    "WeightSync",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lightning_rlhf' has no attribute {name!r}; it has {', '.join(sorted(_PUBLIC))}.")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


register_strategies()
