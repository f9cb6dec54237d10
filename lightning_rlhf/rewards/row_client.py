"""The trainer's side of ``rewards.row_server``: starts the process, hands it rows, replaces it if it breaks."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import files
from multiprocessing.connection import Connection
from typing import Any

from lightning_rlhf.rewards.row_server import RowLimits
from lightning_rlhf.rewards.scores import Failure, RewardBrokenError

START_SECONDS = 180.0
GRACE_SECONDS = 20.0
"""How much longer than a row's limit the server may be silent before it is taken for broken."""


class RowClient:
    """Scores rows in a process of its own, each under limits.

    Args:
        reward: called with one row at a time, in the other process; must be importable there, so neither a lambda nor
            defined in ``__main__``.
        limits: of each row.
        name: of the reward, for messages.
    """

    def __init__(self, reward: Callable[..., Any], *, limits: RowLimits, name: str) -> None:
        self._limits = limits
        self._name = name
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._owner = 0
        self._payload = _pickled(reward, name)

    def start(self) -> None:
        """Starts the process, if it does not run, in the time that importing the reward takes; a batch does so itself.

        Raises:
            RewardBrokenError: if the reward cannot be imported there.
        """
        with self._lock:
            self._ensure()

    def score(self, rows: list[tuple[str, str, dict[str, Any]]]) -> list[float | Failure]:
        """One number or failure per row, in the rows' order; takes at most ``rows / workers`` times the limit."""
        found: list[float | Failure] = [Failure("its process ended before it was scored")] * len(rows)
        with self._lock:
            connection = self._ensure()
            try:
                connection.send((dataclasses.asdict(self._limits), rows))
                for _ in rows:
                    if not connection.poll(self._limits.seconds + GRACE_SECONDS):
                        raise EOFError  # stopped, or starved: the rows that are left have no verdict
                    answer = json.loads(connection.recv_bytes())
                    value = answer.get("value")
                    found[answer["row"]] = (
                        Failure(answer["failure"], answer["cause"]) if value is None else float(value)
                    )
            except (EOFError, OSError):
                self._close()
        return found

    def close(self) -> None:
        """Ends the process; a later batch starts another."""
        with self._lock:
            self._close()

    def _ensure(self) -> Connection:
        # a fork of the trainer must not talk over its parent's connection
        if self._connection is not None and self._owner == os.getpid() and self._process is not None:
            if self._process.poll() is None:
                return self._connection
            self._close()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # -P: the file's folder, whose math.py is not Python's, stays off the path
                [sys.executable, "-P", str(files("lightning_rlhf.rewards") / "row_server.py"), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            )
        self._connection, self._owner = Connection(ours.detach()), os.getpid()
        weakref.finalize(self, _end, self._process, self._connection, self._owner)
        self._connection.send_bytes(self._payload)
        broken = "it did not answer"
        with suppress(EOFError, OSError):
            if self._connection.poll(START_SECONDS):
                broken = json.loads(self._connection.recv_bytes()).get("broken", "")
        if broken:
            self._close()
            raise RewardBrokenError(
                f"Reward {self._name} cannot be loaded in a process of its own ({broken}). Define it in a module that "
                'can be imported, not in the script that is run, or say where="thread".'
            )
        return self._connection

    def _close(self) -> None:
        if self._process is not None and self._connection is not None:
            _end(self._process, self._connection, self._owner)
        self._process = self._connection = None


def _pickled(reward: Callable[..., Any], name: str) -> bytes:
    try:
        return pickle.dumps(reward)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(
            f"Reward {name} cannot be sent to a process of its own ({error}). Make it a function or an object of a "
            'module that can be imported, or say where="thread".'
        ) from error


def _end(process: subprocess.Popen[bytes], connection: Connection, owner: int) -> None:
    if not connection.closed:
        connection.close()
    if owner == os.getpid() and process.poll() is None:
        process.kill()  # its children die with it
        process.wait()
