"""What the checkpoint engine over shared memory has of its own."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fork import in_own_process
from support.receivers import Forked, Receiver, came_through_a_pipe, pack, push
from torch import Tensor

from lightning_rlhf.contracts.checkpoint_engine import CheckpointEngineRegistry
from lightning_rlhf.weights import PeerError, ShmCheckpointEngine
from lightning_rlhf.weights.shm_link import PREFIX, ShmSenderLink, remove_abandoned


def test_shm_leaves_no_file_even_if_killed(tmp_path: Path) -> None:
    def killed_while_its_files_have_names(pipe: Any) -> None:
        link = ShmSenderLink(tmp_path, 4096, ["r0"])
        pipe.send(link.offer("r0")["name"])
        os.kill(os.getpid(), signal.SIGKILL)

    def body() -> None:
        engine = ShmCheckpointEngine(bucket_bytes=4096, timeout=2.0, directory=str(tmp_path))
        engine.prepare()
        receiver = Receiver(engine.invitation("r0"))
        receiver.sync()
        push(engine, ["r0"], {"x": torch.ones(5000)})
        assert receiver.result() == {"x": pack(torch.ones(5000))}
        assert list(tmp_path.iterdir()) == []  # mapped by both, and nameless: nothing is left however this ends

    in_own_process(body)
    dead = Forked(killed_while_its_files_have_names)
    left = dead.result()
    dead.wait()
    assert left.startswith(PREFIX)
    assert [path.name for path in tmp_path.iterdir()] == [left]
    living = ShmSenderLink(tmp_path, 4096, ["r0"])  # removes it, and not its own
    assert [path.name for path in tmp_path.iterdir()] == [living.offer("r0")["name"]]
    assert remove_abandoned(tmp_path) == []
    living.close()
    assert list(tmp_path.iterdir()) == []


def test_shm_that_is_full_says_how_much_is_missing() -> None:
    engine = ShmCheckpointEngine(bucket_bytes=1 << 50, timeout=2.0)
    with pytest.raises(OSError, match=r"no room for \d+ bytes, 2 buckets of 1125899906842624 and more \(\d+ free\)"):
        engine.open_sender_link(["r0"])
    assert not list(Path("/dev/shm").glob(f"{PREFIX}*"))


@pytest.mark.parametrize(
    ("handover", "checksum", "owns"),
    [
        ("counters", "sampled", False),
        ("messages", "sampled", False),
        ("messages", "sampled", True),
        ("counters", "full", True),
        ("counters", "sampled", True),  # through the pipe
    ],
)
def test_shm_hands_over_by_counters_or_by_messages(handover: str, checksum: str, owns: bool) -> None:
    """Held groups larger than the memory, tensors in place, copied and spread, three rounds, and a death."""
    weights = {f"l.0.{name}_proj.w": torch.randn(2000) for name in ("gate", "up")}  # 16 000 of 16 384 bytes
    weights |= {"small": torch.ones(3), "exact": torch.randn(2048), "large": torch.randn(9000)}
    weights |= {f"l.1.{name}_proj.w": torch.randn(5000) for name in ("q", "k", "v")}
    weights |= {f"many.{index}": torch.full((3,), float(index)) for index in range(300)}
    own = {name: torch.zeros_like(tensor) for name, tensor in weights.items() if owns and name != "l.1.k_proj.w"}

    def body() -> None:
        engine = ShmCheckpointEngine(bucket_bytes=8192, timeout=2.0, handover=handover, checksum=checksum)
        engine.prepare()
        receiver, victim = Receiver(engine.invitation("r0"), own=own), Receiver(engine.invitation("dies"))
        for _ in range(3):
            weights["exact"] += 1
            receiver.sync()
            push(engine, ["r0"], weights)
            assert receiver.result() == {name: pack(tensor) for name, tensor in weights.items()}
        assert came_through_a_pipe(engine) == (owns and (handover, checksum) == ("counters", "sampled"))
        receiver.sync()
        victim.sync("receive")
        with pytest.raises(PeerError, match="dies"):
            push(engine, ["r0", "dies"], weights)
        engine.close()

    in_own_process(body)


def test_shm_goes_through_the_pipe_if_no_receiver_reads_in_place() -> None:
    def body() -> None:
        engine = ShmCheckpointEngine(bucket_bytes=1 << 20, timeout=2.0)
        engine.prepare()
        weights = {"a": torch.randn(70_000), "b": torch.randn(3)}
        owner = Receiver(engine.invitation("owner"), own={name: torch.zeros_like(one) for name, one in weights.items()})
        reader = Receiver(engine.invitation("reader"))
        receivers = {"owner": owner, "reader": reader}
        for members, piped in ((["owner", "reader"], False), (["owner"], True), (["reader", "owner"], False)):
            for member in members:
                receivers[member].sync()
            push(engine, members, weights)
            for member in members:
                assert receivers[member].result() == {name: pack(tensor) for name, tensor in weights.items()}
            assert came_through_a_pipe(engine) == piped  # another link for other members
        engine.close()

    in_own_process(body)


@pytest.mark.parametrize("owns", [False, True])
def test_shm_waits_as_long_as_it_may_also_after_a_long_export(owns: bool) -> None:
    """The timeout counts from when a side begins to wait, not from when it last saw the other one move."""
    weights = {name: torch.randn(20_000) for name in "abc"}

    def receive(pipe: Any) -> None:
        torch.set_num_threads(1)
        invitation = pipe.recv()
        engine = CheckpointEngineRegistry.new(invitation.engine, **invitation.settings)
        engine.join(invitation)
        got = {}
        own = {name: torch.zeros_like(tensor) for name, tensor in weights.items()} if owns else None
        for name, tensor in engine.receive_weights(own):
            got[name] = pack(tensor)
            if name == "b":
                time.sleep(1.7)  # longer than the receiver's patience, 3 times the timeout
        pipe.send(got)

    def body() -> None:
        engine = ShmCheckpointEngine(bucket_bytes=1 << 15, timeout=0.5)
        engine.prepare()
        receiver = Forked(receive)
        receiver.pipe.send(engine.invitation("r0"))

        def stream() -> Iterator[tuple[str, Tensor]]:
            time.sleep(0.7)
            os.kill(receiver.pid, signal.SIGSTOP)
            threading.Timer(0.1, os.kill, [receiver.pid, signal.SIGCONT]).start()
            yield "a", weights["a"]
            yield "b", weights["b"]
            time.sleep(1.9)
            yield "c", weights["c"]

        engine.init_process_group(engine.build_topology(trainer_world_size=1, receiver_ids=["r0"]))
        engine.send_weights(stream())
        assert receiver.result() == {name: pack(tensor) for name, tensor in weights.items()}
        engine.close()

    in_own_process(body)


@pytest.mark.parametrize("checksum", ["sampled", "full"])
def test_a_consumer_s_memory_is_let_go_after_a_sync(checksum: str) -> None:
    def body() -> None:
        engine = ShmCheckpointEngine(timeout=5.0, checksum=checksum)
        engine.prepare()

        own = torch.zeros(1000)
        receiver = CheckpointEngineRegistry.new("shm", **engine.invitation("r0").settings)
        joined = threading.Thread(target=lambda: push(engine, ["r0"], {"w": torch.ones(1000)}))
        joined.start()
        receiver.join(engine.invitation("r0"))
        assert sum(1 for _ in receiver.receive_weights({"w": own})) == 1
        receiver.finalize()
        joined.join(10)
        assert own.sum() == 1000
        gone = weakref.ref(own)
        del own
        gc.collect()
        assert gone() is None
        receiver.close()
        engine.close()

    in_own_process(body)


def test_shm_with_several_threads_copies_by_frames() -> None:
    engine, before = ShmCheckpointEngine(), torch.get_num_threads()
    engine._destinations = {"w": torch.zeros(2)}
    assert engine.readiness() == {"takes_pipe": True}
    engine._destinations = {"w": torch.zeros(2, device="meta")}
    assert engine.readiness() == {"takes_pipe": False}
    torch.set_num_threads(2)
    try:
        engine._destinations = {"w": torch.zeros(2)}
        assert engine.readiness() == {"takes_pipe": False}
    finally:
        torch.set_num_threads(before)


def test_shm_uses_counters_on_no_other_processor_than_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert ShmCheckpointEngine().handover == "messages"
    with pytest.raises(ValueError, match="on aarch64 use 'messages'"):
        ShmCheckpointEngine(handover="counters")
    with pytest.raises(ValueError, match="'counters', 'messages' or None"):
        ShmCheckpointEngine(handover="signals")


def test_shm_maps_no_file_elsewhere() -> None:
    with pytest.raises(ValueError, match="outside"):
        ShmCheckpointEngine().open_receiver_link({"name": "../../etc/passwd"})
