"""One replica as a trainer's rank sees it: its state, and what it has said of itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from lightning_rlhf.rollout.replica_client import ReplicaClient
from lightning_rlhf.rollout.replica_engine import ReplicaStatus

State = Literal["starting", "unready", "up", "down", "dead"]


@dataclass(kw_only=True)
class Replica:
    """One replica as this rank sees it.

    Attributes:
        index: its place.
        client: speaks to it.
        state: see `replica_pool`.
        note: why it is not up.
        version: of its weights, as it said last.
        workers: that share its model, as it said last.
        max_model_len: limit on prompt and response together, as it said last; None: it has said nothing yet.
        dtype: of its weights and compute, as it said last.
        refused: what is wrong where something answers that is not a replica of this run; empty: nothing.
        deaths: how often it had to be started again.
        started: loop time of its last start.
        wake: set to have it looked at now.
    """

    index: int
    client: ReplicaClient
    state: State = "starting"
    note: str = "not heard of yet"
    version: int | None = None
    workers: int = 1
    max_model_len: int | None = None
    dtype: str = "float32"
    refused: str = ""
    deaths: int = 0
    started: float = 0.0
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def hears(self, status: ReplicaStatus) -> None:
        """Takes note of what it says of itself; its version is judged by the pool."""
        self.workers, self.max_model_len, self.dtype = status.workers, status.max_model_len, status.dtype
        self.refused = ""
