"""The checkpoint engine of receivers on the same machine: shared memory, read in place.

Two slots lie in files of a memory file system. Sender and receivers map them, and the sender then removes the names at
once, so that nothing is left behind however a process ends. Between creation and that moment the sender holds a lock on
each file: a file without its lock belongs to a process that died just then, and the next sender removes it.

CUDA IPC (a receiver reading the sender's device memory) is not there: tensors on a GPU pass through host memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry
from lightning_rlhf.weights.link import NUM_SLOTS, ReceiverLink, SenderLink
from lightning_rlhf.weights.linked import LinkedCheckpointEngine

PREFIX = "lightning_rlhf-"


@CheckpointEngineRegistry.register("shm")
class ShmCheckpointEngine(LinkedCheckpointEngine):
    """Shared memory.

    Args:
        directory: a folder in a memory file system that sender and receivers see.
        **kwargs: those of `ConnectedCheckpointEngine`.
    """

    name = "shm"
    # Memory corrects its own bits. What can go wrong is a slot that is read too early or too late, and that is large.
    default_checksum = "sampled"

    def __init__(self, *, directory: str = "/dev/shm", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._directory = Path(directory)

    @override
    def shared_settings(self) -> dict[str, Any]:
        return {"directory": str(self._directory)}

    @override
    def open_sender_link(self, receivers: list[str]) -> SenderLink:
        return ShmSenderLink(self._directory, self.bucket_bytes)

    @override
    def open_receiver_link(self, offer: Mapping[str, Any]) -> ReceiverLink:
        paths = [self._directory / str(name) for name in offer["names"]]
        if any(path.parent != self._directory or not path.name.startswith(PREFIX) for path in paths):
            raise ValueError(f"The sender offered files outside {self._directory}: {offer['names']}.")
        return ShmReceiverLink(paths, self.bucket_bytes)


class ShmSenderLink(SenderLink):
    """Creates, fills and unlinks the slots."""

    def __init__(self, directory: Path, bucket_bytes: int) -> None:
        remove_abandoned(directory)
        self._paths = [directory / f"{PREFIX}{secrets.token_hex(8)}" for _ in range(NUM_SLOTS)]
        self._locked: list[int] = []
        try:
            self.slots = [self._create(path, bucket_bytes) for path in self._paths]
        except OSError as error:
            self.attached()
            free = os.statvfs(directory)
            raise OSError(
                error.errno,
                f"{directory} has no room for {NUM_SLOTS} slots of {bucket_bytes} bytes "
                f"({free.f_bavail * free.f_frsize} free): enlarge it, or choose a smaller bucket_bytes ({error}).",
            ) from error

    def _create(self, path: Path, num_bytes: int) -> Tensor:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._locked.append(descriptor)
        os.posix_fallocate(descriptor, 0, num_bytes)  # full memory is an error here, not a SIGBUS while copying
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)

    @override
    def offer(self, receiver_id: str) -> dict[str, Any]:
        return {"names": [path.name for path in self._paths]}

    @override
    def attached(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)
        for descriptor in self._locked:
            os.close(descriptor)
        self._locked = []

    @override
    def close(self) -> None:
        self.attached()
        self.slots = []


class ShmReceiverLink(ReceiverLink):
    """Maps the slots."""

    copies = False

    def __init__(self, paths: list[Path], bucket_bytes: int) -> None:
        self._slots = []
        for path in paths:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                self._slots.append(torch.frombuffer(mmap.mmap(descriptor, bucket_bytes), dtype=torch.uint8))
            finally:
                os.close(descriptor)

    @override
    def get(self, slot: int, num_bytes: int, *, timeout: float) -> Tensor:
        return self._slots[slot][:num_bytes]

    @override
    def close(self) -> None:
        self._slots = []


def remove_abandoned(directory: Path) -> list[str]:
    """Removes slots of senders that died between creating and unlinking them; returns the names."""
    removed = []
    for path in directory.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or gone meanwhile
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path.name)
            finally:
                os.close(descriptor)
    return removed
