"""The one global plan of an RL step: which row trains when, on which rank, divided by what.

Every rank derives the same plan from the same facts, so that nothing after it needs agreement. Rows are put into a
canonical order (by uid, then sample index) first: what the plan says does not depend on which rank sampled a row, nor
on how many ranks there are.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from lightning_rlhf.batching.balance import balanced_partitions, sequence_costs
from lightning_rlhf.batching.shared_prompts import share_out_groups


@dataclass(frozen=True, kw_only=True)
class RowFact:
    """What all ranks know of one rollout.

    Attributes:
        uid: identity of its prompt.
        sample_index: its index in the group.
        reward: None if the reward failed.
        length: prompt and response tokens.
        num_response_tokens: tokens sampled by the policy.
        num_loss_tokens: tokens that train, 0 for a row that is masked.
        truncated: whether it ended at the length limit.
        skipped: whether it has no response of the policy's own choice: never sent to the engine, dropped, or aborted.
        rank: data-parallel rank that sampled it.
        row: its index on that rank.
        baseline: reward of its prompt's greedy rollout; None if it failed or none was sampled.
        components: what each of several rewards gave, in the order of the rewards; None for one that failed. Empty for
            a single reward.
    """

    uid: str
    sample_index: int
    reward: float | None
    length: int
    num_response_tokens: int
    num_loss_tokens: int
    truncated: bool
    skipped: bool
    rank: int
    row: int
    baseline: float | None = None
    components: tuple[float | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MiniBatchPlan:
    """One optimizer step's rows.

    Attributes:
        rows_of_rank: per data-parallel rank, indices into ``StepPlan.facts``.
        num_global_tokens: tokens that train, over all ranks.
        num_global_sequences: sequences with at least one such token, over all ranks.
    """

    rows_of_rank: tuple[tuple[int, ...], ...]
    num_global_tokens: int
    num_global_sequences: int


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The rows of an RL step in canonical order, and its mini-batches.

    Attributes:
        facts: every row of every rank, by (uid, sample index).
        mini_batches: in the order in which they were drawn.
        seed: orders the mini-batches of later epochs.
    """

    facts: tuple[RowFact, ...]
    mini_batches: tuple[MiniBatchPlan, ...]
    seed: int

    def rows_of_rank(self, rank: int) -> list[int]:
        """Indices into ``facts`` of the rows that ``rank`` trains on, mini-batch after mini-batch."""
        return [row for mini_batch in self.mini_batches for row in mini_batch.rows_of_rank[rank]]

    def merged(self, mini_batch_size: int | None) -> StepPlan:
        """The same rows in larger mini-batches, each the union of consecutive ones; all rows stay where they are.

        Args:
            mini_batch_size: rollouts in one optimizer step over all ranks; None takes all rows.

        Raises:
            ValueError: if the rows do not divide into such mini-batches, or it would cut one.
        """
        rows, unit = len(self.facts), sum(map(len, self.mini_batches[0].rows_of_rank))
        size = mini_batch_size or rows
        if rows % size or size % unit:
            raise ValueError(
                f"Mini-batches of {unit} cannot be joined to mini-batches of {size} that divide {rows} rollouts."
            )
        step = size // unit
        parts = [self.mini_batches[start : start + step] for start in range(0, len(self.mini_batches), step)]
        return replace(self, mini_batches=tuple(_join(part) for part in parts))

    def epoch_order(self, epoch: int) -> list[int]:
        """The order of the mini-batches in an epoch: as drawn in the first, then shuffled by the seed."""
        order = list(range(len(self.mini_batches)))
        if epoch > 0:
            np.random.default_rng([self.seed, epoch]).shuffle(order)
        return order

    def checksum(self) -> int:
        """A 62-bit digest of everything in the plan; equal on every rank, or something is wrong."""
        digest = hashlib.blake2b(json.dumps(asdict(self)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 2


def build_step_plan(
    facts: Sequence[RowFact],
    *,
    mini_batch_size: int | None,
    data_parallel_size: int,
    seed: int,
    keep_groups: bool = False,
) -> StepPlan:
    """Orders rows, cuts mini-batches, and gives each rank its share of each, balanced by estimated FLOPs.

    Args:
        facts: rows of all ranks, in any order.
        mini_batch_size: rollouts in one optimizer step over all ranks; None takes all rows.
        data_parallel_size: ranks to share each mini-batch.
        seed: draws which rows come together when there are several mini-batches.
        keep_groups: rows of one prompt in a mini-batch go to one rank where it pays, for engines that compute a prompt
            once for all its rows; see ``share_out_groups``. Which rows meet in a mini-batch does not change.

    Raises:
        ValueError: if a row appears twice, or the rows do not divide into mini-batches.
    """
    ordered = tuple(sorted(facts, key=lambda fact: (fact.uid, fact.sample_index)))
    keys = [(fact.uid, fact.sample_index) for fact in ordered]
    if len(set(keys)) != len(keys):
        twice = next(a for a, b in itertools.pairwise(keys) if a == b)
        raise ValueError(f"Rollout {twice} (uid, sample index) came from two places; uids must differ within a step.")
    if mini_batch_size is not None and mini_batch_size < 1:
        raise ValueError(f"mini_batch_size must be at least 1, got {mini_batch_size}.")
    size = mini_batch_size or len(ordered)
    if len(ordered) % size:
        raise ValueError(
            f"{len(ordered)} rollouts do not divide into mini-batches of {size}; choose mini_batch_size from the "
            f"divisors of prompts_per_step x num_rollouts."
        )
    order = np.arange(len(ordered))
    if size < len(ordered):
        np.random.default_rng(seed).shuffle(order)
    mini_batches = tuple(
        _plan_mini_batch(ordered, sorted(order[start : start + size].tolist()), data_parallel_size, keep_groups)
        for start in range(0, len(ordered), size)
    )
    return StepPlan(facts=ordered, mini_batches=mini_batches, seed=seed)


def _join(parts: Sequence[MiniBatchPlan]) -> MiniBatchPlan:
    return MiniBatchPlan(
        rows_of_rank=tuple(
            tuple(itertools.chain(*rows)) for rows in zip(*(p.rows_of_rank for p in parts), strict=True)
        ),
        num_global_tokens=sum(part.num_global_tokens for part in parts),
        num_global_sequences=sum(part.num_global_sequences for part in parts),
    )


def _plan_mini_batch(
    facts: Sequence[RowFact], rows: list[int], data_parallel_size: int, keep_groups: bool
) -> MiniBatchPlan:
    lengths = [facts[row].length for row in rows]
    if keep_groups:
        prompts = [facts[row].length - facts[row].num_response_tokens for row in rows]
        parts = share_out_groups(lengths, prompts, [facts[row].uid for row in rows], data_parallel_size)
    else:
        parts = balanced_partitions(sequence_costs(lengths), data_parallel_size)
    return MiniBatchPlan(
        rows_of_rank=tuple(tuple(sorted(rows[index] for index in part)) for part in parts),
        num_global_tokens=sum(facts[row].num_loss_tokens for row in rows),
        num_global_sequences=sum(facts[row].num_loss_tokens > 0 for row in rows),
    )
