"""Metrics of a step's rollouts, from the facts that every rank knows."""

from __future__ import annotations

from collections import defaultdict

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_rlhf.batching.plan import StepPlan
from lightning_rlhf.contracts.engine import BaseEngine
from lightning_rlhf.metrics import Metric, reduce_metrics
from lightning_rlhf.rewards import component_metrics
from lightning_rlhf.types import Experience, Rollouts


def rollout_metrics(plan: StepPlan) -> dict[str, float]:
    """Rewards and lengths over all ranks' rollouts; the same on every rank, without a collective.

    Returns:
        ``reward/mean`` and ``reward/std`` (population) over rows whose reward is known, ``reward/failed`` rows that
        were scored and have none, ``reward/groups_without_signal`` share of groups whose rows that train have equal
        rewards, ``rollout/response_length`` mean and ``rollout/response_length_max`` in tokens, ``rollout/num_tokens``
        prompt and response tokens, ``rollout/trained_tokens``, ``rollout/truncated_fraction`` share that hit the length
        limit, ``rollout/skipped`` rows that were never sampled, dropped or aborted.
    """
    facts = plan.facts
    known = [fact.reward for fact in facts if fact.reward is not None]
    groups: dict[str, set[float]] = defaultdict(set)
    for fact in facts:
        groups[fact.uid].update((fact.reward,) if fact.reward is not None and fact.num_loss_tokens else ())
    metrics = {
        "reward/failed": float(sum(fact.reward is None and not fact.skipped for fact in facts)),
        "reward/groups_without_signal": sum(len(rewards) < 2 for rewards in groups.values()) / len(groups),
        "rollout/response_length": sum(fact.num_response_tokens for fact in facts) / len(facts),
        "rollout/response_length_max": float(max(fact.num_response_tokens for fact in facts)),
        "rollout/num_tokens": float(sum(fact.length for fact in facts)),
        "rollout/trained_tokens": float(sum(fact.num_loss_tokens for fact in facts)),
        "rollout/truncated_fraction": sum(fact.truncated for fact in facts) / len(facts),
        "rollout/skipped": float(sum(fact.skipped for fact in facts)),
    }
    if all(fact.skipped for fact in facts):
        rank_zero_warn(
            f"No response of this RL step can be trained on: all {len(facts)} rows were skipped. Most often prompts "
            f"leave no room for a response: raise max_model_len, or leave long prompts out. Else every request was "
            f"aborted, or every environment failed."
        )
    if known:
        mean = sum(known) / len(known)
        metrics["reward/mean"] = mean
        metrics["reward/std"] = (sum((reward - mean) ** 2 for reward in known) / len(known)) ** 0.5
    return metrics


def component_rewards(rollouts: Rollouts, engine: BaseEngine) -> dict[str, float]:
    """Means and failures of several rewards apart, over all data-parallel ranks; nothing for one alone. Collective."""
    if rollouts.reward_components is None:
        return {}
    rows = rollouts.reward_components
    names = list(rows[0]) if rows else []
    named = {name: torch.tensor([row[name] for row in rows], device=engine.device) for name in names}
    return reduce_metrics(
        component_metrics(named), engine.data_parallel_group, distributed=engine.data_parallel_size > 1
    )


def experience_metrics(
    rollouts: Rollouts, experience: Experience, engine: BaseEngine, *, policy_version: int
) -> dict[str, float]:
    """How old the weights were that sampled, and what the step learns from, over all data-parallel ranks. Collective.

    Args:
        rollouts: this rank's rows as sampled.
        experience: this rank's rows as they train, which may be others.
        engine: gives the ranks.
        policy_version: of the actor now.

    Returns:
        ``rollout/staleness_mean`` and ``rollout/staleness_max`` of the tokens that the policy sampled, in policy
        versions; ``actor/advantage_mean``, ``_std`` (population), ``_min`` and ``_max`` over tokens that train.
    """
    stale = (policy_version - rollouts.token_versions[rollouts.response_mask]).to(engine.device)
    advantages = experience.advantages[experience.loss_mask].to(engine.device)
    over_ranks = reduce_metrics(
        {
            "rollout/staleness_mean": Metric.mean(stale),
            "rollout/staleness_max": Metric.max(stale),
            "actor/advantage_mean": Metric.mean(advantages),
            "actor/advantage_std": Metric.mean(advantages.double().square()),  # less the squared mean, below
            "actor/advantage_min": Metric.min(advantages),
            "actor/advantage_max": Metric.max(advantages),
        },
        engine.data_parallel_group,
        distributed=engine.data_parallel_size > 1,
    )
    if "actor/advantage_std" in over_ranks:
        square, mean = over_ranks["actor/advantage_std"], over_ranks["actor/advantage_mean"]
        over_ranks["actor/advantage_std"] = max(square - mean**2, 0.0) ** 0.5
    return over_ranks
