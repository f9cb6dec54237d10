"""Facts and rows between ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.fork import run_distributed

from lightning_rlhf.algorithms.advantages import grpo
from lightning_rlhf.batching.exchange import all_gather_bytes, assert_same_plan, exchange_rows, gather_row_facts
from lightning_rlhf.batching.plan import RowFact, build_step_plan
from lightning_rlhf.types import Experience

CPU = torch.device("cpu")


def _rows(rank: int, count: int) -> tuple[Experience, list[RowFact]]:
    """Rows whose every value tells where it comes from; lengths are uneven."""
    lengths = [2 + (3 * rank + 5 * row) % 7 for row in range(count)]
    tokens = torch.cat([torch.full((n,), 100 * rank + row) for row, n in enumerate(lengths)] or [torch.zeros(0)]).long()
    facts = [
        RowFact(
            uid=f"{'ba'[rank % 2]}{rank}",
            sample_index=row,
            reward=0.1 * rank + row / 3,
            length=n,
            num_response_tokens=n - 1,
            num_loss_tokens=n - 1,
            truncated=False,
            skipped=False,
            rank=rank,
            row=row,
        )
        for row, n in enumerate(lengths)
    ]
    mask = torch.arange(tokens.numel()) % 2 == 0
    data = Experience(
        tokens=tokens,
        cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]).long(),
        response_mask=mask,
        loss_mask=~mask,
        rollout_log_probs=tokens / 7,
        advantages=torch.zeros(tokens.numel()),
        uids=[fact.uid for fact in facts],
        sample_indices=[fact.sample_index for fact in facts],
    )
    return data, facts


def _exchange(
    counts: list[int], mini_batch_size: int | None
) -> tuple[list[tuple[str, int, list[int], list[bool]]], int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    data, local = _rows(rank, counts[rank])
    facts = gather_row_facts(local, group=None, data_parallel_size=size, device=CPU)
    assert len(facts) == sum(counts)
    assert [f for f in facts if f.rank == rank] == local  # every digit of a reward survives
    plan = build_step_plan(facts, mini_batch_size=mini_batch_size, data_parallel_size=size, seed=5)
    assert_same_plan(plan, group=None, data_parallel_size=size, device=CPU)
    moved = exchange_rows(data, plan, rank=rank, group=None, data_parallel_size=size)
    rows = []
    for index, planned in enumerate(plan.rows_of_rank(rank)):
        one, fact = moved.select([index]), plan.facts[planned]
        assert one.tokens.tolist() == [100 * fact.rank + fact.row] * fact.length
        assert torch.equal(one.rollout_log_probs, one.tokens / 7)
        rows.append((one.uids[0], one.sample_indices[0], one.tokens.tolist(), one.response_mask.tolist()))
    return rows, plan.checksum()


def test_every_row_arrives_whole_where_the_plan_wants_it() -> None:
    for counts, mini_batch_size in (([6, 2], None), ([3, 5], 4), ([0, 4], 2), ([3, 1, 5], 3)):
        results = run_distributed(_exchange, len(counts), counts, mini_batch_size)
        assert len({checksum for _, checksum in results}) == 1
        arrived = sorted((uid, sample, tokens, mask) for rows, _ in results for uid, sample, tokens, mask in rows)
        sent = []
        for rank, count in enumerate(counts):
            data, _ = _rows(rank, count)
            for row in range(count):
                one = data.select([row])
                sent.append((one.uids[0], row, one.tokens.tolist(), one.response_mask.tolist()))
        assert arrived == sorted(sent)


def _different_seeds() -> str:
    rank = dist.get_rank()
    facts = [fact for r in range(2) for fact in _rows(r, 4)[1]]
    plan = build_step_plan(facts, mini_batch_size=2, data_parallel_size=2, seed=rank)
    try:
        assert_same_plan(plan, group=None, data_parallel_size=2, device=CPU)
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_with_different_plans_all_hear_of_it() -> None:
    assert all("another plan" in message for message in run_distributed(_different_seeds, 2))


def _payloads() -> list[bytes]:
    return all_gather_bytes(b"x" * (3 * dist.get_rank()), group=None, device=CPU)


def test_payloads_of_different_sizes_arrive_in_rank_order() -> None:
    for gathered in run_distributed(_payloads, 3):
        assert gathered == [b"", b"xxx", b"xxxxxx"]


def _grouped(uids: list[str], rewards: list[float]) -> list[float]:
    """This rank's advantages, by uid, of rows that were dealt out in turn."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = range(rank, len(uids), size)
    local = [
        RowFact(
            uid=uids[row], sample_index=row, reward=rewards[row], length=3, num_response_tokens=1, num_loss_tokens=1,
            truncated=False, skipped=False, rank=rank, row=place,
        )
        for place, row in enumerate(mine)
    ]  # fmt: skip
    facts = gather_row_facts(local, group=None, data_parallel_size=size, device=CPU)
    found = grpo(
        torch.tensor([fact.reward for fact in facts], dtype=torch.float64),
        [fact.uid for fact in facts],
        normalize_std=False,
    )
    by_row = {fact.sample_index: value for fact, value in zip(facts, found.tolist(), strict=True)}
    return [by_row[row] for row in range(len(uids))]


def test_b05_groups_are_joined_by_uid_over_ranks() -> None:
    """Six rows of two prompts in turn: each of two or three ranks holds another mixture of them."""
    uids, rewards = ["A", "B"] * 3, [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    expected = [2 / 3, 0.0, -1 / 3, 0.0, -1 / 3, 0.0]
    for ranks in (2, 3):
        for found in run_distributed(_grouped, ranks, uids, rewards):
            assert found == pytest.approx(expected, abs=1e-9)
