"""The checkpoint-engine contract: carries named tensors from trainer ranks to rollout engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Route:
    """One sender and those that it serves.

    Attributes:
        sender_rank: a trainer rank.
        receiver_ids: who takes every tensor from it.
    """

    sender_rank: int
    receiver_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Who sends to whom.

    Attributes:
        sender_ranks: trainer ranks that send.
        receiver_ids: receivers: a rollout replica, or one worker of it.
        routes: one for each sender; each receiver stands in exactly one.
    """

    sender_ranks: tuple[int, ...]
    receiver_ids: tuple[str, ...]
    routes: tuple[Route, ...] = ()

    def receivers_of(self, rank: int) -> tuple[str, ...]:
        """The receivers that ``rank`` serves; none for a rank that only takes part in the gather."""
        return next((route.receiver_ids for route in self.routes if route.sender_rank == rank), ())


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """What a receiver needs in order to meet its sender; plain values, so that it travels over any control plane.

    Attributes:
        engine: the checkpoint engine's name.
        receiver_id: the receiver's.
        address: ``host:port`` of the sender.
        token: shown when the receiver joins; a secret.
        settings: constructor arguments that both sides must share.
    """

    engine: str
    receiver_id: str
    address: str
    token: str = field(repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Invitation:
        """From what `to_json` gave."""
        return cls(**values)


class CheckpointEngine(ABC):
    """Moves one version of the weights; used by the manager, in the order of the methods here.

    One class serves both sides. The sender's side: ``prepare``, ``init_process_group``, ``send_weights``, ``finalize``.
    The receiver's, in any process: ``join`` once, then ``receive_weights`` and ``finalize`` for each sync. An engine
    whose ``remote`` is False serves a rollout engine in the trainer's process only, and has no ``join``.
    """

    remote: ClassVar[bool] = False

    @property
    def patience(self) -> float:
        """How long the sender may wait for receivers between two tensors, in seconds, without being stuck."""
        return 0.0

    @abstractmethod
    def prepare(self) -> None:
        """Allocates what a sync needs (buffers, registrations)."""

    @abstractmethod
    def build_topology(self, *, trainer_world_size: int, receiver_ids: Iterable[str]) -> Topology:
        """Decides which ranks send to which receivers. Pure."""

    @abstractmethod
    def init_process_group(self, topology: Topology) -> None:
        """Connects both sides."""

    @abstractmethod
    def send_weights(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Sends every tensor; drains the iterator on every rank, also after an error, since it is collective."""

    @abstractmethod
    def receive_weights(self, destinations: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of this sync, on the rollout's side; each is valid until the next one is asked for.

        Args:
            destinations: memory of the consumer's own, by name: a tensor of one of these names is copied there, by the
                shortest way that the engine has, into the destination's dtype, and what is yielded is the destination
                itself. Each is asked for by name when it is about to be written. They hold nothing that may be used
                before the sync has ended well.
        """

    @abstractmethod
    def finalize(self) -> None:
        """Releases what the sync held; the next one begins at ``prepare``."""

    def invitation(self, receiver_id: str) -> Invitation:
        """What ``receiver_id`` needs in order to join; after ``prepare``.

        Raises:
            NotImplementedError: if this engine serves the trainer's own process only.
        """
        raise NotImplementedError(f"{type(self).__name__} serves a rollout engine in the trainer's process only.")

    def join(self, invitation: Invitation) -> None:
        """Becomes the receiver that ``invitation`` names.

        Raises:
            NotImplementedError: if this engine serves the trainer's own process only.
        """
        raise NotImplementedError(f"{type(self).__name__} serves a rollout engine in the trainer's process only.")

    def close(self) -> None:  # noqa: B027 (an engine that holds nothing has nothing to let go)
        """Lets go of everything; the engine is not used again."""


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
