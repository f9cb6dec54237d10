"""The process that replicas are forked from: it imports vLLM once, so a replica starts, and starts again, in a second.

It talks with its parent in lines of JSON. On stdin come ``{"start": index, "config": {...}}`` and ``{"kill": index}``;
the first line is ``{"token": ..., "sockets": [fd, ...], "folder": ...}``, with the listening socket of each replica. On
the descriptor named on the command line go ``{"ready": true}``, ``{"started": index, "pid": ...}`` and
``{"exited": index, "pid": ..., "status": ...}``. When stdin ends, or the parent is another process than the one that
started this one, the trainer is gone: all replicas are killed, and the folder, which holds weights, is removed. The end
of stdin alone would not do: it stays open as long as any other fork of the trainer holds its other end.

Run as ``python -m lightning_rlhf.rollout.replica_host FD PARENT``.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from lightning_rlhf.rollout.replica_process import ReplicaConfig, prepare_process, serve
from lightning_rlhf.rollout.shared_memory_traces import remove, shared_by_group

POLL_SECONDS = 0.1
LOOK_SECONDS = 1.0
GRACE_SECONDS = 5.0


class ReplicaHost:
    """Forks, watches and kills replicas.

    Args:
        answers: descriptor that events are written to.
        parent: the process that this one obeys, and does not outlive.
    """

    def __init__(self, answers: int, *, parent: int) -> None:
        self._answers = answers
        self._parent = parent
        self._pids: dict[int, int] = {}
        self._token = ""
        self._sockets: list[int] = []
        self._folder = ""
        self._shared: dict[int, set[str]] = {}
        self._looked = 0.0

    def run(self) -> None:
        """Obeys until the parent is gone."""
        prepare_process()
        self._tell({"ready": True})
        pending = b""
        while os.getppid() == self._parent:
            self._note_exits()
            self._note_shared()
            if not select.select([0], [], [], POLL_SECONDS)[0]:
                continue
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self._obey(json.loads(line))
        self._end_all()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _tell(self, event: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):  # the parent is gone: stdin ends next
            os.write(self._answers, json.dumps(event).encode() + b"\n")

    def _obey(self, command: dict[str, Any]) -> None:
        if "token" in command:
            self._token, self._sockets, self._folder = command["token"], command["sockets"], command["folder"]
        elif "start" in command:
            self._start(command["start"], ReplicaConfig(**command["config"]))
        elif "kill" in command:
            self._kill(command["kill"])
        else:
            raise ValueError(f"Unknown command {command}.")

    def _start(self, index: int, config: ReplicaConfig) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be_replica(parent, index, config)
        self._pids[index] = pid
        if config.tensor_parallel_size > 1:
            self._shared[index] = set()
        self._tell({"started": index, "pid": pid})

    def _be_replica(self, parent: int, index: int, config: ReplicaConfig) -> NoReturn:
        try:
            os.setpgid(0, 0)  # a kill reaches its tensor parallel workers, too
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the host
            if os.getppid() == parent:
                os.close(0)
                os.open(os.devnull, os.O_RDONLY)
                os.close(self._answers)
                serve(config, socket.socket(fileno=os.dup(self._sockets[index])), token=self._token)
        except BaseException:  # noqa: BLE001 (the end of this process)
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)

    def _kill(self, index: int) -> None:
        if index in self._pids:
            with suppress(ProcessLookupError):
                os.killpg(self._pids[index], signal.SIGKILL)
            with suppress(ProcessLookupError):  # before its own group existed
                os.kill(self._pids[index], signal.SIGKILL)

    def _end_all(self) -> None:
        """Lets replicas end vLLM, which removes what it shares with its workers; kills those that take too long."""
        self._looked = 0.0
        self._note_shared()
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        self._wait_for_exits()
        for index in list(self._pids):
            self._kill(index)
        self._wait_for_exits()  # which removes what the killed ones could not

    def _wait_for_exits(self) -> None:
        end = time.monotonic() + GRACE_SECONDS
        while self._pids and time.monotonic() < end:
            self._note_exits()
            time.sleep(0.02)

    def _note_shared(self) -> None:
        """Remembers the memory that workers share, as long as they can be asked."""
        if self._shared and time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            for index, names in self._shared.items():
                names |= shared_by_group(self._pids[index])

    def _note_exits(self) -> None:
        for index, pid in list(self._pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._pids[index]
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # workers that it has left behind
                remove(self._shared.pop(index, set()))
                self._tell({"exited": index, "pid": pid, "status": status})


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the trainer, which ends this one
    ReplicaHost(int(sys.argv[1]), parent=int(sys.argv[2])).run()
    os._exit(0)  # taking apart all that was imported takes seconds
