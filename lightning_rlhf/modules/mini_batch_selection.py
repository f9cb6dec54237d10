"""Tokens that a loss treats apart, chosen over a whole mini-batch of all ranks before any engine cuts it."""

from __future__ import annotations

import json

import numpy as np
import torch
from torch import Tensor

from lightning_rlhf.algorithms.registry import TokenSelection
from lightning_rlhf.batching.exchange import all_gather_bytes
from lightning_rlhf.contracts.engine import BaseEngine
from lightning_rlhf.types import Experience


def select_tokens(
    selection: TokenSelection,
    mini_batch: Experience,
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    engine: BaseEngine,
    seed: int,
) -> Tensor:
    """The selection over all ranks' rows, in canonical order: it depends neither on ranks nor on where rows lie.

    Collective over the data-parallel group: one gather of three numbers per token that trains.

    Args:
        selection: see ``algorithms.registry.TokenSelection``.
        mini_batch: this rank's rows.
        log_probs: ``[num_tokens]`` by the policy as it is now.
        old_log_probs: ``[num_tokens]``.
        engine: gives the data-parallel group.
        seed: of what the selection draws; the same on every rank.

    Returns:
        ``[num_tokens]`` bool of this rank's rows, False off the loss mask.
    """
    mask = mini_batch.loss_mask
    counts = torch.zeros_like(mini_batch.lengths).index_add_(0, mini_batch.sequence_ids, mask.long()).tolist()
    own = torch.stack([tensor.detach().float()[mask] for tensor in (log_probs, old_log_probs, mini_batch.advantages)])
    keys = list(zip(mini_batch.uids, mini_batch.sample_indices, strict=True))
    parts = [(keys, counts, own.cpu())]
    if engine.data_parallel_size > 1:
        payload = json.dumps([keys, counts]).encode() + b"\n" + own.cpu().numpy().tobytes()
        group, device = engine.data_parallel_group, engine.device
        parts = [_read(part) for part in all_gather_bytes(payload, group=group, device=device)]
    rows = {
        tuple(key): piece
        for part_keys, part_counts, values in parts
        for key, piece in zip(part_keys, values.split(part_counts, dim=1), strict=True)
    }
    ordered = sorted(rows)
    values = torch.cat([rows[key] for key in ordered], dim=1)
    everywhere = torch.ones(values.shape[1], dtype=torch.bool)
    chosen = selection(*values, everywhere, generator=torch.Generator().manual_seed(seed))
    by_row = dict(zip(ordered, chosen.split([rows[key].shape[1] for key in ordered]), strict=True))
    mine = torch.cat([chosen[:0], *(by_row[key] for key in keys)]).to(mask.device)
    return torch.zeros_like(mask).masked_scatter(mask, mine)


def _read(payload: bytes) -> tuple[list[tuple[str, int]], list[int], Tensor]:
    header, _, memory = payload.partition(b"\n")
    keys, counts = json.loads(header)
    values = torch.from_numpy(np.frombuffer(memory, dtype=np.float32).copy()).reshape(3, sum(counts))
    return [(str(uid), int(index)) for uid, index in keys], counts, values
