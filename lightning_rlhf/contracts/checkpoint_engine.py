"""The checkpoint-engine contract: carries named tensors from trainer ranks to rollout engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Who sends to whom.

    Attributes:
        sender_ranks: trainer ranks that hold tensors to send.
        receiver_ids: rollout replicas that take them.
    """

    sender_ranks: tuple[int, ...]
    receiver_ids: tuple[str, ...]


class CheckpointEngine(ABC):
    """Moves one version of the weights; used by the manager, in the order of the methods here."""

    @abstractmethod
    def prepare(self) -> None:
        """Allocates what a sync needs (buffers, registrations)."""

    @abstractmethod
    def build_topology(self, *, trainer_world_size: int, receiver_ids: Iterable[str]) -> Topology:
        """Decides which ranks send to which replicas. Pure."""

    @abstractmethod
    def init_process_group(self, topology: Topology) -> None:
        """Connects both sides."""

    @abstractmethod
    def send_weights(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Sends every tensor; drains the iterator on every rank, also after an error, since it is collective."""

    @abstractmethod
    def receive_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of this sync, on the rollout's side."""

    @abstractmethod
    def finalize(self) -> None:
        """Releases what the sync held; the next one begins at ``prepare``."""


class CheckpointEngineRegistry:
    """Finds a checkpoint engine by name."""

    _factories: ClassVar[dict[str, Callable[..., CheckpointEngine]]] = {}

    @classmethod
    def register(cls, name: str) -> Callable[[type[CheckpointEngine]], type[CheckpointEngine]]:
        """A class decorator that makes a checkpoint engine known."""

        def add(engine_class: type[CheckpointEngine]) -> type[CheckpointEngine]:
            if cls._factories.setdefault(name, engine_class) is not engine_class:
                raise ValueError(f"A checkpoint engine named {name!r} is registered already: {cls._factories[name]}.")
            return engine_class

        return add

    @classmethod
    def new(cls, name: str, **kwargs: Any) -> CheckpointEngine:
        """Builds the engine called ``name``.

        Raises:
            KeyError: if there is none; the message lists those there are.
        """
        if name not in cls._factories:
            raise KeyError(f"No checkpoint engine {name!r}. Registered: {', '.join(sorted(cls._factories))}.")
        return cls._factories[name](**kwargs)
