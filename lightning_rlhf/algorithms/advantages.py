"""Advantage estimators.

Outcome estimators map one reward per rollout to one advantage per rollout: ``(rewards [B], uids) -> [B]``. Groups are
rows of one uid, wherever they lie. A row whose reward failed (NaN or infinite) is left out of every statistic and
gets 0. So does every row whose group has no two different rewards, a group of one among them, except where groups
play no part (``reinforce_plus_plus``, ``remax``). Results are fp32, or float64 for float64 rewards; statistics are
float64 throughout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_rlhf.algorithms.gae import gae
from lightning_rlhf.algorithms.groups import Groups, UIDs, as_rewards
from lightning_rlhf.algorithms.sequences import num_sequences, sequence_ids, spread

__all__ = [
    "grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "pass_at_k",
    "gdpo",
    "maxrl",
    "gae",
    "whiten",
    "response_advantages",
    "token_level_rewards",
]


def grpo(rewards: Tensor, uids: UIDs, *, normalize_std: bool = True, eps: float = 1e-6) -> Tensor:
    r"""GRPO (arXiv:2402.03300): :math:`(r - \mathrm{mean}) / (\mathrm{std} + \epsilon)` in the group, sample std.

    Args:
        rewards: ``[B]``.
        uids: ``B`` identities of the prompts.
        normalize_std: False leaves the division out (Dr.GRPO, arXiv:2503.20783).
        eps: :math:`\epsilon`, 1e-6 as verl has it; TRL has 1e-4.

    Returns:
        ``[B]``.
    """
    groups = Groups.of(rewards, uids)
    advantages = groups.rewards - groups.means
    if normalize_std:
        advantages = advantages / (groups.stds + eps)
    return groups.informative(advantages, rewards.dtype)


def rloo(rewards: Tensor, uids: UIDs) -> Tensor:
    r"""RLOO (arXiv:2402.14740): the reward minus the mean of the others', :math:`\frac{n}{n-1}(r - \mathrm{mean})`.

    Args:
        rewards: ``[B]``.
        uids: ``B`` identities of the prompts.

    Returns:
        ``[B]``.
    """
    groups = Groups.of(rewards, uids)
    factor = groups.counts / (groups.counts - 1).clamp(min=1)
    return groups.informative(factor * (groups.rewards - groups.means), rewards.dtype)


def reinforce_plus_plus(rewards: Tensor, uids: UIDs, *, lengths: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    r"""REINFORCE++ (arXiv:2501.03262): rewards whitened over the whole batch; groups play no part.

    Args:
        rewards: ``[B]``.
        uids: ``B`` identities; only their number matters.
        lengths: ``[B]`` response tokens of each rollout: whitens over tokens, a longer rollout counting for more, as
            the paper does. None: over rollouts.
        eps: added to the variance.

    Returns:
        ``[B]``.
    """
    groups = Groups.of(rewards, uids)
    return as_rewards(_whiten(groups.rewards, _row_weights(groups, lengths), eps), rewards.dtype)


def reinforce_plus_plus_baseline(
    rewards: Tensor, uids: UIDs, *, lengths: Tensor | None = None, eps: float = 1e-8
) -> Tensor:
    r"""REINFORCE++-baseline (arXiv:2501.03262): the group's mean taken off, then whitened over the whole batch.

    A group of equal rewards counts in the whitening, with 0, and stays at exactly 0.

    Args:
        rewards: ``[B]``.
        uids: ``B`` identities of the prompts.
        lengths: ``[B]`` response tokens of each rollout, see ``reinforce_plus_plus``.
        eps: added to the variance.

    Returns:
        ``[B]``.
    """
    groups = Groups.of(rewards, uids)
    centred = groups.informative(groups.rewards - groups.means, torch.float64)
    return groups.informative(_whiten(centred, _row_weights(groups, lengths), eps), rewards.dtype)


def remax(rewards: Tensor, uids: UIDs, *, baselines: Tensor) -> Tensor:
    """ReMax (arXiv:2310.10505): the reward minus that of the prompt's greedy rollout.

    Args:
        rewards: ``[B]``.
        uids: ``B`` identities; only their number matters.
        baselines: ``[B]`` reward of the greedy rollout of each row's prompt; a row without a finite one gets 0.

    Returns:
        ``[B]``.

    Raises:
        ValueError: if ``baselines`` is not ``[B]``.
    """
    groups = Groups.of(rewards, uids)
    if baselines.shape != rewards.shape:
        raise ValueError(f"baselines must have shape {tuple(rewards.shape)}, got {tuple(baselines.shape)}.")
    advantages = groups.rewards - baselines.double()
    return as_rewards(advantages.masked_fill(~groups.valid | ~baselines.isfinite(), 0), rewards.dtype)


def opo(rewards: Tensor, uids: UIDs, *, lengths: Tensor) -> Tensor:
    r"""OPO (arXiv:2505.23585): the baseline of least variance, :math:`\sum l r / \sum l` in the group.

    Args:
        rewards: ``[B]``.
        uids: ``B`` identities of the prompts.
        lengths: ``[B]`` response tokens of each rollout.

    Returns:
        ``[B]``; 0 for a group without any response token.
    """
    groups = Groups.of(rewards, uids)
    weights = _row_weights(groups, lengths)
    total = groups.sum(weights)
    baseline = groups.sum(weights * groups.rewards) / total.clamp(min=1)
    return groups.informative((groups.rewards - baseline).masked_fill(total == 0, 0), rewards.dtype)


def gpg(rewards: Tensor, uids: UIDs, *, f_norm: float = 1.0) -> Tensor:
    r"""GPG (arXiv:2504.02546): :math:`\alpha (r - \mathrm{mean}) / f`, :math:`\alpha` = rollouts / non-zero rewards.

    Args:
        rewards: ``[B]``; :math:`\alpha` is taken over all of them.
        uids: ``B`` identities of the prompts.
        f_norm: :math:`f`.

    Returns:
        ``[B]``.
    """
    groups = Groups.of(rewards, uids)
    alpha = groups.valid.sum() / torch.count_nonzero(groups.rewards).clamp(min=1)
    return groups.informative(alpha.double() * (groups.rewards - groups.means) / f_norm, rewards.dtype)


def pass_at_k(rewards: Tensor, uids: UIDs, *, normalize_std: bool = True, eps: float = 1e-6) -> Tensor:
    r"""Pass@k advantage (arXiv:2503.19595): the group's best rollout gets its lead over the second, all others 0.

    Args:
        rewards: ``[B]``.
        uids: ``B`` identities of the prompts.
        normalize_std: divide by the group's std plus ``eps``.
        eps: as for ``grpo``.

    Returns:
        ``[B]``; 0 where two rollouts share the first place.
    """
    groups = Groups.of(rewards, uids)
    is_best = groups.valid & (groups.rewards == groups.max(groups.rewards))
    lead = groups.rewards - groups.max(groups.rewards, where=~is_best)
    advantages = torch.where(is_best & (groups.sum(is_best) == 1), lead, 0.0)
    if normalize_std:
        advantages = advantages / (groups.stds + eps)
    return groups.informative(advantages, rewards.dtype)


def gdpo(rewards: Tensor, uids: UIDs, *, weights: Sequence[float] | None = None, eps: float = 1e-6) -> Tensor:
    """GDPO (arXiv:2601.05242): each reward normalised in its group apart, their weighted sum whitened over the batch.

    Args:
        rewards: ``[B, K]``, one column per reward; a row with any failed reward gets 0 and belongs to no statistic.
        uids: ``B`` identities of the prompts.
        weights: ``K`` weights of the sum; None: all 1. A reward of weight 0 neither adds to the sum nor fails a row.
        eps: added to each group's std.

    Returns:
        ``[B]``.

    Raises:
        ValueError: if ``rewards`` is not ``[B, K]`` or the number of weights is not ``K``.
    """
    if rewards.ndim != 2:
        raise ValueError(f"gdpo takes several rewards per rollout, shape [B, K], got {tuple(rewards.shape)}.")
    factors = [1.0] * rewards.shape[1] if weights is None else list(weights)
    if len(factors) != rewards.shape[1]:
        raise ValueError(f"{rewards.shape[1]} rewards per rollout but {len(factors)} weights.")
    used = [k for k, weight in enumerate(factors) if weight != 0]
    failed = ~rewards[:, used].isfinite().all(dim=1)
    columns = rewards.double().masked_fill(failed[:, None], torch.nan)
    nothing = columns.new_zeros(len(columns))
    total = torch.stack([nothing, *(factors[k] * grpo(columns[:, k], uids, eps=eps) for k in used)]).sum(0)
    # a group without a difference in any reward is at 0, and the batch's mean is 0 but for rounding
    whitened = _whiten(total, (~failed).double(), 1e-8).masked_fill(total == 0, 0)
    return as_rewards(whitened, rewards.dtype)


def maxrl(rewards: Tensor, uids: UIDs, *, eps: float = 1e-6) -> Tensor:
    r"""MaxRL (arXiv:2602.02710): :math:`(r - \mathrm{mean}) / (\mathrm{mean} + \epsilon)` in the group.

    Weighs a prompt by the inverse of its success rate, as maximum likelihood does. Meant for rewards of 0 and 1.

    Args:
        rewards: ``[B]``, none below 0.
        uids: ``B`` identities of the prompts.
        eps: :math:`\epsilon`.

    Returns:
        ``[B]``.

    Raises:
        ValueError: for a negative reward, which would make the denominator meaningless.
    """
    groups = Groups.of(rewards, uids)
    if bool((groups.rewards < 0).any()):
        raise ValueError(
            f"maxrl divides by the mean reward and needs rewards of 0 or more, got {float(groups.rewards.min())}."
        )
    return groups.informative((groups.rewards - groups.means) / (groups.means + eps), rewards.dtype)


def whiten(advantages: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Mean 0 and variance 1 (n-1) over the mask; the explicit step that PPO takes after ``gae``, over the global batch.

    Args:
        advantages: any shape; what stands off the mask is never read.
        mask: same shape.
        eps: added to the variance.

    Returns:
        Same shape and dtype, 0 off the mask, and 0 everywhere if all values on it are equal.

    Raises:
        ValueError: for different shapes.
    """
    if advantages.shape != mask.shape:
        raise ValueError(f"advantages {tuple(advantages.shape)} and mask {tuple(mask.shape)} must have one shape.")
    weights = mask.double()
    values = advantages.detach().double().masked_fill(weights == 0, 0)
    return _whiten(values, weights, eps).to(advantages.dtype)


