"""Replicas hold the same weights, so their answers to one question are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

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
        worst = max(abs(a - b) for x, y in zip(first, other, strict=True) for a, b in zip(x, y, strict=True))
        if not worst <= AGREEMENT_NATS:
            raise RuntimeError(
                f"Two replicas differ by {worst:.3g} nats on the same sequence: one of them holds other weights. "
                f"{describe()}."
            )
    return first


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
