"""The checkpoint engine of torch.distributed: buckets broadcast from one sender to all its receivers.

NCCL between CUDA devices, gloo between CPUs. The group is made for this purpose alone: the trainer's default group is
not touched, and receivers need none.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry
from lightning_rlhf.weights.broadcast_group import end_group, joined_store, listening_store, make_group
from lightning_rlhf.weights.link import NUM_SLOTS, ReceiverLink, SenderLink
from lightning_rlhf.weights.linked import LinkedCheckpointEngine


@CheckpointEngineRegistry.register("nccl")
class NCCLCheckpointEngine(LinkedCheckpointEngine):
    """Broadcast.

    Args:
        device: where this side's slots are: ``cuda:<i>`` uses NCCL, ``cpu`` gloo; the same type on both sides.
        **kwargs: those of `ConnectedCheckpointEngine`.
    """

    name = "nccl"

    def __init__(self, *, device: str = "cpu", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._device = torch.device(device)

    @override
    def shared_settings(self) -> dict[str, Any]:
        return {"device": str(self._device)}

    @override
    def open_sender_link(self, receivers: list[str]) -> SenderLink:
        return BroadcastSenderLink(receivers, self.bucket_bytes, self._device, host=self._host, timeout=self.timeout)

    @override
    def open_receiver_link(self, offer: Mapping[str, Any]) -> ReceiverLink:
        host = self._invitation.address.rpartition(":")[0] if self._invitation is not None else self._host
        store = joined_store(host, int(offer["port"]), timeout=self.timeout)
        group = make_group(
            store, rank=int(offer["rank"]), size=int(offer["size"]), device=self._device, timeout=self.timeout
        )
        return BroadcastReceiverLink(group, self.bucket_bytes, self._device)


class BroadcastSenderLink(SenderLink):
    """Rank 0 of the group.

    Args:
        receivers: their names, in order of their ranks.
        bucket_bytes: of one slot.
        device: where the slots are.
        host: address of the store at which the group meets.
        timeout: longest wait of the store, in seconds.
    """

    def __init__(
        self, receivers: list[str], bucket_bytes: int, device: torch.device, *, host: str, timeout: float
    ) -> None:
        self.slots = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
        self._receivers = receivers
        self._device = device
        self._store = listening_store(host, timeout=timeout)
        self._group: dist.ProcessGroup | None = None
        self._on_their_way: dict[int, dist.Work] = {}

    @override
    def offer(self, receiver_id: str) -> dict[str, Any]:
        return {
            "port": self._store.port,
            "rank": 1 + self._receivers.index(receiver_id),
            "size": 1 + len(self._receivers),
        }

    @override
    def connect(self, *, timeout: float) -> None:
        size = 1 + len(self._receivers)
        self._group = make_group(self._store, rank=0, size=size, device=self._device, timeout=timeout)

    @override
    def put(self, slot: int, num_bytes: int) -> None:
        assert self._group is not None
        # The slot's last broadcast is over: every receiver has acknowledged it. Its handle goes now.
        self._on_their_way[slot] = _broadcast(self._group, self.slots[slot][:num_bytes])

    @override
    def close(self) -> None:
        self._on_their_way.clear()
        self.slots = []
        end_group(self._group)
        self._group = None


class BroadcastReceiverLink(ReceiverLink):
    """One of the other ranks.

    Args:
        group: in which rank 0 sends.
        bucket_bytes: of one slot.
        device: where the slots are.
    """

    copies = True

    def __init__(self, group: dist.ProcessGroup, bucket_bytes: int, device: torch.device) -> None:
        self._group: dist.ProcessGroup | None = group
        self._buffers = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
        self._on_their_way: dict[int, dist.Work] = {}

    @override
    def start(self, slot: int, num_bytes: int) -> None:
        assert self._group is not None
        self._on_their_way[slot] = _broadcast(self._group, self._buffers[slot][:num_bytes])

    @override
    def get(self, slot: int, num_bytes: int, *, timeout: float) -> Tensor:
        self._on_their_way.pop(slot).wait(timedelta(seconds=timeout))
        return self._buffers[slot][:num_bytes]

    @override
    def close(self) -> None:
        self._on_their_way.clear()
        end_group(self._group)
        self._group = None


def _broadcast(group: Any, tensor: Tensor) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    work: dist.Work = group.broadcast([tensor], options)
    return work
