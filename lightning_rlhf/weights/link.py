"""What a transport must do for the bucketed engines; everything else (waiting, headers, acknowledgements) is theirs.

A sender's link owns a few slots, buffers that are filled in turn. A receiver's link makes the bytes of a slot available
in the receiver's process. That is all in which shared memory, NIXL, Mooncake and torch.distributed differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

NUM_SLOTS = 2
"""One is filled while the other one is read."""


class SenderLink(ABC):
    """The sender's half of a transport, for a fixed set of receivers.

    Attributes:
        slots: ``NUM_SLOTS`` buffers, ``uint8 [bucket_bytes]``.
    """

    slots: Sequence[Tensor]

    @abstractmethod
    def offer(self, receiver_id: str) -> dict[str, Any]:
        """What this receiver needs in order to attach; JSON values."""

    def connect(self, *, timeout: float) -> None:  # noqa: B027 (optional)
        """Runs once the offers are out: for transports whose two halves meet. Bounded by ``timeout`` seconds."""

    def attached(self) -> None:  # noqa: B027 (optional)
        """Runs once every receiver has attached."""

    def put(self, slot: int, num_bytes: int) -> None:  # noqa: B027 (optional)
        """Sets the bytes of a slot on their way; nothing to do where receivers read them by themselves."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of slots and connections; also after an error, and then without waiting for anybody."""


class ReceiverLink(ABC):
    """The receiver's half.

    ``copies``: whether ``get`` gives memory of the receiver's own. The sender's slot is then free as soon as ``get``
    has returned; else it is free when the consumer is done with the bucket.
    """

    copies: ClassVar[bool]

    def start(self, slot: int, num_bytes: int) -> None:  # noqa: B027 (optional)
        """Begins to fetch a slot; at most ``NUM_SLOTS`` are on their way or in use."""

    @abstractmethod
    def get(self, slot: int, num_bytes: int, *, timeout: float) -> Tensor:
        """The bytes of a slot, ``uint8 [num_bytes]``; waits at most ``timeout`` seconds."""

    def done(self, slot: int) -> None:  # noqa: B027 (optional)
        """Runs when the consumer is done with a slot that it read in place, before the sender is told."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of buffers and connections."""
