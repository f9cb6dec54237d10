"""From rollouts and rewards to the rows that this rank trains on, through one global plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_rlhf.algorithms.aggregation import AggregationMode, loss_weights
from lightning_rlhf.batching.exchange import assert_same_plan, exchange_rows, gather_row_facts
from lightning_rlhf.batching.plan import RowFact, StepPlan, build_step_plan
from lightning_rlhf.contracts.engine import BaseEngine
from lightning_rlhf.types import UNTRAINED_FINISHES, Experience, Rollouts


@dataclass(frozen=True, kw_only=True)
class StepData:
    """One RL step's experience on this rank, with the plan that all ranks share.

    Attributes:
        experience: this rank's rows, mini-batch after mini-batch.
        plan: all ranks' rows and mini-batches.
        rank: this rank in the data-parallel group.
        aggregation: how per-token terms become one loss.
        norm_length: the constant of ``seq-mean-token-sum-norm``, in tokens.
    """

    experience: Experience
    plan: StepPlan
    rank: int
    aggregation: AggregationMode
    norm_length: int | None

    @property
    def uids(self) -> list[str]:
        """``[B]`` of all ranks' rows, in the order of the plan."""
        return [fact.uid for fact in self.plan.facts]

    @property
    def rewards(self) -> Tensor:
        """``[B]`` fp32 of all ranks' rows, in the order of the plan; NaN where a row does not train. On the host."""
        rewards = [
            math.nan if fact.reward is None or fact.num_loss_tokens == 0 else fact.reward for fact in self.plan.facts
        ]
        return torch.tensor(rewards, dtype=torch.float32)

    @property
    def baselines(self) -> Tensor:
        """``[B]`` fp32 of all ranks' rows: reward of the prompt's greedy rollout; NaN where there is none."""
        return _as_tensor([fact.baseline for fact in self.plan.facts])

    @property
    def components(self) -> Tensor:
        """``[B, K]`` fp32 of all ranks' rows, a column for each reward; a row that does not train is NaN.

        A single reward is its own column.
        """
        rewards = self.rewards
        columns = [_as_tensor(list(parts)) for parts in zip(*(f.components for f in self.plan.facts), strict=True)]
        matrix = torch.stack(columns, dim=1) if columns else rewards[:, None]
        return matrix.masked_fill(rewards.isnan()[:, None], math.nan)

    @property
    def response_lengths(self) -> Tensor:
        """``[B]`` int64 of all ranks' rows, in the order of the plan: tokens sampled by the policy. On the host."""
        return torch.tensor([fact.num_response_tokens for fact in self.plan.facts], dtype=torch.int64)

    def own_rows(self, values: Tensor) -> Tensor:
        """This rank's rows' of a value ``[B]`` of all ranks' rows, on the experience's device."""
        rows = torch.tensor(self.plan.rows_of_rank(self.rank), dtype=torch.int64, device=values.device)
        return values[rows].to(self.experience.tokens.device)

    def in_mini_batches(self, size: int | None) -> StepData:
        """The same rows, with ``size`` of them over all ranks in an optimizer step; None takes all in one."""
        return dataclasses.replace(self, plan=self.plan.merged(size))

    @property
    def num_trained(self) -> int:
        """Mini-batches with something to train; the others are left out on every rank alike."""
        return sum(mini_batch.num_global_tokens > 0 for mini_batch in self.plan.mini_batches)

    def mini_batches(self, *, epochs: int) -> Iterator[Experience]:
        """Yields each optimizer step's rows with their loss weights, ``epochs`` times over.

        A mini-batch in which no row trains (all rewards failed, say) is left out: its gradient is zero, but an
        optimizer with momentum would move the weights all the same.
        """
        starts = [0]
        for mini_batch in self.plan.mini_batches:
            starts.append(starts[-1] + len(mini_batch.rows_of_rank[self.rank]))
        for epoch in range(epochs):
            for index in self.plan.epoch_order(epoch):
                mini_batch = self.plan.mini_batches[index]
                if mini_batch.num_global_tokens == 0:
                    continue
                rows = self.experience.select(range(starts[index], starts[index + 1]))
                weights = loss_weights(
                    rows.loss_mask,
                    self.aggregation,
                    cu_seqlens=rows.cu_seqlens,
                    num_global_tokens=mini_batch.num_global_tokens,
                    num_global_sequences=mini_batch.num_global_sequences,
                    norm_length=self.norm_length,
                )
                yield dataclasses.replace(rows, loss_weights=weights)


