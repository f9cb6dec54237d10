"""The checkpoint engine of receivers on the same machine: shared memory.

The body of a sync (see `connected`) needs one message only: buckets are frames, and their headers lie beside them in
the memory (`frames`). Whoever waits for the other side looks at the connection meanwhile::

    S       frame    a bucket and its header                R    taken, then released
    S       frame    without either: the last one
    S -> R  end      how many buckets there were

If all receivers have tensors copied to memory of their own, and nobody copies with several threads, the first frame
says instead that all comes through the `pipe`.

With ``device="cuda:<i>"`` buckets are filled on that GPU instead, receivers map its memory (`cuda_ipc`), and each
bucket takes two messages (see `linked`). Else tensors on a GPU pass through host memory.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry
from lightning_rlhf.weights.bucket_header import BucketError, BucketHeader
from lightning_rlhf.weights.buckets import ALIGNMENT, BucketPacker
from lightning_rlhf.weights.channel import Channel, Message, PeerError, readable
from lightning_rlhf.weights.connected import PATIENCE
from lightning_rlhf.weights.cuda_ipc import CudaIPCReceiverLink, CudaIPCSenderLink
from lightning_rlhf.weights.frames import (
    HEADER_BYTES,
    Frame,
    FrameError,
    FrameReader,
    FrameWriter,
    Pause,
    Watch,
    counters_suffice,
    wait_for,
)
from lightning_rlhf.weights.link import ReceiverLink, SenderLink
from lightning_rlhf.weights.linked import LinkedCheckpointEngine
from lightning_rlhf.weights.pipe import PipeReader, PipeWriter
from lightning_rlhf.weights.shm_link import PREFIX, ShmReceiverLink, ShmSenderLink
from lightning_rlhf.weights.whole_tensors import WholeTensorReader, with_headers

ENOUGH_BYTES = 16 << 20
"""Of a frame: small enough that receivers start early, large enough that what is done once a frame costs nothing."""
_LAST = b""
"""Header of the frame after the last bucket's: whoever waits for a frame looks for messages only after a while."""
_PIPE = b"pipe"
"""Header of the frame after which the pipe is used."""


