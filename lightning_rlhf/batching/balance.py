"""Splitting costs into parts of nearly equal sums."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def sequence_costs(lengths: Sequence[int] | npt.NDArray[np.int64], *, hidden_size: int = 2048) -> FloatArray:
    """Relative compute of one forward-backward over sequences of these lengths.

    A decoder layer with hidden size ``h`` and a four-fold MLP takes about ``24 h^2 L`` FLOPs in its matrix products
    and, causal, ``2 h L^2`` in attention; the common factor ``2 h`` is left out: ``12 h L + L^2``.

    Args:
        lengths: tokens of each sequence.
        hidden_size: of the model; it says from which length on attention counts.

    Returns:
        ``[len(lengths)]`` fp64, in no particular unit.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    return 12.0 * hidden_size * tokens + tokens**2


def balanced_partitions(
    costs: Sequence[float] | FloatArray, num_parts: int, *, equal_counts: bool = False
) -> list[list[int]]:
    """Splits items into parts whose summed costs are as even as a fast heuristic makes them. Deterministic.

    Largest first, each item to the part with the least cost (with ``equal_counts``, a round of one item to each part),
    then swaps and moves between the costliest part and any other for as long as they lower the larger of the two.

    Args:
        costs: one per item, not negative.
        num_parts: how many parts; with fewer items than parts some stay empty.
        equal_counts: sizes of parts differ by one at most.

    Returns:
        ``num_parts`` lists of item indices, each rising; every item is in exactly one.

    Raises:
        ValueError: if ``num_parts`` is not positive, or a cost is negative or not finite.
    """
    values = np.asarray(costs, dtype=np.float64)
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}.")
    if values.ndim != 1 or not np.isfinite(values).all() or (values < 0).any():
        raise ValueError("costs must be a flat list of finite numbers that are not negative.")
    order = np.argsort(-values, kind="stable")
    owner = _deal_rounds(values, order, num_parts) if equal_counts else _largest_first(values, order, num_parts)
    _refine(values, owner, num_parts, may_move=not equal_counts)
    by_owner = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=num_parts))[:-1]
    return [part.tolist() for part in np.split(by_owner, ends)]


def _largest_first(values: FloatArray, order: npt.NDArray[np.int64], num_parts: int) -> npt.NDArray[np.int64]:
    heap = [(0.0, part) for part in range(num_parts)]
    owners = []
    for cost in values[order].tolist():
        total, part = heap[0]
        heapq.heapreplace(heap, (total + cost, part))
        owners.append(part)
    owner = np.empty(len(values), dtype=np.int64)
    owner[order] = owners
    return owner


def _deal_rounds(values: FloatArray, order: npt.NDArray[np.int64], num_parts: int) -> npt.NDArray[np.int64]:
    sums = np.zeros(num_parts)
    owner = np.empty(len(values), dtype=np.int64)
    for start in range(0, len(order), num_parts):
        items = order[start : start + num_parts]  # from the costliest
        parts = np.argsort(sums, kind="stable")[: len(items)]  # from the lightest
        owner[items] = parts
        sums[parts] += values[items]
    return owner


_MAX_EXCHANGES = 256
_MAX_CANDIDATES = 2048
"""Items of one part that are looked at: the search for a pair stays small whatever the number of items."""


def _refine(values: FloatArray, owner: npt.NDArray[np.int64], num_parts: int, *, may_move: bool) -> None:
    """Exchanges single items between the costliest part and others, lightest first, in place."""
    sums = np.bincount(owner, weights=values, minlength=num_parts).astype(np.float64)
    for _ in range(_MAX_EXCHANGES):
        costly = int(sums.argmax())
        others = np.argsort(sums, kind="stable")[: min(num_parts - 1, 8)]
        if not any(_exchange(values, owner, sums, costly, int(other), may_move=may_move) for other in others):
            return


def _exchange(
    values: FloatArray, owner: npt.NDArray[np.int64], sums: FloatArray, costly: int, other: int, *, may_move: bool
) -> bool:
    """Gives an item of ``costly`` to ``other`` for one of its items or (``may_move``) for none; False if none helps."""
    gap = sums[costly] - sums[other]
    if gap <= 1e-9 * sums[costly]:
        return False
    mine = np.flatnonzero(owner == costly)[:_MAX_CANDIDATES]
    theirs = np.flatnonzero(owner == other)[:_MAX_CANDIDATES]
    theirs = theirs[np.argsort(values[theirs], kind="stable")]
    offered = values[theirs]
    if may_move:  # no item, at no cost, stands first
        theirs, offered = np.insert(theirs, 0, -1), np.insert(offered, 0, 0.0)
    if len(mine) == 0 or len(theirs) == 0:
        return False
    # the gap becomes |gap - 2 (mine - theirs)|: for each of mine, the one of theirs nearest to mine - gap / 2
    wanted = values[mine] - gap / 2
    right = np.searchsorted(offered, wanted).clip(max=len(offered) - 1)
    left = (right - 1).clip(min=0)
    nearest = np.where(np.abs(offered[left] - wanted) <= np.abs(offered[right] - wanted), left, right)
    new_gaps = np.abs(gap - 2 * (values[mine] - offered[nearest]))
    best = int(new_gaps.argmin())
    if new_gaps[best] >= gap * (1 - 1e-9):
        return False
    given, taken = mine[best], theirs[nearest[best]]
    shift = values[given] - offered[nearest[best]]
    owner[given] = other
    if taken >= 0:
        owner[taken] = costly
    sums[costly] -= shift
    sums[other] += shift
    return True
