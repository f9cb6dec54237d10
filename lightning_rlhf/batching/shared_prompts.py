"""Which rows of a batch begin with the same tokens, and what they cost when those are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_rlhf.batching.balance import balanced_partitions, sequence_costs

LEAST_SAVING = 0.05
"""Rows share a beginning if that saves this part of their tokens at least: attention in two parts has a cost too."""


@dataclass(frozen=True, kw_only=True)
class SharedPrefix:
    """Rows that begin with the same tokens.

    Attributes:
        rows: at least two, rising; no row is in two of these.
        length: number of tokens at their beginning, equal in all of them.
    """

    rows: tuple[int, ...]
    length: int


def find_shared_prefixes(
    tokens: npt.NDArray[np.int64], cu_seqlens: npt.NDArray[np.int64], uids: Sequence[str]
) -> list[SharedPrefix]:
    """Looks for rows with a common beginning among those of one uid.

    The uid says only where to look: what is shared is what the tokens have in common, be it the prompt, less (a prompt
    that was cut, a conversation that branches early) or more (responses that begin alike, or are the same). Of a uid's
    rows the first that is left is compared with the others, and as many of them join as save the most tokens.

    Args:
        tokens: ``[num_tokens]``, rows back to back.
        cu_seqlens: ``[B+1]``, where each row begins.
        uids: ``[B]``.

    Returns:
        By the first of their rows.
    """
    by_uid: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        by_uid.setdefault(uid, []).append(row)
    found = []
    for rows in by_uid.values():
        left = rows
        while len(left) > 1:
            sequences = [tokens[cu_seqlens[row] : cu_seqlens[row + 1]] for row in left]
            shared = _most_saving(left, sequences)
            if shared is None:
                left = left[1:]
                continue
            found.append(shared)
            left = [row for row in left if row not in shared.rows]
    return sorted(found, key=lambda shared: shared.rows)


def _most_saving(rows: Sequence[int], sequences: Sequence[npt.NDArray[np.int64]]) -> SharedPrefix | None:
    """The first row with those others that save the most tokens; None if too few would be saved."""
    common = np.array([_common_length(sequences[0], other) for other in sequences[1:]])
    order = np.argsort(-common, kind="stable")
    saved = common[order] * np.arange(1, len(common) + 1)
    best = int(saved.argmax())
    joined = [0, *(order[: best + 1] + 1).tolist()]
    if saved[best] < max(LEAST_SAVING * sum(len(sequences[index]) for index in joined), 1):
        return None
    return SharedPrefix(rows=tuple(sorted(rows[index] for index in joined)), length=int(common[order[best]]))


def _common_length(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> int:
    length = min(len(one), len(other))
    differing = one[:length] != other[:length]
    return int(differing.argmax()) if differing.any() else length


def among(shared: Sequence[SharedPrefix], rows: Sequence[int]) -> list[SharedPrefix]:
    """What is still shared in a micro-batch of these rows, by their places in it."""
    places = {row: place for place, row in enumerate(rows)}
    here = [(prefix, tuple(sorted(places[row] for row in prefix.rows if row in places))) for prefix in shared]
    return [SharedPrefix(rows=found, length=prefix.length) for prefix, found in here if len(found) > 1]


def num_computed_tokens(lengths: Sequence[int], shared: Sequence[SharedPrefix]) -> int:
    """Tokens of one micro-batch of all these rows, each shared beginning counted once."""
    return sum(lengths) - sum((len(prefix.rows) - 1) * prefix.length for prefix in shared)


def shared_cost(costs: Sequence[float], beginning: float) -> float:
    """Relative compute of rows that share a beginning.

    Attention's part is right as well: of a row of ``P`` shared and ``R`` own tokens, ``(P + R)^2 - P^2`` is its own.

    Args:
        costs: of each row as a whole, see ``sequence_costs``.
        beginning: that of a sequence as long as the beginning, computed once; 0 if nothing is shared.
    """
    return beginning + sum(cost - beginning for cost in costs)


def check_shared_prompts(*, share_prompts: bool, sp_size: int) -> None:
    """Refuses shared prompts in a token stream that several ranks hold in slices.

    Raises:
        ValueError: with the remedy.
    """
    if share_prompts and sp_size > 1:
        raise ValueError(
            f"share_prompts=True does not work with sequence parallelism (sp_size={sp_size}): the ranks hold slices of "
            f"one stream in which every response needs its own prompt. Use fsdp2_rl, sp_size=1 or share_prompts=False."
        )


def share_out_groups(
    lengths: Sequence[int], prompt_lengths: Sequence[int], uids: Sequence[str], num_parts: int
) -> list[list[int]]:
    """Splits rows into parts of even compute, where every part that has rows of a group computes its prompt once.

    Groups stay whole if that makes the costliest part cheapest; else all are cut into halves, quarters and so on, as
    far as it pays: with fewer groups than parts some would stay idle. Deterministic.

    Args:
        lengths: tokens of each row.
        prompt_lengths: of these, the tokens of its prompt.
        uids: each row's group.
        num_parts: how many parts.

    Returns:
        ``num_parts`` lists of row indices, each rising; every row is in exactly one.
    """
    costs, beginnings = sequence_costs(lengths).tolist(), sequence_costs(prompt_lengths).tolist()
    groups: dict[str, list[int]] = {}
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        groups.setdefault(uids[row], []).append(row)
    most, pieces = max((len(rows) for rows in groups.values()), default=1), 1
    best: tuple[float, list[list[int]]] | None = None
    while best is None or pieces < 2 * most:
        units = [rows[start::pieces] for rows in groups.values() for start in range(min(pieces, len(rows)))]
        unit_costs = [
            shared_cost([costs[row] for row in rows], min(beginnings[row] for row in rows) if len(rows) > 1 else 0.0)
            for rows in units
        ]
        parts = balanced_partitions(unit_costs, num_parts)
        worst = max(sum(unit_costs[unit] for unit in part) for part in parts)
        if best is None or worst < 0.99 * best[0]:
            best = worst, [sorted(row for unit in part for row in units[unit]) for part in parts]
        pieces *= 2
    return best[1]
