"""The micro-batches of a run, from its prompts' lengths and the longest response allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_rlhf.batching.balance import balanced_partitions, sequence_costs
from lightning_rlhf.batching.micro_batch import plan_micro_batches

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
        tokens: of the largest micro-batch.
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
    lengths = [min(prompt + sizes.max_new_tokens, limit) for prompt in prompt_lengths for _ in range(sizes.group_size)]
    order = np.arange(len(lengths))
    if sizes.mini_batch_size < len(lengths):
        np.random.default_rng(sizes.seed).shuffle(order)
    shares = []
    for start in range(0, len(lengths), sizes.mini_batch_size):
        chosen = [lengths[row] for row in sorted(order[start : start + sizes.mini_batch_size].tolist())]
        parts = balanced_partitions(sequence_costs(chosen), sizes.data_parallel_size)
        shares.append([[chosen[place] for place in part] for part in parts])

    def cut(share: list[int]) -> list[list[int]]:
        found = plan_micro_batches(
            share,
            micro_batch_size=sizes.micro_batch_size,
            max_tokens=sizes.max_tokens,
            hidden_size=sizes.hidden_size,
        )
        return [[share[place] for place in part] for part in found]

    training = [cut(share) for mini_batch in shares for share in mini_batch]
    inference = [cut([length for part in rank for length in part]) for rank in zip(*shares, strict=True)]
    cuts = [part for micro_batches in (*training, *inference) for part in micro_batches]
    return MicroBatches(
        per_mini_batch=max(map(len, training)),
        inference=max(map(len, inference)),
        tokens=max(map(sum, cuts)),
        sequences=max(map(len, cuts)),
    )
