"""The checkpoint engines that send buckets over a link: packing, moving and loading overlap.

The body of a sync (see `connected`)::

    S -> R  bucket   header; the bytes go over the link        R -> S  ack (the slot is free again)
    S -> R  end      how many buckets there were
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_rlhf.weights.bucket_header import BucketHeader
from lightning_rlhf.weights.buckets import BucketPacker, BucketReader
from lightning_rlhf.weights.channel import Channel, Message, PeerError
from lightning_rlhf.weights.connected import ConnectedCheckpointEngine
from lightning_rlhf.weights.link import NUM_SLOTS, ReceiverLink, SenderLink


class LinkedCheckpointEngine(ConnectedCheckpointEngine):
    """Sends buckets through two slots of a link, so that packing, moving and loading overlap."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._sender_link: SenderLink | None = None
        self._receiver_link: ReceiverLink | None = None
        self._reader = BucketReader(
            sampled=self.checksum == "sampled", before_reuse=self.before_reuse, in_place_bytes=self.in_place_bytes()
        )

    @override
    def let_go(self) -> None:
        super().let_go()
        self._reader.restart()

    def in_place_bytes(self) -> int:
        """Largest tensor whose buckets are laid back to back by this link."""
        return 0

    @abstractmethod
    def open_sender_link(self, receivers: list[str]) -> SenderLink:
        """Allocates the sender's half for these receivers."""

    @abstractmethod
    def open_receiver_link(self, offer: Mapping[str, Any]) -> ReceiverLink:
        """The receiver's half, attached to what the sender offers."""

    @override
    def attach(self, receivers: list[str]) -> None:
        self.detach()
        link = self._sender_link = self.open_sender_link(receivers)
        for receiver in receivers:
            self.tell({"type": "group", "offer": link.offer(receiver)}, phase="group", receivers=[receiver])
        try:
            link.connect(timeout=self.timeout)
        except RuntimeError as error:
            # whoever is gone is named by its channel; else this raises for want of an answer
            self.hear_all("attached", phase="group", receivers=receivers)
            raise PeerError(f"did not attach: {error}", peer=", ".join(receivers), phase="group") from error
        self.hear_all("attached", phase="group", receivers=receivers)
        link.attached()

    @override
    def attach_to(self, offer: Mapping[str, Any]) -> None:
        with self.naming_the_sender("group", "its link could not be attached to"):
            self._receiver_link = self.open_receiver_link(offer)

    @override
    def detach(self) -> None:
        for link in (self._sender_link, self._receiver_link):
            if link is not None:
                link.close()
        self._sender_link = self._receiver_link = None

    @override
    def send_body(self, stream: Iterator[tuple[str, Tensor]]) -> dict[str, Any]:
        link = self._sender_link
        if link is None:
            raise RuntimeError("send_weights() before init_process_group(): there is no link.")
        acknowledged = dict.fromkeys(self._members, -1)
        indices = itertools.count()

        def free_slot(_: int, __: int) -> Tensor:
            index = next(indices)
            while late := [name for name, last in acknowledged.items() if last < index - NUM_SLOTS]:
                peer, message = self.hear(late, phase="receive")
                acknowledged[peer] = int(message["index"])
            return link.slots[index % NUM_SLOTS]

        count = 0
        packer = BucketPacker(bucket_bytes=self.bucket_bytes, buffer=free_slot, sampled=self.checksum == "sampled")
        for header in packer.pack(stream):
            self.tell({"type": "bucket", "header": header.to_json()}, phase="receive")
            link.put(header.index % NUM_SLOTS, header.num_bytes)
            count += 1
        return {"buckets": count}

    @override
    def receive_body(self, channel: Channel) -> Iterator[tuple[str, Tensor]]:
        link, reader = self._receiver_link, self._reader
        if link is None:
            raise RuntimeError("The sender began a sync without a group: there is no link.")
        reader.restart(self.direct_destinations())
        header = self._next_header(channel, link)
        while isinstance(header, BucketHeader):
            buffer = self._fetch(link, header)
            following: BucketHeader | Message | None = None
            if link.copies:
                self._acknowledge(channel, header)
            for named_tensor in reader.read(header, buffer):
                yield named_tensor
                if link.copies and following is None and channel.holds_message():
                    following = self._next_header(channel, link)
            self.before_reuse()
            if not link.copies:
                link.done(header.index % NUM_SLOTS)
                self._acknowledge(channel, header)
            header = following or self._next_header(channel, link)
        reader.finish(int(header["buckets"]))

    def _fetch(self, link: ReceiverLink, header: BucketHeader) -> Tensor:
        with self.naming_the_sender("receive", f"bucket {header.index} did not come"):
            return link.get(header.index % NUM_SLOTS, header.num_bytes, timeout=self.timeout)

    def _next_header(self, channel: Channel, link: ReceiverLink) -> BucketHeader | Message:
        """The header of the next bucket, whose bytes are on their way then, or the message that there is none."""
        message = self.expect(channel, ("bucket", "end"), phase="receive")
        if message["type"] == "end":
            return message
        header = BucketHeader.from_json(message["header"])
        if header.num_bytes > self.bucket_bytes:
            raise PeerError(
                f"announced a bucket of {header.num_bytes} bytes; {self.bucket_bytes} were agreed.",
                peer=channel.peer,
                phase="receive",
            )
        with self.naming_the_sender("receive", f"bucket {header.index} could not be asked for"):
            link.start(header.index % NUM_SLOTS, header.num_bytes)
        return header

    def _acknowledge(self, channel: Channel, header: BucketHeader) -> None:
        channel.send({"type": "ack", "index": header.index}, phase="receive", timeout=self.timeout)