def response_advantages(advantages: Tensor, response_mask: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Gives each response token its rollout's advantage.

    Args:
        advantages: ``[B]``.
        response_mask: flat ``[num_tokens]`` or padded ``[B, T]``.
        cu_seqlens: ``[B+1]`` for the flat layout.

    Returns:
        In the shape of ``response_mask`` and the dtype of ``advantages``, 0 off the mask.
    """
    return spread(advantages, response_mask, cu_seqlens).masked_fill(~response_mask.bool(), 0)


def token_level_rewards(rewards: Tensor, response_mask: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Puts each rollout's reward on its last response token: the last one on the mask, whatever its id.

    Args:
        rewards: ``[B]``. A failed reward (NaN) stays visible: rows without a reward belong off the mask.
        response_mask: flat ``[num_tokens]`` or padded ``[B, T]``.
        cu_seqlens: ``[B+1]`` for the flat layout.

    Returns:
        In the shape of ``response_mask`` and the dtype of ``rewards``; 0 elsewhere. A row without a response token
        has no place for its reward.
    """
    count = num_sequences(response_mask, cu_seqlens)
    if rewards.shape != (count,):
        raise ValueError(f"Expected one reward per sequence, shape [{count}], got {tuple(rewards.shape)}.")
    ids = sequence_ids(response_mask, cu_seqlens).reshape(-1)
    slots = torch.arange(ids.numel(), device=ids.device).masked_fill(~response_mask.bool().reshape(-1), -1)
    last = slots.new_full((count,), -1).scatter_reduce_(0, ids, slots, "amax")
    placed = rewards.new_zeros(ids.numel())
    placed[last[last >= 0]] = rewards[last >= 0]
    return placed.reshape(response_mask.shape)


def _row_weights(groups: Groups, lengths: Tensor | None) -> Tensor:
    """``[B]`` float64: tokens of each row (or 1), 0 for rows whose reward failed."""
    if lengths is None:
        return groups.valid.double()
    if lengths.shape != groups.rewards.shape:
        raise ValueError(f"lengths must have shape {tuple(groups.rewards.shape)}, got {tuple(lengths.shape)}.")
    return lengths.double().masked_fill(~groups.valid, 0)


def _whiten(values: Tensor, weights: Tensor, eps: float) -> Tensor:
    """Whitens where ``weights`` (counts) are above 0, unbiased; 0 elsewhere, and for values that are all equal."""
    kept = values[weights > 0]
    total = weights.sum()
    if kept.numel() == 0 or bool(kept.min() == kept.max()) or float(total) <= 1.0:
        return torch.zeros_like(values)
    mean = (values * weights).sum() / total
    variance = ((values - mean).square() * weights).sum() / (total - 1)
    return ((values - mean) / (variance + eps).sqrt()).masked_fill(weights == 0, 0)
