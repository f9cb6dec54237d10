"""Replicas hold the same weights, so their answers to one question are the same; and they must suit the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_rlhf.rollout.replica_seen import Replica

AGREEMENT_NATS = 1e-2
"""By so much log-probs may differ, for rounding."""


def same_scores(answers: Sequence[list[list[float]]], *, describe: Callable[[], str]) -> list[list[float]]:
    """The first answer, if the others are near.

    Args:
        answers: of each replica, the log-probs of each sequence in nats; at least one.
        describe: the replicas' states, for the message.

    Raises:
        RuntimeError: if two differ.
    """
    first, *others = answers
    for other in others:
        pairs = [(a, b) for x, y in zip(first, other, strict=True) for a, b in zip(x, y, strict=True)]
        worst = max(_difference(a, b) for a, b in pairs)
        if worst > AGREEMENT_NATS:
            raise RuntimeError(
                f"Two replicas differ by {worst:.3g} nats on the same sequence: one of them holds other weights. "
                f"{describe()}."
            )
    return first


def _difference(a: float, b: float) -> float:
    """In nats. A NaN, which max() would lose among numbers, is as far off as can be; if both have it, they agree."""
    if a == b or (math.isnan(a) and math.isnan(b)):  # equal infinities differ by NaN
        return 0.0
    return math.inf if math.isnan(a) or math.isnan(b) else abs(a - b)


def same_tensors(answers: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The first answer, if the others are equal; nothing if there is none.

    Raises:
        RuntimeError: naming a tensor in which two differ.
    """
    if not answers:
        return {}
    first, *others = answers
    for other in others:
        for name, tensor in first.items():
            if name not in other or not tensor.equal(other[name]):
                raise RuntimeError(f"Two replicas hold different values of {name} after a push.")
    return dict(first)


def check_room(replicas: Sequence[Replica], *, max_model_len: int) -> None:
    """Makes sure that replicas take what they will be sent; those given by URL are started by somebody else.

    Raises:
        ValueError: naming one that takes less.
    """
    for replica in replicas:
        if replica.max_model_len is not None and replica.max_model_len < max_model_len:
            raise ValueError(
                f"Replica {replica.index} at {replica.client.url} takes {replica.max_model_len} tokens, but "
                f"max_model_len={max_model_len}: it would cut responses short. Start it with --max-model-len "
                f"{max_model_len}, or lower max_model_len=."
            )


def coarsest_dtype(replicas: Sequence[Replica]) -> torch.dtype:
    """bfloat16 if some replica computes in it, else float32."""
    return torch.bfloat16 if any(replica.dtype == "bfloat16" for replica in replicas) else torch.float32
