"""A process that scores rows for a trainer, each in a forked child that can be killed.

``rewards.row_client`` runs this file by its path, with one end of a socket pair as argument. The trainer sends its own
objects, pickled, over that pair; nothing else can reach it. Answers come back as JSON. The file needs the standard
library alone, so that the process starts in milliseconds and holds what the reward's module imports and no more.

It has one thread, so that forking it is safe; forking the trainer, with its threads of OpenMP, vLLM and NCCL, would not
be. A child belongs to a process group of its own and ends with this process.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import selectors
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
MAX_REASON = 1000
"""Characters of a failure's reason: an answer must fit into a pipe's buffer."""


@dataclass(frozen=True, kw_only=True)
class RowLimits:
    """What one row may take.

    Attributes:
        workers: rows scored side by side.
        seconds: wall time of a row.
        cpu_seconds: processor time of a row, whole seconds; None leaves it to the wall time.
        memory_bytes: memory that a row may take beyond what its process starts with; None leaves it.
    """

    workers: int
    seconds: float
    cpu_seconds: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Child:
    row: int
    pid: int
    end: float


def serve(connection: Connection) -> None:
    """Takes the reward, then batches of rows, until the trainer closes its end."""
    try:
        reward = connection.recv()
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001 - the user's module may raise anything as it is imported
        connection.send_bytes(json.dumps({"broken": _reason(error)}).encode())
        return
    connection.send_bytes(b"{}")
    while True:
        try:
            limits, rows = connection.recv()
            _score_batch(connection, reward, RowLimits(**limits), rows)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return  # the trainer has gone; rows that still run die with this process


def _score_batch(
    connection: Connection, reward: Callable[..., Any], limits: RowLimits, rows: list[tuple[Any, ...]]
) -> None:
    """Sends one answer for each row, in the order in which they are found."""
    waiting, running = list(enumerate(rows))[::-1], dict[int, _Child]()
    with selectors.DefaultSelector() as readable:
        readable.register(connection.fileno(), selectors.EVENT_READ)
        while waiting or running:
            while waiting and len(running) < limits.workers:
                row, content = waiting.pop()
                pipe, running_child = _fork(reward, row, content, limits)
                running[pipe] = running_child
                readable.register(pipe, selectors.EVENT_READ)
            first_end = min(child.end for child in running.values())
            answered = {key.fd for key, _ in readable.select(max(0.0, first_end - time.monotonic()))}
            if connection.fileno() in answered:
                raise EOFError  # the trainer says nothing during a batch, so it has closed its end
            for pipe, child in list(running.items()):
                if pipe in answered or time.monotonic() >= child.end:
                    readable.unregister(pipe)
                    answer = _answer_of(pipe, running.pop(pipe), limits, overdue=pipe not in answered)
                    connection.send_bytes(json.dumps({"row": child.row, **answer}).encode())


def _fork(reward: Callable[..., Any], row: int, content: tuple[Any, ...], limits: RowLimits) -> tuple[int, _Child]:
    read, write = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            _end_with(parent)
            _limit(limits)
            os.write(write, json.dumps(_call(reward, content)).encode())
        finally:
            os._exit(0)
    with suppress(OSError):
        os.setpgid(pid, pid)  # whoever comes first: it must be a group before it is killed as one
    os.close(write)
    return read, _Child(row=row, pid=pid, end=time.monotonic() + limits.seconds)


def _answer_of(pipe: int, child: _Child, limits: RowLimits, *, overdue: bool) -> dict[str, Any]:
    payload = b"" if overdue else os.read(pipe, 1 << 16)
    os.close(pipe)
    if not payload and not overdue:
        # its end of the pipe is closed: it has died, or is about to; its status is wanted before the kill
        status = _wait(child.pid, seconds=1.0)
    else:
        status = None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    if status is None:
        status = os.waitpid(child.pid, 0)[1]
    if payload:
        answer: dict[str, Any] = json.loads(payload)
        return answer
    if overdue:
        return {"cause": "wall", "failure": f"over its limit of {limits.seconds:g} s"}
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) and limits.cpu_seconds:
        return {"cause": "cpu", "failure": f"over its limit of {limits.cpu_seconds} s of processor time"}
    return {"cause": "error", "failure": f"its process ended without an answer, {_describe(status)}"}


def _wait(pid: int, *, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.001)
    return None


def _describe(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit status {os.WEXITSTATUS(status)}"


def _end_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent dies; it may have died already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _limit(limits: RowLimits) -> None:
    if limits.cpu_seconds is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds + 1))
    if limits.memory_bytes is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        bound = pages * resource.getpagesize() + limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


def _call(reward: Callable[..., Any], content: tuple[Any, ...]) -> dict[str, Any]:
    prompt, response, metadata = content
    try:
        given = reward([prompt], [response], [metadata])
        if len(given) != 1:
            return _failed(f"gave {len(given)} values for 1 response")
        value = given[0]
        if value is None or isinstance(value, str):
            return _failed(f"gave {value!r:.60}, not a number")
        if type(value).__name__ == "Failure":  # of rewards.scores, which is not imported here
            return _failed(value.reason, value.cause)
        number = float(value)
    except MemoryError as error:
        return _failed(_reason(error), "memory")
    except BaseException as error:  # noqa: BLE001 - also SystemExit: this process ends after its answer anyway
        return _failed(_reason(error))
    return {"value": number} if math.isfinite(number) else _failed(f"gave {number}, not a finite number")


def _failed(reason: str, cause: str = "error") -> dict[str, Any]:
    return {"cause": cause, "failure": reason[:MAX_REASON]}


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_REASON]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle; it closes the connection
    serve(Connection(int(sys.argv[1])))
