"""The checkpoint engine over Mooncake's transfer engine: receivers read the sender's slots over RDMA or TCP."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry
from lightning_rlhf.weights.link import NUM_SLOTS, ReceiverLink, SenderLink
from lightning_rlhf.weights.linked import LinkedCheckpointEngine

POLL_SECONDS = 5e-4


@CheckpointEngineRegistry.register("mooncake")
class MooncakeCheckpointEngine(LinkedCheckpointEngine):
    """One-sided reads.

    Args:
        protocol: ``"tcp"`` or ``"rdma"``.
        **kwargs: those of `ConnectedCheckpointEngine`; ``host`` is also where Mooncake listens.

    Raises:
        ImportError: without Mooncake, or without the libibverbs that it is linked to; names the remedy.
    """

    name = "mooncake"

    def __init__(self, *, protocol: str = "tcp", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if protocol not in ("tcp", "rdma"):
            raise ValueError(f"protocol={protocol!r}: expected 'tcp' or 'rdma'.")
        import_mooncake()
        self._protocol = protocol

    @override
    def shared_settings(self) -> dict[str, Any]:
        return {"protocol": self._protocol}

    @override
    def open_sender_link(self, receivers: list[str]) -> SenderLink:
        return MooncakeSenderLink(self.bucket_bytes, self._host, self._protocol)

    @override
    def open_receiver_link(self, offer: Mapping[str, Any]) -> ReceiverLink:
        return MooncakeReceiverLink(offer, self.bucket_bytes, self._host, self._protocol)


def import_mooncake() -> Any:
    """Mooncake's Python interface.

    Raises:
        ImportError: naming the extra and the system library.
    """
    try:
        from mooncake import engine
    except ImportError as error:
        raise ImportError(
            "The mooncake checkpoint engine needs Mooncake (pip install 'lightning_rlhf[mooncake]') and, also for TCP, "
            f"the system library libibverbs.so.1 (Debian: libibverbs1): {error}"
        ) from error
    return engine


def begin_read(engine: Any, session: str, *, own: int, there: int, num_bytes: int) -> int:
    """Sets Mooncake's threads to read; gives the read's number, for `finish_read`.

    Mooncake's blocking read asks for the result without a pause, which takes the core that its threads need: where a
    receiver has one core, a third of the speed.

    Args:
        engine: Mooncake's.
        session: ``host:port`` of the other one.
        own: address to write to, registered here.
        there: address to read from, registered there.
        num_bytes: how much.

    Raises:
        ConnectionError: if the other one cannot be reached.
    """
    read = int(engine.batch_transfer_async_read(session, [own], [there], [num_bytes]))
    if read == 0:
        raise ConnectionError(f"Mooncake could not begin to read {num_bytes} bytes of {session}.")
    return read


def finish_read(engine: Any, read: int, *, session: str, timeout: float) -> None:
    """Waits for a read.

    Raises:
        ConnectionError: if it failed.
        TimeoutError: if it takes longer than ``timeout`` seconds; the memory may still be written to.
    """
    end = time.monotonic() + timeout
    while (status := engine.transfer_check_status(read)) == 0:
        if time.monotonic() > end:
            raise TimeoutError(f"Mooncake did not read the memory of {session} within {timeout:g} s.")
        time.sleep(POLL_SECONDS)
    if status != 1:
        raise ConnectionError(f"Mooncake could not read the memory of {session}: status {status}.")


class _Engine:
    """A transfer engine with registered slots."""

    def __init__(self, bucket_bytes: int, host: str, protocol: str) -> None:
        self.engine = import_mooncake().TransferEngine()
        if self.engine.initialize(host, "P2PHANDSHAKE", protocol, "") != 0:
            raise ConnectionError(f"Mooncake did not start on {host} with protocol {protocol!r}.")
        self.slots = [torch.empty(bucket_bytes, dtype=torch.uint8) for _ in range(NUM_SLOTS)]
        self.addresses = [slot.data_ptr() for slot in self.slots]
        if self.engine.batch_register_memory(self.addresses, [bucket_bytes] * NUM_SLOTS) != 0:
            raise ConnectionError(f"Mooncake did not register {NUM_SLOTS} slots of {bucket_bytes} bytes.")

    def close(self) -> None:
        if self.addresses:
            self.engine.batch_unregister_memory(self.addresses)
        self.addresses = []
        self.engine = None  # its threads end with it: one that still reads writes to the slots
        self.slots = []


class MooncakeSenderLink(SenderLink):
    """Registers the slots; receivers do the rest.

    Args:
        bucket_bytes: of one slot.
        host: address that Mooncake listens on.
        protocol: ``tcp`` or ``rdma``.
    """

    def __init__(self, bucket_bytes: int, host: str, protocol: str) -> None:
        self._own = _Engine(bucket_bytes, host, protocol)
        self._session = f"{host}:{self._own.engine.get_rpc_port()}"
        self.slots = self._own.slots

    @override
    def offer(self, receiver_id: str) -> dict[str, Any]:
        return {"session": self._session, "addresses": self._own.addresses}

    @override
    def close(self) -> None:
        self._own.close()
        self.slots = []


class MooncakeReceiverLink(ReceiverLink):
    """Reads a slot into one of its own.

    Args:
        offer: the sender's: its session, and the addresses of its slots.
        bucket_bytes: of one slot.
        host: address that Mooncake listens on.
        protocol: ``tcp`` or ``rdma``.
    """

    copies = True

    def __init__(self, offer: Mapping[str, Any], bucket_bytes: int, host: str, protocol: str) -> None:
        self._own = _Engine(bucket_bytes, host, protocol)
        self._session = str(offer["session"])
        self._addresses = [int(address) for address in offer["addresses"]]
        self._reads: dict[int, int] = {}

    @override
    def start(self, slot: int, num_bytes: int) -> None:
        own, there = self._own.addresses[slot], self._addresses[slot]
        self._reads[slot] = begin_read(self._own.engine, self._session, own=own, there=there, num_bytes=num_bytes)

    @override
    def get(self, slot: int, num_bytes: int, *, timeout: float) -> Tensor:
        finish_read(self._own.engine, self._reads.pop(slot), session=self._session, timeout=timeout)
        return self._own.slots[slot][:num_bytes]

    @override
    def close(self) -> None:
        self._own.close()
