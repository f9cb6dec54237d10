"""What a rollout's length adds to its reward, ``(rewards [B], uids, lengths [B]) -> [B]``, 0 for failed rewards.

DAPO's soft overlong penalty, which needs no group, is ``rewards.soft_overlong_penalty``.
"""

from __future__ import annotations

from torch import Tensor

from lightning_rlhf.algorithms.groups import Groups, UIDs, as_rewards


def linear(rewards: Tensor, uids: UIDs, lengths: Tensor, *, per_token: float = 1e-3) -> Tensor:
    """A price for each token, :math:`-c l`.

    Args:
        rewards: ``[B]``; only tells which rows count.
        uids: ``B`` identities of the prompts; only their number matters.
        lengths: ``[B]`` response tokens.
        per_token: :math:`c`, not negative.

    Returns:
        ``[B]``, in the dtype that advantages have.

    Raises:
        ValueError: for a negative price, or a number of lengths that is not ``B``.
    """
    if per_token < 0:
        raise ValueError(f"per_token is a price and must not be negative, got {per_token}.")
    groups = _groups(rewards, uids, lengths)
    return as_rewards((-per_token * lengths.double()).masked_fill(~groups.valid, 0), rewards.dtype)


def relative(
    rewards: Tensor, uids: UIDs, lengths: Tensor, *, weight: float = 1.0, correct_above: float = 0.0
) -> Tensor:
    r"""Kimi k1.5's length reward (arXiv:2501.12599, section 2.3.3): short among its group is good, if it is correct.

    With :math:`\lambda = \frac12 - \frac{l - l_{min}}{l_{max} - l_{min}}` over the group, a correct rollout gets
    :math:`w\lambda`, another :math:`w\min(0, \lambda)`: a wrong answer earns nothing by being short. 0 for a group
    whose lengths are all equal.

    Args:
        rewards: ``[B]``.
        uids: ``B`` identities of the prompts.
        lengths: ``[B]`` response tokens.
        weight: :math:`w`, not negative.
        correct_above: a rollout is correct if its reward is above this.

    Returns:
        ``[B]``, in the dtype that advantages have.

    Raises:
        ValueError: for a negative weight, or a number of lengths that is not ``B``.
    """
    if weight < 0:
        raise ValueError(f"weight must not be negative, got {weight}.")
    groups = _groups(rewards, uids, lengths)
    values = lengths.double()
    shortest, longest = -groups.max(-values), groups.max(values)
    share = (values - shortest) / (longest - shortest).clamp(min=1)
    score = (0.5 - share).masked_fill(longest <= shortest, 0)
    score = score.where(groups.rewards > correct_above, score.clamp(max=0))
    return as_rewards((weight * score).masked_fill(~groups.valid, 0), rewards.dtype)


def _groups(rewards: Tensor, uids: UIDs, lengths: Tensor) -> Groups:
    if lengths.shape != rewards.shape:
        raise ValueError(f"lengths must have shape {tuple(rewards.shape)}, got {tuple(lengths.shape)}.")
    return Groups.of(rewards, uids)
