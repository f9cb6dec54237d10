"""The two collectives of the global plan: everyone learns every row's facts, then rows move once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_rlhf.batching.plan import RowFact, StepPlan
from lightning_rlhf.types import Experience


def all_gather_bytes(payload: bytes, *, group: dist.ProcessGroup | None, device: torch.device) -> list[bytes]:
    """Every rank's payload, in rank order; the payloads may differ in size."""
    world_size = dist.get_world_size(group)
    size = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(size) for _ in range(world_size)]
    dist.all_gather(sizes, size, group=group)
    longest = max(int(s) for s in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    if payload:
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    gathered = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(gathered, padded, group=group)
    return [bytes(part[: int(s)].cpu().numpy()) for part, s in zip(gathered, sizes, strict=True)]


def gather_row_facts(
    local: Sequence[RowFact], *, group: dist.ProcessGroup | None, data_parallel_size: int, device: torch.device
) -> list[RowFact]:
    """The facts of all ranks' rows. Collective; numbers survive exactly (JSON keeps every digit of a float)."""
    if data_parallel_size == 1:
        return list(local)
    payload = json.dumps([dataclasses.astuple(fact) for fact in local]).encode()
    names = [spec.name for spec in dataclasses.fields(RowFact)]
    parts = all_gather_bytes(payload, group=group, device=device)
    rows = [dict(zip(names, row, strict=True)) for part in parts for row in json.loads(part)]
    return [RowFact(**{**row, "components": tuple(row["components"])}) for row in rows]


def assert_same_plan(
    plan: StepPlan, *, group: dist.ProcessGroup | None, data_parallel_size: int, device: torch.device
) -> None:
    """Compares the plan's checksum over the ranks. Collective.

    Raises:
        RuntimeError: on every rank, if two ranks derived different plans.
    """
    if data_parallel_size == 1:
        return
    mine = plan.checksum()
    if not equal_on_all_ranks(mine, group=group, device=device):
        raise RuntimeError(
            f"Data-parallel rank {dist.get_rank(group)} derived another plan (checksum {mine}) than its peers: the "
            "ranks must share seed, mini_batch_size and reward code."
        )


def equal_on_all_ranks(number: int, *, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether all ranks hold this number, which has at most 62 bits; all get the same answer. Collective."""
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    return int(extremes[0]) == -int(extremes[1])


def exchange_rows(
    data: Experience, plan: StepPlan, *, rank: int, group: dist.ProcessGroup | None, data_parallel_size: int
) -> Experience:
    """Moves every row to the rank that trains on it. Collective; no sizes travel, since the plan knows them.

    Args:
        data: this rank's rows as sampled, without any field that only some rows have.
        plan: the step's plan.
        rank: this rank in the data-parallel group.
        group: the data-parallel group.
        data_parallel_size: its size.

    Returns:
        The rows of ``plan.rows_of_rank(rank)``, in that order.
    """
    wanted = plan.rows_of_rank(rank)
    facts = plan.facts
    if all(facts[row].rank == r for r in range(data_parallel_size) for row in plan.rows_of_rank(r)):
        return data.select([facts[row].row for row in wanted])
    outgoing = [
        [row for row in plan.rows_of_rank(receiver) if facts[row].rank == rank]
        for receiver in range(data_parallel_size)
    ]
    incoming = [[row for row in wanted if facts[row].rank == sender] for sender in range(data_parallel_size)]
    send = data.select([facts[row].row for rows in outgoing for row in rows])
    arrived = [row for rows in incoming for row in rows]
    lengths = torch.tensor([facts[row].length for row in arrived], dtype=torch.int64, device=data.tokens.device)
    changes: dict[str, object] = {
        "cu_seqlens": torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        "uids": [facts[row].uid for row in arrived],
        "sample_indices": [facts[row].sample_index for row in arrived],
    }
    for spec in dataclasses.fields(send):
        value, kind = getattr(send, spec.name), spec.metadata.get("kind")
        if value is None or kind not in ("token", "sequence"):
            continue
        sizes_out, sizes_in = (
            [sum(facts[row].length if kind == "token" else 1 for row in rows) for rows in side]
            for side in (outgoing, incoming)
        )
        wire = value.to(torch.uint8) if value.dtype == torch.bool else value
        received = wire.new_empty((sum(sizes_in), *wire.shape[1:]))
        dist.all_to_all_single(received, wire.contiguous(), sizes_in, sizes_out, group=group)
        changes[spec.name] = received.to(value.dtype)
    place = {row: index for index, row in enumerate(arrived)}
    moved: Experience = dataclasses.replace(send, **changes)  # type: ignore[arg-type]
    return moved.select([place[row] for row in wanted])
