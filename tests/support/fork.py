"""Run a function on several gloo ranks, each a fork of the test's process.

A fork has every import done already, so a rank starts in milliseconds. What a rank prints goes where the test's own
output goes. The ranks are killed when one fails, when time is up, and when the test's process dies.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_GRACE = 2.0
"""Seconds that the other ranks get to report their own error after one has failed."""


class DistributedError(RuntimeError):
    """Some rank failed, died or hung; the message holds the tracebacks, the earliest first."""


@dataclass(frozen=True)
class _Meeting:
    """Where the ranks of one call meet; without a listener, ``fn`` makes the process group itself."""

    world_size: int
    port: int
    listener: socket.socket | None
    timeout: float


@dataclass(frozen=True)
class _Rank:
    rank: int
    pid: int
    pipe: Connection


def run_distributed(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    init_process_group: bool = True,
    **kwargs: Any,
) -> list[T]:
    """Call ``fn(*args, **kwargs)`` in ``world_size`` forked processes and collect what each returns.

    In each, ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are
    set, and the default gloo group exists.

    Args:
        fn: the function; closures and lambdas will do. What it returns is pickled by value.
        world_size: the number of ranks.
        *args: passed to ``fn``.
        timeout: seconds after which all ranks are killed and the call fails.
        init_process_group: False leaves the group to ``fn`` (a Lightning strategy, say).
        **kwargs: passed to ``fn``.

    Returns:
        The returned values, by rank.

    Raises:
        DistributedError: if a rank raises, dies, or is not done in time.
    """
    if dist.is_initialized():
        raise RuntimeError("The parent of the ranks must have no process group of its own: it would be forked too.")
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(world_size + 8)
    meeting = _Meeting(world_size, listener.getsockname()[1], listener if init_process_group else None, timeout)
    if not init_process_group:
        listener.close()
    ranks: list[_Rank] = []
    try:
        for rank in range(world_size):
            ranks.append(_fork(rank, meeting, lambda: fn(*args, **kwargs)))
        listener.close()
        return _collect(ranks, timeout)
    finally:
        listener.close()
        for one in ranks:
            _kill(one)


def in_own_process(body: Callable[[], Any], *, timeout: float = 60.0) -> None:
    """The test itself in a process: what a transport starts in it ends with it."""
    run_distributed(body, 1, init_process_group=False, timeout=timeout)


def _fork(rank: int, meeting: _Meeting, call: Callable[[], Any]) -> _Rank:
    ours, theirs = Pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _child(parent, rank, meeting, theirs, call)
    theirs.close()
    return _Rank(rank, pid, ours)


def _child(parent: int, rank: int, meeting: _Meeting, pipe: Connection, call: Callable[[], Any]) -> NoReturn:
    """Be one rank. Never returns: what the parent has open and registered is not the child's to clean up."""
    status = 1
    gc.freeze()  # nor to collect: a destructor may wait for a thread that only the parent has
    try:
        os.setpgid(0, 0)  # so that the parent can kill what this rank has started as well
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent
        if os.getppid() != parent:
            os._exit(1)
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
        try:
            _set_up(rank, meeting)
            message = (True, pickle.dumps(call()))
            status = 0
        except BaseException:  # noqa: BLE001 (the parent raises it)
            message = (False, traceback.format_exc())
        pipe.send(message)
        sys.stdout.flush()
        sys.stderr.flush()
        with suppress(EOFError):
            pipe.recv()  # rank 0 holds the store, which others may still need: all leave together
    finally:
        os._exit(status)


def _set_up(rank: int, meeting: _Meeting) -> None:
    world_size = meeting.world_size
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(meeting.port),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    if meeting.listener is None:
        return
    # Rank 0 serves on the socket that the parent has bound, so nobody can take the port in between.
    fd = meeting.listener.detach()
    if rank != 0:
        os.close(fd)
    limit = timedelta(seconds=meeting.timeout)
    store = dist.TCPStore(
        "127.0.0.1",
        meeting.port,
        world_size,
        is_master=rank == 0,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=fd if rank == 0 else None,
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)


def _collect(ranks: list[_Rank], timeout: float) -> list[Any]:
    """Read one message from each rank, then let all of them go."""
    results: dict[int, Any] = {}
    failures: list[str] = []
    waiting = {one.pipe: one for one in ranks}
    end = time.monotonic() + timeout
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            one = waiting.pop(pipe)
            try:
                good, payload = pipe.recv()
            except EOFError:
                good, payload = False, f"left without a word: {_describe_exit(one.pid)}"
            if good:
                results[one.rank] = pickle.loads(payload)
            else:
                failures.append(f"--- rank {one.rank}\n{payload}")
                end = min(end, time.monotonic() + _GRACE)
    if failures:
        silent = sorted(one.rank for one in waiting.values())
        note = f"\n(killed without an answer: ranks {silent})" if silent else ""
        raise DistributedError(f"{len(failures)} of {len(ranks)} ranks failed\n" + "\n".join(failures) + note)
    if waiting:
        silent = sorted(one.rank for one in waiting.values())
        for one in waiting.values():
            os.kill(one.pid, signal.SIGUSR1)  # faulthandler prints where it hangs
        time.sleep(0.3)
        raise DistributedError(f"ranks {silent} of {len(ranks)} were not done after {timeout:g} s; stacks on stderr")
    for one in ranks:
        one.pipe.send("leave")
    for one in ranks:
        _reap(one.pid, seconds=5.0)
    return [results[one.rank] for one in ranks]


def _describe_exit(pid: int) -> str:
    status = _reap(pid, seconds=5.0)
    if status is None:
        return "its pipe is closed, but it still runs"
    if os.WIFSIGNALED(status):
        return f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit status {os.WEXITSTATUS(status)}"


_reaped: dict[int, int] = {}


def _reap(pid: int, *, seconds: float) -> int | None:
    """Wait for a child; None if it still runs after that time."""
    end = time.monotonic() + seconds
    while pid not in _reaped:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            _reaped[pid] = status
        elif time.monotonic() > end:
            return None
        else:
            time.sleep(0.005)
    return _reaped[pid]


def _kill(one: _Rank) -> None:
    """End the rank and all that it has started."""
    one.pipe.close()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(one.pid, signal.SIGKILL)
    if one.pid not in _reaped:
        with suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)
        _reap(one.pid, seconds=5.0)
    _reaped.pop(one.pid, None)
