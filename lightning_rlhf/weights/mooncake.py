"""The checkpoint engine over Mooncake's transfer engine: receivers read the sender's slots over RDMA or TCP."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry
from lightning_rlhf.weights.link import NUM_SLOTS, ReceiverLink, SenderLink
from lightning_rlhf.weights.linked import LinkedCheckpointEngine


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
        self.slots = []


class MooncakeSenderLink(SenderLink):
    """Registers the slots; receivers do the rest."""

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
    """Reads a slot into one of its own, in a thread: Mooncake's read blocks."""

    copies = True

    def __init__(self, offer: Mapping[str, Any], bucket_bytes: int, host: str, protocol: str) -> None:
        self._own = _Engine(bucket_bytes, host, protocol)
        self._session = str(offer["session"])
        self._addresses = [int(address) for address in offer["addresses"]]
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mooncake-read")
        self._reads: dict[int, Future[int]] = {}

    @override
    def start(self, slot: int, num_bytes: int) -> None:
        self._reads[slot] = self._reader.submit(
            self._own.engine.transfer_sync_read,
            self._session,
            self._own.addresses[slot],
            self._addresses[slot],
            num_bytes,
        )

    @override
    def get(self, slot: int, num_bytes: int, *, timeout: float) -> Tensor:
        status = self._reads.pop(slot).result(timeout)
        if status != 0:
            raise ConnectionError(f"Mooncake could not read {num_bytes} bytes of {self._session}: status {status}.")
        return self._own.slots[slot][:num_bytes]

    @override
    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)
        if not self._reads:  # a read that is still on its way may yet write to the slots
            self._own.close()
