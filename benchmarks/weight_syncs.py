"""One sync of a made-up model between processes, and copies to compare it with, for `bench_weight_sync`."""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry, Invitation
from lightning_rlhf.weights import CheckpointEngineManager  # noqa: F401 (registers the engines)

HIDDEN, INTERMEDIATE, KEY_VALUE = 896, 4864, 128
LAYER: dict[str, tuple[int, ...]] = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEY_VALUE, HIDDEN),
    "self_attn.v_proj": (KEY_VALUE, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
CORES = sorted(os.sched_getaffinity(0))
TIMEOUT = 120.0


def shapes(gigabytes: float) -> dict[str, tuple[int, ...]]:
    """An embedding and whole layers: 30 layers at 1 GB; smaller and larger models have fewer and more."""
    layer_bytes = 2 * sum(math.prod(shape) for shape in LAYER.values())
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (int(gigabytes * 56000), HIDDEN)}
    layers = round((gigabytes * 1e9 - 2 * found["model.embed_tokens.weight"][0] * HIDDEN) / layer_bytes)
    for layer in range(layers):
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in LAYER.items()}
    return found


def views(flat: Tensor, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Consecutive parts of one buffer, so that the sync and the plain copy read the same memory."""
    parts = flat.split([math.prod(shape) for shape in wanted.values()])
    return {name: part.view(shape) for (name, shape), part in zip(wanted.items(), parts, strict=True)}


def zeros(gigabytes: float) -> dict[str, Tensor]:
    """A receiver's own memory, touched."""
    return {name: torch.full(shape, 0.0, dtype=torch.bfloat16) for name, shape in shapes(gigabytes).items()}


def sums(tensors: Mapping[str, Tensor]) -> list[int]:
    """Of each tensor's bits, as 64-bit words: what arrived is compared with what was sent."""
    return [int(tensor.view(-1).view(torch.int64).sum()) for tensor in tensors.values()]


def pin(side: int) -> None:
    """The sender on one core, receivers on the others, as on a machine where each has its own."""
    os.sched_setaffinity(0, CORES[:1] if side == 0 or len(CORES) == 1 else CORES[1:])


def memcpy(source: Tensor, target: Tensor) -> float:
    """Seconds to copy all of ``source``; a smaller target is filled several times."""
    start = time.perf_counter()
    for part in source.split(len(target)):
        target[: len(part)].copy_(part)
    return time.perf_counter() - start


class Syncs(ABC):
    """One engine, its sender in this process.

    Attributes:
        engine: the sender's side.
    """

    engine: CheckpointEngine

    @abstractmethod
    def sync(self, source: dict[str, Tensor]) -> tuple[float, float]:
        """One sync, whose result is checked: seconds by the clock, and of computing on both sides.

        Raises:
            RuntimeError: if a receiver does not hold what was sent.
        """

    @abstractmethod
    def copies_at_once(self, source: Tensor, target: Tensor) -> float | None:
        """Seconds until sender and receivers have each copied as much as a sync carries, all at the same time."""

    @abstractmethod
    def close(self) -> None:
        """Ends the receivers."""


class SameProcess(Syncs):
    """The consumer copies the tensors that it is handed into memory of its own: `naive`."""

    def __init__(self, engine: str, *, gigabytes: float) -> None:
        self.engine = CheckpointEngineRegistry.new(engine)
        self._own = zeros(gigabytes)

    def sync(self, source: dict[str, Tensor]) -> tuple[float, float]:
        start, computed = time.perf_counter(), time.process_time()
        self.engine.prepare()
        self.engine.init_process_group(self.engine.build_topology(trainer_world_size=1, receiver_ids=["own"]))
        self.engine.send_weights(iter(source.items()))
        for _ in self.engine.receive_weights(self._own):
            pass
        self.engine.finalize()
        times = time.perf_counter() - start, time.process_time() - computed
        if sums(self._own) != sums(source):
            raise RuntimeError("The consumer does not hold what was sent.")
        return times

    def copies_at_once(self, source: Tensor, target: Tensor) -> None:
        return None

    def close(self) -> None:
        self.engine.close()


class OtherProcesses(Syncs):
    """Receivers in processes of their own.

    Args:
        engine: its name.
        settings: of the engine.
        gigabytes: of the model that each receiver has memory for.
        receivers: how many.
        in_place: whether they copy tensors themselves, from where the engine has put them.
    """

    def __init__(
        self, engine: str, settings: Mapping[str, Any], *, gigabytes: float, receivers: int, in_place: bool
    ) -> None:
        self.engine = CheckpointEngineRegistry.new(engine, timeout=TIMEOUT, **settings)
        self.engine.prepare()
        self._names = [f"receiver{index}" for index in range(receivers)]
        self._pipes, self._processes = [], []
        context = get_context("fork")
        for name in self._names:
            ours, theirs = context.Pipe()
            arguments = (theirs, self.engine.invitation(name), gigabytes, in_place)
            process = context.Process(target=_receive, args=arguments)
            process.start()
            theirs.close()  # so that a receiver that dies is noticed
            self._pipes.append(ours)
            self._processes.append(process)

    def sync(self, source: dict[str, Tensor]) -> tuple[float, float]:
        self._order("sync")
        start, computed = time.perf_counter(), time.process_time()
        self.engine.prepare()
        self.engine.init_process_group(self.engine.build_topology(trainer_world_size=1, receiver_ids=self._names))
        self.engine.send_weights(iter(source.items()))
        self.engine.finalize()
        seconds, computed = time.perf_counter() - start, time.process_time() - computed
        sent = sums(source)
        for pipe in self._pipes:
            more, arrived = pipe.recv()
            computed += more
            if arrived != sent:
                raise RuntimeError("A receiver does not hold what was sent.")
        return seconds, computed

    def copies_at_once(self, source: Tensor, target: Tensor) -> float:
        start = time.perf_counter()
        self._order("copy")
        memcpy(source, target)
        for pipe in self._pipes:
            pipe.recv()
        return time.perf_counter() - start

    def _order(self, what: str) -> None:
        for pipe in self._pipes:
            pipe.send(what)

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send("stop")
        for process in self._processes:
            process.join(5)
            process.kill()
        self.engine.close()


def _receive(pipe: Connection, invitation: Invitation, gigabytes: float, in_place: bool) -> None:
    """A receiver: has the tensors put into memory of its own, or puts them there; reports its computing time."""
    torch.set_num_threads(1)
    pin(1)
    own = zeros(gigabytes)
    engine = CheckpointEngineRegistry.new(invitation.engine, **invitation.settings)
    engine.join(invitation)
    spare = zeros(gigabytes)
    while (order := pipe.recv()) != "stop":
        if order == "copy":
            for name, tensor in own.items():
                spare[name].copy_(tensor)
            pipe.send("copied")
            continue
        start = time.process_time()
        for name, tensor in engine.receive_weights({} if in_place else own):
            if in_place:
                own[name].copy_(tensor)
        engine.finalize()
        pipe.send((time.process_time() - start, sums(own)))
    os._exit(0)  # what a transport's own threads do at the end takes half a minute with Mooncake
