"""Processes of a parity run: started, watched, and ended together. What they find comes back in files."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from lightning_rlhf.strategies.processes import die_with_parent

_GRACE_SECONDS = 2.0
"""The other ranks get this long to write down their own error after one has failed."""


class RankError(RuntimeError):
    """A rank failed or was not done in time; the message holds what the ranks wrote, the earliest first."""


def run_ranks(
    work: Callable[[int], None],
    *,
    world_size: int,
    device_type: str,
    folder: Path,
    timeout_seconds: float,
    num_threads: int = 1,
) -> None:
    """Calls ``work(rank)`` in each of ``world_size`` processes that share a process group.

    On the CPU they are forks of this process, which has everything imported; CUDA does not survive a fork. The group
    meets in a file, so no port can be taken by another.

    Args:
        work: what to do; with CUDA it must be picklable.
        world_size: processes.
        device_type: ``cpu`` or ``cuda``.
        folder: empty, for the meeting point and errors.
        timeout_seconds: after it all are ended.
        num_threads: of each process.

    Raises:
        RankError: if a process fails or time is up.
    """
    context = multiprocessing.get_context("fork" if device_type == "cpu" else "spawn")
    sys.stdout.flush()
    sys.stderr.flush()
    arguments = (work, world_size, device_type, folder, timeout_seconds, num_threads)
    processes: list[BaseProcess] = [
        context.Process(target=_rank, args=(rank, *arguments), daemon=True)  # type: ignore[attr-defined]
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        _watch(processes, folder, timeout_seconds)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            if process.pid is not None:
                process.join()


def _watch(processes: list[BaseProcess], folder: Path, timeout_seconds: float) -> None:
    running = dict(enumerate(processes))
    end = time.monotonic() + timeout_seconds
    failed: list[str] = []
    while running:
        ready = wait([process.sentinel for process in running.values()], timeout=max(0.0, end - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank, process in running.items() if process.sentinel in ready]:
            process = running.pop(rank)
            process.join()
            if process.exitcode != 0:
                failed.append(f"rank {rank} ended with status {process.exitcode}")
                end = min(end, time.monotonic() + _GRACE_SECONDS)
    if failed:
        reports = sorted(folder.glob("error_*.txt"), key=lambda path: path.stat().st_mtime_ns)
        raise RankError("\n".join([*(path.read_text(encoding="utf-8") for path in reports), "; ".join(failed)]))
    if running:
        raise RankError(f"ranks {sorted(running)} of {len(processes)} were not done after {timeout_seconds:g} s")


def _rank(
    rank: int,
    work: Callable[[int], None],
    world_size: int,
    device_type: str,
    folder: Path,
    timeout_seconds: float,
    num_threads: int,
) -> None:
    try:
        die_with_parent()
        os.dup2(2, 1)  # what is printed here must not get into the report on stdout
        torch.set_num_threads(num_threads)
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in names.items()})
        if device_type == "cuda":
            torch.cuda.set_device(rank)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=FileStore(str(folder / "meeting"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
        )
        work(rank)
        dist.barrier()  # nobody leaves while another still talks to it
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 (the parent raises it)
        (folder / f"error_{rank}.txt").write_text(f"rank {rank}\n{traceback.format_exc()}", encoding="utf-8")
        os._exit(1)  # a peer may be waiting in a collective: there is nothing to tidy up together
