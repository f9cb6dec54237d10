"""A trainer, replicas and a manager of pushes that are as small as can be, with faults where a test wants them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_rlhf.contracts.rollout import RolloutEngine
from lightning_rlhf.types import Experience, ModelOutputs
from lightning_rlhf.weights import CheckpointEngineManager, ShmCheckpointEngine
from lightning_rlhf.weights.replica import ReplicaHub, serve_replica
from support.receivers import Forked


class TinyTrainer:
    """What a sync calls of an engine; a token's log-prob is minus its weight.

    ``seconds_late`` says how long this rank takes before it gathers a tensor, by name.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.weights = {f"layer.{index}": torch.full((40, 40), float(index + 1)) for index in range(4)}
        self.seconds_late: dict[str, float] = {}

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights.items():
            time.sleep(self.seconds_late.get(name, 0.0))
            if dist.is_initialized():
                dist.barrier()  # as a gather would, on every rank
            yield name, tensor

    def infer_batch(self, data: Experience, *, entropy: bool = False) -> ModelOutputs:
        return ModelOutputs(log_probs=-self.weights["layer.0"][0, 0] * data.tokens)


class TinyRollout(RolloutEngine):
    """Notes what is asked of it; goes wrong where it is told; may have a push written into its own weights."""

    def __init__(self, fault: str = "", *, owns: bool = False) -> None:
        self.fault = fault
        self.owns = owns
        self.weights: dict[str, Tensor] = {}
        self.events: list[str] = []
        self.pushes = 0

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.events.append("load")
        self.pushes += 1
        assert self.weight_version is None  # out of service while its weights are mixed
        for index, (name, tensor) in enumerate(named_tensors):
            if self.pushes == 2 and index == 2 and self.fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.pushes == 2 and index == 2 and self.fault == "raise":
                raise ValueError("no space on the device")
            if self.pushes == 2 and self.fault == f"stale {name}":
                continue
            self.weights[name] = tensor.clone()

    def weight_destinations(self) -> dict[str, Tensor]:
        return self.weights if self.owns else {}

    def read_weights(self, names: Sequence[str]) -> dict[str, Tensor]:
        self.events.append("read")
        return {name: self.weights[name].bfloat16() for name in names}

    def score(self, token_ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[list[float]]:
        self.events.append("score")
        return [[0.0, *(-float(self.weights["layer.0"][0, 0]) * token for token in token_ids[0][1:])]]

    def reset_prefix_cache(self) -> None:
        self.events.append("reset")

    def pause(self) -> None:
        self.events.append("pause")
        if self.fault == "pause" and self.pushes == 1:
            raise RuntimeError("a request cannot be paused")

    def abort(self) -> None:
        self.events.append("abort")

    def resume(self) -> None:
        self.events.append("resume")

    def release_kv_cache(self) -> None:
        self.events.append("release")

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self.events.append(f"wake {','.join(tags or ())}")

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a sync samples nothing")

    sleep = shutdown = generate


class Served(Forked):
    """A replica in its own process; sends its events and weights when its trainer has gone."""

    def __init__(self, hub: ReplicaHub, name: str, fault: str = "", *, owns: bool = False) -> None:
        def work(pipe: Any) -> None:
            rollout = TinyRollout(fault, owns=owns)
            serve_replica(rollout, address=hub.address, token=hub.token, replica_id=name, timeout=5.0)
            pipe.send((rollout.events, {key: float(value[0, 0]) for key, value in rollout.weights.items()}))

        super().__init__(work)


def new_manager(
    trainer: TinyTrainer, replicas: Any, *, link_timeout: float = 2.0, **kwargs: Any
) -> CheckpointEngineManager:
    engine: Any = trainer
    return CheckpointEngineManager(
        engine=engine,
        checkpoint_engine=ShmCheckpointEngine(bucket_bytes=8192, timeout=link_timeout),
        replicas=replicas,
        probe_token_ids=[3, 1, 2],
        probe_tolerance=1e-3,
        timeout=10.0,
        **kwargs,
    )


def start(faults: dict[str, str], *, owns: bool = False) -> tuple[ReplicaHub, list[Served], Any]:
    hub = ReplicaHub()
    served = [Served(hub, name, fault, owns=owns) for name, fault in faults.items()]
    return hub, served, hub.replicas(list(faults), timeout=5.0)
