"""Cutting one rank's share of a mini-batch into micro-batches, by count or by tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightning_rlhf.batching.balance import balanced_partitions, sequence_costs

IntArray = npt.NDArray[np.int64]


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    num_micro_batches: int | None = None,
    hidden_size: int = 2048,
) -> list[list[int]]:
    """Which sequences go into which micro-batch: none above the limit, compute as even as it gets.

    Ranks that step through collectives together call it twice: once for their own number of micro-batches, and, if the
    maximum over the ranks is larger, again with that number. The caller puts outputs back in its own order.

    Args:
        lengths: tokens of each sequence.
        micro_batch_size: most sequences in one micro-batch.
        max_tokens: most tokens in one micro-batch, a hard limit.
        num_micro_batches: exactly this many; those that no sequence is left for are empty lists. None: as few as
            the limit allows (by tokens: as first-fit-decreasing finds).
        hidden_size: of the model, see ``sequence_costs``.

    Returns:
        Lists of sequence indices, each rising, from the costliest micro-batch to the cheapest; every sequence is in
        exactly one. With neither limit, all are in one.

    Raises:
        ValueError: if both limits are given, one is not positive, a sequence alone exceeds ``max_tokens``, or
            ``num_micro_batches`` is too small for the limit.
    """
    _check_limits(lengths, micro_batch_size=micro_batch_size, max_tokens=max_tokens)
    sizes = np.asarray(lengths, dtype=np.int64)
    if max_tokens is not None:
        fitted = _first_fit_decreasing(sizes, max_tokens)
        needed = len(fitted)
    else:
        fitted = []
        needed = -(-len(sizes) // (micro_batch_size or max(len(sizes), 1)))
    wanted = needed if num_micro_batches is None else num_micro_batches
    if wanted < needed:
        raise ValueError(
            f"{len(sizes)} sequences of {int(sizes.sum())} tokens need {needed} micro-batches under "
            f"micro_batch_size={micro_batch_size}, max_tokens={max_tokens}, but num_micro_batches={num_micro_batches}. "
            f"Give at least the maximum over all ranks."
        )
    filled = min(wanted, len(sizes))
    costs = sequence_costs(sizes, hidden_size=hidden_size)
    if filled == 0:
        parts: list[list[int]] = []
    elif max_tokens is None:
        # equal counts: at most ceil(n / filled) <= micro_batch_size sequences each
        parts = balanced_partitions(costs, filled, equal_counts=micro_batch_size is not None)
    else:
        balanced = _balance_under_limit(sizes, costs, filled, max_tokens)
        parts = _split_to_number(fitted, costs, filled) if balanced is None else balanced
    parts.sort(key=lambda part: -float(costs[part].sum()))
    return parts + [[] for _ in range(wanted - filled)]


def _check_limits(lengths: Sequence[int], *, micro_batch_size: int | None, max_tokens: int | None) -> None:
    if micro_batch_size is not None and max_tokens is not None:
        raise ValueError(f"Give micro_batch_size={micro_batch_size} or max_tokens={max_tokens}, not both.")
    for name, limit in (("micro_batch_size", micro_batch_size), ("max_tokens", max_tokens)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name} must be at least 1, got {limit}.")
    longest = max(range(len(lengths)), key=lambda row: lengths[row], default=None)
    if max_tokens is not None and longest is not None and lengths[longest] > max_tokens:
        raise ValueError(
            f"Sequence {longest} has {lengths[longest]} tokens, more than the {max_tokens} that one micro-batch may "
            f"hold. Raise max_tokens_per_micro_batch to at least {lengths[longest]}, or allow shorter sequences."
        )


def _first_fit_decreasing(sizes: IntArray, limit: int) -> list[list[int]]:
    """Packs into few bins; at most 11/9 of the fewest possible, plus 1."""
    room = np.full(max(len(sizes), 1), limit, dtype=np.int64)  # of each bin, opened or not
    bins: list[list[int]] = []
    for row in np.argsort(-sizes, kind="stable"):
        found = int(np.argmax(room[: len(bins) + 1] >= sizes[row]))
        if found == len(bins):
            bins.append([])
        bins[found].append(int(row))
        room[found] -= sizes[row]
    return [sorted(part) for part in bins]


def _balance_under_limit(
    sizes: IntArray, costs: npt.NDArray[np.float64], num_parts: int, limit: int
) -> list[list[int]] | None:
    """Largest first, each to the cheapest part that has room; None if one finds no room."""
    room = np.full(num_parts, limit, dtype=np.int64)
    sums = np.zeros(num_parts)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for row in np.argsort(-sizes, kind="stable"):
        part = int(np.argmin(np.where(room >= sizes[row], sums, np.inf)))
        if room[part] < sizes[row]:
            return None
        parts[part].append(int(row))
        room[part] -= sizes[row]
        sums[part] += costs[row]
    return [sorted(part) for part in parts]


def _split_to_number(parts: list[list[int]], costs: npt.NDArray[np.float64], num_parts: int) -> list[list[int]]:
    """Halves the costliest part that can be halved until there are ``num_parts``."""
    parts = [list(part) for part in parts]
    while len(parts) < num_parts:
        costliest = max(range(len(parts)), key=lambda i: (len(parts[i]) > 1, float(costs[parts[i]].sum())))
        rows = parts.pop(costliest)
        parts += [[rows[i] for i in half] for half in balanced_partitions(costs[rows], 2)]
    return parts
