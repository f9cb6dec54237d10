"""The checkpoint engine of a rollout engine in the trainer's own process: tensors are handed over, not copied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor
from typing_extensions import override

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry, Topology
from lightning_rlhf.weights.groups import into_destination


@CheckpointEngineRegistry.register("naive")
class NaiveCheckpointEngine(CheckpointEngine):
    """Each rank feeds the rollout engine in its own process; there is nothing to connect and nothing to buffer."""

    def __init__(self) -> None:
        self._stream: Iterator[tuple[str, Tensor]] | None = None

    @override
    def prepare(self) -> None:
        """Nothing to allocate."""

    @override
    def build_topology(self, *, trainer_world_size: int, receiver_ids: Iterable[str]) -> Topology:
        return Topology(sender_ranks=tuple(range(trainer_world_size)), receiver_ids=tuple(receiver_ids))

    @override
    def init_process_group(self, topology: Topology) -> None:
        """Nothing to connect.

        Raises:
            ValueError: if the replicas are not one per trainer rank.
        """
        if len(topology.receiver_ids) != len(topology.sender_ranks):
            raise ValueError(
                f"The naive checkpoint engine serves a rollout engine in each trainer process: "
                f"{len(topology.sender_ranks)} rank(s), but {len(topology.receiver_ids)} replica(s)."
            )

    @override
    def send_weights(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        self._stream = named_tensors

    @override
    def receive_weights(self, destinations: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        if self._stream is None:
            raise RuntimeError("receive_weights() before send_weights(): there is nothing to receive.")
        stream, self._stream = self._stream, None
        # not `yield from`, which would close the sender's stream together with this one
        for name, tensor in stream:
            yield name, into_destination(name, tensor, destinations or {})

    @override
    def finalize(self) -> None:
        self._stream = None
