"""The protocol of one sync between processes, the same for all engines that connect them.

Each sync, with ``S`` the sender and each receiver ``R``::

    S -> R  group    only when the receivers changed: how to attach to the link        R -> S  attached
    S -> R  begin    what this sync is (tied names, ...)                                R -> S  ready
    ...     body     how the bytes travel is the engine's own (`linked`, `disk`)
    S -> R  end      what there was                                                     R -> S  loaded

Either side may say ``abort`` or ``failed`` with a reason at any point. After a failure both sides drop the connection;
the receiver joins again, with the same invitation, for the next sync.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngine, Invitation, Topology
from lightning_rlhf.weights.channel import Channel, Hub, Message, PeerError, first_message, join_hub, readable
from lightning_rlhf.weights.groups import FUSED_GROUPS, FusedGroups, into_destination, with_tied, without_tied
from lightning_rlhf.weights.topology import build_topology
from lightning_rlhf.weights.transform import StreamTransform

BUCKET_BYTES = 64 << 20
PATIENCE = 3.0
"""A receiver waits this many times the timeout: the sender's own error, which says more, comes first."""


class ConnectedCheckpointEngine(CheckpointEngine):
    """Both sides of a sync between processes; subclasses say how the bytes of one sync travel.

    Args:
        bucket_bytes: size of a bucket.
        timeout: longest silence of a peer, in seconds; each wait is bounded by it, not the sync as a whole.
        rank: the trainer rank that sends; picks its route in the topology.
        host: address that the sender listens on.
        tied: first name of each tied tensor by second name; it travels once and arrives under both.
        fused_groups: modules that are delivered together or not at all.
        checksum: ``"full"`` reads every byte of a bucket, ``"sampled"`` a part of large ones (`RunningChecksum`);
            None is the engine's own choice.

    Attributes:
        ready: what each receiver said about itself at the beginning of this sync (`readiness`), on the sender's side.
    """

    remote = True
    name: ClassVar[str]
    default_checksum: ClassVar[str] = "full"

    def __init__(
        self,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float = 60.0,
        rank: int = 0,
        host: str = "127.0.0.1",
        tied: Mapping[str, str] | None = None,
        fused_groups: Sequence[Sequence[str]] = FUSED_GROUPS,
        checksum: str | None = None,
    ) -> None:
        if checksum not in (None, "full", "sampled"):
            raise ValueError(f"checksum={checksum!r}: expected 'full' or 'sampled'.")
        self.checksum = checksum or self.default_checksum
        self.bucket_bytes = bucket_bytes
        self.timeout = timeout
        self.rank = rank
        self.tied = dict(tied or {})
        self.fused_groups = tuple(tuple(group) for group in fused_groups)
        self.transform: StreamTransform | None = None
        self._host = host
        self._hub: Hub | None = None
        self._members: tuple[str, ...] = ()
        self.ready: dict[str, Message] = {}
        self._invitation: Invitation | None = None
        self._channel: Channel | None = None
        self._first: Message | None = None
        self._arrivals: Iterator[tuple[str, Tensor]] | None = None
        self._groups = FusedGroups(self.fused_groups)
        self._destinations: Mapping[str, Tensor] = {}

    @property
    @override
    def patience(self) -> float:
        return PATIENCE * self.timeout

    # --- the sender's side -------------------------------------------------------------------------------------------

    @override
    def prepare(self) -> None:
        if self._hub is None and self._invitation is None:
            self._hub = Hub(host=self._host)

    @override
    def build_topology(self, *, trainer_world_size: int, receiver_ids: Iterable[str]) -> Topology:
        return build_topology(trainer_world_size=trainer_world_size, receiver_ids=receiver_ids)

    @override
    def invitation(self, receiver_id: str) -> Invitation:
        hub = self._sender_hub()
        settings = {
            "bucket_bytes": self.bucket_bytes,
            "timeout": self.timeout,
            "checksum": self.checksum,
            "fused_groups": [list(group) for group in self.fused_groups],
            **self.shared_settings(),
        }
        return Invitation(
            engine=self.name, receiver_id=receiver_id, address=hub.address, token=hub.token, settings=settings
        )

    def shared_settings(self) -> dict[str, Any]:
        """More constructor arguments that both sides must share."""
        return {}

    def _sender_hub(self) -> Hub:
        if self._hub is None:
            raise RuntimeError("prepare() comes first: there is no address to join yet.")
        return self._hub

    @override
    def init_process_group(self, topology: Topology) -> None:
        """Waits for this rank's receivers to join and attaches them; receivers may differ from the last sync's."""
        hub, wanted = self._sender_hub(), topology.receivers_of(self.rank)
        try:
            before = {name: hub.channels.get(name) for name in self._members}
            hub.admit(wanted, phase="group", timeout=self.timeout)
            for gone in [name for name in hub.channels if name not in wanted]:
                hub.dismiss(gone)
            same = tuple(wanted) == self._members and all(hub.channels[n] is before[n] for n in wanted)
            if not same:
                self._members = ()
                self.attach(list(wanted))
                self._members = tuple(wanted)
        except BaseException as error:
            self._abort(error)
            raise

    def attach(self, receivers: list[str]) -> None:
        """Sets up what lasts from sync to sync, for a new set of receivers."""

    @override
    def send_weights(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        try:
            if self._members:
                self._send(named_tensors)
        except BaseException as error:
            self._abort(error)
            raise
        finally:
            # each tensor is gathered by all trainer ranks: they wait for this one even if its receivers are gone
            deque(named_tensors, maxlen=0)

    def _send(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.tell({"type": "begin", "tied": self.tied}, phase="begin")
        self.ready = answers = self.hear_all("ready", phase="begin")
        stream = without_tied(named_tensors, self.tied)
        if self.transform is not None:
            stream = self.transform.encode(stream, bases=[answer.get("base") for answer in answers.values()])
        end = self.send_body(stream)
        self.tell({"type": "end", **end}, phase="load")
        self.hear_all("loaded", phase="load")
        if self.transform is not None:
            self.transform.sent()

    @abstractmethod
    def send_body(self, stream: Iterator[tuple[str, Tensor]]) -> dict[str, Any]:
        """Moves the tensors; returns what the receivers must know at the end."""

    def tell(self, message: Message, *, phase: str, receivers: Iterable[str] | None = None) -> None:
        """Sends a message to each receiver."""
        for name in self._members if receivers is None else receivers:
            self._sender_hub().channels[name].send(message, phase=phase, timeout=self.timeout)

    def hear_all(self, kind: str, *, phase: str, receivers: Iterable[str] | None = None) -> dict[str, Message]:
        """Waits for one message of this kind from each receiver."""
        waiting = set(self._members if receivers is None else receivers)
        answers: dict[str, Message] = {}
        while waiting:
            peer, message = self.hear(waiting, phase=phase)
            if message["type"] == "ack":  # of the last buckets
                continue
            if message["type"] != kind:
                raise PeerError(f"said {message['type']!r} instead of {kind!r}.", peer=peer, phase=phase)
            waiting.discard(peer)
            answers[peer] = message
        return answers

    def hear(self, receivers: Iterable[str], *, phase: str) -> tuple[str, Message]:
        """The next message of any of these receivers; a reported failure is raised."""
        channels = [self._sender_hub().channels[name] for name in receivers]
        channel, message = first_message(channels, phase=phase, timeout=self.timeout)
        if message.get("type") == "failed":
            # it may have failed for want of another one, which is dead
            self._name_the_dead([one for one in channels if one is not channel], phase=phase)
            raise PeerError(str(message.get("reason")), peer=channel.peer, phase=phase)
        return channel.peer, message

    def _name_the_dead(self, channels: Sequence[Channel], *, phase: str) -> None:
        for channel in readable(channels, timeout=0):
            if not channel.holds_message():
                raise PeerError("is gone: it closed the connection or died.", peer=channel.peer, phase=phase)

    def _abort(self, error: BaseException) -> None:
        hub = self._sender_hub()
        for channel in hub.channels.values():
            with suppress(PeerError):
                channel.send({"type": "abort", "reason": str(error)}, phase="abort", timeout=1.0)
        for name in list(hub.channels):
            hub.dismiss(name)
        self._members = ()
        self.detach()
        if self.transform is not None:
            self.transform.forget()

    def detach(self) -> None:
        """Undoes ``attach``, on either side; never waits for a peer."""

    # --- the receiver's side -----------------------------------------------------------------------------------------

    @override
    def join(self, invitation: Invitation) -> None:
        if self._hub is not None:
            raise RuntimeError("This engine is a sender already; receivers use an engine of their own.")
        if invitation.engine != self.name:
            raise ValueError(f"The sender uses {invitation.engine!r}, this receiver {self.name!r}.")
        if self._invitation != invitation:
            self._leave()
        self._invitation = invitation
        self._connect()

    def _connect(self) -> Channel:
        if self._channel is not None and readable([self._channel], timeout=0):
            self._read_ahead(self._channel)
        if self._channel is None:
            if self._invitation is None:
                raise RuntimeError("receive_weights() before join(): nobody to receive from.")
            invitation = self._invitation
            self._channel = join_hub(
                invitation.address, token=invitation.token, receiver_id=invitation.receiver_id, timeout=self.timeout
            )
        return self._channel

    def _read_ahead(self, channel: Channel) -> None:
        """Looks whether the sender has begun a sync, or given this receiver up when another one failed."""
        try:
            self._first = channel.receive(phase="join", timeout=self.timeout)
            given_up = self._first["type"] == "abort"
        except PeerError:
            given_up = True
        if given_up:
            self._leave()

    @override
    def receive_weights(self, destinations: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors; each is valid until the next one is asked for.

        Args:
            destinations: see `CheckpointEngine.receive_weights`.

        Raises:
            ValueError: if a tensor's destination has another shape.
            PeerError: if the sender is gone, silent for ``PATIENCE`` times the timeout, or has aborted.
            BucketError: if a bucket is corrupted. What was yielded so far must not be used.
        """
        self._destinations = destinations or {}
        self._arrivals = self._receive(self._connect())
        return self._arrivals

    def _receive(self, channel: Channel) -> Iterator[tuple[str, Tensor]]:
        whole = False
        reason = "the consumer gave up before the end"
        try:
            begin = self._begin(channel)
            groups = self._groups = FusedGroups(self.fused_groups, lasting=self._destinations.keys())
            stream = self.receive_body(channel)
            if self.transform is not None:
                stream = self.transform.decode(stream)
            for name, tensor in with_tied(stream, begin["tied"]):
                yield from groups.add(name, into_destination(name, tensor, self._destinations))
            groups.finish()
            if self.transform is not None:
                self.transform.received()
            channel.send({"type": "loaded"}, phase="load", timeout=self.timeout)
            whole = True
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.let_go()
            if not whole:
                with suppress(PeerError):
                    channel.send({"type": "failed", "reason": reason}, phase="abort", timeout=1.0)
                self._leave()

    def _begin(self, channel: Channel) -> Message:
        message, self._first = self._first, None
        message = message or self.expect(channel, ("group", "begin"), phase="begin")
        if message["type"] == "group":
            self.detach()
            self.attach_to(message["offer"])
            channel.send({"type": "attached"}, phase="group", timeout=self.timeout)
            message = self.expect(channel, ("begin",), phase="begin")
        base = None if self.transform is None else self.transform.base
        channel.send({"type": "ready", "base": base, **self.readiness()}, phase="begin", timeout=self.timeout)
        return message

    def readiness(self) -> Message:
        """What the sender must know of this receiver before the body of a sync."""
        return {}

    def attach_to(self, offer: Mapping[str, Any]) -> None:
        """The receiver's part of ``attach``."""

    @abstractmethod
    def receive_body(self, channel: Channel) -> Iterator[tuple[str, Tensor]]:
        """Yields tensors until the sender's ``end``; calls `before_reuse` before memory that was yielded is reused."""

    def let_go(self) -> None:
        """The sync has ended: nothing that is the consumer's is kept."""
        self._destinations = {}
        self._groups = FusedGroups(self.fused_groups)

    def before_reuse(self) -> None:
        """Memory of tensors that were yielded is about to be written again."""
        self._groups.secure()

    def holds_yielded(self) -> bool:
        """Whether a tensor that was yielded is held back for the rest of its group, and its memory is in use still."""
        return self._groups.holds_borrowed()

    def direct_destinations(self) -> Mapping[str, Tensor]:
        """Where the body of the sync may put tensors at once; with a transform they are not what travels."""
        return self._destinations if self.transform is None else {}

    def expect(self, channel: Channel, kinds: Sequence[str], *, phase: str) -> Message:
        """The sender's next message, of one of these kinds."""
        message = channel.receive(phase=phase, timeout=PATIENCE * self.timeout)
        if message.get("type") == "abort":
            raise PeerError(f"aborted: {message.get('reason')}", peer=channel.peer, phase=phase)
        if message.get("type") not in kinds:
            raise PeerError(f"said {message.get('type')!r} instead of {kinds}.", peer=channel.peer, phase=phase)
        return message

    @contextmanager
    def naming_the_sender(self, phase: str, reason: str) -> Iterator[None]:
        """Makes a `PeerError` of what a transport or a package raises: each has exceptions of its own."""
        try:
            yield
        except Exception as error:
            peer = "sender" if self._channel is None else self._channel.peer
            raise PeerError(f"{reason}: {type(error).__name__}: {error}", peer=peer, phase=phase) from error

    def _leave(self) -> None:
        channel, self._channel = self._channel, None
        self._first = None
        if channel is not None:
            channel.close()
        self.detach()
        if self.transform is not None:
            self.transform.forget()

    # --- both --------------------------------------------------------------------------------------------------------

    @override
    def finalize(self) -> None:
        arrivals, self._arrivals = self._arrivals, None
        if arrivals is not None:
            arrivals.close()  # type: ignore[attr-defined] # a generator: `_receive`

    @override
    def close(self) -> None:
        self.finalize()
        self._leave()
        self._members = ()
        if self._hub is not None:
            self._hub.close()
            self._hub = None
