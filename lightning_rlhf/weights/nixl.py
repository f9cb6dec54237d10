"""The checkpoint engine over NIXL: receivers read the sender's slots, by RDMA where there is any.

Without special hardware its UCX back end uses cross-memory attach or TCP. NIXL's own progress thread is left out: it
keeps a core busy from the first sync to the last, in the trainer's process and in the rollout engine's, and takes half
of the speed where that core had other work. A receiver makes progress while it waits for its reads; the sender's side
of connections, and of transports whose reads need it (TCP), is looked after by `_Attendant`.
"""

from __future__ import annotations

import base64
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry
from lightning_rlhf.weights.link import NUM_SLOTS, ReceiverLink, SenderLink
from lightning_rlhf.weights.linked import LinkedCheckpointEngine

POLL_SECONDS = 2e-4
SHORTEST_PAUSE, LONGEST_PAUSE = 5e-5, 2e-2
PAUSE_SHARE = 0.01
"""Of the time since the last bucket: long pauses when nothing is on its way, short ones while a reader may wait."""


@CheckpointEngineRegistry.register("nixl")
class NIXLCheckpointEngine(LinkedCheckpointEngine):
    """One-sided reads.

    Args:
        device: where this side's slots are, ``cpu`` or ``cuda:<i>``.
        **kwargs: those of `ConnectedCheckpointEngine`.

    Raises:
        ImportError: without NIXL; names the extra.
    """

    name = "nixl"

    def __init__(self, *, device: str = "cpu", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        import_nixl()
        self._device = torch.device(device)

    @override
    def shared_settings(self) -> dict[str, Any]:
        return {"device": str(self._device)}

    @override
    def open_sender_link(self, receivers: list[str]) -> SenderLink:
        return NIXLSenderLink(self.bucket_bytes, self._device)

    @override
    def open_receiver_link(self, offer: Mapping[str, Any]) -> ReceiverLink:
        return NIXLReceiverLink(offer, self.bucket_bytes, self._device)


def import_nixl() -> Any:
    """NIXL's Python interface.

    Raises:
        ImportError: naming the extra.
    """
    try:
        from nixl_cu12 import _api
    except ImportError as error:
        raise ImportError("The nixl checkpoint engine needs NIXL: pip install 'lightning_rlhf[nixl]'.") from error
    return _api


class _Agent:
    """A NIXL agent with registered slots."""

    def __init__(self, bucket_bytes: int, device: torch.device) -> None:
        api = import_nixl()
        self.name = f"lightning_rlhf-{secrets.token_hex(8)}"
        self.agent = api.nixl_agent(self.name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self.memory = "VRAM" if device.type == "cuda" else "DRAM"
        self.device_id = max(0, device.index or 0)
        self.slots = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
        self._registered = self.agent.register_memory(self.slots)

    def close(self) -> None:
        if self.slots:
            self.agent.deregister_memory(self._registered)
            self.slots = []
            self.agent = None


class _Attendant:
    """Makes progress on the sender's side, from a thread of its own that sleeps most of the time.

    Args:
        agent: nobody else uses it until `stop`: it has no locks.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._last = time.monotonic()
        self._called = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._attend, name="nixl-attendant", daemon=True)
        self._thread.start()

    def call(self) -> None:
        """Something is about to be read."""
        self._last = time.monotonic()
        self._called.set()

    def stop(self) -> None:
        """Returns when the agent is free."""
        self._stopped = True
        self._called.set()
        self._thread.join()

    def _attend(self) -> None:
        while not self._stopped:
            self._called.clear()
            self._agent.get_new_notifs()  # there are none: it goes through all that has arrived
            pause = PAUSE_SHARE * (time.monotonic() - self._last)
            self._called.wait(min(LONGEST_PAUSE, max(SHORTEST_PAUSE, pause)))


class NIXLSenderLink(SenderLink):
    """Registers the slots; receivers do the rest.

    Args:
        bucket_bytes: of one slot.
        device: where the slots are.
    """

    def __init__(self, bucket_bytes: int, device: torch.device) -> None:
        self._own = _Agent(bucket_bytes, device)
        self._attendant: _Attendant | None = None
        self.slots = self._own.slots

    @override
    def offer(self, receiver_id: str) -> dict[str, Any]:
        return {
            "metadata": base64.b64encode(self._own.agent.get_agent_metadata()).decode(),
            "addresses": [slot.data_ptr() for slot in self._own.slots],
            "memory": self._own.memory,
            "device_id": self._own.device_id,
        }

    @override
    def connect(self, *, timeout: float) -> None:
        self._attendant = _Attendant(self._own.agent)

    @override
    def put(self, slot: int, num_bytes: int) -> None:
        if self._attendant is not None:
            self._attendant.call()

    @override
    def close(self) -> None:
        if self._attendant is not None:
            self._attendant.stop()
            self._attendant = None
        self._own.close()
        self.slots = []


class NIXLReceiverLink(ReceiverLink):
    """Reads a slot into one of its own.

    Args:
        offer: the sender's: its agent, and the addresses of its slots.
        bucket_bytes: of one slot.
        device: where the slots are.
    """

    copies = True

    def __init__(self, offer: Mapping[str, Any], bucket_bytes: int, device: torch.device) -> None:
        self._own = _Agent(bucket_bytes, device)
        self._remote = self._own.agent.add_remote_agent(base64.b64decode(offer["metadata"]))
        self._addresses = [int(address) for address in offer["addresses"]]
        self._remote_memory, self._remote_device = str(offer["memory"]), int(offer["device_id"])
        self._reads: dict[int, Any] = {}

    @override
    def start(self, slot: int, num_bytes: int) -> None:
        agent, own = self._own.agent, self._own
        here = agent.get_xfer_descs([(own.slots[slot].data_ptr(), num_bytes, own.device_id)], own.memory)
        there = agent.get_xfer_descs([(self._addresses[slot], num_bytes, self._remote_device)], self._remote_memory)
        self._reads[slot] = agent.initialize_xfer("READ", here, there, self._remote)
        agent.transfer(self._reads[slot])

    @override
    def get(self, slot: int, num_bytes: int, *, timeout: float) -> Tensor:
        agent, read = self._own.agent, self._reads[slot]
        end = time.monotonic() + timeout
        while (state := agent.check_xfer_state(read)) != "DONE":
            if state == "ERR":
                raise ConnectionError("NIXL could not read the sender's memory: it is gone or out of reach.")
            if time.monotonic() > end:
                raise TimeoutError(f"NIXL did not read {num_bytes} bytes of the sender within {timeout:g} s.")
            time.sleep(POLL_SECONDS)
        agent.release_xfer_handle(read)
        del self._reads[slot]  # not before: `close` ends those that are left, whose memory goes next
        return self._own.slots[slot][:num_bytes]

    @override
    def close(self) -> None:
        if self._own.agent is not None:
            for read in self._reads.values():
                self._own.agent.release_xfer_handle(read)
            self._reads.clear()
            self._own.agent.remove_remote_agent(self._remote)
        self._own.close()
