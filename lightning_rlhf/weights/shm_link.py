"""Shared memory between a sender and its receivers: one file of a memory file system, without a name.

Sender and receivers map the file, and the sender then removes its name at once, so that nothing is left behind however
a process ends. Between creation and that moment the sender holds a lock on the file: a file without its lock belongs to
a process that died just then, and the next sender removes it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_rlhf.weights.frames import FrameMemory, FrameReader, FrameWriter, control_bytes
from lightning_rlhf.weights.link import NUM_SLOTS, ReceiverLink, SenderLink

PREFIX = "lightning_rlhf-"


class ShmSenderLink(SenderLink):
    """Creates the file and writes to it, either frames or slots.

    Args:
        directory: of the file.
        bucket_bytes: the memory takes `NUM_SLOTS` times as much.
        receivers: who maps it.
    """

    def __init__(self, directory: Path, bucket_bytes: int, receivers: list[str]) -> None:
        remove_abandoned(directory)
        self._receivers = receivers
        self._path = directory / f"{PREFIX}{secrets.token_hex(8)}"
        self._locked: int | None = None
        num_bytes = control_bytes(len(receivers)) + NUM_SLOTS * bucket_bytes
        try:
            mapping = self._create(num_bytes)
        except OSError as error:
            self.attached()
            free = os.statvfs(directory)
            raise OSError(
                error.errno,
                f"{directory} has no room for {num_bytes} bytes, {NUM_SLOTS} buckets of {bucket_bytes} "
                f"({free.f_bavail * free.f_frsize} free): enlarge it, or choose a smaller bucket_bytes ({error}).",
            ) from error
        memory = FrameMemory(mapping, readers=len(receivers))
        self.frames = FrameWriter(memory)
        self.slots = memory.data.split(bucket_bytes)

    def _create(self, num_bytes: int) -> mmap.mmap:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._locked = descriptor
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(descriptor, 0, num_bytes)  # full memory is an error here, not a SIGBUS while copying
        return mmap.mmap(descriptor, num_bytes)

    @override
    def offer(self, receiver_id: str) -> dict[str, Any]:
        return {
            "name": self._path.name,
            "reader": self._receivers.index(receiver_id),
            "readers": len(self._receivers),
        }

    @override
    def attached(self) -> None:
        self._path.unlink(missing_ok=True)
        if self._locked is not None:
            os.close(self._locked)
        self._locked = None

    @override
    def close(self) -> None:
        self.attached()
        self.slots = []


class ShmReceiverLink(ReceiverLink):
    """Maps the file.

    Args:
        path: of the file, while it still has a name.
        bucket_bytes: of one slot.
        reader: number of this receiver.
        readers: how many there are.
    """

    copies = False

    def __init__(self, path: Path, bucket_bytes: int, *, reader: int, readers: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            mapping = mmap.mmap(descriptor, control_bytes(readers) + NUM_SLOTS * bucket_bytes)
        finally:
            os.close(descriptor)
        memory = FrameMemory(mapping, readers=readers)
        self.frames = FrameReader(memory, reader=reader)
        self._slots: list[Tensor] = list(memory.data.split(bucket_bytes))

    @override
    def get(self, slot: int, num_bytes: int, *, timeout: float) -> Tensor:
        return self._slots[slot][:num_bytes]

    @override
    def close(self) -> None:
        self._slots = []


def remove_abandoned(directory: Path) -> list[str]:
    """Removes files of senders that died between creating and unlinking them; returns the names."""
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
