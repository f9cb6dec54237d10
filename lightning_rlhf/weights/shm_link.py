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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.weights.frames import FrameMemory, FrameReader, FrameWriter, control_bytes
from lightning_rlhf.weights.link import NUM_SLOTS, ReceiverLink, SenderLink
from lightning_rlhf.weights.pipe import PipeMemory, PipeReader, PipeWriter, pipe_bytes, ring_bytes

PREFIX = "lightning_rlhf-"


@dataclass(frozen=True)
class _Layout:
    """Where things lie in the file: frames (or slots in their place), and the pipe, at a memory page.

    Attributes:
        bucket_bytes: of one slot.
        readers: how many there are.
    """

    bucket_bytes: int
    readers: int

    @property
    def _pipe_place(self) -> int:
        end = control_bytes(self.readers) + NUM_SLOTS * self.bucket_bytes
        return -(-end // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def num_bytes(self) -> int:
        return self._pipe_place + pipe_bytes(ring_bytes(self.bucket_bytes), readers=self.readers)

    def frames(self, mapping: mmap.mmap) -> FrameMemory:
        return FrameMemory(mapping, readers=self.readers, data_bytes=NUM_SLOTS * self.bucket_bytes)

    def pipe(self, mapping: mmap.mmap) -> PipeMemory:
        memory = torch.frombuffer(mapping, dtype=torch.uint8, offset=self._pipe_place)
        return PipeMemory(memory, ring=ring_bytes(self.bucket_bytes), readers=self.readers)


class ShmSenderLink(SenderLink):
    """Creates the file and writes to it: frames, the pipe, or slots.

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
        layout = _Layout(bucket_bytes, len(receivers))
        try:
            mapping = self._create(layout.num_bytes)
        except OSError as error:
            self.attached()
            free = os.statvfs(directory)
            raise OSError(
                error.errno,
                f"{directory} has no room for {layout.num_bytes} bytes, {NUM_SLOTS} buckets of {bucket_bytes} and more "
                f"({free.f_bavail * free.f_frsize} free): enlarge it, or choose a smaller bucket_bytes ({error}).",
            ) from error
        memory = layout.frames(mapping)
        self.frames = FrameWriter(memory)
        self.pipe = PipeWriter(layout.pipe(mapping))
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
        layout = _Layout(bucket_bytes, readers)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            mapping = mmap.mmap(descriptor, layout.num_bytes)
        finally:
            os.close(descriptor)
        memory = layout.frames(mapping)
        self.frames = FrameReader(memory, reader=reader)
        self.pipe = PipeReader(layout.pipe(mapping), reader=reader)
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
