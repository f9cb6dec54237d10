"""Cutting one rank's share of a mini-batch into micro-batches, by count or by tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_rlhf.batching.balance import balanced_partitions, sequence_costs
from lightning_rlhf.batching.shared_prompts import SharedPrefix, among, shared_cost
from lightning_rlhf.contracts.micro_batch_counts import MicroBatchCounts

IntArray = npt.NDArray[np.int64]


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    num_micro_batches: int | None = None,
    hidden_size: int = 2048,
    shared: Sequence[SharedPrefix] = (),
) -> list[list[int]]:
    """Which sequences go into which micro-batch: none above the limit, compute as even as it gets.

    Ranks that step through collectives together call it twice: once for their own number of micro-batches, and, if the
    maximum over the ranks is larger, again with that number. The caller puts outputs back in its own order.

    Sequences that share a beginning stay together as far as the limit allows: every micro-batch that has one of them
    computes the beginning once more.

    Args:
        lengths: tokens of each sequence.
        micro_batch_size: most sequences in one micro-batch.
        max_tokens: most tokens in one micro-batch, a hard limit; a shared beginning counts once in each.
        num_micro_batches: exactly this many; those that no sequence is left for are empty lists. None: as few as
            the limit allows (by tokens: as first-fit-decreasing finds).
        hidden_size: of the model, see ``sequence_costs``.
        shared: sequences that compute their common beginning once, see ``find_shared_prefixes``.

    Returns:
        Lists of sequence indices, each rising, from the costliest micro-batch to the cheapest; every sequence is in
        exactly one. With neither limit, all are in one.

    Raises:
        ValueError: if both limits are given, one is not positive, a sequence alone exceeds ``max_tokens``, or
            ``num_micro_batches`` is too small for the limit.
    """
    _check_limits(lengths, micro_batch_size=micro_batch_size, max_tokens=max_tokens)
    units = _units(lengths, shared, micro_batch_size=micro_batch_size, max_tokens=max_tokens, hidden_size=hidden_size)
    costs = np.array([unit.cost for unit in units], dtype=np.float64)
    # equal counts fill micro-batches of rows evenly; what is kept together has to find room, as tokens have
    deals = max_tokens is None and not shared
    limit = max_tokens if micro_batch_size is None else micro_batch_size
    sizes = np.array([unit.tokens if max_tokens is not None else len(unit.rows) for unit in units], dtype=np.int64)
    fitted: list[list[int]] = []
    if limit is None:
        needed = min(len(units), 1)
    elif deals:
        needed = -(-len(units) // limit)
    else:
        fitted = _first_fit_decreasing(sizes, limit)
        needed = len(fitted)
    wanted = needed if num_micro_batches is None else num_micro_batches
    if wanted < needed:
        raise ValueError(
            f"{len(lengths)} sequences of {sum(lengths)} tokens need {needed} micro-batches under "
            f"micro_batch_size={micro_batch_size}, max_tokens={max_tokens}, but num_micro_batches={num_micro_batches}. "
            f"Give at least the maximum over all ranks."
        )
    filled = min(wanted, len(units))
    if filled == 0:
        parts: list[list[int]] = []
    elif limit is None or deals:
        # equal counts: at most ceil(n / filled) <= micro_batch_size sequences each
        parts = balanced_partitions(costs, filled, equal_counts=limit is not None)
    else:
        balanced = _balance_under_limit(sizes, costs, filled, limit)
        parts = _split_to_number(fitted, costs, filled) if balanced is None else balanced
    parts.sort(key=lambda part: -float(costs[part].sum()))
    plan = [sorted(row for index in part for row in units[index].rows) for part in parts]
    return plan + [[] for _ in range(wanted - filled)]


def count_computed(
    lengths: Sequence[int], plan: Sequence[Sequence[int]], *, shared: Sequence[SharedPrefix] = (), multiple: int = 1
) -> MicroBatchCounts:
    """What the micro-batches of a plan compute, each laid out as one stream of tokens.

    Args:
        lengths: tokens of each sequence.
        plan: of ``plan_micro_batches``.
        shared: sequences that compute their common beginning once in a micro-batch.
        multiple: what each stream is padded to a multiple of; one without sequences has this many tokens.
    """
    real = [
        sum(lengths[row] for row in rows)
        - sum(prefix.length * (len(prefix.rows) - 1) for prefix in among(shared, rows))
        for rows in plan
    ]
    padded = [max(tokens + -tokens % multiple, multiple) for tokens in real]
    return MicroBatchCounts(num_micro_batches=len(plan), num_tokens=sum(padded), num_padding=sum(padded) - sum(real))


@dataclass(frozen=True)
class _Unit:
    """Rows that a plan moves together.

    Attributes:
        rows: which.
        tokens: that they compute, a shared beginning once.
        cost: see ``shared_cost``.
    """

    rows: tuple[int, ...]
    tokens: int
    cost: float


def _units(
    lengths: Sequence[int],
    shared: Sequence[SharedPrefix],
    *,
    micro_batch_size: int | None,
    max_tokens: int | None,
    hidden_size: int,
) -> list[_Unit]:
    """Rows that share a beginning in as few pieces as the limit allows, every other row by itself."""
    in_prefix = {row for prefix in shared for row in prefix.rows}
    pieces = [((row,), 0) for row in range(len(lengths)) if row not in in_prefix]
    for prefix in shared:
        rows = np.array(prefix.rows)
        own = np.array([lengths[row] for row in prefix.rows], dtype=np.int64) - prefix.length
        if max_tokens is not None:
            room = max_tokens - prefix.length
            fewest = _first_fit_decreasing(own, room)
            cut = _balance_under_limit(own, own.astype(np.float64), len(fewest), room) or fewest
        else:
            size = micro_batch_size or len(rows)
            cut = [list(range(start, min(start + size, len(rows)))) for start in range(0, len(rows), size)]
        pieces += [(tuple(rows[part].tolist()), prefix.length if len(part) > 1 else 0) for part in cut]
    pieces.sort()
    costs = sequence_costs(lengths, hidden_size=hidden_size).tolist()
    beginnings = sequence_costs([length for _, length in pieces], hidden_size=hidden_size).tolist()
    return [
        _Unit(
            rows=rows,
            tokens=length + sum(lengths[row] - length for row in rows),
            cost=shared_cost([costs[row] for row in rows], beginning),
        )
        for (rows, length), beginning in zip(pieces, beginnings, strict=True)
    ]


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
    for row in np.lexsort((-costs, -sizes)):
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
