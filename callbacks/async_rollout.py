"""Rollouts that run ahead of training: how far, and how a training step is filled from what is under way."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_rlhf.batching.exchange import all_gather_bytes
from lightning_rlhf.callbacks.dynamic_sampling import DynamicSampling, fill_step, replace_prompts
from lightning_rlhf.callbacks.episodes import note_episodes
from lightning_rlhf.callbacks.rollout_window import Prompt, RolloutWindow, batch_of, prompts_of
from lightning_rlhf.contracts.environment import EPISODE_KEY
from lightning_rlhf.contracts.rollout import RolloutEngine, SamplingConfig
from lightning_rlhf.data import PromptDataModule
from lightning_rlhf.modules.on_policy import OnPolicyModule
from lightning_rlhf.rollout.episode_groups import EpisodeGroups
from lightning_rlhf.rollout.multi_turn import MultiTurnSampler
from lightning_rlhf.types import PromptBatch, Rollouts, RolloutSequence

if TYPE_CHECKING:
    from lightning_rlhf.rollout.served import ServedRolloutEngine

WINDOW_KEY = "lightning_rlhf_rollout_window"
"""Entry of a checkpoint dictionary that holds what all ranks had under way."""


@dataclass(frozen=True, kw_only=True)
class AsyncSettings:
    """How far rollouts run ahead.

    Attributes:
        max_staleness: policy versions that a group may be older than the step that trains on it. 0 is synchronous; the
            optimizer steps of one RL step (mostly 1) are one step off; more is fully asynchronous.
        over_sampling: groups under way for each group that a step takes; what is not taken in time is begun again.

    Raises:
        ValueError: for numbers out of range.
        TypeError: for versions that are no integer.
    """

    max_staleness: int = 0
    over_sampling: float = 1.0

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        if not isinstance(self.max_staleness, int):
            raise TypeError(f"max_staleness={self.max_staleness!r} counts policy versions: it must be an integer.")
        if self.max_staleness < 0 or not 1 <= self.over_sampling < math.inf:
            raise ValueError(
                f"max_staleness={self.max_staleness} must be at least 0, over_sampling={self.over_sampling} a finite "
                f"number of at least 1."
            )

    @property
    def needs_window(self) -> bool:
        """Whether anything runs ahead."""
        return self.max_staleness > 0 or self.over_sampling > 1


def versions_per_step(module: OnPolicyModule, *, rollouts_per_step: int) -> int:
    """Optimizer steps of the actor in one RL step, at most."""
    mini_batch = module.mini_batch_size or rollouts_per_step
    return module.num_epochs * math.ceil(rollouts_per_step / mini_batch)


def steps_ahead(settings: AsyncSettings, *, per_step: int, lag: int) -> int:
    """How many RL steps the rollouts may run ahead.

    Args:
        settings: the bound.
        per_step: policy versions of one RL step.
        lag: versions that the rollout engine's weights may be behind when a group is begun.

    Raises:
        ValueError: if the bound is less than one RL step.
    """
    if settings.max_staleness == 0:
        if lag:
            raise ValueError(
                f"WeightSync(every={lag + 1}) leaves the replicas up to {lag} policy versions behind: allow for "
                f"them by max_staleness={lag + per_step} or more, with which the rollouts run ahead."
            )
        return 0
    ahead = (settings.max_staleness - lag) // per_step
    if ahead < 1:
        raise ValueError(
            f"max_staleness={settings.max_staleness} policy versions, but one RL step takes {per_step} optimizer "
            f"step(s) and the replicas' weights may be {lag} behind: to run one step ahead say "
            f"max_staleness={per_step + lag} or more, or 0 for a synchronous run."
        )
    return ahead


def check_same_kind(parts: Sequence[dict[str, Any]], *, episodes: bool) -> None:
    """Makes sure that finished groups of a checkpoint are what the run samples.

    Args:
        parts: of all ranks, as `AsyncRollout.to_json` gave them.
        episodes: whether this run has an environment.

    Raises:
        ValueError: if the other run had one and this has none, or the other way round.
    """
    rows = [row for part in parts for group in part["finished"] for row in group["sequences"]]
    if any((EPISODE_KEY in row["metadata"]) != episodes for row in rows):
        raise ValueError(
            f"The checkpoint holds finished groups of a run {'without' if episodes else 'with'} an environment=, which "
            f"this one has {'' if episodes else 'not'}: go on with environment= as that run had it."
        )


class AsyncRollout:
    """Fills training steps of one rank from a window of groups under way.

    Args:
        settings: how far rollouts run ahead.
        trainer: of the run.
        module: that trains.
        engine: that samples.
        sampling: how.
        lag: see `steps_ahead`.
        restored: what a checkpoint held, by rank.
        dynamic: leaves groups of equal rewards out of a step; what takes their place is under way already, and further
            prompts are begun instead. None takes every group.
        episodes: plays each group's episodes; None: one response to each prompt.
    """

    def __init__(
        self,
        settings: AsyncSettings,
        *,
        trainer: pl.Trainer,
        module: OnPolicyModule,
        engine: ServedRolloutEngine,
        sampling: SamplingConfig,
        lag: int,
        restored: Sequence[dict[str, Any]] | None,
        dynamic: DynamicSampling | None = None,
        episodes: MultiTurnSampler | None = None,
    ) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, PromptDataModule):
            raise TypeError(f"Rollouts that run ahead draw prompts from a PromptDataModule, got {type(data).__name__}.")
        shared = module.actor.model_parallel_group
        if shared is not None and dist.get_world_size(shared) > 1:
            raise ValueError(
                "Rollouts cannot run ahead where ranks share each sequence: they would have to finish the same groups "
                "in the same order. Use max_staleness=0 and over_sampling=1 with sequence, tensor or pipeline parallel."
            )
        self.settings, self.module, self.engine, self.sampling = settings, module, engine, sampling
        self._data, self._dynamic, self._episodes = data, dynamic, episodes
        self._groups = EpisodeGroups(episodes, engine) if episodes is not None else None
        self._ranks = module.actor.data_parallel_size
        self._count = data.prompts_per_step // self._ranks
        self._per_step = versions_per_step(module, rollouts_per_step=data.prompts_per_step * sampling.n)
        ahead = steps_ahead(settings, per_step=self._per_step, lag=lag)
        extra = math.ceil((settings.over_sampling - 1) * self._count)
        self._extra = ahead * self._count + extra
        self.window = RolloutWindow(
            self._begin, capacity=self._count + self._extra, max_staleness=settings.max_staleness
        )
        if restored is not None:
            self.window.load(restored, rank=module.actor.data_parallel_rank, num_ranks=self._ranks)

    def fill(self, batch: PromptBatch) -> None:
        """Begins the batch's prompts, and puts the step's groups in their place."""
        rl_step = self.module.rl_step
        self.window.add(prompts_of(batch, rl_step=rl_step))
        lacking = self._count + self._extra - len(self.window)
        if lacking > 0:  # the first step: nothing is under way
            self._draw(lacking, rl_step=rl_step)
        before = self.window.restarted
        if self._dynamic is None:
            batch.rollouts = self._take_into(batch)
        else:
            self._fill_with_signal(batch, self._dynamic)
        assert batch.rollouts is not None
        self._note(batch.rollouts, restarted=self.window.restarted - before)
        if self._episodes is not None:
            note_episodes(self._episodes.take_counts(), self.module)

    def _take_into(self, batch: PromptBatch) -> Rollouts:
        """As many groups as the batch has prompts, which become theirs."""
        version = self.engine.weight_version
        if version is None:
            raise RuntimeError("The rollout engine has no weights; a push must come before the rollout.")
        self.window.begin_all(version=version)
        with self.engine.session():
            groups = self.window.take(
                len(batch),
                version=self.module.policy_version,
                versions_per_step=self._per_step,
                on_wait=self.engine.push_if_none_serves,
            )
        replace_prompts(batch, batch_of([group.prompt for group in groups]))
        sequences = [sequence for group in groups for sequence in group.sequences]
        if self._episodes is not None:
            self._episodes.count(sequences)
        return Rollouts.from_sequences(sequences, temperature=self.sampling.temperature or 1.0)

    def _fill_with_signal(self, batch: PromptBatch, settings: DynamicSampling) -> None:
        """As a synchronous step is filled, with groups from the window. Collective over data-parallel ranks."""

        def drawn(count: int) -> PromptBatch:
            prompts = self._data.draw(count)
            self.window.add(prompts_of(prompts, rl_step=self.module.rl_step))
            return prompts

        def scored(prompts: PromptBatch) -> Rollouts:
            rollouts = self._take_into(prompts)
            self.module.score(rollouts)
            return rollouts

        actor = self.module.actor
        step = fill_step(
            batch,
            settings=settings,
            mask_truncated=self.module.mask_truncated,
            sample=scored,
            draw=drawn,
            group=actor.data_parallel_group,
            num_replicas=self._ranks,
            device=actor.device,
            stand_by=self.engine.stand_by,
        )
        replace_prompts(batch, step.prompts)
        batch.rollouts = step.rollouts
        self.module.note_metrics(step.metrics)

    def _draw(self, lacking: int, *, rl_step: int) -> None:
        drawn = self._data.draw(lacking * self._ranks)
        if len(drawn) < lacking:
            raise ValueError(
                f"{(self._count + self._extra) * self._ranks} prompts are to be under way at once (max_staleness="
                f"{self.settings.max_staleness}, over_sampling={self.settings.over_sampling}), but there are fewer: "
                f"give more prompts, or lower one of the two."
            )
        self.window.add(prompts_of(drawn, rl_step=rl_step))

    def _begin(self, prompt: Prompt, version: int) -> Future[list[RolloutSequence]]:
        starter = self._groups or self.engine
        return starter.start_group(batch_of([prompt]), 0, self.sampling, rl_step=self.module.rl_step, version=version)

    def serves(self, engine: RolloutEngine, module: OnPolicyModule, trainer: pl.Trainer) -> bool:
        """Whether what is under way is of this engine, this module and this trainer's prompts."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        return self.engine is engine and self.module is module and self._data is data

    def close(self) -> None:
        """Ends all that is under way."""
        self.window.close()
        if self._groups is not None:
            self._groups.close()

    def _note(self, rollouts: Rollouts, *, restarted: int) -> None:
        """Staleness of the step's tokens over all ranks, as shares by version. Collective over data-parallel ranks.

        Raises:
            RuntimeError: for tokens that are older than the bound.
        """
        stale = self.module.policy_version - rollouts.token_versions[rollouts.response_mask]
        counts = torch.bincount(stale, minlength=self.settings.max_staleness + 1).tolist()
        every = self._of_all_ranks({"counts": counts, "restarted": restarted})
        oldest = max(len(part["counts"]) for part in every) - 1
        if oldest > self.settings.max_staleness:
            raise RuntimeError(
                f"Tokens of {oldest} policy versions ago were taken for this step, but max_staleness="
                f"{self.settings.max_staleness}: the window of groups under way has let one grow too old. This is a "
                f"fault of lightning_rlhf; please report it with your settings."
            )
        total = [sum(part["counts"][age] for part in every) for age in range(self.settings.max_staleness + 1)]
        tokens = max(1, sum(total))
        self.module.note_metrics(
            {
                **{f"rollout/staleness_{age}": number / tokens for age, number in enumerate(total)},
                "rollout/staleness_mean": sum(age * number for age, number in enumerate(total)) / tokens,
                "rollout/staleness_max": float(max((age for age, number in enumerate(total) if number), default=0)),
                "rollout/restarted_groups": float(sum(part["restarted"] for part in every)),
            }
        )

    def to_json(self) -> list[dict[str, Any]]:
        """What all ranks have under way, for a checkpoint. Collective over data-parallel ranks."""
        return self._of_all_ranks(self.window.to_json())

    def _of_all_ranks(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        if self._ranks == 1:
            return [own]
        actor = self.module.actor
        parts = all_gather_bytes(json.dumps(own).encode(), group=actor.data_parallel_group, device=actor.device)
        return [json.loads(part) for part in parts]
