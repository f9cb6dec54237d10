"""The checkpoint engine over MoonshotAI's checkpoint-engine: buckets broadcast, or read peer to peer over Mooncake.

The body of a sync (see `connected`)::

    S -> R  portion   what the sender's memory holds; the package's loop moves it       R -> S  taken
    S -> R  end       how many portions there were, and the tensors without an element

Within a portion the receivers acknowledge each bucket: the sender knows them alive, and who is behind. With
``mode="p2p"`` it takes no part in the loop: one receiver reads its memory, bucket after bucket, and broadcasts them to
the others. The memory is filled again only when all have said ``taken``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from queue import Empty
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from typing_extensions import override

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry
from lightning_rlhf.weights.broadcast_group import joined_store, listening_store, make_group
from lightning_rlhf.weights.bucket_header import DTYPES, BucketError
from lightning_rlhf.weights.channel import Channel, PeerError
from lightning_rlhf.weights.connected import PATIENCE, ConnectedCheckpointEngine
from lightning_rlhf.weights.kimi_portions import Portion, PortionPacker, upstream_metas
from lightning_rlhf.weights.mooncake import import_mooncake

if TYPE_CHECKING:
    from lightning_rlhf.weights.kimi_server import Collectives, Handover, KeptMemory, KimiServer, LocalP2PStore

PORTION_BYTES = 512 << 20
MODES = ("broadcast", "p2p")
POLL_SECONDS = 0.1
_ELSEWHERE = "another one's failure ended it"


@CheckpointEngineRegistry.register("kimi")
class KimiCheckpointEngine(ConnectedCheckpointEngine):
    """MoonshotAI's loop over a group of the engine's own, fed and drained within the two processes.

    Args:
        mode: ``"broadcast"``: the sender to all receivers; ``"p2p"``: a receiver reads the sender's memory.
        protocol: of the reads, ``"tcp"`` or ``"rdma"``.
        device: where this side's buckets are: ``cuda:<i>`` uses NCCL, ``cpu`` gloo; the same type on both sides.
        portion_bytes: the weights are packed into host memory of this size and moved from there, one portion after the
            other; the memory is kept.
        **kwargs: those of `ConnectedCheckpointEngine`. A bucket grows to the largest tensor.

    Raises:
        ImportError: without checkpoint-engine in the version that this is written for, or for ``"p2p"`` without
            Mooncake; names the remedy.
    """

    name = "kimi"

    def __init__(
        self,
        *,
        mode: str = "broadcast",
        protocol: str = "tcp",
        device: str = "cpu",
        portion_bytes: int = PORTION_BYTES,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: expected one of {', '.join(MODES)}.")
        if protocol not in ("tcp", "rdma"):
            raise ValueError(f"protocol={protocol!r}: expected 'tcp' or 'rdma'.")
        self._upstream = import_kimi_server()
        self._mode = mode
        self._protocol = protocol
        self._device = torch.device(device)
        self._portion_bytes = portion_bytes
        self._store: TCPStore | None = None
        self._collectives: Collectives | None = None
        self._rank = 0
        self._ranks: list[int] = []
        self._p2p_store: LocalP2PStore | None = None
        if mode == "p2p":
            import_mooncake()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._bucket_memory: KeptMemory = self._upstream.KeptMemory()

    @override
    def shared_settings(self) -> dict[str, Any]:
        return {"mode": self._mode, "protocol": self._protocol, "device": str(self._device)}

    # --- the sender's side -------------------------------------------------------------------------------------------

    @override
    def attach(self, receivers: list[str]) -> None:
        self.detach()
        self._rank, self._ranks = 0, list(range(1, 1 + len(receivers)))
        self._store = listening_store(self._host, timeout=self.timeout)
        for rank, receiver in zip(self._ranks, receivers, strict=True):
            offer = {"port": self._store.port, "rank": rank, "receivers": len(receivers)}
            self.tell({"type": "group", "offer": offer}, phase="group", receivers=[receiver])
        try:
            self._join_group(self._store, timeout=self.timeout)
        except RuntimeError as error:
            # whoever is gone is named by its channel; else this raises for want of an answer
            self.hear_all("attached", phase="group", receivers=receivers)
            raise PeerError(f"did not attach: {error}", peer=", ".join(receivers), phase="group") from error
        self.hear_all("attached", phase="group", receivers=receivers)

    def _join_group(self, store: TCPStore, *, timeout: float) -> None:
        """Becomes a member of the group of those that broadcast to each other, if there are two of them."""
        if self._mode == "p2p" and self._p2p_store is None:
            self._p2p_store = self._upstream.LocalP2PStore(
                host=self._host, protocol=self._protocol, timeout=self.timeout
            )
        members = self._ranks if self._mode == "p2p" else [0, *self._ranks]
        group = None
        if self._rank in members and len(members) > 1:
            place = members.index(self._rank)
            group = make_group(store, rank=place, size=len(members), device=self._device, timeout=timeout)
        self._collectives = self._upstream.Collectives(group, first_rank=members[0])

    @override
    def detach(self) -> None:
        if self._collectives is not None:
            self._collectives.close()
        self._collectives = self._store = None

    @override
    def send_body(self, stream: Iterator[tuple[str, Tensor]]) -> dict[str, Any]:
        packer = PortionPacker(
            portion_bytes=self._portion_bytes, memory=self._memory_of, sampled=self.checksum == "sampled"
        )
        count = 0
        for portion in packer.pack(stream):
            self._send_portion(portion)
            count += 1
        empty = [[entry.name, entry.dtype, list(entry.shape)] for entry in packer.empty]
        return {"portions": count, "empty": empty}

    def _memory_of(self, num_bytes: int) -> Tensor:
        """Memory that is read from; every receiver is done with what it held."""
        if self._memory.numel() < num_bytes:
            store = self._p2p_store
            if store is not None and store.named_tensors:
                store.unregister_named_tensors(list(store.named_tensors))
            self._memory = torch.empty(0, dtype=torch.uint8)  # let go of the smaller one first
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            if store is not None:
                store.register_named_tensors({"portion": self._memory})
        return self._memory

    def _send_portion(self, portion: Portion) -> None:
        address = "" if self._p2p_store is None else self._p2p_store.addr
        message = {"contents": portion.to_json(), "pointer": self._memory.data_ptr(), "store": address}
        self.tell({"type": "portion", **message}, phase="receive")
        broken: PeerError | None = None
        if self._mode == "broadcast":
            try:
                self._run(portion, message, self._upstream.Unheard())
            except RuntimeError as error:
                self.detach()  # receivers that wait for this rank notice now
                broken = PeerError(f"{_ELSEWHERE}: {error}", peer=", ".join(self._members), phase="receive")
        self._wait_until_taken(broken)

    def _wait_until_taken(self, broken: PeerError | None) -> None:
        """Waits for all receivers. The one that failed first is blamed, not those that lost the others because of it.

        Args:
            broken: the sender's own error, if it lost them.
        """
        waiting, buckets = set(self._members), dict.fromkeys(self._members, 0)
        while waiting:
            try:
                peer, message = self.hear(waiting, phase="receive")
            except PeerError as error:
                if error.peer not in waiting:  # nobody says anything: whoever is behind holds the others up
                    behind = [name for name in waiting if buckets[name] == min(buckets[one] for one in waiting)]
                    reason = f"no answer within {self.timeout:g} s."
                    raise PeerError(reason, peer=", ".join(sorted(behind)), phase="receive") from error
                if _ELSEWHERE not in str(error):
                    raise
                waiting.discard(error.peer)
                broken = broken or error
                continue
            if message["type"] == "taken":
                waiting.discard(peer)
            else:
                buckets[peer] += 1
        if broken is not None:
            raise broken

    # --- the receiver's side -----------------------------------------------------------------------------------------

    @override
    def attach_to(self, offer: Mapping[str, Any]) -> None:
        self._rank, self._ranks = int(offer["rank"]), list(range(1, 1 + int(offer["receivers"])))
        host = self._host if self._invitation is None else self._invitation.address.rpartition(":")[0]
        with self.naming_the_sender("group", "its group could not be joined"):
            store = joined_store(host, int(offer["port"]), timeout=self.timeout)
            self._join_group(store, timeout=PATIENCE * self.timeout)

    @override
    def receive_body(self, channel: Channel) -> Iterator[tuple[str, Tensor]]:
        count = 0
        while (message := self.expect(channel, ("portion", "end"), phase="receive"))["type"] == "portion":
            yield from self._receive_portion(channel, message)
            channel.send({"type": "taken"}, phase="receive", timeout=self.timeout)
            count += 1
        if count != message["portions"]:
            raise BucketError(f"{count} of {message['portions']} portions arrived.")
        for name, dtype, shape in message["empty"]:
            yield str(name), torch.empty([int(size) for size in shape], dtype=DTYPES[dtype], device=self._device)

    def _receive_portion(self, channel: Channel, message: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        portion = Portion.from_json(message["contents"])
        handover = self._upstream.Handover()
        loop = threading.Thread(target=self._loop, args=(portion, message, handover), name="kimi-loop", daemon=True)
        loop.start()
        turn = 0
        try:
            while (bucket := self._next_bucket(channel, handover)) is not None:
                for name, tensor in bucket:
                    portion.check(name, tensor, turn=turn, sampled=self.checksum == "sampled")
                    turn += 1
                    yield name, tensor
                self.before_reuse()
                handover.answer()
                channel.send({"type": "ack"}, phase="receive", timeout=self.timeout)
        except BaseException:
            handover.answer("The consumer has failed.")
            raise
        finally:
            loop.join(self.timeout)
            if loop.is_alive():
                self._p2p_store = None  # it has buffers registered there yet
        if turn != len(portion.entries):
            raise BucketError(f"{turn} of {len(portion.entries)} tensors arrived.")

    def _next_bucket(self, channel: Channel, handover: Handover) -> list[tuple[str, Tensor]] | None:
        end = time.monotonic() + PATIENCE * self.timeout
        while True:
            event = handover.next_event(timeout=POLL_SECONDS)
            if event is None or isinstance(event, list):
                return event
            if channel.holds_message():
                self.expect(channel, (), phase="receive")  # raises, with the sender's own reason
            if not isinstance(event, Empty) or time.monotonic() > end:
                reason = f"{_ELSEWHERE}: {type(event).__name__}: {event}"
                raise PeerError(reason, peer=channel.peer, phase="receive") from event

    def _loop(self, portion: Portion, message: Mapping[str, Any], handover: Handover) -> None:
        """Runs on a thread of its own: the package pushes, and the consumer pulls."""
        try:
            self._run(portion, message, handover)
        except BaseException as error:  # noqa: BLE001 (raised in the consumer's thread)
            handover.end(error)
        else:
            handover.end(None)

    # --- both --------------------------------------------------------------------------------------------------------

    def _run(self, portion: Portion, message: Mapping[str, Any], handover: Any) -> None:
        metas = upstream_metas(portion, pointer=int(message["pointer"]), store_address=str(message["store"]))
        if self._collectives is None:
            raise RuntimeError("The sender began a sync without a group: there is nobody to broadcast with.")
        server: KimiServer = self._upstream.KimiServer(
            rank=self._rank,
            device=self._device,
            bucket_bytes=self.bucket_bytes,
            store=self._p2p_store,
            metas=self._upstream.MemoryBufferMetaList.model_validate(metas),
            memory=self._memory if self._rank == 0 else None,
        )
        memory, self._bucket_memory = self._bucket_memory, self._upstream.KeptMemory()
        readers = self._ranks if self._mode == "p2p" else []
        server.run(handover, self._collectives, memory=memory, readers=readers)
        self._bucket_memory = memory  # not after a failure: something may still write to it


def import_kimi_server() -> Any:
    """What runs MoonshotAI's package.

    Raises:
        ImportError: naming the extra, or the version.
    """
    try:
        from lightning_rlhf.weights import kimi_server
    except ModuleNotFoundError as error:
        raise ImportError(
            f"The kimi checkpoint engine needs checkpoint-engine (pip install 'lightning_rlhf[kimi]'): {error}"
        ) from error
    return kimi_server