def row_facts(rollouts: Rollouts, rewards: Tensor, *, mask_truncated: bool, rank: int) -> list[RowFact]:
    """What this rank tells the others of its rows.

    A row trains on its response tokens, unless its reward failed (NaN), it was skipped or aborted or its environment
    failed, or it was truncated and ``mask_truncated``: such a row counts in no denominator, and one that was not
    sampled whole in no mean reward.
    """
    facts = []
    # read once: each of these properties goes over every token
    lengths, response_lengths = rollouts.lengths.tolist(), rollouts.response_lengths.tolist()
    baselines = None if rollouts.baseline_rewards is None else rollouts.baseline_rewards.tolist()
    for row, reward in enumerate(rewards.tolist()):
        truncated = rollouts.finish_reasons[row] == "length"
        skipped = rollouts.finish_reasons[row] in UNTRAINED_FINISHES
        known = math.isfinite(reward) and not skipped
        baseline = None if baselines is None else baselines[row]
        components = {} if rollouts.reward_components is None else rollouts.reward_components[row]
        trains = known and not (truncated and mask_truncated)
        facts.append(
            RowFact(
                uid=rollouts.uids[row],
                sample_index=rollouts.sample_indices[row],
                reward=reward if known else None,
                length=lengths[row],
                num_response_tokens=response_lengths[row],
                num_loss_tokens=response_lengths[row] if trains else 0,
                truncated=truncated,
                skipped=skipped,
                rank=rank,
                row=row,
                baseline=_known(baseline),
                components=tuple(_known(value) for value in components.values()),
            )
        )
    return facts


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _as_tensor(values: list[float | None]) -> Tensor:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float32)


def build_step_data(
    rollouts: Rollouts,
    rewards: Tensor,
    *,
    engine: BaseEngine,
    aggregation: AggregationMode,
    norm_length: int | None,
    mask_truncated: bool,
    mini_batch_size: int | None,
    seed: int,
) -> StepData:
    """Agrees on the global plan, and moves rows to where they train; advantages are still 0. Collective.

    Args:
        rollouts: this rank's rows as sampled.
        rewards: ``[B]`` fp32, NaN where the reward failed.
        engine: gives the data-parallel group.
        aggregation: see ``algorithms.aggregation``.
        norm_length: tokens, for ``seq-mean-token-sum-norm``.
        mask_truncated: leave rows that hit the length limit out of the loss and its denominators.
        mini_batch_size: rollouts in one optimizer step over all ranks; None takes all.
        seed: draws mini-batches.
    """
    rank, size, group = engine.data_parallel_rank, engine.data_parallel_size, engine.data_parallel_group
    device = engine.device
    rollouts = rollouts.to(device)
    local = row_facts(rollouts, rewards, mask_truncated=mask_truncated, rank=rank)
    facts = gather_row_facts(local, group=group, data_parallel_size=size, device=device)
    plan = build_step_plan(
        facts,
        mini_batch_size=mini_batch_size,
        data_parallel_size=size,
        seed=seed,
        keep_groups=engine.config.share_prompts,
    )
    assert_same_plan(plan, group=group, data_parallel_size=size, device=device)
    row_trains = torch.tensor([fact.num_loss_tokens > 0 for fact in local], dtype=torch.bool, device=device)
    sampled = Experience(
        tokens=rollouts.tokens,
        cu_seqlens=rollouts.cu_seqlens,
        response_mask=rollouts.response_mask,
        loss_mask=rollouts.response_mask & row_trains[rollouts.sequence_ids],
        rollout_log_probs=rollouts.rollout_log_probs,
        advantages=torch.zeros_like(rollouts.rollout_log_probs),
        uids=rollouts.uids,
        sample_indices=rollouts.sample_indices,
        temperature=rollouts.temperature,
    )
    experience = exchange_rows(sampled, plan, rank=rank, group=group, data_parallel_size=size)
    return StepData(experience=experience, plan=plan, rank=rank, aggregation=aggregation, norm_length=norm_length)
