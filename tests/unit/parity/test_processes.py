from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_rlhf.parity.processes import RankError, run_ranks


def _run(work: object, folder: Path, *, world_size: int = 2, timeout_seconds: float = 30.0) -> None:
    run_ranks(work, world_size=world_size, device_type="cpu", folder=folder, timeout_seconds=timeout_seconds)  # type: ignore[arg-type]


def test_ranks_share_a_group(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        total = torch.tensor(float(rank + 1))
        dist.all_reduce(total)
        (tmp_path / f"out_{rank}").write_text(f"{total} {os.environ['RANK']} {os.environ['WORLD_SIZE']}")

    _run(work, tmp_path, world_size=3)
    assert [(tmp_path / f"out_{rank}").read_text() for rank in range(3)] == [f"6.0 {rank} 3" for rank in range(3)]


def test_a_failure_ends_the_others_and_is_told(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        (tmp_path / f"pid_{rank}").write_text(str(os.getpid()))
        if rank == 1:
            raise ValueError("the weights are wrong")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1\n(.|\n)*ValueError: the weights are wrong"):
        _run(work, tmp_path)
    assert time.monotonic() - start < 20
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid_{rank}").read_text()), 0)


def test_a_run_that_is_killed_leaves_no_rank_behind(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        (tmp_path / "pid.part").write_text(str(os.getpid()))
        (tmp_path / "pid.part").rename(tmp_path / "pid")
        time.sleep(60)

    parent = os.fork()
    if parent == 0:
        try:
            _run(work, tmp_path, world_size=1)
        finally:
            os._exit(0)
    end = time.monotonic() + 30
    while not (tmp_path / "pid").exists() and time.monotonic() < end:
        time.sleep(0.01)
    rank = int((tmp_path / "pid").read_text())
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    while _is_running(rank):
        assert time.monotonic() < end
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # dead, and not yet collected by whoever inherited it


def test_a_rank_that_hangs_is_ended(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        if rank == 1:
            time.sleep(60)

    with pytest.raises(RankError, match="were not done after 2 s"):
        _run(work, tmp_path, timeout_seconds=2.0)
