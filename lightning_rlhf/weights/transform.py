"""What may happen to the stream of tensors between the trainer and the link, and back on the other side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from torch import Tensor

NamedTensors = Iterator[tuple[str, Tensor]]


class StreamTransform(ABC):
    """Turns the tensors of a sync into others that say the same, and back.

    Attributes:
        base: on the receiver's side, names the state that the next sync may build on; None for nothing.
    """

    base: str | None = None

    @abstractmethod
    def encode(self, stream: NamedTensors, *, bases: Sequence[str | None]) -> NamedTensors:
        """On the sender's side; ``bases`` are the receivers' own."""

    @abstractmethod
    def sent(self) -> None:
        """All receivers have loaded what ``encode`` gave."""

    @abstractmethod
    def decode(self, stream: NamedTensors) -> NamedTensors:
        """On the receiver's side."""

    @abstractmethod
    def received(self) -> None:
        """The stream of ``decode`` is complete."""

    @abstractmethod
    def forget(self) -> None:
        """A sync failed: what the other side holds is not known any more."""
