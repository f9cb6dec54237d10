"""MoonshotAI's checkpoint-engine as a link: its loop and its peer-to-peer store run for real, its sockets never."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fork import run_distributed
from support.mooncake import run_with_mooncake
from support.receivers import Receiver, pack, push
from torch import Tensor

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry
from lightning_rlhf.weights import KimiCheckpointEngine, PeerError
from lightning_rlhf.weights.bucket_header import BucketError
from lightning_rlhf.weights.kimi_portions import ALIGNMENT, Portion, PortionPacker, upstream_metas

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("checkpoint_engine") is None, reason="needs checkpoint-engine"
)


def weights() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {
        "large": torch.randn(5000, generator=draw),  # more than two buckets, and more than a portion
        "half": torch.randn(300, generator=draw).bfloat16(),
        "transposed": torch.randn(40, 60, generator=draw).T,
        "fp8": torch.randn(33, generator=draw).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2**40 + 1),
        "bool": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 3),
        **{f"layer.{index}": torch.randn(700 + index, generator=draw) for index in range(8)},
    }


# --- portions --------------------------------------------------------------------------------------------------------


def packed_portions(tensors: dict[str, Tensor], portion_bytes: int) -> tuple[list[tuple[Portion, bytes]], list[str]]:
    memory = torch.zeros(0, dtype=torch.uint8)

    def memory_of(num_bytes: int) -> Tensor:
        nonlocal memory
        if memory.numel() < num_bytes:
            memory = torch.full((num_bytes,), 255, dtype=torch.uint8)
        return memory

    packer = PortionPacker(portion_bytes=portion_bytes, memory=memory_of, sampled=False)
    portions = [(one, bytes(memory[: one.num_bytes].numpy())) for one in packer.pack(iter(tensors.items()))]
    return portions, [entry.name for entry in packer.empty]


def test_portions_by_hand() -> None:
    tensors = {
        "a": torch.arange(64, dtype=torch.float32),  # 256 bytes: no gap
        "b": torch.ones(3, dtype=torch.uint8),  # 3 bytes, and a gap of 253
        "none": torch.zeros(2, 0),
        "c": torch.ones(300, dtype=torch.uint8),  # takes 512: does not fit beside the first two
        "d": torch.ones(2000, dtype=torch.uint8),  # larger than a portion
        "e": torch.ones(1, dtype=torch.uint8),
    }
    portions, empty = packed_portions(tensors, 600)
    assert [[entry.name for entry in one.entries] for one, _ in portions] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert [one.num_bytes for one, _ in portions] == [512, 512, 2048, 256]
    assert empty == ["none"]
    assert portions[0][1] == bytes(tensors["a"].view(torch.uint8).numpy()) + b"\1" * 3 + bytes(253)
    assert Portion.from_json(portions[0][0].to_json()) == portions[0][0]


def test_a_portion_believes_nothing_that_it_can_check() -> None:
    portion = packed_portions({"a": torch.ones(4), "b": torch.ones(2)}, 4096)[0][0][0]
    portion.check("b", torch.ones(2), turn=1, sampled=False)
    for name, tensor, turn, said in (
        ("b", torch.tensor([1.0, 1.5]), 1, "b is corrupted"),
        ("b", torch.ones(2), 0, "b arrived, but a comes next"),
        ("a", torch.ones(2, 2), 0, "a arrived"),
        ("a", torch.ones(4, dtype=torch.int32), 0, "a arrived"),
        ("b", torch.ones(2), 2, "but None comes next"),
    ):
        with pytest.raises(BucketError, match=said):
            portion.check(name, tensor, turn=turn, sampled=False)
    for values in ([["a", "object", [1], ""]], [["a", "float32", [-1], ""]], [["a", "float32"]], 3):
        with pytest.raises(BucketError):
            Portion.from_json(values)
    with pytest.raises(ValueError, match="'a' comes twice"):
        list(PortionPacker(portion_bytes=512, memory=lambda n: torch.zeros(n, dtype=torch.uint8), sampled=False).pack(
            iter([("a", torch.ones(1)), ("a", torch.ones(1))])
        ))  # fmt: skip


@needs_package
def test_the_package_reads_the_layout_as_its_own() -> None:
    """Its plan of buckets, from our description of a portion: the offsets are ours, each bucket within its size."""
    from checkpoint_engine.data_types import MemoryBufferMetaList
    from checkpoint_engine.pin_memory import _ALIGN_SIZE, _align_size
    from checkpoint_engine.ps import _gen_h2d_buckets

    assert _ALIGN_SIZE == ALIGNMENT
    tensors = {name: tensor for name, tensor in weights().items() if tensor.numel()}
    [(portion, _)] = packed_portions(tensors, 1 << 20)[0]
    metas = MemoryBufferMetaList.model_validate(upstream_metas(portion, pointer=4096, store_address="127.0.0.1:1"))
    [buffer] = metas.memory_buffer_metas_list
    assert [meta.aligned_size for meta in buffer.metas] == [_align_size(t.dtype, t.shape) for t in tensors.values()]
    plan = _gen_h2d_buckets({0: metas}, 20224, {}, {})  # "large" takes 20,224 bytes
    place = 0
    for owner, receiver, bucket in plan:
        assert (owner, receiver) == (0, 0)
        assert bucket.size <= 20224
        for part in bucket.ranges:
            assert part.offset == place
            place += part.size
    assert place == portion.num_bytes
    assert [meta.name for _, _, bucket in plan for meta in bucket.items] == list(tensors)


# --- what is left out of the package ---------------------------------------------------------------------------------


@needs_package
def test_the_loop_looks_up_the_names_that_are_bound_anew() -> None:
    """Else it would use the default process group and hand out CUDA memory: the package has changed."""
    from checkpoint_engine.ps import ParameterServer

    loop = ParameterServer._update_per_bucket
    assert {"dist", "reduce_tensor", "gc", "_bind_zmq_socket", "_detect_bucket_size"} <= set(loop.__code__.co_names)
    assert {"torch", "empty", "batch_transfer_sync_read"} <= set(loop.__code__.co_names) | set(
        ParameterServer._copy_to_buffer.__code__.co_names
    )
    assert loop.__code__.co_freevars == ()


@needs_package
def test_nothing_is_pickled_no_socket_is_opened_and_the_default_group_stays() -> None:
    """In the trainer's process, which has a default group; the receiver is a thread beside it."""

    def body() -> tuple[int, int]:
        import pickle

        import zmq

        from lightning_rlhf.weights import kimi_server

        def alarm(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("pickle or zmq was used")

        before = dist.group.WORLD
        functions = torch.distributed.TCPStore, kimi_server.ps.dist, kimi_server.ps.reduce_tensor
        engine = KimiCheckpointEngine(bucket_bytes=8192, timeout=10.0, portion_bytes=16384)
        engine.prepare()
        invitation = engine.invitation("r0")
        receiver = CheckpointEngineRegistry.new("kimi", **invitation.settings)
        got: dict[str, Any] = {}

        def receive() -> None:
            receiver.join(invitation)
            got.update((name, pack(tensor)) for name, tensor in receiver.receive_weights())

        with pytest.MonkeyPatch.context() as patch:
            for module, names in (
                (pickle, ("loads", "load", "dumps", "dump", "Unpickler", "Pickler")),
                (zmq, ("Context", "Socket")),
                (zmq.Context, ("__init__", "socket")),
            ):
                for name in names:
                    patch.setattr(module, name, alarm)
            with pytest.raises(AssertionError, match="was used"):
                zmq.Context()  # the alarm works
            thread = threading.Thread(target=receive)
            thread.start()
            push(engine, ["r0"], weights())
            thread.join()
        assert got == {name: pack(tensor) for name, tensor in weights().items()}
        assert dist.group.WORLD is before
        assert (torch.distributed.TCPStore, kimi_server.ps.dist, kimi_server.ps.reduce_tensor) == functions
        total = torch.ones(1)
        dist.all_reduce(total)  # the trainer's own collectives go on
        receiver.close()
        engine.close()
        return int(total), dist.get_world_size()

    assert run_distributed(body, 1, timeout=120.0) == [(1, 1)]


# --- failures --------------------------------------------------------------------------------------------------------


@needs_package
def test_of_three_receivers_the_one_that_failed_is_named() -> None:
    """The other two fail as well, because of it, perhaps before it can say so."""

    def body() -> None:
        engine = KimiCheckpointEngine(bucket_bytes=8192, timeout=8.0, portion_bytes=16384)
        engine.prepare()
        receivers = {name: Receiver(engine.invitation(name)) for name in ("a", "broken", "c")}
        for name, receiver in receivers.items():
            receiver.sync("raise" if name == "broken" else "")
        with pytest.raises(PeerError, match=r"phase 'receive', peer 'broken': the consumer gave up"):
            push(engine, list(receivers), weights())
        assert "disk is full" in receivers["broken"].result()
        for name in ("a", "c"):
            answer = receivers[name].result()
            assert "peer 'broken': the consumer gave up" in answer or "another one's failure ended it" in answer, answer
        for receiver in receivers.values():
            receiver.sync()
        push(engine, list(receivers), weights())
        for receiver in receivers.values():
            assert receiver.result() == {name: pack(tensor) for name, tensor in weights().items()}
        engine.close()

    run_distributed(body, 1, init_process_group=False, timeout=120.0)


@needs_package
def test_an_export_that_fails_is_the_senders_error_and_ends_the_sync() -> None:
    def stream() -> Iterator[tuple[str, Tensor]]:
        yield from list(weights().items())[:4]
        raise ValueError("the export ran out of memory")

    def body() -> None:
        engine = KimiCheckpointEngine(bucket_bytes=8192, timeout=8.0, portion_bytes=4096)
        engine.prepare()
        receiver = Receiver(engine.invitation("r0"))
        receiver.sync()
        engine.init_process_group(engine.build_topology(trainer_world_size=1, receiver_ids=["r0"]))
        start = time.monotonic()
        with pytest.raises(ValueError, match="ran out of memory"):
            engine.send_weights(stream())
        assert "aborted: the export ran out of memory" in receiver.result()
        assert time.monotonic() - start < 8.0
        engine.close()

    run_distributed(body, 1, init_process_group=False, timeout=120.0)


def test_what_cannot_be_meant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="mode='multicast': expected one of broadcast, p2p"):
        KimiCheckpointEngine(mode="multicast")
    with pytest.raises(ValueError, match="protocol='udp': expected 'tcp' or 'rdma'"):
        KimiCheckpointEngine(protocol="udp")
    with pytest.raises(KeyError, match="No checkpoint engine 'moonshot'"):
        CheckpointEngineRegistry.new("moonshot")


