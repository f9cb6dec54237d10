"""Generation and scoring within a model-parallel group: each rank does a share, and all hold everything."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_rlhf.batching.exchange import all_gather_bytes, equal_on_all_ranks
from lightning_rlhf.types import PromptBatch, Rollouts

_TENSORS = {
    "tokens": torch.int64,
    "cu_seqlens": torch.int64,
    "response_mask": torch.bool,
    "rollout_log_probs": torch.float32,
    "token_versions": torch.int64,
    "rewards": torch.float32,
}
_LISTS = ("uids", "sample_indices", "finish_reasons", "responses", "reward_components")


def generate_in_shares(
    batch: PromptBatch,
    generate: Callable[[PromptBatch], Rollouts],
    score: Callable[[Rollouts], Tensor],
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    session: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Rollouts:
    """Has each rank of a model-parallel group generate and score a contiguous share of the prompts. Collective.

    Rewards are computed once for each row, on the rank that generated it: one that draws or waits on a service gives
    all ranks the same. A rank on its own generates everything and leaves scoring to ``training_step``.

    Args:
        batch: the group's prompts, the same on all its ranks.
        generate: gives the rollouts of some of the prompts. Not called for a share of none.
        score: puts ``rewards`` into rollouts.
        group: the ranks; None: this one alone.
        device: where collectives take their tensors.
        session: of the rollout engine, which every rank enters, with a share or without: ranks of this and of other
            groups may share its model.

    Returns:
        The rollouts of all prompts, in the prompts' order; from a group with rewards, and identical on all its ranks.

    Raises:
        RuntimeError: on every rank, if they did not hold the same prompts, or do not end with the same rollouts.
    """
    if group is None or dist.get_world_size(group) == 1:
        with session():
            return generate(batch)
    prompts = json.dumps([batch.uids, batch.prompts, batch.prompt_token_ids]).encode()
    if not equal_on_all_ranks(_digest(prompts), group=group, device=device):
        raise RuntimeError(
            "The ranks of a model-parallel group hold different prompts. They need the same ones: let the data's "
            "sampler count data-parallel ranks alone, as Trainer.distributed_sampler_kwargs does."
        )
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    share = _prompts_of(batch, slice(rank * len(batch) // size, (rank + 1) * len(batch) // size))
    payload = b""
    with session():
        own = generate(share) if len(share) else None
    if own is not None:
        score(own)
        payload = pack(own)
    parts = [unpack(part, batch) for part in all_gather_bytes(payload, group=group, device=device) if part]
    rollouts = Rollouts.cat(parts)
    if not equal_on_all_ranks(_digest(pack(rollouts)), group=group, device=device):
        raise RuntimeError(
            "The ranks of a model-parallel group hold different rollouts or rewards after sharing them: they would "
            "train on slices of different rows. A collective has delivered different bytes to different ranks."
        )
    return rollouts


def _prompts_of(batch: PromptBatch, part: slice) -> PromptBatch:
    return PromptBatch(
        uids=batch.uids[part],
        prompt_token_ids=batch.prompt_token_ids[part],
        prompts=batch.prompts[part],
        metadata=batch.metadata[part],
    )


def pack(rollouts: Rollouts) -> bytes:
    """Scored rollouts as bytes: a line of JSON, then the tensors' memory. Prompts and metadata stay behind.

    Raises:
        ValueError: if the rollouts have no rewards.
    """
    if rollouts.rewards is None:
        raise ValueError("Rollouts are shared with their rewards, but these have none: score them first.")
    tensors: dict[str, Tensor] = {name: getattr(rollouts, name).to(dtype) for name, dtype in _TENSORS.items()}
    header = {
        "temperature": rollouts.temperature,
        "sizes": {name: len(tensor) for name, tensor in tensors.items()},
        **{name: getattr(rollouts, name) for name in _LISTS},
    }
    memory = b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors.values())
    return json.dumps(header).encode() + b"\n" + memory


def unpack(payload: bytes, batch: PromptBatch) -> Rollouts:
    """What ``pack`` wrote, on the CPU; text and metadata of the prompts are those of this rank's own batch."""
    line, _, memory = payload.partition(b"\n")
    header = json.loads(line)
    tensors: dict[str, Any] = {}
    start = 0
    for name, dtype in _TENSORS.items():
        size = header["sizes"][name] * dtype.itemsize
        values = np.frombuffer(memory[start : start + size], dtype=str(dtype).removeprefix("torch."))
        tensors[name] = torch.from_numpy(values.copy())
        start += size
    place = {uid: index for index, uid in enumerate(batch.uids)}
    rows = [place[uid] for uid in header["uids"]]
    return Rollouts(
        **tensors,
        **{name: header[name] for name in _LISTS},
        prompts=[batch.prompts[row] for row in rows],
        metadata=[batch.metadata[row] for row in rows],
        temperature=header["temperature"],
    )


def _digest(payload: bytes) -> int:
    """A 62-bit digest."""
    return int.from_bytes(hashlib.blake2b(payload, digest_size=8).digest(), "big") >> 2