@CheckpointEngineRegistry.register("shm")
class ShmCheckpointEngine(LinkedCheckpointEngine):
    """Shared memory.

    Args:
        directory: a folder in a memory file system that sender and receivers see.
        handover: ``"counters"`` in the memory, or ``"messages"``, two for each bucket; None is counters where the
            processor allows them. Both sides use the sender's.
        device: where the sender fills buckets, ``cpu`` or ``cuda:<i>``; receivers must see the same GPU.
        **kwargs: those of `ConnectedCheckpointEngine`. Tensors of up to ``bucket_bytes`` are read in place; the memory
            is a little more than twice as large.
    """

    name = "shm"
    # Memory corrects its own bits. What can go wrong is a frame that is read too early or too late, and that is large.
    default_checksum = "sampled"

    def __init__(
        self, *, directory: str = "/dev/shm", handover: str | None = None, device: str = "cpu", **kwargs: Any
    ) -> None:
        if handover not in (None, "counters", "messages"):
            raise ValueError(f"handover={handover!r}: expected 'counters', 'messages' or None.")
        if handover == "counters" and not counters_suffice():
            raise ValueError(f"handover='counters' is for x86 processors; on {platform.machine()} use 'messages'.")
        self._device = torch.device(device)
        on_gpu = self._device.type == "cuda"
        if on_gpu and not torch.cuda.is_available():
            raise ValueError(f"device={device!r}: this process sees no GPU; use device='cpu'.")
        if on_gpu and self._device.index is None:
            raise ValueError(f"device={device!r}: say which GPU, as in 'cuda:0': pushes come from several threads.")
        if on_gpu and handover == "counters":
            raise ValueError(f"handover='counters' is for host memory; with device={device!r} use 'messages'.")
        self.handover = handover or ("counters" if counters_suffice() and not on_gpu else "messages")
        super().__init__(**kwargs)
        self._directory = Path(directory)
        self._whole_reader = WholeTensorReader(before_reuse=self.before_reuse)
        self._end: Message | None = None

    @override
    def shared_settings(self) -> dict[str, Any]:
        return {"directory": str(self._directory), "handover": self.handover, "device": str(self._device)}

    @override
    def open_sender_link(self, receivers: list[str]) -> SenderLink:
        if self._device.type == "cuda":
            return CudaIPCSenderLink(self.bucket_bytes, self._device)
        return ShmSenderLink(self._directory, self.bucket_bytes, receivers)

    @override
    def open_receiver_link(self, offer: Mapping[str, Any]) -> ReceiverLink:
        if self._device.type == "cuda":
            return CudaIPCReceiverLink(offer, self.bucket_bytes)
        path = self._directory / str(offer["name"])
        if path.parent != self._directory or not path.name.startswith(PREFIX):
            raise ValueError(f"The sender offered a file outside {self._directory}: {offer['name']}.")
        return ShmReceiverLink(path, self.bucket_bytes, reader=int(offer["reader"]), readers=int(offer["readers"]))

    @override
    def let_go(self) -> None:
        super().let_go()
        self._whole_reader.restart({})

    @override
    def in_place_bytes(self) -> int:
        return self.bucket_bytes // ALIGNMENT * ALIGNMENT if self.handover == "counters" else 0

    # --- the sender's side -------------------------------------------------------------------------------------------

    @override
    def send_body(self, stream: Iterator[tuple[str, Tensor]]) -> dict[str, Any]:
        link = self._sender_link
        if self.handover == "messages" or not isinstance(link, ShmSenderLink):
            return super().send_body(stream)
        writer = link.frames
        room = self._room_in(writer)
        if self._takes_pipe() and all(answer["takes_pipe"] for answer in self.ready.values()):
            room(0, 0)
            writer.publish(0, _PIPE)
            return {"buckets": self._send_piped(link.pipe, stream)}
        count = 0
        packer = BucketPacker(
            bucket_bytes=self.bucket_bytes,
            buffer=room,
            sampled=self.checksum == "sampled",
            enough=max(ALIGNMENT, min(ENOUGH_BYTES, self.bucket_bytes // 4)),
            header_bytes=HEADER_BYTES,
        )
        for header in packer.pack(stream):
            writer.publish(header.num_bytes, json.dumps(header.to_json()).encode())
            count += 1
        room(0, 0)
        writer.publish(0, _LAST)
        return {"buckets": count}

    def _send_piped(self, pipe: PipeWriter, stream: Iterator[tuple[str, Tensor]]) -> int:
        """Sends all tensors through the pipe; how many."""
        count, watch = 0, partial(self._watch_receivers, pipe.read_positions, pipe.late)
        pipe.restart()
        for header, content in with_headers(stream):
            pipe.write(header, content, watch=watch)
            count += 1
        pipe.end(watch=watch)
        return count

    def _room_in(self, writer: FrameWriter) -> Callable[[int, int], Tensor]:
        """Memory for the next frame; waits for receivers to make room."""
        watch = partial(self._watch_receivers, writer.counts, writer.late)
        return lambda num_bytes, following: wait_for(lambda: writer.room(num_bytes, following=following), watch=watch)

    def _watch_receivers(self, progress: Callable[[], object], late: Callable[[], list[int]]) -> Pause:
        """A wait for receivers begins; none may stand still for longer than the timeout.

        Args:
            progress: differs when one has gone on.
            late: numbers of those that are waited for.
        """
        channels = [self._sender_hub().channels[name] for name in self._members]
        seen, end = progress(), time.monotonic() + self.timeout

        def pause(seconds: float) -> None:
            nonlocal seen, end
            if readable(channels, timeout=seconds):
                peer, message = self.hear(self._members, phase="receive")
                raise PeerError(f"said {message['type']!r} before the end.", peer=peer, phase="receive")
            now, moved = time.monotonic(), progress()
            if moved != seen:
                seen, end = moved, now + self.timeout
            elif now > end:
                names = ", ".join(self._members[reader] for reader in late())
                raise PeerError(f"no answer within {self.timeout:g} s.", peer=names, phase="receive")

        return pause

    # --- the receiver's side -----------------------------------------------------------------------------------------

    @override
    def readiness(self) -> Message:
        destinations = self.direct_destinations().values()
        on_host = bool(destinations) and all(tensor.is_cpu for tensor in destinations)
        return {"takes_pipe": on_host and self._takes_pipe()}

    def _takes_pipe(self) -> bool:
        """What one thread carries through the pipe, several carry faster by way of frames."""
        return self.handover == "counters" and self.checksum == "sampled" and torch.get_num_threads() == 1

    @override
    def receive_body(self, channel: Channel) -> Iterator[tuple[str, Tensor]]:
        link, reader = self._receiver_link, self._reader
        if self.handover == "messages" or not isinstance(link, ShmReceiverLink):
            yield from super().receive_body(channel)
            return
        reader.restart(self.direct_destinations())
        self._end = None
        frames = link.frames
        watch = partial(self._watch_sender, channel)
        while (frame := self._next_frame(frames, watch)).header not in (_LAST, _PIPE):
            header = BucketHeader.from_json(json.loads(frame.header))
            if header.num_bytes != frame.content.numel():
                raise PeerError(
                    f"said {header.num_bytes} bytes of a bucket that has {frame.content.numel()}.",
                    peer=channel.peer,
                    phase="receive",
                )
            yield from reader.read(header, frame.content)
            frames.take()
            if not self.holds_yielded() and not reader.needs_buffers:
                frames.release()
        frames.take()
        frames.release()
        if frame.header == _PIPE:
            yield from self._receive_piped(channel, link.pipe)
        else:
            reader.finish(int(self._last_message(channel)["buckets"]))

    def _receive_piped(self, channel: Channel, pipe: PipeReader) -> Iterator[tuple[str, Tensor]]:
        reader, watch = self._whole_reader, partial(self._watch_sender, channel)
        reader.restart(self.direct_destinations())
        while (header := pipe.header(watch=watch)) is not None:
            name, tensor, content = reader.landing(header)
            try:
                pipe.read(content, watch=watch)
            except FrameError as error:
                raise BucketError(f"{name} is {error}. The weights must not be used.") from error
            yield name, tensor
        reader.finish(int(self._last_message(channel)["buckets"]))

    def _last_message(self, channel: Channel) -> Message:
        return self._end or self.expect(channel, ("end",), phase="receive")

    def _next_frame(self, frames: FrameReader, watch: Watch) -> Frame:
        def attempt() -> Frame | None:
            frame = frames.next()
            if frame is None and frames.is_needed():
                self.before_reuse()
                frames.release()
            return frame

        return wait_for(attempt, watch=watch)

    def _watch_sender(self, channel: Channel) -> Pause:
        """A wait for the sender begins; the message that ends the sync may come meanwhile."""
        deadline = time.monotonic() + PATIENCE * self.timeout

        def pause(seconds: float) -> None:
            if channel.holds_message() or readable([channel], timeout=seconds):
                self._end = self.expect(channel, ("end",), phase="receive")
            elif time.monotonic() > deadline:
                raise PeerError(f"no answer within {PATIENCE * self.timeout:g} s.", peer=channel.peer, phase="receive")

        return pause
