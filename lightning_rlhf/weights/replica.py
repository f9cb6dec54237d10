"""Replicas of the rollout engine: in the trainer's process, or in any other that can reach it.

`ReplicaServant` is what both have in common: it carries out what a push asks, on a `RolloutEngine`. A process that has
one calls `serve_replica`; the trainer's side of it is a `RemoteReplica`, which it gets from a `ReplicaHub`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry, Invitation
from lightning_rlhf.contracts.replica import Replica, Verb
from lightning_rlhf.contracts.rollout import RolloutEngine
from lightning_rlhf.weights.bucket_header import DTYPES
from lightning_rlhf.weights.channel import Channel, Hub, PeerError, join_hub
from lightning_rlhf.weights.checksum import as_bytes
from lightning_rlhf.weights.receipt import sample_elements, sample_rows

DAY = 24 * 3600.0


class ReplicaServant:
    """Carries out the verbs of a push on a rollout engine.

    Args:
        rollout: the engine.
        carrier: the checkpoint engine that it shares with the trainer, in the trainer's process; None elsewhere: one is
            made from the invitation.
    """

    def __init__(self, rollout: RolloutEngine, *, carrier: CheckpointEngine | None = None) -> None:
        self.rollout = rollout
        self._shared = carrier
        self._own: tuple[Invitation, CheckpointEngine] | None = None
        self._version_before: int | None = None

    def handle(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Does what ``verb`` asks (`contracts.replica.Verb`); returns the answer's fields."""
        rollout = self.rollout
        if verb == "pause":
            self._pause(abort=bool(arguments["abort"]))
        elif verb == "load":
            self._load([Invitation.from_json(values) for values in arguments["invitations"]])
        elif verb == "refresh":
            rollout.reset_prefix_cache()
        elif verb == "read":
            names = list(arguments["names"])
            samples = {name: (sample_elements(tensor), 0) for name, tensor in rollout.read_weights(names).items()}
            rows = {name: sample_rows(part) for name, part in rollout.read_rows(names).items()}
            samples |= {name: (values, first) for name, (values, first) in rows.items() if len(values)}
            return {"samples": {name: pack_sample(values, first=first) for name, (values, first) in samples.items()}}
        elif verb == "serve":
            rollout.wake_up(["kv_cache"])
            rollout.resume()
            rollout.weight_version = int(arguments["version"])
        elif verb == "score":
            return {"log_probs": rollout.score([list(arguments["token_ids"])])[0]}
        elif verb == "restore":
            self._restore()
        elif verb == "retire":
            rollout.weight_version = None
        else:
            raise ValueError(f"A replica knows no {verb!r}.")
        return {"version": rollout.weight_version}

    def _pause(self, *, abort: bool) -> None:
        if abort:
            self.rollout.abort()
        self.rollout.pause()
        self._version_before, self.rollout.weight_version = self.rollout.weight_version, None
        if self._shared is None:  # colocated: the trainer's own loop has put the cache to sleep if it wants the memory
            self.rollout.release_kv_cache()
        self.rollout.wake_up(["weights"])

    def _load(self, invitations: Sequence[Invitation]) -> None:
        carrier = self._shared or self._joined(invitations)
        own = {} if self._shared is not None else self.rollout.weight_destinations()
        arrivals = carrier.receive_weights(_Watched(own, when_used=self._touch))
        try:
            self.rollout.load_weights(self._touching(arrivals))
        finally:
            if self._shared is None:
                carrier.finalize()

    def _joined(self, invitations: Sequence[Invitation]) -> CheckpointEngine:
        if len(invitations) != 1:
            raise ValueError(f"This replica is one receiver, but {len(invitations)} were invited.")
        invitation = invitations[0]
        if self._own is None or self._own[0] != invitation:
            self.close()
            self._own = (invitation, CheckpointEngineRegistry.new(invitation.engine, **invitation.settings))
        carrier = self._own[1]
        carrier.join(invitation)
        return carrier

    def _touching(self, named_tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for named_tensor in named_tensors:
            self._touch()
            yield named_tensor

    def _touch(self) -> None:
        self._version_before = None  # the old weights are going

    def _restore(self) -> None:
        if self._version_before is not None:
            self.rollout.wake_up(["kv_cache"])
            self.rollout.resume()
            self.rollout.weight_version = self._version_before

    def close(self) -> None:
        """Leaves the sender."""
        if self._own is not None:
            self._own[1].close()
            self._own = None


class _Watched(Mapping[str, Tensor]):
    """Tensors of which it matters when the first one is asked for by name: to be written. To look at all is no use."""

    def __init__(self, tensors: Mapping[str, Tensor], *, when_used: Callable[[], None]) -> None:
        self._tensors = tensors
        self._when_used = when_used

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        self._when_used()
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @override
    def values(self) -> ValuesView[Tensor]:
        return self._tensors.values()


def pack_sample(sample: Tensor, *, first: int = 0) -> dict[str, str | int]:
    """A small tensor as JSON values, with the number of its first element among a tensor's samples."""
    content = bytes(as_bytes(sample).tolist())
    return {"dtype": str(sample.dtype).removeprefix("torch."), "bytes": content.hex(), "first": first}


def unpack_sample(values: Mapping[str, str | int]) -> tuple[Tensor, int]:
    """What `pack_sample` was given, flat."""
    content = torch.tensor(list(bytes.fromhex(str(values["bytes"]))), dtype=torch.uint8)
    return content.view(DTYPES[str(values["dtype"])]), int(values["first"])


class LocalReplica(Replica):
    """A rollout engine in this process.

    Args:
        rollout: the engine.
        carrier: the checkpoint engine that hands it the tensors.
    """

    def __init__(self, rollout: RolloutEngine, carrier: CheckpointEngine) -> None:
        self.replica_id = "local"
        self.receiver_ids = ("local",)
        self.rollout = rollout
        self._servant = ReplicaServant(rollout, carrier=carrier)
        self._call: tuple[str, dict[str, Any]] | None = None

    @property
    def weight_version(self) -> int | None:  # type: ignore[override] # the engine's own
        """The rollout engine's."""
        return self.rollout.weight_version

    @override
    def start(self, verb: Verb, **arguments: Any) -> None:
        self._call = (verb, arguments)

    @override
    def finish(self, *, timeout: float) -> dict[str, Any]:
        if self._call is None:
            raise RuntimeError("finish() before start(): nothing was asked.")
        (verb, arguments), self._call = self._call, None
        return self._servant.handle(verb, arguments)


class RemoteReplica(Replica):
    """A rollout engine behind `serve_replica` in another process.

    Args:
        channel: to that process.
        timeout: longest time to hand a message over, in seconds.
    """

    def __init__(self, channel: Channel, *, timeout: float) -> None:
        self.replica_id = channel.peer
        self.receiver_ids = (channel.peer,)
        self.weight_version: int | None = None
        self._channel = channel
        self._timeout = timeout
        self._verb = ""
        self._calls = 0

    @override
    def start(self, verb: Verb, **arguments: Any) -> None:
        self.weight_version = None  # until the answer says which
        self._verb = verb
        self._calls += 1
        call = {"type": "call", "number": self._calls, "verb": verb, "arguments": arguments}
        self._channel.send(call, phase=verb, timeout=self._timeout)

    @override
    def finish(self, *, timeout: float) -> dict[str, Any]:
        while True:
            answer = self._channel.receive(phase=self._verb, timeout=timeout)
            if answer["number"] == self._calls:  # else of a call that was given up when a push failed
                break
        self.weight_version = answer["version"]
        if answer["type"] == "failed":
            raise PeerError(str(answer["reason"]), peer=self.replica_id, phase=self._verb)
        return answer


class ReplicaHub:
    """The trainer's side: where replicas of other processes come to be asked.

    Args:
        host: address to listen on.
    """

    def __init__(self, *, host: str = "127.0.0.1") -> None:
        self._hub = Hub(host=host)
        self.address, self.token = self._hub.address, self._hub.token

    def replicas(self, replica_ids: Sequence[str], *, timeout: float = 60.0) -> list[RemoteReplica]:
        """Waits until these have come.

        Raises:
            PeerError: naming those that have not in time.
        """
        self._hub.admit(replica_ids, phase="join", timeout=timeout)
        return [RemoteReplica(self._hub.channels[name], timeout=timeout) for name in replica_ids]

    def close(self) -> None:
        """Lets all go: their `serve_replica` returns."""
        self._hub.close()


def serve_replica(
    rollout: RolloutEngine, *, address: str, token: str, replica_id: str, timeout: float = 60.0, idle: float = DAY
) -> None:
    """Does what the trainer at ``address`` asks, until it goes away.

    Args:
        rollout: the engine, in this process.
        address: of the `ReplicaHub`.
        token: its token.
        replica_id: this replica's name.
        timeout: longest wait for the trainer to take a message, in seconds.
        idle: longest time without a request.
    """
    channel = join_hub(address, token=token, receiver_id=replica_id, timeout=timeout)
    servant = ReplicaServant(rollout)
    try:
        with suppress(PeerError):  # the trainer has gone
            while True:
                call = channel.receive(phase="idle", timeout=idle)
                try:
                    answer: dict[str, Any] = {"type": "result", **servant.handle(call["verb"], call["arguments"])}
                except Exception as error:  # noqa: BLE001 (the trainer raises it)
                    answer = {"type": "failed", "reason": f"{type(error).__name__}: {error}"}
                answer |= {"number": call["number"], "version": rollout.weight_version}
                channel.send(answer, phase="answer", timeout=timeout)
    finally:
        rollout.weight_version = None
        servant.close()
        channel.close()
