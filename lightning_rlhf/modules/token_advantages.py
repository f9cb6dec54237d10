"""Advantages that differ from token to token: GAE on flat experience, and whitening over all ranks' tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_rlhf.algorithms.advantages import token_level_rewards
from lightning_rlhf.algorithms.gae import gae
from lightning_rlhf.batching.packing import flat_to_padded, padded_to_flat, real_slots
from lightning_rlhf.contracts.engine import BaseEngine
from lightning_rlhf.metrics import Metric, reduce_metrics
from lightning_rlhf.modules.step_data import StepData
from lightning_rlhf.types import Experience


def token_advantages(
    experience: Experience,
    rewards: Tensor,
    values: Tensor,
    *,
    gamma: float,
    lam: float,
    penalties: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE over each sequence's tokens that train; see ``algorithms.gae``.

    Args:
        experience: gives sequences and loss mask.
        rewards: ``[B]`` of the sequences; stands on the last token of the loss mask.
        values: ``[num_tokens]`` by the critic.
        gamma: discount per token.
        lam: GAE's lambda.
        penalties: ``[num_tokens]``, taken off the reward of each token.

    Returns:
        Advantages and returns, ``[num_tokens]`` fp32, 0 off the loss mask.
    """
    mask = experience.loss_mask
    per_token = token_level_rewards(rewards, mask, cu_seqlens=experience.cu_seqlens)
    if penalties is not None:
        per_token = per_token - penalties
    # GAE skips what is off the mask, so only the rest is padded: a prompt of thousands of tokens costs nothing
    counts = torch.zeros_like(experience.lengths).index_add_(0, experience.sequence_ids, mask.long())
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    padded_rewards, padded_values = (flat_to_padded(flat[mask], starts, 0.0) for flat in (per_token, values))
    found = gae(padded_rewards, padded_values, real_slots(counts), gamma=gamma, lam=lam)

    def at_tokens(padded: Tensor) -> Tensor:
        return values.new_zeros(len(values)).masked_scatter(mask, padded_to_flat(padded, counts))

    return at_tokens(found[0]), at_tokens(found[1])


def sum_over_rows(data: StepData, per_token: Tensor, engine: BaseEngine) -> Tensor:
    """Each row's sum of a per-token value of this rank's rows, for all ranks' rows. Collective.

    Args:
        data: gives rows and plan.
        per_token: ``[num_tokens]`` of this rank.
        engine: gives the data-parallel group.

    Returns:
        ``[B]`` float64 of all ranks' rows, in the order of the plan, on the host.
    """
    experience = data.experience
    own = torch.zeros(len(experience), dtype=torch.float64, device=per_token.device)
    own.index_add_(0, experience.sequence_ids, per_token.detach().double())
    over_all = torch.zeros(len(data.plan.facts), dtype=torch.float64, device=per_token.device)
    over_all[torch.tensor(data.plan.rows_of_rank(data.rank), dtype=torch.int64, device=per_token.device)] = own
    _all_reduce(over_all, engine, dist.ReduceOp.SUM)
    return over_all.cpu()


def whiten_over_ranks(advantages: Tensor, mask: Tensor, engine: BaseEngine, *, eps: float = 1e-8) -> Tensor:
    """``algorithms.advantages.whiten`` over the tokens of all data-parallel ranks, from sums. Collective.

    Args:
        advantages: ``[num_tokens]`` of this rank.
        mask: same shape; what stands off it is never read.
        engine: gives the data-parallel group.
        eps: added to the variance.

    Returns:
        Same shape and dtype, 0 off the mask, and 0 everywhere if all values on it are equal.
    """
    kept = advantages.detach().double()[mask]
    bound = kept.new_full((1,), torch.inf)
    extremes = torch.stack([torch.cat([-kept, -bound]).max(), torch.cat([kept, -bound]).max()])
    sums = torch.stack([kept.new_tensor(float(kept.numel())), kept.sum()])
    _all_reduce(extremes, engine, dist.ReduceOp.MAX)
    _all_reduce(sums, engine, dist.ReduceOp.SUM)
    count, mean = float(sums[0]), float(sums[1]) / max(float(sums[0]), 1.0)
    # from the deviations, in a second pass: the mean of squares less the squared mean would cancel
    squares = (kept - mean).square().sum()
    _all_reduce(squares, engine, dist.ReduceOp.SUM)
    if count <= 1 or float(-extremes[0]) == float(extremes[1]):
        return torch.zeros_like(advantages)
    deviation = (float(squares) / (count - 1) + eps) ** 0.5
    return torch.zeros_like(advantages).masked_scatter(mask, ((kept - mean) / deviation).to(advantages.dtype))


def value_metrics(experience: Experience, values: Tensor, returns: Tensor, engine: BaseEngine) -> dict[str, float]:
    """How well the critic foresaw the returns, over all ranks' tokens that train. Collective.

    Returns:
        ``critic/return_mean``, and ``critic/explained_variance``: 1 - Var(returns - values) / Var(returns), 1 for a
        perfect critic, absent where all returns are equal.
    """
    mask, errors = experience.loss_mask, returns - values
    parts = {
        name: Metric.mean(found.double(), mask)
        for name, found in {
            "return": returns,
            "return_squared": returns.double().square(),
            "error": errors,
            "error_squared": errors.double().square(),
        }.items()
    }
    means = reduce_metrics(parts, engine.data_parallel_group, distributed=engine.data_parallel_size > 1)
    if not means:
        return {}
    metrics = {"critic/return_mean": means["return"]}
    variance = means["return_squared"] - means["return"] ** 2
    if variance > 1e-12:
        metrics["critic/explained_variance"] = 1 - (means["error_squared"] - means["error"] ** 2) / variance
    return metrics


def _all_reduce(values: Tensor, engine: BaseEngine, operation: dist.ReduceOp.RedOpType) -> None:
    if engine.data_parallel_size > 1:
        dist.all_reduce(values, op=operation, group=engine.data_parallel_group)
