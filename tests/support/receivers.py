"""Receivers of weights in processes of their own, which can be told to go wrong in one place."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lightning_rlhf.weights  # noqa: F401 (registers the engines)
from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry, Invitation
from lightning_rlhf.weights.bucket_header import BucketHeader
from lightning_rlhf.weights.checksum import as_bytes
from lightning_rlhf.weights.connected import ConnectedCheckpointEngine
from lightning_rlhf.weights.disk import DiskCheckpointEngine
from lightning_rlhf.weights.frames import Watch
from lightning_rlhf.weights.kimi import KimiCheckpointEngine
from lightning_rlhf.weights.linked import LinkedCheckpointEngine
from lightning_rlhf.weights.pipe import PipeReader
from lightning_rlhf.weights.shm_link import ShmSenderLink

Packed = tuple[str, tuple[int, ...], bytes]


def pack(tensor: Tensor) -> Packed:
    """Dtype, shape and bytes: two are equal if the tensors are, bit by bit."""
    return str(tensor.dtype), tuple(tensor.shape), bytes(as_bytes(tensor).numpy())


class Forked:
    """``work(pipe)`` in a fork of this process."""

    def __init__(self, work: Callable[[Connection], None]) -> None:
        self.pipe, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self.pipe.close()
            status = 1
            faulthandler.enable()
            try:
                work(theirs)
                status = 0
            except BaseException:  # noqa: BLE001 (it goes to the test's output)
                traceback.print_exc()
            finally:
                os._exit(status)
        theirs.close()

    def result(self, seconds: float = 20.0) -> Any:
        """What it sent last; fails the test if nothing comes."""
        assert self.pipe.poll(seconds), f"process {self.pid} is silent after {seconds} s"
        return self.pipe.recv()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        os.waitpid(self.pid, 0)


class Receiver(Forked):
    """Takes one sync for each `sync`.

    A ``fault`` is the phase in which to die, or ``hang``, ``slow``, ``raise``, ``flip``.

    Args:
        invitation: whom to join.
        own: memory of its own for tensors of these names.
    """

    def __init__(self, invitation: Invitation, *, own: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(lambda pipe: _serve(pipe, invitation, own or {}))

    def sync(self, fault: str = "") -> None:
        self.pipe.send(fault)


def _serve(pipe: Connection, invitation: Invitation, own: Mapping[str, Tensor]) -> None:
    torch.set_num_threads(1)
    engine = CheckpointEngineRegistry.new(invitation.engine, **invitation.settings)
    while True:
        try:
            fault = pipe.recv()
        except EOFError:
            break
        try:
            engine.join(invitation)
            _go_wrong(inner_of(engine), fault)
            got: dict[str, Packed] = {}
            for name, tensor in engine.receive_weights(own):
                assert name not in own or tensor is own[name], name
                _misbehave(fault, count=len(got))
                got[name] = pack(tensor)
            pipe.send(got)
        except (RuntimeError, ValueError, OSError) as error:
            pipe.send(f"{type(error).__name__}: {error}")
        finally:
            engine.finalize()
    engine.close()


def push(engine: CheckpointEngine, names: list[str], tensors: Mapping[str, Tensor]) -> None:
    """One sync to the receivers of these names, on the sender's side."""
    push_stream(engine, names, iter(tensors.items()))


def push_stream(engine: CheckpointEngine, names: list[str], stream: Iterator[tuple[str, Tensor]]) -> None:
    """One sync of what the stream brings."""
    engine.prepare()
    engine.init_process_group(engine.build_topology(trainer_world_size=1, receiver_ids=names))
    engine.send_weights(stream)
    engine.finalize()


def inner_of(engine: CheckpointEngine) -> ConnectedCheckpointEngine:
    inner = getattr(engine, "inner", engine)
    assert isinstance(inner, ConnectedCheckpointEngine)
    return inner


def came_through_a_pipe(engine: CheckpointEngine) -> bool:
    """Whether this sender has used the pipe since its receivers changed last."""
    link = getattr(engine, "_sender_link", None)
    return isinstance(link, ShmSenderLink) and link.pipe._memory.positions[0] > 0


def die(*args: Any, **kwargs: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _misbehave(fault: str, *, count: int) -> None:
    if fault == "receive" and count == 1:
        die()
    if fault == "hang" and count == 1:
        time.sleep(60)
    if fault == "slow":
        time.sleep(0.08)
    if fault == "raise" and count == 1:
        raise ValueError("the model's disk is full")


def _go_wrong(engine: ConnectedCheckpointEngine, fault: str) -> None:
    """Arranges for what happens inside the engine."""
    if fault == "group":
        engine.attach_to = die  # type: ignore[method-assign]
    elif fault == "begin":
        engine._begin = die  # type: ignore[method-assign]
    elif fault == "load":
        expect = engine.expect

        def die_at_the_end(*args: Any, **kwargs: Any) -> Any:
            message = expect(*args, **kwargs)
            return die() if message["type"] == "end" else message

        engine.expect = die_at_the_end  # type: ignore[method-assign]
    elif fault == "flip":
        _flip_one_bit(engine)


def _flip_one_bit_in_pipes() -> None:
    """Of each tensor, after it was written and before it is read."""
    read = PipeReader.read

    def flipped(self: PipeReader, content: Tensor, *, watch: Watch) -> None:
        place = self._memory.positions[self._side]
        while content.numel() and self._memory.positions[0] <= place:
            time.sleep(1e-3)
        byte = ctypes.c_uint8.from_address(self._memory.ring_address + place % self._memory.ring)
        byte.value ^= 8
        read(self, content, watch=watch)

    PipeReader.read = flipped  # type: ignore[method-assign]


def _flip_one_bit(engine: ConnectedCheckpointEngine) -> None:
    if isinstance(engine, LinkedCheckpointEngine):
        _flip_one_bit_in_pipes()
        read = engine._reader.read

        def flipped(header: BucketHeader, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
            damaged = buffer.clone()
            damaged[header.num_bytes // 2 : header.num_bytes // 2 + 1] ^= 8  # an empty bucket has no bit to flip
            return read(header, damaged)

        engine._reader.read = flipped  # type: ignore[method-assign]
        return
    if isinstance(engine, KimiCheckpointEngine):
        next_bucket = engine._next_bucket

        def damaged_bucket(*args: Any) -> list[tuple[str, Tensor]] | None:
            bucket = next_bucket(*args)
            for _, tensor in bucket or []:
                as_bytes(tensor)[tensor.nbytes // 2] ^= 8
            return bucket

        engine._next_bucket = damaged_bucket  # type: ignore[method-assign]
        return
    assert isinstance(engine, DiskCheckpointEngine)
    expect = engine.expect

    def damage(*args: Any, **kwargs: Any) -> Any:
        message = expect(*args, **kwargs)
        if message["type"] == "end":
            file = max(
                Path(engine.folder, message["snapshot"]).glob("*.safetensors"), key=lambda one: one.stat().st_size
            )
            content = bytearray(file.read_bytes())
            content[-7] ^= 8
            file.write_bytes(content)
        return message

    engine.expect = damage  # type: ignore[method-assign]