def without_module(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for loaded in [one for one in sys.modules if one.split(".")[0] == name or one.endswith("weights.kimi_server")]:
        monkeypatch.delitem(sys.modules, loaded)
    import lightning_rlhf.weights

    monkeypatch.delattr(lightning_rlhf.weights, "kimi_server", raising=False)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    without_module(monkeypatch, "checkpoint_engine")
    monkeypatch.setitem(sys.modules, "checkpoint_engine", None)
    with pytest.raises(ImportError, match=r"lightning_rlhf\[kimi\]"):
        CheckpointEngineRegistry.new("kimi")


@needs_package
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code is written for what one version does inside."""
    real = importlib.metadata.version
    without_module(monkeypatch, "nothing")
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.5.0" if name == "checkpoint-engine" else real(name)
    )
    with pytest.raises(ImportError, match=r"checkpoint-engine 0\.5\.0 is installed.*checkpoint-engine==0\.4\.2"):
        CheckpointEngineRegistry.new("kimi")


# --- peer to peer ----------------------------------------------------------------------------------------------------

PEER_TO_PEER = """
    import os, sys
    sys.path[:0] = [{tests!r}, {here!r}]
    from support.receivers import Receiver, pack, push
    from test_kimi import push, weights
    from lightning_rlhf.weights import KimiCheckpointEngine, PeerError
    engine = KimiCheckpointEngine(mode="p2p", bucket_bytes=8192, timeout=5.0, portion_bytes=16384)
    engine.prepare()
    receivers = [Receiver(engine.invitation(name)) for name in ("r0", "r1")]
    victim = Receiver(engine.invitation("dies"))
    tensors = weights()
    for round_ in range(3):
        tensors["large"] += round_
        for receiver in receivers:
            receiver.sync()
        push(engine, ["r0", "r1"], tensors)
        for receiver in receivers:
            assert receiver.result() == {{name: pack(tensor) for name, tensor in tensors.items()}}
    assert engine._p2p_store.named_tensors.keys() == {{"portion"}}  # the memory that receivers read, registered once
    receivers[0].sync()
    victim.sync("receive")
    try:
        push(engine, ["r0", "dies"], tensors)
    except PeerError as error:
        assert (error.peer, error.phase) == ("dies", "receive"), error
    else:
        raise AssertionError("nobody died")
    receivers[0].result()
    receivers[0].sync()
    push(engine, ["r0"], tensors)  # alone: no group at all
    assert receivers[0].result() == {{name: pack(tensor) for name, tensor in tensors.items()}}
    for receiver in receivers:
        receiver.kill()
    print("all right", flush=True)
    os._exit(0)  # Mooncake's own threads take half a minute to end
"""


@needs_package
def test_peer_to_peer_contents_three_rounds_and_a_death(tmp_path: Path) -> None:
    here = Path(__file__).parent
    run_with_mooncake(PEER_TO_PEER.format(tests=str(here.parent), here=str(here)), tmp_path, timeout=150)
