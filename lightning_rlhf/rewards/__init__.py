"""Scoring responses: functions and verifiers.

A reward is any callable ``reward(prompts, responses, metadata)`` that gives one number per response.
"""

from __future__ import annotations

from lightning_rlhf.rewards.code import CodeReward
from lightning_rlhf.rewards.deadline import FunctionLimits, LimitedFunction
from lightning_rlhf.rewards.environment import EnvironmentReward, reads_environment
from lightning_rlhf.rewards.extract import Extraction, extract_answer
from lightning_rlhf.rewards.function import RewardFunction, WeightedRewards, reward_name, score
from lightning_rlhf.rewards.length import soft_overlong_penalty
from lightning_rlhf.rewards.math import gsm8k_reward
from lightning_rlhf.rewards.math_verify import MathVerifyReward
from lightning_rlhf.rewards.model import ModelReward
from lightning_rlhf.rewards.reasoning_gym import ReasoningGymReward
from lightning_rlhf.rewards.remote import RemoteReward
from lightning_rlhf.rewards.sandbox import SandboxLimits, SandboxResult, run_sandboxed
from lightning_rlhf.rewards.scores import Failure, RewardBrokenError, Scores, component_metrics
from lightning_rlhf.rewards.time_limited import TimeLimited

__all__ = [
    "CodeReward",
    "EnvironmentReward",
    "Extraction",
    "Failure",
    "FunctionLimits",
    "LimitedFunction",
    "MathVerifyReward",
    "ModelReward",
    "ReasoningGymReward",
    "RemoteReward",
    "RewardBrokenError",
    "RewardFunction",
    "SandboxLimits",
    "SandboxResult",
    "Scores",
    "TimeLimited",
    "WeightedRewards",
    "component_metrics",
    "extract_answer",
    "gsm8k_reward",
    "reads_environment",
    "reward_name",
    "run_sandboxed",
    "score",
    "soft_overlong_penalty",
]
