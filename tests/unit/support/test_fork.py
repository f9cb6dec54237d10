from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.fork import DistributedError, run_distributed


def test_each_rank_computes_and_returns_its_own_value():
    scale = 10.0

    def work(offset: float) -> tuple[int, int, torch.Tensor]:
        value = torch.tensor([dist.get_rank() * scale + offset])
        dist.all_reduce(value)
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), value

    results = run_distributed(work, 3, 1.0)
    assert [result[:2] for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert all(result[2].item() == 33.0 for result in results)  # 0 + 10 + 20 + 3 x 1
    assert not dist.is_initialized()


def test_backward_works_in_the_ranks_after_one_in_the_parent():
    def gradient() -> float:
        weight = torch.ones(4, requires_grad=True)
        (weight * weight).sum().backward()
        assert weight.grad is not None
        return weight.grad.sum().item()

    assert gradient() == 8.0
    assert run_distributed(gradient, 2) == [8.0, 8.0]


def test_the_childs_traceback_is_raised_and_the_hanging_rank_killed():
    def work() -> None:
        if dist.get_rank() == 1:
            raise ValueError("rank one says no")
        dist.recv(torch.zeros(1), src=1)

    start = time.monotonic()
    with pytest.raises(DistributedError, match=r"(?s)rank 1.*in work.*ValueError: rank one says no"):
        run_distributed(work, 2, timeout=30)
    assert time.monotonic() - start < 15


def test_a_hang_ends_in_time_and_leaves_no_process(tmp_path: Path):
    def work() -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(60)

    with pytest.raises(DistributedError, match=r"ranks \[0, 1\] of 2 were not done after 1 s"):
        run_distributed(work, 2, timeout=1)
    pids = [int(file.name) for file in tmp_path.iterdir()]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_a_rank_has_started_is_killed_with_it():
    def work() -> int:
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        return pid

    (pid,) = run_distributed(work, 1)
    end = time.monotonic() + 5
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < end, "the rank's child still runs"
        time.sleep(0.01)


def test_a_killed_rank_is_named():
    def work() -> None:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(DistributedError, match=r"(?s)rank 0.*SIGKILL"):
        run_distributed(work, 2, timeout=30)


def test_the_group_can_be_left_to_the_function():
    def work() -> bool:
        before = dist.is_initialized()
        dist.init_process_group("gloo")
        dist.barrier()
        return before

    assert run_distributed(work, 2, init_process_group=False) == [False, False]
