"""Device memory of the sender that receivers on the same machine map, by CUDA's inter-process handles.

A handle names an allocation of one GPU; a receiver opens it on that GPU, whatever number it has there, so it must be
among those that the receiver sees. Receivers read the slots in place, or copy out of them from GPU to GPU.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.weights.link import NUM_SLOTS, ReceiverLink, SenderLink


class CudaIPCSenderLink(SenderLink):
    """Allocates the slots on a GPU.

    No signal tells receivers that a slot is filled, beyond the message with its header: the header holds the checksum,
    which the host has read from the device, on the stream of the copies and after them.

    Args:
        bucket_bytes: of a slot.
        device: ``cuda:<i>`` in this process.
    """

    def __init__(self, bucket_bytes: int, device: torch.device) -> None:
        self._uuid = device_uuids()[device.index]
        self.slots = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]

    @override
    def offer(self, receiver_id: str) -> dict[str, Any]:
        # one share for each receiver: torch counts who still maps the memory, and frees it after the last one
        return {
            "device": self._uuid,
            "slots": [handle_to_json(slot.untyped_storage()._share_cuda_()) for slot in self.slots],
        }

    @override
    def close(self) -> None:
        self.slots = []


class CudaIPCReceiverLink(ReceiverLink):
    """Maps the slots.

    Args:
        offer: the sender's.
        bucket_bytes: of a slot.

    Raises:
        ValueError: if the GPU is not among those that this process sees.
    """

    copies = False

    def __init__(self, offer: Mapping[str, Any], bucket_bytes: int) -> None:
        self._device = torch.device("cuda", local_index(str(offer["device"]), device_uuids()))
        with torch.cuda.device(self._device):
            self._slots = [self._open(one, bucket_bytes) for one in offer["slots"]]

    def _open(self, handle: Mapping[str, Any], bucket_bytes: int) -> Tensor:
        storage = torch.UntypedStorage._new_shared_cuda(self._device.index, *handle_from_json(handle))
        slot = torch.empty(0, dtype=torch.uint8, device=self._device)
        return slot.set_(storage, 0, (bucket_bytes,), (1,))

    @override
    def get(self, slot: int, num_bytes: int, *, timeout: float) -> Tensor:
        return self._slots[slot][:num_bytes]

    @override
    def done(self, slot: int) -> None:
        torch.cuda.synchronize(self._device)  # the consumer's copies may be under way still, on any stream

    @override
    def close(self) -> None:
        self._slots = []


def device_uuids() -> list[str]:
    """The GPUs that this process sees, in its own order."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def local_index(uuid: str, seen: Sequence[str]) -> int:
    """This process's number of a GPU.

    Args:
        uuid: the GPU's.
        seen: those that this process sees.

    Raises:
        ValueError: if it is not among them.
    """
    if uuid not in seen:
        raise ValueError(
            f"The sender's weights lie on GPU {uuid}, and this process sees {', '.join(seen) or 'none'}: let "
            f"CUDA_VISIBLE_DEVICES name that one as well, or use WeightSync(engine='nccl')."
        )
    return seen.index(uuid)


_FIELDS = ("handle", "size", "offset", "counter", "counter_offset", "event", "event_sync")
_BYTES = ("handle", "counter", "event")


def handle_to_json(shared: Sequence[Any]) -> dict[str, Any]:
    """What torch gives for a shared storage, less the number of the device in its own process.

    Args:
        shared: device, handle, size and offset in bytes, handle and offset of the counter of users, an event's handle,
            whether to wait for it.
    """
    values = dict(zip(_FIELDS, shared[1:], strict=True))
    return values | {name: base64.b64encode(values[name]).decode() for name in _BYTES}


def handle_from_json(values: Mapping[str, Any]) -> tuple[Any, ...]:
    """What `handle_to_json` was given, less the device."""
    return tuple(base64.b64decode(values[name]) if name in _BYTES else values[name] for name in _FIELDS)
