"""DAPO's dynamic sampling: groups without signal make room for those of further prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from lightning_rlhf.batching.exchange import all_gather_bytes
from lightning_rlhf.types import UNTRAINED_FINISHES, PromptBatch, Rollouts


@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """How an RL step is filled with groups whose rewards differ (arXiv:2503.14476, section 3.2).

    A group whose rewards are all equal, over the rows that train, has no advantage in any of them: a row without a
    reward or a response token does not train, nor, with ``mask_truncated``, one that hit the length limit. Such groups
    are left out, and as many further prompts are sampled in their place, round after round, until each of the step's
    groups has a signal. The prompts left out are consumed like those that train. What counts is the reward alone,
    before length penalties and before a KL in the reward.

    Args:
        max_rounds: rounds of refilling in one RL step, after the first sampling. Each samples as many prompts as lack.
        at_limit: what happens if the step lacks groups after the last round, or when every prompt has been tried:
            ``"train"`` fills it up with groups without signal, the first drawn first, as a step without dynamic
            sampling would have them; ``"error"`` ends the run.

    Raises:
        ValueError: for less than one round, or another word.
    """

    max_rounds: int = 10
    at_limit: Literal["train", "error"] = "train"

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        if self.max_rounds < 1:
            raise ValueError(
                f"DynamicSampling(max_rounds={self.max_rounds}) must be at least 1; leave dynamic_sampling out to take "
                "every group as it comes."
            )
        if self.at_limit not in ("train", "error"):
            raise ValueError(f"DynamicSampling(at_limit={self.at_limit!r}): expected 'train' or 'error'.")


@dataclass(frozen=True, kw_only=True)
class FilledStep:
    """One rank's rows of a step that dynamic sampling has filled.

    Attributes:
        prompts: of the groups that train, on this rank.
        rollouts: theirs.
        metrics: over all ranks: ``rollout/refill_rounds``, ``rollout/drawn_prompts``, ``rollout/kept_groups`` with a
            signal, ``rollout/dropped_groups`` without, those that fill the step at the limit among them.
    """

    prompts: PromptBatch
    rollouts: Rollouts
    metrics: dict[str, float]


def replace_prompts(batch: PromptBatch, others: PromptBatch) -> None:
    """Makes the prompts of a batch those that its groups are of; its rollouts stay."""
    batch.uids, batch.prompt_token_ids = others.uids, others.prompt_token_ids
    batch.prompts, batch.metadata = others.prompts, others.metadata


def fill_step(
    first: PromptBatch,
    *,
    settings: DynamicSampling,
    mask_truncated: bool,
    sample: Callable[[PromptBatch], Rollouts],
    draw: Callable[[int], PromptBatch],
    group: dist.ProcessGroup | None,
    num_replicas: int,
    device: torch.device,
    stand_by: Callable[[], None] = lambda: None,
) -> FilledStep:
    """Samples, leaves out groups without signal, and refills until the step is full or the limit is reached.

    Every decision follows from what all ranks know, so that they agree on it, and it does not depend on their number.
    Collective over the data-parallel group: one gather after each round.

    Args:
        first: this rank's prompts of the step.
        settings: the limits.
        mask_truncated: whether the module leaves truncated responses out of the loss, and so of a group's signal.
        sample: gives scored rollouts of prompts of this rank.
        draw: gives this rank's share of so many further prompts over all ranks; fewer if there are no others.
        group: the data-parallel group.
        num_replicas: its size.
        device: where collectives take their tensors.
        stand_by: called in a round in which this rank has no prompts; others may sample with its help.

    Raises:
        RuntimeError: at the limit with ``at_limit="error"``, on every rank.
    """
    parts: list[tuple[PromptBatch, Rollouts]] = []
    kept: list[str] = []
    dropped: list[str] = []
    size = refills = 0
    for number in range(settings.max_rounds + 1):
        prompts = draw(size - len(kept)) if number else first
        own: list[tuple[str, bool]] = []
        if len(prompts):
            rollouts = sample(prompts)
            parts.append((prompts, rollouts))
            own = list(zip(prompts.uids, _signals(prompts, rollouts, mask_truncated), strict=True))
        else:
            stand_by()
        found = _over_ranks(own, group=group, num_replicas=num_replicas, device=device)
        kept += [uid for uid, signal in found if signal]
        dropped += [uid for uid, signal in found if not signal]
        if number == 0:
            size = len(found)
        elif not found:  # every prompt has been tried
            break
        refills = number
        if len(kept) == size:
            break
    lacking = size - len(kept)
    if lacking and settings.at_limit == "error":
        raise RuntimeError(
            f"Dynamic sampling found {len(kept)} of {size} groups with different rewards among {len(kept + dropped)} "
            f"prompts in {refills} rounds of refilling. Raise max_rounds, take easier or harder prompts or more "
            "rollouts a prompt, or train on what there is: DynamicSampling(at_limit='train')."
        )
    training = {*kept, *dropped[:lacking]}
    metrics = {
        "rollout/refill_rounds": float(refills),
        "rollout/drawn_prompts": float(len(kept) + len(dropped)),
        "rollout/kept_groups": float(len(kept)),
        "rollout/dropped_groups": float(len(dropped)),
    }
    return FilledStep(
        prompts=_joined([_of_uids(prompts, training) for prompts, _ in parts]),
        rollouts=Rollouts.cat(
            [rows.select([i for i, uid in enumerate(rows.uids) if uid in training]) for _, rows in parts]
        ),
        metrics=metrics,
    )


def _signals(prompts: PromptBatch, rollouts: Rollouts, mask_truncated: bool) -> list[bool]:
    """Per prompt, whether two of its rollouts that train have different rewards."""
    if rollouts.rewards is None:
        raise ValueError("Dynamic sampling reads rewards, but the rollouts have none: score them first.")
    rewards: dict[str, set[float]] = {uid: set() for uid in prompts.uids}
    untrained = (*UNTRAINED_FINISHES, *(("length",) if mask_truncated else ()))
    lengths = rollouts.response_lengths.tolist()
    rows = zip(rollouts.uids, rollouts.rewards.tolist(), rollouts.finish_reasons, lengths, strict=True)
    for uid, reward, reason, length in rows:
        if length and math.isfinite(reward) and reason not in untrained:
            rewards[uid].add(reward)
    return [len(rewards[uid]) > 1 for uid in prompts.uids]


def _over_ranks(
    own: list[tuple[str, bool]], *, group: dist.ProcessGroup | None, num_replicas: int, device: torch.device
) -> list[tuple[str, bool]]:
    """Every rank's pairs in rank order, which is the order in which the prompts were drawn. Collective."""
    if num_replicas == 1:
        return own
    parts = all_gather_bytes(json.dumps(own).encode(), group=group, device=device)
    return [(str(uid), bool(signal)) for part in parts for uid, signal in json.loads(part)]


def _of_uids(prompts: PromptBatch, uids: set[str]) -> PromptBatch:
    rows = [row for row, uid in enumerate(prompts.uids) if uid in uids]
    return PromptBatch(
        uids=[prompts.uids[row] for row in rows],
        prompt_token_ids=[prompts.prompt_token_ids[row] for row in rows],
        prompts=[prompts.prompts[row] for row in rows],
        metadata=[prompts.metadata[row] for row in rows],
    )


def _joined(batches: list[PromptBatch]) -> PromptBatch:
    return PromptBatch(
        uids=[uid for batch in batches for uid in batch.uids],
        prompt_token_ids=[ids for batch in batches for ids in batch.prompt_token_ids],
        prompts=[text for batch in batches for text in batch.prompts],
        metadata=[facts for batch in batches for facts in batch.metadata],
    )
