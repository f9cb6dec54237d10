"""Rollouts of several turns in a run: the sampler that it needs, and what its episodes came to over all ranks."""

from __future__ import annotations

import dataclasses
import json

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_rlhf.batching.exchange import all_gather_bytes
from lightning_rlhf.contracts.environment import EnvironmentFactory
from lightning_rlhf.data import PromptDataModule
from lightning_rlhf.modules.on_policy import OnPolicyModule
from lightning_rlhf.rewards import reads_environment
from lightning_rlhf.rollout.episodes import TurnLimits
from lightning_rlhf.rollout.multi_turn import EpisodeCounts, MultiTurnSampler


def episode_sampler(
    environment: EnvironmentFactory,
    limits: TurnLimits,
    *,
    trainer: pl.Trainer,
    module: OnPolicyModule,
    max_model_len: int,
) -> MultiTurnSampler:
    """The sampler for a module's tokenizer, with the chat template's variables that the run's prompts have."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    return MultiTurnSampler(
        environment=environment,
        tokenizer=module.tokenizer,
        max_model_len=max_model_len,
        limits=limits,
        chat_template_kwargs=data.chat_template_kwargs if isinstance(data, PromptDataModule) else {},
    )


def note_episodes(counts: EpisodeCounts, module: OnPolicyModule) -> None:
    """Logs what the episodes of all ranks came to. Collective over model- and data-parallel ranks.

    Warns where the environment gives rewards that the module does not read.
    """
    actor = module.actor
    every = [counts]
    if actor.model_parallel_group is not None:
        every = _of_group(every, module, actor.model_parallel_group)
    if actor.data_parallel_size > 1:
        every = _of_group(every, module, actor.data_parallel_group)
    episodes = max(1, sum(one.episodes for one in every))
    module.note_metrics(
        {
            "rollout/turns_mean": sum(one.turns for one in every) / episodes,
            "rollout/turns_max": float(max(one.most_turns for one in every)),
            "rollout/observation_tokens": sum(one.observation_tokens for one in every) / episodes,
            "rollout/failed_episodes": float(sum(one.failed for one in every)),
        }
    )
    if any(one.rewarded for one in every) and not reads_environment(module.reward) and module.rl_step == 0:
        rank_zero_warn(
            "The environment gives rewards, but the module's reward is not lightning_rlhf.rewards.EnvironmentReward() "
            "and has none among its WeightedRewards: unless it reads metadata['episode'] itself, they are not used."
        )


def _of_group(own: list[EpisodeCounts], module: OnPolicyModule, group: dist.ProcessGroup | None) -> list[EpisodeCounts]:
    payload = json.dumps([dataclasses.asdict(one) for one in own]).encode()
    parts = all_gather_bytes(payload, group=group, device=module.actor.device)
    return [EpisodeCounts(**one) for part in parts for one in json.loads(part)]
