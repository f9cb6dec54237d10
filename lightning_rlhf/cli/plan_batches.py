"""The micro-batches of a run, from its prompts' lengths and the longest response allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_rlhf.batching.balance import balanced_partitions, sequence_costs
from lightning_rlhf.batching.micro_batch import plan_micro_batches
from lightning_rlhf.batching.shared_prompts import SharedPrefix, among, num_computed_tokens, share_out_groups

_MAX_STEPS = 16
"""RL steps that are tried out; the largest counts among them are reported."""


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """What decides on mini-batches and micro-batches.

    Attributes:
        prompts_per_step: over all ranks.
        group_size: rollouts of a prompt.
        mini_batch_size: rollouts of one optimizer step over all ranks.
        data_parallel_size: ranks that hold different rows.
        micro_batch_size: sequences of a micro-batch, or None.
        max_tokens: tokens of a micro-batch, or None.
        max_new_tokens: longest response.
        hidden_size: of the model; weighs attention against the rest.
        seed: draws mini-batches.
        share_prompts: rollouts of a prompt compute its tokens once in a micro-batch.
    """

    prompts_per_step: int
    group_size: int
    mini_batch_size: int
    data_parallel_size: int
    micro_batch_size: int | None
    max_tokens: int | None
    max_new_tokens: int
    hidden_size: int = 2048
    seed: int = 0
    share_prompts: bool = False

    @property
    def share(self) -> int:
        """Rollouts of a mini-batch on one rank."""
        return self.mini_batch_size // self.data_parallel_size


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """The most that a mini-batch takes if every response is as long as it may be.

    Attributes:
        per_mini_batch: micro-batches of one mini-batch, the same on every rank.
        inference: micro-batches of one pass over all of a rank's rows of an RL step.
        tokens: of the largest micro-batch, a shared prompt once.
        sequences: of the largest micro-batch.
    """

    per_mini_batch: int
    inference: int
    tokens: int
    sequences: int


def bound_micro_batches(prompt_lengths: Sequence[int], sizes: BatchSizes) -> MicroBatches:
    """Cuts some RL steps of these prompts as the run cuts them, every response at its longest.

    Args:
        prompt_lengths: tokens of each prompt, chat template applied, in the data's order.
        sizes: of the batches.

    Raises:
        ValueError: if a prompt leaves no room for a token of its response under ``max_tokens``.
    """
    if sizes.max_tokens is not None and max(prompt_lengths) >= sizes.max_tokens:
        raise ValueError(
            f"max_tokens_per_micro_batch={sizes.max_tokens} leaves no room for a response to the longest prompt of "
            f"{max(prompt_lengths)} tokens. Use at least {max(prompt_lengths) + sizes.max_new_tokens} (with "
            f"max_new_tokens={sizes.max_new_tokens})."
        )
    most = MicroBatches(per_mini_batch=0, inference=0, tokens=0, sequences=0)
    for start in range(0, len(prompt_lengths) - sizes.prompts_per_step + 1, sizes.prompts_per_step)[:_MAX_STEPS]:
        found = _step(prompt_lengths[start : start + sizes.prompts_per_step], sizes)
        most = MicroBatches(
            per_mini_batch=max(most.per_mini_batch, found.per_mini_batch),
            inference=max(most.inference, found.inference),
            tokens=max(most.tokens, found.tokens),
            sequences=max(most.sequences, found.sequences),
        )
    return most


def _step(prompt_lengths: Sequence[int], sizes: BatchSizes) -> MicroBatches:
    longest = max(prompt_lengths) + sizes.max_new_tokens
    # a longer one would stop the run; responses that end sooner may still fit, and count as what fits
    limit = longest if sizes.max_tokens is None else sizes.max_tokens
    rows = [
        _Row(group=group, prompt=prompt, length=min(prompt + sizes.max_new_tokens, limit))
        for group, prompt in enumerate(prompt_lengths)
        for _ in range(sizes.group_size)
    ]
    order = np.arange(len(rows))
    if sizes.mini_batch_size < len(rows):
        np.random.default_rng(sizes.seed).shuffle(order)
    shares = []
    for start in range(0, len(rows), sizes.mini_batch_size):
        chosen = [rows[row] for row in sorted(order[start : start + sizes.mini_batch_size].tolist())]
        parts = _deal(chosen, sizes)
        shares.append([[chosen[place] for place in part] for part in parts])
    training = [_cut(share, sizes) for mini_batch in shares for share in mini_batch]
    inference = [_cut([row for part in rank for row in part], sizes) for rank in zip(*shares, strict=True)]
    cuts = [part for micro_batches in (*training, *inference) for part in micro_batches]
    return MicroBatches(
        per_mini_batch=max(map(len, training)),
        inference=max(map(len, inference)),
        tokens=max(tokens for _, tokens in cuts),
        sequences=max(sequences for sequences, _ in cuts),
    )


@dataclass(frozen=True, kw_only=True)
class _Row:
    group: int
    prompt: int
    length: int


def _deal(rows: Sequence[_Row], sizes: BatchSizes) -> list[list[int]]:
    """Which rows of a mini-batch go to which rank."""
    lengths = [row.length for row in rows]
    if not sizes.share_prompts:
        return balanced_partitions(sequence_costs(lengths), sizes.data_parallel_size)
    uids = [str(row.group) for row in rows]
    return share_out_groups(lengths, [row.prompt for row in rows], uids, sizes.data_parallel_size)


def _cut(rows: Sequence[_Row], sizes: BatchSizes) -> list[tuple[int, int]]:
    """Sequences, and tokens that are computed, of each micro-batch of a rank's rows."""
    lengths, shared = [row.length for row in rows], _shared(rows) if sizes.share_prompts else []
    plan = plan_micro_batches(
        lengths,
        micro_batch_size=sizes.micro_batch_size,
        max_tokens=sizes.max_tokens,
        hidden_size=sizes.hidden_size,
        shared=shared,
    )
    return [(len(part), num_computed_tokens([lengths[row] for row in part], among(shared, part))) for part in plan]


def _shared(rows: Sequence[_Row]) -> list[SharedPrefix]:
    """Each prompt with several rows here; responses that begin alike would share more."""
    places: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(row.group, []).append(place)
    return [
        SharedPrefix(rows=tuple(found), length=rows[found[0]].prompt) for found in places.values() if len(found) > 1
    ]
